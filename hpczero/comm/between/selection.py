"""Which algorithm serves which size between nodes.

Owns: the table, its text and its JSON. Must not know: MPI, how the table was measured (``tuning``), what an algorithm
does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpczero.options.values import ALGORITHMS, named_algorithms
from hpczero.plan.rounds import ROUND_BYTES


@dataclass(frozen=True)
class Choice:
    """What serves blocks of one size and above, up to the next choice.

    Attributes:
        algorithm: its name.
        chunk_nbytes: most bytes of a block that travel in one round, for an algorithm that works in rounds.
        from_nbytes: smallest block that it serves.
        at_nbytes: block that it was measured with; 0 if it was not measured.
        seconds: what each candidate took at that size, by ``algorithm`` or ``algorithm/chunk``.
    """

    algorithm: str
    chunk_nbytes: int = ROUND_BYTES
    from_nbytes: int = 0
    at_nbytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """The algorithm, with the chunk where it is not the usual one."""
        return candidate_name(self.algorithm, self.chunk_nbytes)


@dataclass(frozen=True)
class Selection:
    """Choices by size, smallest first; the first serves blocks from 0 bytes on.

    Attributes:
        gathers: choices for all-gathers, by the bytes of one rank's shard.
        exchanges: choices for reduce-scatters, by the bytes of one node's partial sum for one rank.
        origin: where the choices come from, in words.
    """

    gathers: tuple[Choice, ...]
    exchanges: tuple[Choice, ...]
    origin: str = "not measured"

    def __post_init__(self) -> None:
        for choices in (self.gathers, self.exchanges):
            starts = [choice.from_nbytes for choice in choices]
            if not starts or starts[0] != 0 or starts != sorted(set(starts)):
                raise ValueError(f"choices must rise from size 0, got {starts}")

    def gather_for(self, nbytes: int) -> Choice:
        """Choice for an all-gather of shards of ``nbytes``."""
        return _at(self.gathers, nbytes)

    def exchange_for(self, nbytes: int) -> Choice:
        """Choice for a reduce-scatter with partial sums of ``nbytes``."""
        return _at(self.exchanges, nbytes)

    def in_rounds_of(self, least_nbytes: int) -> Selection:
        """The same algorithms, in rounds of at least ``least_nbytes``."""
        gathers, exchanges = (
            tuple(replace(c, chunk_nbytes=max(c.chunk_nbytes, least_nbytes)) for c in choices)
            for choices in (self.gathers, self.exchanges)
        )
        return replace(self, gathers=gathers, exchanges=exchanges)

    @classmethod
    def parse(cls, text: str) -> Selection:
        """Selection from ``all_gather=ring,reduce_scatter=pairwise``; an operation that is left out keeps its default.

        Raises:
            ConfigError: an operation or an algorithm does not exist.
        """
        chosen = {"all_gather": DEFAULT.gathers[0], "reduce_scatter": DEFAULT.exchanges[0]}
        for operation, algorithm in named_algorithms(text).items():
            chosen[operation] = Choice(algorithm)
        return cls((chosen["all_gather"],), (chosen["reduce_scatter"],), origin="given")

    def describe(self) -> str:
        """One line: ``all-gather ring, from 1 MiB doubling; ...``."""
        gathers, exchanges = _line(self.gathers), _line(self.exchanges)
        return f"all-gather {gathers}; reduce-scatter {exchanges} ({self.origin})"

    def table(self) -> list[str]:
        """Lines of what was measured, in milliseconds; none if nothing was measured."""
        rows: list[str] = []
        titled = (("all-gather", self.gathers), ("reduce-scatter", self.exchanges))
        for title, choices in titled:
            for choice in choices:
                if choice.seconds:
                    times = ", ".join(
                        f"{name} {1e3 * s:.3g} ms" for name, s in sorted(choice.seconds.items())
                    )
                    size = size_text(choice.at_nbytes)
                    rows.append(f"{title} of {size} blocks: {choice.name} ({times})")
        return rows

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        """The selection as JSON values, which ``from_json`` reads."""
        return {
            name: [
                {
                    "algorithm": choice.algorithm,
                    "chunk_nbytes": choice.chunk_nbytes,
                    "from_nbytes": choice.from_nbytes,
                    "at_nbytes": choice.at_nbytes,
                    "seconds": dict(choice.seconds),
                }
                for choice in choices
            ]
            for name, choices in (("gathers", self.gathers), ("exchanges", self.exchanges))
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, origin: str) -> Selection:
        """The selection that ``as_json`` wrote.

        Raises:
            ValueError: the value has another form, or names algorithms that this version does not have.
        """
        try:
            gathers, exchanges = (
                tuple(Choice(**row) for row in value[name]) for name in ("gathers", "exchanges")
            )
            known = all(c.algorithm in ALGORITHMS["all_gather"] for c in gathers) and all(
                c.algorithm in ALGORITHMS["reduce_scatter"] for c in exchanges
            )
            if not known or any(c.chunk_nbytes < 1 for c in (*gathers, *exchanges)):
                raise ValueError("unknown algorithm or bad chunk")
            return cls(gathers, exchanges, origin=origin)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a selection: {error}") from error


# Between emulated hosts these come closest to the bound of the links (docs/performance.md).
DEFAULT = Selection((Choice("pairwise"),), (Choice("pairwise"),))


def candidate_name(algorithm: str, chunk_nbytes: int) -> str:
    """``pairwise``, or ``pairwise/512 KiB`` for rounds of another length than usual."""
    return algorithm if chunk_nbytes == ROUND_BYTES else f"{algorithm}/{size_text(chunk_nbytes)}"


def boundary(smaller: int, larger: int) -> int:
    """Size from which the choice for ``larger`` holds, where the next smaller measured size is ``smaller``."""
    return math.isqrt(smaller * larger)


def size_text(nbytes: int) -> str:
    """A size in words: ``64 KiB``, ``8 MiB``."""
    if nbytes >= 2**20:
        return f"{nbytes / 2**20:.3g} MiB"
    return f"{nbytes / 2**10:.3g} KiB"


def _at(choices: Sequence[Choice], nbytes: int) -> Choice:
    return next(choice for choice in reversed(choices) if choice.from_nbytes <= nbytes)


def _line(choices: Sequence[Choice]) -> str:
    words = [choices[0].name]
    for before, choice in itertools.pairwise(choices):
        if choice.name != before.name:
            words.append(f"from {size_text(choice.from_nbytes)} {choice.name}")
    return ", ".join(words)
