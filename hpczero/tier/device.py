"""The device tier: shards rest where they are computed with, and nothing moves.

Owns: one tensor for each record. Must not know: files, staging.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from typing_extensions import override

from hpczero.accelerator import Accelerator, HostAccelerator
from hpczero.errors import TierError
from hpczero.files.direct import PAGE
from hpczero.memory.pages import device_pages
from hpczero.tier.base import Fetch, Staged, Tier
from hpczero.tier.lanes import Transfer
from hpczero.tier.record import Place, Record


class _Here(Fetch):
    def __init__(self, name: str, staged: Staged) -> None:
        self.name = name
        self._staged = staged

    @override
    def wait(self) -> Staged:
        return self._staged


class DeviceTier(Tier):
    """Resident memory of the device: ``fetch`` gives the memory itself, ``evict`` moves nothing."""

    resident = True

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        """On the device of ``accelerator``; None: on the host."""
        super().__init__()
        self._accelerator = accelerator or HostAccelerator()
        self._memory: dict[Place, Tensor] = {}

    @override
    def describe(self) -> str:
        return f"resident on {self._accelerator.device}"

    @property
    @override
    def staging_nbytes(self) -> int:
        return 0

    @override
    def _reserve(self, record: Record) -> Place:
        place = Place(record, 0, PAGE)
        try:
            self._memory[place] = device_pages(place.end, PAGE, self._accelerator)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise TierError(
                f"device tier: {place.end:,} bytes for {record.name!r} do not fit on "
                f"{self._accelerator.device}: {error}"
            ) from error
        return place

    @override
    def _release_room(self, place: Place) -> None:
        del self._memory[place]

    @override
    def _fetch(self, place: Place, read: Mapping[str, int], fresh: Mapping[str, int]) -> Fetch:
        memory = self._memory[place]
        parts = {
            part: memory[begin : begin + nbytes]
            for part, nbytes in place.record.parts.items()
            for begin in (place.offsets[part],)
            if part in read or part in fresh
        }
        return _Here(f"fetch of {place.record.name!r}", Staged(place, parts))

    @override
    def _evict(self, staged: Staged, written: Mapping[str, int]) -> Transfer:
        staged.surrender()
        return Transfer(f"evict of {staged.place.record.name!r}")

    @override
    def _close(self) -> None:
        self._memory.clear()
