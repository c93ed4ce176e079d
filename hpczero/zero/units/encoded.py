"""Encoded: frozen parameters that rest and travel as codes of few bits, and are decoded where they are used.

    at rest   codes of this rank's shard            on transports whose buffers last, its slice of the wire
    unshard   codes of all shards on the wire       started like any gather, ahead of use too
    wait      whole parameters, decoded by the thread that is going to use them; the wire is given back

Each rank has whole parameters of its own, on every transport. They are given back between uses.

[Note: Exact copies]
Encoding what was decoded gives the same codes, so fp32 values are an exact copy of them. What asks for this rank's
values gets these: a checkpoint, ``full_state_dict``, a comparison. Values in half precision are no exact copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from typing_extensions import override

from hpczero.comm.collectives import Collectives
from hpczero.kernels.codes import decode, encode
from hpczero.memory.buffers import Use, lasting
from hpczero.plan import Plan, UnitSpec
from hpczero.zero.units.away_shard import UnitStorage, same_place
from hpczero.zero.units.whole import UnitState, WholeParameters


class EncodedParameters(WholeParameters):
    """The whole parameters of one unit whose shards are codes.

    Attributes:
        codec: the form.
        encoded: (words,) fp32 words that hold this rank's codes.
    """

    def __init__(
        self,
        spec: UnitSpec,
        parameters: Sequence[nn.Parameter],
        plan: Plan,
        comm: Collectives,
        *,
        given_back: bool = False,
    ) -> None:
        """As of ``WholeParameters``; ``spec`` has a codec."""
        super().__init__(spec, parameters, plan, comm, given_back=given_back)
        assert spec.codec is not None, "chosen by it"
        self.codec = codec = spec.codec
        self._words = codec.words(spec.layout.shard_numel)
        self._wire_lasts = comm.footprint.lasting
        self._wire = comm.allocate(
            self._words * spec.layout.num_shards,
            torch.float32,
            category="parameters" if self._wire_lasts else "unsharded",
            use=Use.GATHER,
            keep=self._wire_lasts,
        )
        self._wire.release()
        if self._wire_lasts:
            self.encoded = self._own_slice()
        else:
            self.encoded = comm.allocate(self._words, torch.float32, category="parameters").tensor

    def _own_slice(self) -> Tensor:
        index = self._comm.group.index
        return self._wire.tensor[index * self._words : (index + 1) * self._words]

    @override
    def unshard(self, read: Callable[[Tensor], None], *, exact: bool = False) -> None:
        self.check_certain()
        if self.state not in (UnitState.SHARDED, UnitState.RETAINED):
            return
        if not (self._gathered and self._wire_lasts):
            self._send()
        self.state = UnitState.GATHERING  # not before: memory may run out

    def _send(self) -> None:
        """Start to bring all ranks' codes together. Collective."""
        self._wire.take()
        own = self._own_slice()
        if not same_place(self.encoded, own):
            with torch.no_grad():
                own.copy_(self.encoded)
        self._start_gather(self._wire.tensor)

    @override
    def wait_for_unshard(self, *, given_up: bool = False) -> None:
        if self.state is UnitState.GATHERING:
            self._wait()
            if not given_up:
                self._decode()
            self._wire.release()
        super().wait_for_unshard(given_up=given_up)

    def _decode(self) -> None:
        """From the wire to the parameters."""
        self._buffer.take()
        shards = self.spec.layout.num_shards
        words, values = self._wire.tensor.view(shards, -1), self.flat.detach().view(shards, -1)
        with torch.no_grad():
            decode(words, values, self.codec.name)

    @override
    def update(self, read: Callable[[Tensor], None]) -> None:
        super().update(read)
        if self._wire_lasts:
            self._send()

    def show_kept(self) -> None:
        """Codes were made of what a user has written: the parameters become what these decode to. Collective."""
        self._send()
        self._wait()
        self._decode()
        self._wire.release()


class EncodedRest(UnitStorage):
    """This rank's values as codes. Values that it gives are decoded in fp32. See [Note: Exact copies]."""

    def __init__(self, whole: EncodedParameters, numel: int) -> None:
        """``numel``: elements of this rank's shard."""
        super().__init__(lasting(numel, torch.float32, whole.encoded.device))
        self.tensor.untyped_storage().resize_(0)
        self._whole, self._codec = whole, whole.codec

    def read(self, into: Tensor) -> None:
        """Decoded."""
        into = into.detach().view(1, -1)
        with torch.no_grad():
            decode(self._whole.encoded.view(1, -1), into, self._codec.name)

    def read_some(self, begin: int, into: Tensor) -> None:
        """Copy values from element ``begin`` on to ``into``; no other block is decoded."""
        codec, words, numel = self._codec, self._whole.encoded, self.tensor.numel()
        first = begin // codec.block
        last = -(-(begin + len(into)) // codec.block)
        codes = numel * codec.bits // 32
        width = codec.block * codec.bits // 32
        part = torch.cat([words[first * width : last * width], words[codes + first : codes + last]])
        values = torch.empty(
            (1, (last - first) * codec.block), device=words.device, dtype=torch.float32
        )
        with torch.no_grad():
            decode(part.view(1, -1), values, self._codec.name)
            into.copy_(values[0, begin - first * codec.block :][: len(into)])

    def write(self, values: Tensor) -> None:
        """Encoded."""
        with torch.no_grad():
            flat = values.detach().to(self._whole.encoded.device, torch.float32)
            encode(flat, self._whole.encoded, self._codec.name)

    @contextmanager
    def at_hand(self, *, changes: bool = False, anew: bool = False) -> Iterator[Tensor]:
        """A copy, of which codes are made at the end if it was to be changed."""
        values = torch.zeros(self.tensor.numel(), device=self.tensor.device, dtype=torch.float32)
        if not anew:
            self.read(values)
        yield values
        if changes or anew:
            self.write(values)
