"""One training step of the same model over each transport: ``mpirun -n 8 python -m scaling.transports``.

All models stay resident; in each round each takes one step, in an order drawn anew.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING, Literal, get_args

from hpczero.errors import ConfigError, HpcZeroError, run
from scaling.contenders.workload import WORKLOADS
from scaling.evidence import harness
from scaling.evidence.plot import Bar, Panels, as_bars
from scaling.evidence.record import Row, emulated, head_of, of_kind, run_row
from scaling.evidence.spread import Spread, by_round, paired, table_of, with_spread

if TYPE_CHECKING:
    from hpczero.job.topology import Topology

Known = Literal["flat", "hierarchical", "window-inline", "window"]


@dataclass(frozen=True)
class Options(harness.OnNodes):
    """What to measure.

    Attributes:
        workload: model and batch.
        stage: ZeRO stage.
        transports: as in "flat window"; window-inline moves nothing while the model computes.
        rounds: measured steps over each transport; from 6 on there is a 95 % interval of the median.
        warm_up: steps before the first round.
        link: what joins the nodes, for the table, such as "1 Gbit/s".
    """

    workload: Literal["gpt-8x512", "gpt-8x512-short", "gpt-12x768", "tiny"] = "gpt-8x512"
    stage: Literal[0, 1, 2, 3] = 3
    transports: tuple[Known, ...] = get_args(Known)
    rounds: int = 7
    warm_up: int = 2
    link: str = ""

    def __post_init__(self) -> None:
        harness.at_least(self, rounds=1, warm_up=1)
        if not self.transports or len(set(self.transports)) < len(self.transports):
            raise ConfigError(f"--transports: got {self.transports}, expected each at most once")


def main() -> int:
    """Measure, write the rows, print the table, draw the plot. Collective over MPI's world."""
    return harness.on_ranks(Options, "transports", _name, measure, REPORT)


def _name(topology: Topology, options: Options) -> str:
    return f"transports-{options.workload}-{harness.placement(topology)}{options.suffix}"


def measure(topology: Topology, options: Options) -> Iterator[Row]:
    """All rows, the same on every rank. Collective.

    Raises:
        HpcZeroError: the transports do not train the same, bit for bit.
    """
    import hpczero
    from scaling.contenders.base import batch
    from scaling.contenders.hpczero_stage import Contender

    workload = WORKLOADS[options.workload]
    yield run_row(
        options,
        "link stage rounds",
        **harness.nodes_of(topology, options),
        workload=workload.name,
        description=workload.describe(),
    )
    contenders: dict[str, Contender] = {}
    for name in options.transports:
        transport, _, inline = name.partition("-")
        contender = Contender(options.stage, transport, overlap=not inline)
        contender.join(topology)
        contender.build(workload)
        contenders[name] = contender
        said = hpczero.sharding(contender.model).collectives.describe()
        yield {"kind": "transport", "transport": name, "description": said}
    turns = harness.in_turns(
        options.transports,
        options.rounds,
        random.Random(options.seed),
        warm_up=options.warm_up,
        program="transports",
    )
    for number, turn in turns:
        samples = batch(workload, step=number + options.warm_up, rank=topology.rank)
        losses: dict[str, float] = {}
        for name in turn:
            step = partial(contenders[name].step, *samples)
            took, losses[name] = harness.timed(topology, step)
            if number >= 0:
                yield {"kind": "step", "transport": name, "round": number, "seconds": took}
        found = {name: topology.gather(loss) for name, loss in sorted(losses.items())}
        if any(values != found[options.transports[0]] for values in found.values()):
            raise HpcZeroError(
                f"losses of round {number} differ between transports, expected the same bits: {found}"
            )
    for contender in contenders.values():
        hpczero.release(contender.model)


def _times(rows: list[Row]) -> dict[str, dict[int, float]]:
    """Seconds of a step by transport and round."""
    return by_round(rows, "step", itemgetter("transport"), itemgetter("seconds"))


def text(rows: list[Row]) -> str:
    """Heading and table; markdown. Compares with ``flat``, or with the first transport where that was left out."""
    head, found = head_of(rows), _times(rows)
    described = {row["transport"]: row["description"] for row in of_kind(rows, "transport")}
    reference = "flat" if "flat" in described else next(iter(described))

    def ratio(name: str) -> str:
        return "1" if name == reference else with_spread(paired(found[reference], found[name]), 2)

    shown = table_of(
        found,
        {
            "transport": str,
            "ms per step": lambda name: with_spread(Spread.of(found[name].values()), 0, scale=1e3),
            f"{reference} / this": ratio,
        },
    )
    link = f", {head['link']}" if head["link"] else ""
    title = (
        f"{emulated(head)}{head['description']}, stage {head['stage']}, {head['ranks']} ranks as "
        f"{head['placement']}{link}; {head['cores']} cores of {head['cpu']}; fp32, fused AdamW. Median of "
        f"{head['rounds']} steps of each, in turn; losses equal bit for bit. Commit {head['commit']}, {head['date']}."
    )
    return "\n".join([title, "", shown, *(f"- {name}: {of}" for name, of in described.items())])


@as_bars
def draw(rows: list[Row]) -> tuple[str, Panels]:
    """Step times as bars."""
    head = head_of(rows)
    bars = [Bar.of(name, values.values(), 1e3) for name, values in _times(rows).items()]
    label = ", emulated" if head["emulated"] else ""
    return f"{head['description']}, {head['placement']}{label}", {"ms per step": bars}


REPORT = harness.Report("Transports between the ranks", text, draw)

if __name__ == "__main__":
    run(main)
