"""Stand-ins for the algorithms between ranks: the real ones, whose messages go nowhere, with an entry for each call.

Owns: what of an algorithm's call is recorded. Must not know: transports, units, the engine, time.

Rounds and numbers of messages are the algorithm's own. What the MPI library would do by itself is recorded as bytes.
"""

from __future__ import annotations

from collections.abc import Iterator

from mpi4py import MPI
from torch import Tensor
from typing_extensions import override

from hpczero.accelerator import Accelerator
from hpczero.comm.algorithms import CHUNK_BYTES, Blocks, Exchange, Gather, Meanwhile, Prepare, steps
from hpczero.comm.devices import Reach
from hpczero.plan.footprint import IN_FLIGHT
from scaling.simulate.programs import Work
from scaling.simulate.recorder import Recorder
from scaling.simulate.standin import StandIn

ADDRESS = 2**40


class Elsewhere(Blocks):
    """Blocks of tensors without memory, whose address is 0; MPI wants another one, of which it reads nothing."""

    @classmethod
    @override
    def of(cls, tensor: Tensor, start: int, numel: int, stride: int, count: int) -> Blocks:
        item = tensor.element_size()
        return cls(tensor, start * item, numel * item, stride * item, count)

    @override
    def block(self, index: int) -> MPI.buffer:
        return MPI.buffer.fromaddress(ADDRESS + self.start + index * self.stride, self.nbytes)

    @override
    def pieces(self, most_nbytes: int) -> Iterator[Blocks]:
        for piece in super().pieces(most_nbytes):
            yield Elsewhere(piece.tensor, piece.start, piece.nbytes, piece.stride, piece.count)


class RecordedGather(Gather):
    """An algorithm whose messages go nowhere; each call is an entry."""

    def __init__(self, inner: Gather, recorder: Recorder) -> None:
        super().__init__(inner.comm, chunk_nbytes=inner.chunk_nbytes)
        self.name = inner.name  # type: ignore[misc]  # of this one object
        self.in_rounds = inner.in_rounds  # type: ignore[misc]  # of this one object
        self._inner, self._recorder = inner, recorder

    @override
    def __call__(self, blocks: Blocks, *, round_nbytes: int = CHUNK_BYTES) -> None:
        if blocks.count == 1:
            return
        if blocks.tensor.device.type == "cpu":
            with self._recorder.paused():  # what was there before may be no number
                for place in range(blocks.count):
                    if place != self.comm.rank:
                        blocks.view(place).zero_()
        self._recorder.open()
        if self.name != "library":
            self._inner(blocks, round_nbytes=round_nbytes)
        messages = self._inner.messages - self.messages
        self.messages = self._inner.messages
        _note(self, self._recorder, blocks.nbytes, messages, self._recorder.close())

    def _gather(self, blocks: Blocks) -> None:
        raise AssertionError("the inner one does it")

    @override
    def free(self) -> None:
        self._inner.free()


class RecordedExchange(Exchange):
    """The same of an exchange: all calls up to ``finish`` are one entry."""

    def __init__(self, inner: Exchange, recorder: Recorder) -> None:
        super().__init__(inner.comm, chunk_nbytes=inner.chunk_nbytes)
        self.name = inner.name  # type: ignore[misc]  # of this one object
        self._inner, self._recorder = inner, recorder
        self._nbytes = 0  # of the calls so far
        self._is_open = False

    def _exchange(
        self, send: Blocks, receive: Blocks, prepare: Prepare, meanwhile: Meanwhile
    ) -> None:
        if not self._is_open:
            self._recorder.open()
            self._is_open = True
        self._nbytes += send.nbytes
        if receive.tensor.device.type == "cpu":
            with self._recorder.paused():  # what was there before may be no number
                receive.tensor.zero_()
        if self.name == "library":
            meanwhile()
            prepare(0, send.count)
        else:
            self._inner(send, receive, prepare=prepare, meanwhile=meanwhile)

    @override
    def finish(self) -> None:
        if not self._is_open:
            return
        self._inner.finish()
        messages = self._inner.messages - self.messages
        self.messages = self._inner.messages
        nbytes, self._nbytes, self._is_open = self._nbytes, 0, False
        _note(self, self._recorder, nbytes, messages, self._recorder.close())

    @override
    def free(self) -> None:
        self._inner.free()


def _note(
    algorithm: Gather | Exchange, recorder: Recorder, nbytes: int, messages: int, work: Work
) -> None:
    comm = algorithm.comm
    assert isinstance(comm, StandIn), "of this study"
    batches = messages
    if algorithm.name == "pairwise":
        each = -(-messages // max(comm.size - 1, 1))
        batches = -(-len(list(steps(comm.size))) * each // IN_FLIGHT)
    recorder.call(
        comm.name_of,
        nbytes,
        operation=recorder.operation or "exchange",
        dtype=recorder.dtype or "bytes",
        sent=nbytes,
        messages=messages,
        batches=max(batches, 1),
        work=work,
    )


class RecordedReach(Reach):
    """Makes algorithms whose messages are recorded, for memory that MPI sees."""

    name = "nobody's memory"

    def __init__(self, accelerator: Accelerator, recorder: Recorder, inner: Reach) -> None:
        super().__init__(accelerator)
        self.recorder, self._inner = recorder, inner

    @override
    def gather(
        self, kind: type[Gather], comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES
    ) -> Gather:
        return RecordedGather(
            self._inner.gather(kind, comm, chunk_nbytes=chunk_nbytes), self.recorder
        )

    @override
    def exchange(
        self, kind: type[Exchange], comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES
    ) -> Exchange:
        return RecordedExchange(
            self._inner.exchange(kind, comm, chunk_nbytes=chunk_nbytes), self.recorder
        )

    @override
    def broadcast(self, comm: MPI.Intracomm, blocks: Blocks, root: int) -> None:
        assert isinstance(comm, StandIn), "of this study"
        self.recorder.call(comm.name_of, blocks.nbytes, operation="broadcast", dtype="bytes")


def name_of(tensor: Tensor) -> str:
    """Of the tensor's dtype, as programs have it."""
    return str(tensor.dtype).removeprefix("torch.")
