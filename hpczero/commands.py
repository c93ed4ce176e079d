"""Console scripts: ``hpczero-train`` is ``python -m hpczero.train``, and so on for every command.

Owns: their names. Must not know: what a command does. Each script imports its module when it is called, as ``python
-m`` does.
"""

from __future__ import annotations

from importlib import import_module

from hpczero.errors import run


def train() -> None:
    """``hpczero-train``."""
    _run("hpczero.train")


def sample() -> None:
    """``hpczero-sample``."""
    _run("hpczero.sample")


def checkpoint() -> None:
    """``hpczero-checkpoint``."""
    _run("hpczero.checkpoint.__main__")


def plan() -> None:
    """``hpczero-plan``."""
    _run("hpczero.plan.__main__")


def data() -> None:
    """``hpczero-data``."""
    _run("hpczero.data.__main__")


def doctor() -> None:
    """``hpczero-doctor``."""
    _run("hpczero.doctor.__main__")


def preflight() -> None:
    """``hpczero-preflight``."""
    _run("hpczero.preflight.__main__")


def _run(module: str) -> None:
    run(import_module(module).main)
