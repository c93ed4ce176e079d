"""What is said of a choice: the settings, why they, and the options that pin them.

Owns: the words. Must not know: how anything was chosen, torch, MPI.
"""

from __future__ import annotations

from hpczero.plan.offload import MIB, NOTHING_AWAY, Offload
from hpczero.plan.peak import Run
from hpczero.planner.choice import Choice, Foretold

PARTS = ("optimizer", "gradients", "parameters")


def options_of(run: Run) -> list[str]:
    """The settings as options of ``hpczero.train``, each as it is typed."""
    offload = run.offload
    typed = [f"--parallel.reduce {run.reduce}"] if run.reduce != "fp32" else []
    typed += [
        f"--parallel.stage {run.stage}",
        f"--train.micro_batch {run.micro_batch}",
        f"--train.accumulation {run.accumulation}",
        f"--model.checkpoint_activations {str(run.checkpointing).lower()}",
    ]
    for name in PARTS:
        medium = getattr(offload, name)
        if medium != "device":
            typed.append(f"--offload.{name} {medium}")
    if offload.medium == "disk":
        typed.append(f"--offload.folder {offload.folder}")
    typed += _beside_parts(offload)
    if run.checkpointing and run.kept.away:
        typed.append(f"--activations.rest {run.kept.rest}")
        if run.kept.rest == "disk":
            typed.append(f"--activations.folder {run.kept.folder}")
    return typed


def _beside_parts(offload: Offload) -> list[str]:
    """What else is in force of a tier, chosen or given."""
    if not offload.any:
        return []
    names = ("fraction", "step", "delayed", "buffers", "ahead")
    given = [(name, getattr(offload, name), getattr(NOTHING_AWAY, name)) for name in names]
    given.append(("window", offload.window // MIB, NOTHING_AWAY.window // MIB))
    return [
        f"--offload.{name} {str(value).lower()}" for name, value, usual in given if value != usual
    ]


def describe(found: Foretold) -> str:
    """One line: settings, seconds, bytes."""
    run = found.run
    words = [f"stage {run.stage}"]
    words += [away(run)] if run.offload.any else []
    words += [recomputed(run)] if run.checkpointing else []
    times = f" x {run.accumulation}" if run.accumulation > 1 else ""
    words.append(f"micro-batch {run.micro_batch}{times}")
    resting = [
        f"{nbytes(run.resting(medium))} on {medium}"
        for medium in ("host", "disk")
        if run.resting(medium)
    ]
    held = " and ".join([f"up to {nbytes(run.most - run.tiered)} a rank", *resting])
    return f"{', '.join(words)}: {seconds(found.step_s)} a step, {held}"


def away(run: Run) -> str:
    """What rests elsewhere, such as ``optimizer and gradients of 3 of 9 units on disk``."""
    parts = [name for name in PARTS if getattr(run.offload, name) != "device"]
    *most, last = parts
    said = f"{', '.join(most)} and {last}" if most else last
    some = ""
    if run.offload.fraction < 1:
        some = f" of {len(run.offloaded.away)} of {len(run.plan.trainable_units)} units"
    stepped = ", stepped on by the host" if run.offload.on_host else ""
    return f"{said}{some} on {run.offload.medium}{stepped}"


def recomputed(run: Run) -> str:
    """That activations are checkpointed, and where inputs of blocks rest."""
    where = f" with inputs on {run.kept.rest}" if run.kept.away else ""
    return f"activations checkpointed{where}"


def lines(choice: Choice) -> list[str]:
    """The choice, the runner-up, what binds, and the options that pin the choice; of a choice that has a best."""
    best, other, large = choice.best, choice.runner_up, choice.too_large
    assert best is not None, "nothing to describe"
    part, took = best.longest
    said = [f"chosen of {choice.tried} settings: {describe(best)}"]
    if other is not None:
        said.append(f"runner-up: {describe(other)}")
    said.append(f"what binds: {part}, {seconds(took)} of it")
    if large is not None and large.step_s < best.step_s:
        said[-1] += f"; and memory: {describe(large)} would be faster and does not fit"
    said.append(f"to pin it: {' '.join(options_of(best.run))}")
    return said


def seconds(value: float) -> str:
    """As a user reads them."""
    return f"{value:,.2f} s" if value >= 1 else f"{value * 1e3:,.3g} ms"


def nbytes(value: float) -> str:
    """As a user reads them."""
    return f"{value / 1e9:,.1f} GB" if value >= 1e9 else f"{value / 1e6:,.0f} MB"
