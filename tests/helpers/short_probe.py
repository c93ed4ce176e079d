"""Jobs whose probe of the host is short: what tests of plans and sweeps look at is not how well it measures.

Owns: how such a job is started. Must not know: what any test looks for.
"""

from __future__ import annotations

from pathlib import Path

from tests.helpers.mpirun import ROOT
from tests.helpers.processes import write_tool

# ``-c`` and this go in front of ``-m module arguments...``; a probe has thirty pieces of work, of 0.12 s each.
SHORT_PROBE = """
import runpy, sys
from hpczero.probe import job as kernels
kernels.TURN_S = 1e-3
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def write_launcher(path: Path) -> dict[str, str]:
    """Make ``path`` a launcher of jobs with a short probe; the variables that choose it."""
    launch = f'exec {ROOT}/install/launch.sh "$1" "$2" -c \'{SHORT_PROBE}\' "${{@:3}}"\n'
    write_tool(path, f"#!/bin/bash\nunset HPCZERO_LAUNCH\n{launch}")
    return {"HPCZERO_LAUNCH": str(path)}
