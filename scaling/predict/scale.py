"""A step at 400, 4,096 and 100,000 ranks, charged as before and as the code sends; the best layout of each machine.

The charge of before knew no rounds and no host: a gather took a latency for each other node, or for each doubling where
the nodes are a power of two, and a reduction one for each other node.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from typing_extensions import override

from hpczero.models.config import PRESETS
from hpczero.planner.search import FoundLayout, describe_layout, search_layouts
from hpczero.predict.job import Job
from hpczero.predict.machine import Machine, load_machine, machine_names
from hpczero.predict.model import Prediction, predict
from hpczero.predict.network import Cost, Network, RailTimes
from scaling.evidence.spread import table

MODEL = "gpt-60b"
RANKS = (400, 4096, 100_000)
BATCH = 4  # sequences of a rank
MACHINE, PER_NODE = "dgx-h100", (8, 16)
# What the host may take of a step: issue 20.
MOST_HOST_S = {400: 0.5, 4096: 2.0}
MOST_SHARE = {400: 0.05}


class RailsBefore(RailTimes):
    """Between nodes, as commit 9f3dc12 charged it."""

    @override
    def gather(self, nbytes: int) -> Cost:
        nodes = self.nodes
        power = nodes & (nodes - 1) == 0
        return self._sent(int(math.log2(nodes)) if power else nodes - 1, nbytes)

    @override
    def reduce(self, shard_numel: int, itemsize: int, wire: int) -> Cost:
        return self._sent(self.nodes - 1, shard_numel * wire)

    def _sent(self, latencies: int, nbytes: int) -> Cost:
        travel = (self.nodes - 1) * nbytes / self.machine.rail_rate
        return Cost(latencies * self.machine.nic_latency + travel)


class NetworkBefore(Network):
    """The collectives, as commit 9f3dc12 charged them."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._rails = RailsBefore(**vars(self._rails))


@dataclass(frozen=True)
class Case:
    """One number of ranks."""

    before: Prediction  # the same step by both charges
    after: Prediction

    @property
    def share(self) -> float:
        """The host's time of collectives over the time of forward and backward."""
        return self.after.host_s / self.after.computing_s


def of_size(machine: Machine, per_node: int) -> Machine:
    """The machine with another number of ranks on a node, each with its NIC."""
    if per_node == machine.ranks_per_node:
        return machine
    nics = machine.nics * per_node // machine.ranks_per_node
    return dataclasses.replace(machine, ranks_per_node=per_node, nics=nics)


def cases(ranks: Sequence[int] = RANKS, per_node: Sequence[int] = PER_NODE) -> Iterator[Case]:
    """The steps of ``MODEL`` at stage 3, checkpointed, over all ranks."""
    machine = load_machine(MACHINE)
    for many in ranks:
        for local in per_node:
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
            yield Case(predict(job, network=NetworkBefore), predict(job))


def best_layouts(machine: Machine, ranks: int) -> list[FoundLayout]:
    """The layouts that fit, best first, with ``BATCH`` sequences for each rank; for 400 ranks less than a minute."""
    precision = "bf16" if "bf16" in machine.peak else "fp16"
    return search_layouts(
        PRESETS[MODEL], machine, ranks=ranks, precision=precision, global_batch=BATCH * ranks
    )


def charges_text(found: Sequence[Case]) -> str:
    """The steps by both charges, and what the host takes of them."""
    header = ["ranks, on a node", "messages", "launches", "before: step, s", "exposed", "MFU"]
    header += ["now: step, s", "exposed", "MFU", "host, s", "host / compute"]
    rows = []
    for case in found:
        before, after = case.before, case.after
        shown = [
            f"{after.job.ranks:,}, {after.job.shards.local}",
            f"{after.messages:,}",
            f"{after.launches:,}",
        ]
        for step in (before, after):
            exposed = f"{step.communication_s / step.step_s:.0%}"
            shown += [f"{step.step_s:.2f}", exposed, f"{step.mfu:.0%}"]
        rows.append([*shown, f"{after.host_s:.2f}", f"{case.share:.1%}"])
    title = (
        f"{MODEL}, stage 3, {BATCH} x {PRESETS[MODEL].context} tokens a rank, bf16, checkpointed, on "
        f"{load_machine(MACHINE).title}, at 16 on a node as if each GPU kept its NIC. A prediction, nothing was run. "
        "Before: a latency for each other node. Now: rounds, messages and launches, and what they cost the host."
    )
    return "\n".join([title, "", table(header, rows), *_judged(found)])


def _judged(found: Sequence[Case]) -> Iterator[str]:
    """Each goal, and whether it is met."""
    for case in found:
        ranks, local = case.after.job.ranks, case.after.job.shards.local
        said = []
        if ranks in MOST_HOST_S:
            good = "met" if case.after.host_s <= MOST_HOST_S[ranks] else "MISSED"
            said.append(f"host {case.after.host_s:.2f} s, goal {MOST_HOST_S[ranks]:g} s: {good}")
        if ranks in MOST_SHARE:
            good = "met" if case.share <= MOST_SHARE[ranks] else "MISSED"
            said.append(f"{case.share:.1%} of compute, goal {MOST_SHARE[ranks]:.0%}: {good}")
        if said:
            yield f"- {ranks:,} ranks, {local} on a node: {'; '.join(said)}."


def layouts_text(ranks: int) -> str:
    """For each machine that comes with hpczero the best layout, and shards over all ranks beside it."""
    lines = [
        f"{MODEL} on {ranks:,} ranks, {BATCH} samples a rank. Foretold, nothing was run. Of the layouts that fit:",
        "",
    ]
    for name in machine_names():
        found = best_layouts(load_machine(name), ranks)
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
