"""Even and balanced shares of samples where one rank is slow: ``mpirun -n 4 python -m scaling.balance``.

The model's loss sleeps for its samples, on the last rank ``--slower`` times as long. Both ways train side by side, a
window of steps each in turn, in an order drawn anew.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import TYPE_CHECKING

from hpczero.errors import run
from scaling.evidence import harness
from scaling.evidence.plot import Bar, Panels, as_bars
from scaling.evidence.record import Row, head_of, of_kind, run_row, where_and_when
from scaling.evidence.spread import Spread, by_round, paired, table_of, with_spread

if TYPE_CHECKING:
    import torch

    from hpczero.job.topology import Topology
    from hpczero.run.balance import Balance

WAYS = ("even", "balanced")


@dataclass(frozen=True)
class Options(harness.Common):
    """What to measure.

    Attributes:
        rounds: windows of steps of each way; from 6 on there is a 95 % interval of the median.
        steps: of a window.
        slower: how many times as long the last rank takes.
        fixed_ms: of each forward, whatever its samples are.
        sample_ms: of each sample.
        micro_batch: samples of an even share.
    """

    rounds: int = 6
    steps: int = 5
    slower: float = 3.0
    fixed_ms: float = 5.0
    sample_ms: float = 10.0
    micro_batch: int = 6

    def __post_init__(self) -> None:
        harness.at_least(self, rounds=1, steps=1, micro_batch=2)


def main() -> int:
    """Measure, write the rows, print the table, draw the plot. Collective over MPI's world."""
    return harness.on_ranks(
        Options, "balance", lambda t, o: f"balance-{t.size}x{o.slower:g}", measure, REPORT
    )


def measure(topology: Topology, options: Options) -> Iterator[Row]:
    """All rows, the same on every rank. Collective."""
    import torch

    import hpczero
    from hpczero.accelerator import HostAccelerator
    from hpczero.data.batches import positions
    from hpczero.run.balance import EVERY, Balance
    from hpczero.run.evaluation import PlainPasses
    from hpczero.run.step import TrainingStep

    yield run_row(
        options, "rounds steps slower fixed_ms sample_ms micro_batch", ranks=topology.size
    )
    factor = options.slower if topology.rank == topology.size - 1 else 1.0
    batch, accelerator = options.micro_batch * topology.size, HostAccelerator()

    def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        time.sleep(factor * (options.fixed_ms + options.sample_ms * len(x)) / 1e3)
        return torch.as_tensor(model(x).square().mean())

    def samples(number: int, shares: list[int] | None) -> tuple[torch.Tensor]:
        places = positions(batch, number, 0, topology.rank, topology.size, 1, shares)
        draws = [torch.Generator().manual_seed(int(place)) for place in places]
        return (torch.stack([torch.randn(64, generator=draw) for draw in draws]),)

    def training(way: str) -> tuple[torch.nn.Module, Balance | None, Callable[[int], list[float]]]:
        """The model, its balance, and what takes so many steps and returns their losses."""
        balance = Balance(topology, options.micro_batch) if way == "balanced" else None
        torch.manual_seed(0)
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        hpczero.zeroify(model, optimizer, topology=topology)
        hpczero.sharding(model).advice.weighted = True
        step = TrainingStep(
            model,
            optimizer,
            passes=PlainPasses(
                model, loss=loss, accumulation=1, accelerator=accelerator, balance=balance
            ),
            samples=lambda number, _: samples(number, None if balance is None else balance.shares),
            accelerator=accelerator,
        )
        numbers = itertools.count()

        def window(steps: int) -> list[float]:
            losses = []
            for number in itertools.islice(numbers, steps):
                taken = step.take(number)
                losses.append(taken.loss)
                if balance is not None:
                    balance.note(taken.own_s)
                    balance.decide()
            return losses

        return model, balance, window

    trained = {way: training(way) for way in WAYS}
    losses = {way: window(3 * EVERY) for way, (_, _, window) in trained.items()}
    turns = harness.in_turns(WAYS, options.rounds, random.Random(options.seed), program="balance")
    for number, turn in turns:
        for way in turn:
            _, balance, window = trained[way]
            took, found = harness.timed(topology, partial(window, options.steps))
            losses[way] += found
            even = [options.micro_batch] * topology.size
            yield {
                "kind": "window",
                "way": way,
                "round": number,
                "seconds": took / options.steps,
                "shares": even if balance is None else balance.shares,
            }
    apart = harness.check_same_losses("balanced", losses["balanced"], "even", losses["even"], 1e-5)
    yield {"kind": "losses", "apart": apart, "first": losses["even"][0]}
    for model, _, _ in trained.values():
        hpczero.release(model)


def _times(rows: list[Row]) -> dict[str, dict[int, float]]:
    return by_round(rows, "window", itemgetter("way"), itemgetter("seconds"))


def text(rows: list[Row]) -> str:
    """Heading and table; markdown."""
    head, found = head_of(rows), _times(rows)
    (losses,) = of_kind(rows, "losses")

    def shares(way: str) -> str:
        last = [row["shares"] for row in of_kind(rows, "window") if row["way"] == way][-1]
        return ", ".join(map(str, last))

    def ratio(way: str) -> str:
        return "1" if way == "even" else with_spread(paired(found["even"], found[way]), 2)

    shown = table_of(
        {way: found[way] for way in WAYS},
        {
            "shares": str,
            "samples by rank": shares,
            "ms per step": lambda way: with_spread(
                Spread.of([1e3 * each for each in found[way].values()]), 0
            ),
            "even / this": ratio,
        },
    )
    title = (
        f"{head['ranks']} ranks, the last {head['slower']:g} times as slow; a forward sleeps {head['fixed_ms']:g} ms "
        f"and {head['sample_ms']:g} ms a sample; {head['micro_batch']} samples a rank and step when even. Median of "
        f"{head['rounds']} windows of {head['steps']} steps of each, in turn; losses differ by at most "
        f"{losses['apart']:.1e} (the first is {losses['first']:.3f}). {where_and_when(head)}"
    )
    return "\n".join([title, "", shown])


@as_bars
def draw(rows: list[Row]) -> tuple[str, Panels]:
    """Step times as bars."""
    bars = [Bar.of(way, values.values()) for way, values in _times(rows).items()]
    return f"{head_of(rows)['ranks']} ranks, one slow", {"s per step": bars}


REPORT = harness.Report("Even and balanced shares of samples", text, draw)

if __name__ == "__main__":
    run(main)
