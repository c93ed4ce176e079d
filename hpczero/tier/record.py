"""Record: named parts that rest together, and the Place that a tier gave them.

Owns: sizes and offsets. Must not know: the medium, what the bytes mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hpczero.errors import TierError
from hpczero.memory.pages import padded

if TYPE_CHECKING:
    from hpczero.tier.lanes import Transfer

MOST_PARTS = 16  # of a record: a block of staging has so many ends of pages to spare


@dataclass(frozen=True)
class Record:
    """What is reserved at once.

    Attributes:
        name: for messages, such as ``blocks.3 window 0``.
        parts: bytes of each part, by its name; their order is that on the medium. A part may be empty.
    """

    name: str
    parts: Mapping[str, int]

    def __post_init__(self) -> None:
        if not 0 < len(self.parts) <= MOST_PARTS:
            raise TierError(
                f"record {self.name!r} has {len(self.parts)} parts, expected 1 to {MOST_PARTS}"
            )
        for part, nbytes in self.parts.items():
            if nbytes < 0:
                raise TierError(
                    f"part {part!r} of record {self.name!r} has {nbytes} bytes, expected 0 or more"
                )

    @property
    def nbytes(self) -> int:
        """Of all parts."""
        return sum(self.parts.values())


class Place:
    """Where one record rests in one tier; made by ``Tier.reserve``, and of use to that tier alone.

    Attributes:
        record: what rests there.
        begin: offset of its first part in the tier.
        end: offset behind its last one.
        offsets: of each part in the tier, at multiples of the tier's alignment.
        known: parts that have been evicted and can be fetched.
        writes: the last write of each part, which may have failed.
        reads: reads that nobody has waited for yet.
        before: reads and writes of what had this room before, which a write comes after.
    """

    def __init__(
        self, record: Record, begin: int, alignment: int, before: Iterable[Transfer] = ()
    ) -> None:
        self.record = record
        self.begin = begin
        self.offsets: dict[str, int] = {}
        for part, nbytes in record.parts.items():
            self.offsets[part] = begin
            begin += padded(nbytes, alignment)
        self.end = begin
        self.known: set[str] = set()
        self.writes: dict[str, Transfer] = {}
        self.reads: set[Transfer] = set()
        self.before = frozenset(before)

    def sizes(self, parts: Iterable[str]) -> dict[str, int]:
        """Bytes of these parts, in the order of the record.

        Raises:
            TierError: one of them is none of the record, or is named twice.
        """
        names = list(parts)
        of = self.record.parts
        strange = [name for name in names if name not in of]
        if strange or len(set(names)) < len(names):
            raise TierError(
                f"record {self.record.name!r}: got parts {names}, expected each at most once and of {list(of)}"
            )
        return {name: of[name] for name in of if name in names}
