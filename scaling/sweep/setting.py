"""What is known, before a point is measured, of where and how it will be.

Owns: which words of a command line, which variables and which versions make two measurements different. Must not know:
the point itself, how it is started. All of it is text by name, so that records keep it as it is.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence

from hpczero.errors import ConfigError
from scaling.evidence.record import Row, machine_name, versions

Setting = dict[str, str]

# Options of sbatch that choose nodes or what a rank gets of them; a job's time, name or account change no result.
NODE_OPTIONS: tuple[tuple[str, ...], ...] = (
    ("--partition", "-p"),
    ("--constraint", "-C"),
    ("--nodelist", "-w"),
    ("--clusters", "-M"),
    ("--gres",),
    ("--gpus", "-G"),
    ("--gpus-per-node",),
    ("--gpus-per-task",),
    ("--cpus-per-task", "-c"),
)
# Of ours, those that change how long something may take, not how long it takes.
INDIFFERENT = ("HPCZERO_TIMEOUT", "HPCZERO_SERIES")


def local(environment: Mapping[str, str] | None = None) -> Setting:
    """Of points that run here."""
    return {"machine": machine_name(), **_common(environment)}


def slurm(options: Sequence[str], environment: Mapping[str, str] | None = None) -> Setting:
    """Of points that run as jobs.

    Args:
        options: of sbatch, as they were typed.
        environment: None: that of this process, which its jobs inherit.

    Raises:
        ConfigError: an option without its value.
    """
    variables = os.environ if environment is None else environment
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for names in NODE_OPTIONS:
        variable = f"SBATCH_{names[0].strip('-').upper().replace('-', '_')}"
        parser.add_argument(*names, default=variables.get(variable))
    try:
        found, _ = parser.parse_known_args(list(options))
    except argparse.ArgumentError as error:
        raise ConfigError(f"after --: got {' '.join(options)!r}: {error}") from error
    chosen = {name: value for name, value in vars(found).items() if value}
    return {**dict(sorted(chosen.items())), **_common(variables)}


def agrees(row: Row, setting: Mapping[str, str]) -> bool:
    """Whether ``row`` was measured in this setting, as far as it says."""
    if row.get("setting"):
        return bool(row["setting"] == dict(setting))
    return setting.get("machine") in (None, row.get("machine"))


def _common(environment: Mapping[str, str] | None) -> Setting:
    variables = os.environ if environment is None else environment
    ours = {
        name: value
        for name, value in sorted(variables.items())
        if name.startswith("HPCZERO_") and name not in INDIFFERENT and value
    }
    return {**versions("torch", "mpi4py"), **ours}
