"""A step at 400, 4,096 and 100,000 ranks, as the code sends; the best layout of each machine."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from hpczero.models.config import PRESETS
from hpczero.planner.search import FoundLayout, describe_layout, search_layouts
from hpczero.predict.job import Job
from hpczero.predict.machine import Machine, load_machine, machine_names
from hpczero.predict.model import Prediction, predict
from scaling.evidence.spread import table_of

MODEL = "gpt-60b"
RANKS = (400, 4096, 100_000)
BATCH = 4  # sequences of a rank
MACHINE, PER_NODE = "dgx-h100", (8, 16)
# What the host may take of a step.
MOST_HOST_S = {400: 0.5, 4096: 2.0}
MOST_SHARE = {400: 0.05}


def of_size(machine: Machine, per_node: int) -> Machine:
    """The machine with another number of ranks on a node, each with its NIC."""
    if per_node == machine.ranks_per_node:
        return machine
    nics = machine.nics * per_node // machine.ranks_per_node
    return dataclasses.replace(machine, ranks_per_node=per_node, nics=nics)


def steps(ranks: Sequence[int] = RANKS, per_node: Sequence[int] = PER_NODE) -> Iterator[Prediction]:
    """Those of ``MODEL`` at stage 3, checkpointed, over all ranks."""
    machine = load_machine(MACHINE)
    for many, local in itertools.product(ranks, per_node):
        job = Job.plain(
            PRESETS[MODEL],
            of_size(machine, local),
            many,
            3,
            "bf16",
            BATCH,
            checkpointing=True,
            transport="ipc",
        )
        yield predict(job)


def _share(step: Prediction) -> float:
    """The host's time of collectives over the time of forward and backward."""
    return step.host_s / step.computing_s


def best_layouts(machine: Machine, ranks: int) -> list[FoundLayout]:
    """The layouts that fit, best first, with ``BATCH`` sequences for each rank; for 400 ranks less than a minute."""
    precision = "bf16" if "bf16" in machine.peak else "fp16"
    return search_layouts(
        PRESETS[MODEL], machine, ranks=ranks, precision=precision, global_batch=BATCH * ranks
    )


def charges_text(found: Sequence[Prediction]) -> str:
    """The steps, and what the host takes of them."""
    shown = table_of(
        found,
        {
            "ranks, on a node": lambda step: f"{step.job.ranks:,}, {step.job.shards.local}",
            "messages": lambda step: f"{step.messages:,}",
            "launches": lambda step: f"{step.launches:,}",
            "step, s": lambda step: f"{step.step_s:.2f}",
            "exposed": lambda step: f"{step.communication_s / step.step_s:.0%}",
            "MFU": lambda step: f"{step.mfu:.0%}",
            "host, s": lambda step: f"{step.host_s:.2f}",
            "host / compute": lambda step: f"{_share(step):.1%}",
        },
    )
    title = (
        f"{MODEL}, stage 3, {BATCH} x {PRESETS[MODEL].context} tokens a rank, bf16, checkpointed, on "
        f"{load_machine(MACHINE).title}, at 16 on a node as if each GPU kept its NIC. A prediction, nothing was run: "
        "rounds, messages and launches, and what they cost the host."
    )
    return "\n".join([title, "", shown, *_judged(found)])


def _judged(found: Sequence[Prediction]) -> Iterator[str]:
    """Each goal, and whether it is met."""
    for step in found:
        ranks, said = step.job.ranks, []
        if ranks in MOST_HOST_S:
            good = "met" if step.host_s <= MOST_HOST_S[ranks] else "MISSED"
            said.append(f"host {step.host_s:.2f} s, goal {MOST_HOST_S[ranks]:g} s: {good}")
        if ranks in MOST_SHARE:
            good = "met" if _share(step) <= MOST_SHARE[ranks] else "MISSED"
            said.append(f"{_share(step):.1%} of compute, goal {MOST_SHARE[ranks]:.0%}: {good}")
        if said:
            yield f"- {ranks:,} ranks, {step.job.shards.local} on a node: {'; '.join(said)}."


def layouts_text(ranks: int) -> str:
    """For each machine that comes with hpczero the best layout, and shards over all ranks beside it."""
    lines = [
        f"{MODEL} on {ranks:,} ranks, {BATCH} samples a rank. Predicted, nothing was run. Of the layouts that fit:",
        "",
    ]
    for name in machine_names():
        machine = load_machine(name)
        if machine.shares_memory:  # no devices: nothing so large is trained there
            continue
        found = best_layouts(machine, ranks)
        if not found:
            lines.append(f"- {name}: none fits.")
            continue
        best = found[0]
        lines.append(f"- {name}, best of {len(found)}: {describe_layout(best)}{_host(best)}.")
        plain = next((one for one in found if one.spread.mesh.shard == ranks), None)
        if plain is not None and plain is not best:
            lines.append(f"  - shards over all: {describe_layout(plain)}{_host(plain)}.")
    return "\n".join(lines)


def _host(found: FoundLayout) -> str:
    return f", host {found.step.host_s:.2f} s"
