"""UnitPeak: bytes that a module's units hold while it runs, and those of modules that are held together.

Owns: what of codes, whole parameters and gradients is there at the same time. Must not know: torch, stages' names.

    decoding   whole | wire of its own                          | gradients of the module before
    running    whole | gradients of its own | the next one ahead | gradients of the module before

The next module is unsharded ahead when this one is decoded: of wires there is one at a time, this module's or the next
one's. The sums are what the ledger counts, to the byte, in a backward through modules alike. They are an upper bound
where no module has neighbours of the largest sizes, and where ranks of a node share memory that is given back between
uses: a rank may be through with a module that a peer still uses, and which of them is ahead depends on time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpczero.plan.footprint import Footprint
from hpczero.plan.unit_spec import UnitSpec


@dataclass
class UnitPeak:
    """Bytes of the units of one module, summed by ``add``.

    Attributes:
        whole: parameters in use.
        ahead: what is there before they are in use.
        wire: codes that are there beside them while they are decoded.
        gradients: of this rank alone.
        stays: what is there as long as a peer uses them.
    """

    whole: int = 0
    ahead: int = 0
    wire: int = 0
    gradients: int = 0
    stays: int = 0

    def add(self, unit: UnitSpec, itemsize: int, footprint: Footprint, *, sharded: bool) -> None:
        """Add the parameters of one unit."""
        whole = unit.layout.padded_numel * itemsize
        if unit.rest_nbytes is not None:
            codes = unit.rest_nbytes * unit.layout.num_shards
            wire = 0 if footprint.lasting else -(-codes // footprint.copies)
            self.whole += whole  # each rank's own, on every transport
            self.ahead += wire
            self.wire = max(self.wire, wire)
        elif sharded and not footprint.lasting:
            share = -(-whole // footprint.copies)
            self.whole += share
            self.ahead += share
            if footprint.copies > 1:
                self.stays += share

    @property
    def alone(self) -> int:
        """While it is decoded or runs, without other modules."""
        return self.whole + max(self.wire, self.gradients)


def largest_together(modules: Sequence[UnitPeak], *, overlap: bool) -> int:
    """Bytes of modules at most, of which one is decoded or runs; the largest sum.

    Args:
        modules: all but the root.
        overlap: whether the next module is unsharded while one runs, and gradients of the one before are still being
            reduced.
    """
    places = range(len(modules))
    ahead = [module.ahead if overlap else 0 for module in modules]
    behind = [module.stays + (module.gradients if overlap else 0) for module in modules]
    # One of them may be in use, and one have the other part.
    next_ones = sorted(places, key=ahead.__getitem__, reverse=True)[:3]
    ones_before = sorted(places, key=behind.__getitem__, reverse=True)[:3]

    def sums(place: int) -> Iterator[int]:
        module = modules[place]
        yield module.alone
        for before in ones_before:
            if before != place:
                yield behind[before] + module.alone
        for following in next_ones:
            if following != place:
                running = module.whole + module.gradients + ahead[following]
                yield running
                yield from (
                    running + behind[before]
                    for before in ones_before
                    if before not in (place, following)
                )

    # Modules of one size are one case, and there are mostly few sizes.
    seen = {
        (m.whole, m.ahead, m.wire, m.gradients, m.stays): place for place, m in enumerate(modules)
    }
    return max((nbytes for place in seen.values() for nbytes in sums(place)), default=0)
