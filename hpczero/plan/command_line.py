"""A run as options of the plan command.

Owns: the options of ``python -m hpczero.plan`` as they are typed. Must not know: how it answers.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import fields

from hpczero.options.config import LayoutOptions
from hpczero.plan.peak import Run
from hpczero.plan.peak_of_part import PartRun


def command_line(run: Run, title: str, *, memory_nbytes: int | None = None) -> str:
    """The command that shows the whole table for ``run``.

    Args:
        run: run of a job.
        title: the preset that the model began as.
        memory_nbytes: bytes that a rank may have; None leaves a number to be filled in.
    """
    memory = "GB_OF_A_RANK" if memory_nbytes is None else _size(memory_nbytes)
    model = run.network.model
    words = ["python -m hpczero.plan", f"--memory {memory}", f"--ranks {run.ranks}"]
    words += [f"--ranks-per-node {run.local_size}"] * (run.ranks % run.local_size == 0)
    words += [f"--transport {run.transport}", f"--model {shlex.quote(title)}"]
    words += [f"--layers {model.layers}", f"--hidden {model.hidden}", f"--vocab {model.vocab_size}"]
    words += [f"--positions {model.positions}", f"--sequence {run.sequence}"]
    words += [f"--precision {run.precision}", f"--micro-batch {run.micro_batch}"]
    words += [f"--reduce {run.reduce}"] * (run.reduce != "fp32")
    words += [f"--accumulation {run.accumulation}"] * (run.accumulation > 1)
    if isinstance(run, PartRun):
        words += layout_words(run.layout)
    return " ".join(words)


def layout_words(layout: LayoutOptions) -> list[str]:
    """The degrees as they are typed; those that are not the default."""
    chosen = [
        (each.name, getattr(layout, each.name))
        for each in fields(LayoutOptions)
        if getattr(layout, each.name) != each.default
    ]
    return [f"--parallel.{name} {str(value).lower()}" for name, value in chosen]


def _size(nbytes: int) -> str:
    """A size rounded down, so that what is said to fit does fit."""
    unit, scale = ("GB", 10**9) if nbytes >= 10**9 else ("MB", 10**6)
    return f"{max(math.floor(nbytes / scale * 10) / 10, 0.1):g}{unit}"
