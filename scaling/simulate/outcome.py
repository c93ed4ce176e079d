"""Outcome: how long a step has taken, and what each rank has spent it with.

Owns: the kinds of waiting, and sums over ranks. Must not know: how a step was replayed.
"""

from __future__ import annotations

from dataclasses import dataclass

# What a lane does or waits for. Waiting of the main lane for another one counts as what that one does meanwhile.
COMPUTE, PEERS, BETWEEN, INSIDE, HOST, STAGES, LANE = (
    "compute",
    "other ranks",
    "links between nodes",
    "links inside nodes",
    "sums and messages of the host",
    "other stages",
    "another lane",
)
WAITS = (PEERS, BETWEEN, INSIDE, HOST, STAGES)


@dataclass(frozen=True)
class Outcome:
    """One step of all ranks.

    Attributes:
        step_s: from the first event to the last.
        spent: of each rank, seconds of its main lane by what it did or waited for.
        between_nbytes: of each rank, sent to other nodes.
        inside_nbytes: of each rank, sent to or read by ranks of its node.
        messages: of each rank, to other nodes, as far as its own code sends them.
        links: share of the step in which a node's links between nodes carry anything, the most of all nodes.
        used: bytes that these links carried, of those they could have carried in the step.
    """

    step_s: float
    spent: list[dict[str, float]]
    between_nbytes: list[int]
    inside_nbytes: list[int]
    messages: list[int]
    links: float
    used: float

    @property
    def idle_s(self) -> list[float]:
        """Of each rank, seconds in which it computes nothing."""
        return [self.step_s - spent.get(COMPUTE, 0.0) for spent in self.spent]

    def mean(self, what: str) -> float:
        """Seconds over all ranks."""
        return sum(spent.get(what, 0.0) for spent in self.spent) / len(self.spent)

    @property
    def binds(self) -> str:
        """What ranks spend most of the step with."""
        return max((COMPUTE, *WAITS), key=self.mean)
