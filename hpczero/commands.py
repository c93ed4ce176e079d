"""Console scripts: ``hpczero-train`` is ``python -m hpczero.train``, and so on for every command.

Each script imports its module when it is called, as ``python -m`` does.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module

from hpczero.errors import run


def _run(module: str) -> None:
    run(import_module(module).main)


train = partial(_run, "hpczero.train")
sample = partial(_run, "hpczero.sample")
replay = partial(_run, "hpczero.replay")
checkpoint = partial(_run, "hpczero.checkpoint.__main__")
plan = partial(_run, "hpczero.plan.__main__")
data = partial(_run, "hpczero.data.__main__")
doctor = partial(_run, "hpczero.doctor.__main__")
preflight = partial(_run, "hpczero.preflight.__main__")
watch = partial(_run, "hpczero.watch")
