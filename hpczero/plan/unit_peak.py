"""UnitPeak: bytes that a module's units hold while it runs, and those of modules that are held together.

Owns: what of codes, whole parameters and gradients is there at the same time. Must not know: torch, stages' names.

    unshard   codes of all shards on the wire     wait   whole, decoded; the wire is given back     backward   gradients
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """

    whole: int = 0
    ahead: int = 0
    wire: int = 0
    gradients: int = 0

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
            self.whole += -(-whole // footprint.copies)
            self.ahead += -(-whole // footprint.copies)

    @property
    def now(self) -> int:
        """While the module runs: forward's peak or backward's."""
        return self.whole + max(self.wire, self.gradients)

    @property
    def before(self) -> int:
        """While another module runs: unsharded ahead of use, or with a gradient that is being reduced."""
        return self.ahead + self.gradients


def largest_together(modules: Sequence[UnitPeak], count: int) -> int:
    """Bytes of ``count`` modules at most, one of which runs; the largest sum."""
    if not modules:
        return 0

    def beside(index: int) -> int:
        others = sorted((m.before for i, m in enumerate(modules) if i != index), reverse=True)
        return modules[index].now + sum(others[: count - 1])

    # Modules of one size are one case, and there are mostly few sizes.
    seen = {(module.now, module.before): index for index, module in enumerate(modules)}
    return max(beside(index) for index in seen.values())
