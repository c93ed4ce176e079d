"""Store: inputs of blocks on a memory tier, written behind forward and read ahead of backward.

    forward    keep(1)  keep(2)  keep(3)            1 is written when 2 comes, 2 when 3 comes; 3 stays
    backward   bring(3) bring(2) bring(1)           3 was never away; 2 and 1 are read before they are asked for

[Note: The newest]
Backward begins with the block that forward ended with. Its input would be read as soon as it is written, so the newest
input is only written when another comes. Meanwhile it is the program's own tensor. If that is changed in place, this is
torch's own error.

[Note: Ahead]
Reads that nobody waits for yet hold blocks of staging: two fewer than there are, so that whoever writes, or needs
something that was not foreseen, finds one. Calls are needed in the reverse of the order in which they came, and the
inputs of each in the order in which they came.
"""

from __future__ import annotations

import math
import threading
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hpczero.comm.collectives import Collectives
from hpczero.errors import StepError, TierError
from hpczero.job.group import told_all
from hpczero.kernels.norm import digest_of_bits
from hpczero.memory.buffers import Memory
from hpczero.plan.offload import SPARE
from hpczero.tier import Place, Record, Tier
from hpczero.zero.units.away_shard import UnitStore

# Form: how a tensor lies in memory, so that its copy lies in the same way.
#
# A kernel may round in another way where strides differ, or where memory begins elsewhere between two bounds of a cache
# line. Recomputation would then not give the bits of the first forward. So a copy has both as the original had them.

LINE = 64  # bytes; torch's memory begins at a multiple of it


@dataclass(frozen=True)
class TensorForm:
    """Of one tensor with memory of its own, or a view of some.

    Attributes:
        shape, stride, dtype: as torch has them.
        offset: of its first byte behind a multiple of ``LINE``.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> TensorForm:
        """That of a dense or strided tensor."""
        offset = tensor.data_ptr() % LINE
        if offset % tensor.element_size():
            offset = 0
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, offset)

    @property
    def span(self) -> int:
        """Elements from the first to the last, gaps between them included."""
        if not math.prod(self.shape):
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    @property
    def nbytes(self) -> int:
        """Of ``span``."""
        return self.span * self.dtype.itemsize

    def raw(self, tensor: Tensor) -> Tensor:
        """(nbytes,) uint8 view of a tensor of this form."""
        with torch.no_grad():
            return tensor.detach().as_strided((self.span,), (1,)).view(torch.uint8)

    def memory(self, device: torch.device, room: int = 0) -> Tensor:
        """(nbytes or ``room``, what is more) uint8, content undefined, that begins as the original did."""
        whole = torch.empty(self.offset + max(self.nbytes, room), dtype=torch.uint8, device=device)
        return whole[self.offset :]

    def tensor(self, memory: Tensor) -> Tensor:
        """A tensor over ``memory``, which ``memory`` has made; no view of another tensor."""
        storage, item = memory.untyped_storage(), self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=memory.device)
        with torch.no_grad():
            return empty.set_(storage, memory.storage_offset() // item, self.shape, self.stride)

    def lost(self, device: torch.device) -> Tensor:
        """All NaN: what is computed from it shows that it is no result."""
        tensor = self.tensor(self.memory(device))
        with torch.no_grad():
            return (
                tensor.as_strided((self.span,), (1,))
                .fill_(math.nan)
                .as_strided(self.shape, self.stride)
            )


INPUTS = "block inputs"  # category of the ledger


class KeptInput:
    """An input that was given to a ``InputStorage``. Its room comes back after the last reference to it is gone.

    Attributes:
        form: of the tensor.
        what: of the ``InputStorage`` that made it.
    """

    def __init__(self, form: TensorForm, what: Any, dropped: deque[Any] | None = None) -> None:
        """``dropped`` gets ``what`` in the end, on whatever thread and inside whatever call that is."""
        self.form, self.what, self._dropped = form, what, dropped

    def __del__(self) -> None:
        if self._dropped is not None:
            self._dropped.append(self.what)


class InputStorage(ABC):
    """Where inputs lie. Any thread may call it.

    Attributes:
        memory: ledger of the bytes held where blocks compute, staging left out.
    """

    def __init__(self) -> None:
        self.memory = Memory()

    def begin(self, moving: str) -> None:
        """A call of a block begins; ``moving``: which of its arguments will be kept, or why none can be.

        Raises:
            StepError: ranks that keep them together would not keep the same ones; on all of these ranks.
        """
        return

    @abstractmethod
    def keep(self, tensor: Tensor, call: int) -> KeptInput:
        """Take over an input; returns before it is written.

        Args:
            tensor: whose values nobody changes until the next one is kept.
            call: of which block it is, numbered as they come: its inputs are brought in the order in which they are
                kept, and those of later calls before those of earlier ones.

        Raises:
            TierError: this is closed.
        """

    @abstractmethod
    def bring(self, kept: KeptInput) -> Tensor:
        """A tensor of the same values and the same form; any number of times.

        Raises:
            TierError: it could not be kept, or cannot be read.
        """

    @abstractmethod
    def collect(self) -> None:
        """Take back the room of what nobody refers to any more; every other call does so too."""

    def close(self) -> None:
        """Give everything back."""
        return


class DeviceInputs(InputStorage):
    """On the device: the tensor itself."""

    def __init__(self) -> None:
        super().__init__()
        self._dropped: deque[int] = deque()

    @override
    def keep(self, tensor: Tensor, call: int) -> KeptInput:
        self.collect()
        kept = _HeldInput(TensorForm.of(tensor), tensor.nbytes, self._dropped)
        kept.tensor = tensor.detach()
        self.memory.add(INPUTS, tensor.nbytes)
        return kept

    @override
    def bring(self, kept: KeptInput) -> Tensor:
        self.collect()
        assert isinstance(kept, _HeldInput), "made by keep"
        return kept.tensor

    @override
    def collect(self) -> None:
        while self._dropped:
            self.memory.add(INPUTS, -self._dropped.popleft())


class _HeldInput(KeptInput):
    tensor: Tensor


def version_of(tensor: Tensor) -> int:
    """Version of ``tensor``; a tensor of inference mode has none, and cannot be changed where it counts."""
    return 0 if tensor.is_inference() else int(tensor._version)


def changed(tensor: Tensor, version: int) -> RuntimeError | None:
    """What torch says of a saved tensor that was changed in place since."""
    now = version_of(tensor)
    if now == version:
        return None
    kind = f"{torch.typename(tensor)} {list(tensor.shape)}"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: [input of a "
        f"checkpointed block, {kind}] is at version {now}; expected version {version} instead"
    )


PART = "block input"


@dataclass(eq=False)
class _Input:
    number: int  # in the order in which they came
    call: int  # of which block
    form: TensorForm
    tensor: Tensor | None  # the program's own, with its version, until it is written
    version: int
    places: list[Place] = field(default_factory=list)  # of its bytes, one for each block of staging
    failure: Exception | None = None  # why it could not be written


class TierInputs(InputStorage):
    """On a tier."""

    def __init__(self, tier: Tier, *, blocks: int, block_nbytes: int, device: torch.device) -> None:
        """``close`` closes ``tier``, whose staging has ``blocks`` of ``block_nbytes``. ``device``: that computes."""
        super().__init__()
        self.tier = tier
        self._store = UnitStore(tier, blocks=blocks, window_nbytes=block_nbytes, device=device)
        self._horizon, self._block_nbytes, self._device = blocks - SPARE, block_nbytes, device
        self._lock = threading.Lock()  # a device's backward runs on a thread of its own
        self._inputs: list[_Input] = []  # that somebody refers to, by number
        self._newest: _Input | None = None
        self._dropped: deque[_Input] = deque()
        self._count, self._closed = 0, False

    @override
    def keep(self, tensor: Tensor, call: int) -> KeptInput:
        with self._lock:
            if self._closed:
                raise TierError("the tier of block inputs is closed; open another one")
            self._collect()
            self._write_newest()
            form = TensorForm.of(tensor)
            new = _Input(self._count, call, form, tensor.detach(), version_of(tensor))
            self._count += 1
            self._inputs.append(new)
            self._newest = new
            self.memory.add(INPUTS, form.nbytes)
            return KeptInput(form, new, self._dropped)

    @override
    def bring(self, kept: KeptInput) -> Tensor:
        wanted: _Input = kept.what
        with self._lock:
            self._collect()
            if wanted.failure is not None:
                raise _again(wanted.failure)
            if wanted.tensor is not None:
                if (error := changed(wanted.tensor, wanted.version)) is not None:
                    raise error
                self._read_ahead(wanted, 0)
                return wanted.tensor
            memory = wanted.form.memory(self._device)
            for index, place in enumerate(wanted.places):
                begin = index * self._block_nbytes
                self._read(wanted, index, memory[begin : begin + place.record.nbytes])
            return wanted.form.tensor(memory)

    @override
    def collect(self) -> None:
        with self._lock:
            self._collect()

    @override
    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._store.make_room(self._store.blocks)
            self._inputs.clear()
            self._newest, self._closed = None, True
            self.tier.close()

    # --- out

    def _write_newest(self) -> None:
        newest, self._newest = self._newest, None
        if newest is None or newest.tensor is None:
            return
        tensor, newest.tensor = newest.tensor, None
        self.memory.add(INPUTS, -newest.form.nbytes)
        newest.failure = changed(tensor, newest.version)
        if newest.failure is None:
            try:
                self._write(newest, newest.form.raw(tensor))
            except TierError as error:  # told where the input is asked for
                newest.failure = error
                self._release(newest)

    def _write(self, newest: _Input, raw: Tensor) -> None:
        for begin in range(0, raw.numel(), self._block_nbytes):
            piece = raw[begin : begin + self._block_nbytes]
            record = Record(f"block input {newest.number}", {PART: piece.numel()})
            place = self.tier.reserve(record)
            newest.places.append(place)
            staged = self.tier.fetch(place, [], fresh=[PART]).wait()
            with torch.no_grad():
                staged[PART].copy_(piece, non_blocking=True)
            self.tier.evict(staged, [PART])

    # --- back

    def _read(self, wanted: _Input, index: int, into: Tensor) -> None:
        fetch = self._store.fetch(wanted.places[index], [PART])
        self._read_ahead(wanted, index + 1)
        staged = fetch.wait()
        with torch.no_grad():
            into.copy_(staged[PART], non_blocking=True)
        self.tier.evict(staged, [])

    def _read_ahead(self, wanted: _Input, index: int) -> None:
        """Begin to read what comes after place ``index`` of ``wanted``; see [Note: Ahead]."""
        coming = list(islice(self._coming(wanted, index), self._horizon))
        self._store.keep(coming)
        with suppress(TierError):  # told to whoever wants it
            for place in coming:
                self._store.start(place, PART)

    def _coming(self, wanted: _Input, index: int) -> Iterator[Place]:
        yield from wanted.places[index:]
        at = first = self._at(wanted)
        while at + 1 < len(self._inputs) and self._inputs[at + 1].call == wanted.call:
            at += 1
            yield from self._inputs[at].places
        while first and self._inputs[first - 1].call == wanted.call:
            first -= 1
        while first:
            end = first
            while first and self._inputs[first - 1].call == self._inputs[end - 1].call:
                first -= 1
            for each in self._inputs[first:end]:
                yield from each.places

    def _at(self, wanted: _Input) -> int:
        return bisect_left(self._inputs, wanted.number, key=lambda each: each.number)

    # --- ends

    def _collect(self) -> None:
        while self._dropped:
            gone = self._dropped.popleft()
            at = self._at(gone)
            if at < len(self._inputs) and self._inputs[at] is gone:  # else closed
                del self._inputs[at]
                self._release(gone)
            if gone.tensor is not None:
                gone.tensor = None
                self.memory.add(INPUTS, -gone.form.nbytes)
            if gone is self._newest:
                self._newest = None

    def _release(self, gone: _Input) -> None:
        self._store.forget(gone.places)
        for place in gone.places:
            self.tier.release(place)
        gone.places.clear()


def _again(failure: Exception) -> Exception:
    """The same error once more, for whoever asks again."""
    error = type(failure)(str(failure))
    error.__cause__ = failure
    return error


# Partition: inputs of blocks that are equal on all ranks of a group, of which each rank keeps a part.
#
# It is for ranks that compute one block together (tensor parallelism): each has the whole input and keeps 1/N of it.
# All ranks make the same calls in the same order, as for any collective: for each call of a block an exchange of 8
# bytes, for each input one of 24 bytes in forward and one all-gather in backward.
#
# Source: Rajbhandari et al., ZeRO, SC20, sec. 6.1: P_a, and P_a+cpu where the parts rest elsewhere.

WORD = 2  # bytes; parts are cut at multiples, and moved as numbers of so many
NAME = "input of a checkpointed block"


class Partitioned(InputStorage):
    """Parts on another ``InputStorage``. ``begin``, ``keep`` and ``bring`` are collective over the group."""

    def __init__(self, inner: InputStorage, collectives: Collectives, *, fails: bool) -> None:
        """The part of this rank rests with ``inner``, whose ledger is this one's; ``close`` closes both.

        ``fails``: whether ``inner`` may fail on one rank, so that ranks have to agree.
        """
        super().__init__()
        self.inner, self.memory = inner, inner.memory
        self._collectives, self._fails = collectives, fails
        self._group = collectives.group

    @override
    def begin(self, moving: str) -> None:
        """Sizes decide what moves, and a rank that keeps nothing would not come to the exchange about its values."""
        if not self._are_equal([zlib.crc32(moving.encode())]):
            raise self._unequal("arguments of a checkpointed block are", moving)

    @override
    def keep(self, tensor: Tensor, call: int) -> KeptInput:
        form = TensorForm.of(tensor)
        self._check_equal(tensor, form)
        shard, index = self._shard(form), self._group.index
        mine = torch.zeros(shard, dtype=torch.uint8, device=tensor.device)
        begin, end = index * shard, min((index + 1) * shard, form.nbytes)
        with torch.no_grad():
            if begin < end:
                mine[: end - begin].copy_(form.raw(tensor)[begin:end])
        return KeptInput(form, self.inner.keep(mine, call))

    @override
    def bring(self, kept: KeptInput) -> Tensor:
        """As of any Rest.

        Raises:
            TierError: on every rank, where any of them cannot bring its part.
        """
        mine = self._agreed(kept.what) if self._fails else self.inner.bring(kept.what)
        form, shard = kept.form, self._shard(kept.form)
        whole = shard * self._group.size
        memory = form.memory(mine.device, whole)
        with torch.no_grad():
            memory[self._group.index * shard :][:shard].copy_(mine)
        words = memory[:whole].view(torch.float16)  # moved as they are, whatever they mean
        self._collectives.all_gather(words, name=NAME).wait()
        return form.tensor(memory)

    @override
    def collect(self) -> None:
        self.inner.collect()

    @override
    def close(self) -> None:
        """Collective over the group."""
        self.inner.close()
        self._collectives.close()

    def _shard(self, form: TensorForm) -> int:
        """Bytes of a part."""
        return -(-form.nbytes // (WORD * self._group.size)) * WORD

    def _agreed(self, kept: KeptInput) -> Tensor:
        found = None
        with self._group.agreed("bring back its part of the input of a checkpointed block"):
            found = self.inner.bring(kept)
        if found is None:
            raise TierError("agreed work came to no end")
        return found

    def _check_equal(self, tensor: Tensor, form: TensorForm) -> None:
        """Refuse inputs that differ between ranks: their parts would make up a tensor that no rank ever had.

        Raises:
            StepError: on every rank of the group.
        """
        dense = form.span == tensor.numel()
        raw = form.raw(tensor) if dense else tensor.detach().contiguous().view(-1).view(torch.uint8)
        if raw.storage_offset() % 8:  # which words of 64 bits cannot begin at
            raw = raw.clone()
        digest = int(digest_of_bits(raw).item())
        # Memory of NumPy begins anywhere, on each rank elsewhere.
        shape = repr(replace(form, offset=0))
        words = [digest & 0xFFFFFFFF, digest >> 32 & 0xFFFFFFFF, zlib.crc32(shape.encode())]
        if not self._are_equal(words):
            mine = f"{list(form.shape)} {form.dtype} {digest & 0xFFFFFFFFFFFFFFFF:016x}"
            raise self._unequal("input of a checkpointed block is", mine)

    def _are_equal(self, numbers: list[int]) -> bool:
        """Whether all ranks of the group have the same ``numbers`` of 32 bits. One exchange."""
        words = np.array(numbers, dtype=np.uint32).view(np.uint8)
        both = self._collectives.agree(np.concatenate([words, ~words]), name=NAME)
        return bool((both[: len(words)] == ~both[len(words) :]).all())

    def _unequal(self, what: str, mine: str) -> StepError:
        """The error of every rank of the group."""
        texts = self._group.gather_text(mine)
        odd = [rank for rank, text in enumerate(texts) if text != texts[0]]
        error = StepError(
            f"rank {self._group.rank}: the {what} not the same on all ranks of the group that is to keep a part of "
            f"each: {mine} here, {texts[0]} on rank 0, other ones on rank(s) {odd[:8]}. Partition inputs only over "
            "ranks that compute one block together, with the same samples and the same dropout; not over ranks that "
            "share a sequence. Else leave the group out"
        )
        return told_all(error, self._group.comm)
