"""Partition: inputs of blocks that are equal on all ranks of a group, of which each rank keeps a part.

Owns: the check that they are equal, the cut, the all-gather. Must not know: where parts rest, blocks, autograd.

It is for ranks that compute one block together (tensor parallelism): each has the whole input and keeps 1/N of it. All
ranks make the same calls in the same order, as for any collective: for each call of a block an exchange of 8 bytes, for
each input one of 24 bytes in forward and one all-gather in backward.

Source: Rajbhandari et al., ZeRO, SC20, sec. 6.1: P_a, and P_a+cpu where the parts rest elsewhere.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hpczero.activations.store import Form, Kept, Rest
from hpczero.comm.collectives import Collectives
from hpczero.errors import StepError, TierError
from hpczero.kernels.norm import digest_of_bits

WORD = 2  # bytes; parts are cut at multiples, and moved as numbers of so many
NAME = "input of a checkpointed block"


class Partitioned(Rest):
    """Parts on another ``Rest``. ``begin``, ``keep`` and ``bring`` are collective over the group."""

    def __init__(self, inner: Rest, collectives: Collectives, *, fails: bool) -> None:
        """Not collective.

        Args:
            inner: where the part of this rank rests; closed by ``close``, and its ledger is this one's.
            collectives: over the group; closed by ``close``.
            fails: whether ``inner`` may fail on one rank, so that ranks have to agree.
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
    def keep(self, tensor: Tensor, call: int) -> Kept:
        form = Form.of(tensor)
        self._check_equal(tensor, form)
        shard, index = self._shard(form), self._group.index
        mine = torch.zeros(shard, dtype=torch.uint8, device=tensor.device)
        begin, end = index * shard, min((index + 1) * shard, form.nbytes)
        with torch.no_grad():
            if begin < end:
                mine[: end - begin].copy_(form.raw(tensor)[begin:end])
        return Kept(form, self.inner.keep(mine, call))

    @override
    def bring(self, kept: Kept) -> Tensor:
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

    def _shard(self, form: Form) -> int:
        """Bytes of a part."""
        return -(-form.nbytes // (WORD * self._group.size)) * WORD

    def _agreed(self, kept: Kept) -> Tensor:
        found = None
        with self._group.agreed("bring back its part of the input of a checkpointed block"):
            found = self.inner.bring(kept)
        if found is None:
            raise TierError("agreed work came to no end")
        return found

    def _check_equal(self, tensor: Tensor, form: Form) -> None:
        """Refuse inputs that differ between ranks: their parts would make up a tensor that no rank ever had.

        Raises:
            StepError: on every rank of the group.
        """
        dense = form.span == tensor.numel()
        raw = form.raw(tensor) if dense else tensor.detach().contiguous().view(-1).view(torch.uint8)
        if raw.storage_offset() % 8:  # which words of 64 bits cannot begin at
            raw = raw.clone()
        digest = int(digest_of_bits(raw).item())
        shape = repr(
            replace(form, offset=0)
        )  # memory of NumPy begins anywhere, on each rank elsewhere
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
        error.agreed = self._group.is_job
        return error
