"""Calibrated: a machine whose numbers are those that measured steps of some runs show.

    forward + backward, without waits  = products / share of the peak + passes / rate of memory + starts of operations
    optimizer                          = bytes of an update / rate of memory in an update
    communication                      = what the model says, with one number of the links fitted
    rest of a step                     = time of the host for a step

With one run products and passes are slower than assumed by one factor. It must not know where steps were measured.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hpczero.predict.job import Job
from hpczero.predict.machine import Machine
from hpczero.predict.model import Prediction, predict

LINKS = ("imbalance", "node_rate", "nic_rate", "overlap")
LEAST, LEAST_NOISE = 1e-3, 1e-3  # of shares; of the median of a run's steps
WITHOUT_MEMORY = 1e30  # bytes per second: passes take no time
SPREAD = 10  # percent of all steps that are faster, and slower, than the range says


@dataclass(frozen=True)
class Seen:
    """Steps of one run. Seconds of rank 0, one of each step.

    Attributes:
        job: what was trained, on the machine that is to be calibrated.
        computing_s: forward and backward, without waits for others.
        communication_s: in collectives and waits for them.
        update_s: clipping and optimizer.
        beside_s: what no part covers, reading the batch included.
    """

    job: Job
    computing_s: Sequence[float]
    communication_s: Sequence[float]
    update_s: Sequence[float]
    beside_s: Sequence[float]

    def on(self, machine: Machine) -> Prediction:
        """What the model says of a step on another machine."""
        return predict(dataclasses.replace(self.job, machine=machine))


def calibrated(machine: Machine, seen: Sequence[Seen], *, source: str) -> Machine:
    """``machine`` with the numbers of runs. Its range becomes that of their steps; other numbers lose theirs.

    Args:
        machine: what was assumed; it keeps what the runs do not show.
        seen: runs on it, of plain ZeRO layouts.
        source: of the numbers that change.
    """
    share, memory_rate = _compute(machine, seen)
    slow = statistics.median(
        statistics.median(each.update_s) / each.on(machine).update_s for each in seen
    )
    found = dataclasses.replace(
        machine,
        matmul_efficiency=share,
        memory_rate=memory_rate,
        update_rate=(machine.update_rate or machine.memory_rate) / slow,
        step_host=statistics.median(s for each in seen for s in each.beside_s),
        bounds={},
    )
    linked = [_linked(found, each) for each in seen]
    for name in LINKS:
        before = getattr(found, name)
        values = [getattr(each, name) for each in linked if getattr(each, name) != before]
        if values:
            found = dataclasses.replace(found, **{name: statistics.median(values)})
    ratios = [_own(each, found) / taken for each in seen for taken in each.computing_s]
    low, *_, high = statistics.quantiles(ratios, n=100 // SPREAD)
    changed = [
        each.name
        for each in dataclasses.fields(machine)
        if getattr(machine, each.name) != getattr(found, each.name)
    ]
    return dataclasses.replace(
        found,
        bounds={"matmul_efficiency": (share * min(max(low, LEAST), 1.0), share * max(high, 1.0))},
        sources={**machine.sources, **dict.fromkeys(changed, source)},
    )


def _own(each: Seen, machine: Machine) -> float:
    return each.on(machine).computing_s


def _compute(machine: Machine, seen: Sequence[Seen]) -> tuple[float, float]:
    """(share of the peak, rate of memory) that are likeliest, by what was computed and by what was assumed.

    Both are slower than assumed by one factor, as on a busy machine, unless the runs agree on more than their noise.
    """
    share, rate = machine.matmul_efficiency, machine.memory_rate
    free = dataclasses.replace(machine, memory_rate=WITHOUT_MEMORY)
    rows = []
    for each in seen:
        measured = statistics.median(each.computing_s)
        products, passes = _own(each, free), _own(each, machine) - _own(each, free)
        low, _, high = statistics.quantiles(each.computing_s, n=4)
        noise = (high - low) / measured / math.sqrt(len(each.computing_s))
        rows.append((products / measured, passes / measured, max(noise, LEAST_NOISE)))

    def fit(skew: float) -> tuple[float, float, float]:
        """(what is against it, factor of products, factor of passes), where passes are slower by ``skew`` too."""
        sums = [(products + skew * passes, noise) for products, passes, noise in rows]
        slower = sum(s / n**2 for s, n in sums) / sum((s / n) ** 2 for s, n in sums)
        against = sum(((slower * s - 1) / n) ** 2 for s, n in sums)
        return against + math.log(skew) ** 2, slower, slower * skew

    tried = (2 ** (step / 16) for step in range(-48, 49)) if len(seen) > 1 else (1.0,)
    _, of_products, of_passes = min(map(fit, tried))
    return share / of_products, rate / of_passes


def _linked(machine: Machine, each: Seen) -> Machine:
    """The machine with one of its ``LINKS`` so that a run's communication is what was seen."""
    shards, wanted = each.job.shards, statistics.median(each.communication_s)
    if shards.size == 1:
        return machine
    found = each.on(machine)
    hidden, shown = found.hidden_s, found.communication_s + found.replicas_s
    if hidden and wanted < shown + hidden:
        hides = hidden / machine.overlap  # if all did
        overlap = 1 - max(wanted - shown - hidden + hides, 0.0) / hides
        return dataclasses.replace(machine, overlap=max(overlap, LEAST))
    if each.job.transport == "window":  # no message leaves: they wait for each other
        waits = max(wanted - shown, 0.0) / found.computing_s
        return dataclasses.replace(machine, imbalance=max(waits, LEAST))
    name, slower = "nic_rate" if shards.nodes > 1 else "node_rate", wanted / (shown + hidden)
    overlap = LEAST if hidden else machine.overlap
    return dataclasses.replace(machine, overlap=overlap, **{name: getattr(machine, name) / slower})


def machine_toml(machine: Machine) -> str:
    """The machine as a file that `hpczero.predict.machine.load_machine` reads."""
    beside = ("name", "title", "peak", "bounds", "sources")
    lines = [f"title = {_quoted(machine.title)}"]

    def line(name: str, value: float, where: str = "") -> str:
        ends = machine.bounds.get(name)
        low, high = (f"low = {ends[0]!r}, ", f"high = {ends[1]!r}, ") if ends else ("", "")
        source = _quoted(machine.sources.get(where + name, "as assumed"))
        return f"{name} = {{ {low}value = {str(value).lower()}, {high}source = {source} }}"

    for each in dataclasses.fields(machine):
        value = getattr(machine, each.name)
        if each.name not in beside and value:
            lines.append(line(each.name, value))
    lines += ["", "[peak]", *(line(name, value, "peak.") for name, value in machine.peak.items())]
    return "\n".join([*lines, ""])


def _quoted(text: str) -> str:
    """As TOML and JSON write it."""
    return json.dumps(text, ensure_ascii=False)
