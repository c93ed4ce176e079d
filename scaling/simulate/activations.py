"""Stand-ins for ranks that share layers or blocks: what goes between them in a forward and a backward, recorded.

Owns: what a rank gets where nobody sends: what it has itself, or tensors of the right form. Must not know: schedules,
time, transports of shards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from typing_extensions import override

from hpczero.comm.stage_messages import Message, StageMessages
from hpczero.comm.sums import Path
from hpczero.comm.sums import SumCall as PathCall
from hpczero.job.group import Group
from scaling.simulate.messages import name_of
from scaling.simulate.programs import Post, Receive, Send
from scaling.simulate.recorder import Recorder
from scaling.simulate.standin import StandIn

ROOM_NBYTES = 32 * 2**20  # as of the paths that move something


class RecordedPath(Path):
    """Ranks that share each layer's products, each of which brings what this one brings."""

    def __init__(self, group: Group, recorder: Recorder) -> None:
        super().__init__(group, ROOM_NBYTES)
        self._recorder = recorder

    @override
    def _exchange(
        self,
        parts: Sequence[Tensor],
        call: PathCall,
        say: Callable[[], str],
        *,
        whole: bool,
        start: int = 0,
    ) -> tuple[list[PathCall], list[Tensor]]:
        size, comm = self.group.size, self.group.comm
        assert isinstance(comm, StandIn), "of this study"
        own = parts[0 if whole else self.group.rank].contiguous().view(-1)
        nbytes = own.numel() * own.element_size()
        verb = f"{'whole' if whole else 'parts'} of activations"
        self._recorder.call(comm.name_of, nbytes, operation=verb, dtype=name_of(own), sent=nbytes)
        return [call] * size, [own] * size

    @override
    def close(self) -> None:
        """Nothing to free."""


class RecordedStageMessages(StageMessages):
    """Messages from and to stages that are not there; those that come have the form that all have.

    The small message that tells a form goes with the first activation, and is not counted.
    """

    def __init__(
        self,
        recorder: Recorder,
        group: Group,
        *,
        chunks: int,
        form: Tensor,
    ) -> None:
        """``form``: what passes from stage to stage, of one micro-batch."""
        super().__init__(group, chunks=chunks)
        assert isinstance(group.comm, StandIn), "of this study"
        self._recorder, self._comm = recorder, group.comm.name_of
        self._form = form
        self._known: set[int] = set()  # boundaries whose form is known
        self._expected: set[Message] = set()

    @override
    def begin(self, settings: int) -> None:
        super().begin(settings)
        self._known.clear()
        self._expected.clear()

    @override
    def moving(self) -> AbstractContextManager[None]:
        return nullcontext()

    @override
    def send(self, message: Message, data: Tensor) -> None:
        self._known.add(message.boundary)
        self._record_send(self._stage(message.piece), self._tag(message), data, _title(message))

    @override
    def progress(self) -> None:
        """Nothing is under way."""

    @override
    def finish(self) -> None:
        """Everything is delivered."""

    @override
    def expect(self, message: Message) -> None:
        if message.boundary in self._known and message not in self._expected:
            self._expected.add(message)
            self._recorder.record(Post(self._comm, self._stage(message.source), self._tag(message)))

    @override
    def receive(self, message: Message) -> Tensor:
        self._known.add(message.boundary)
        self.expect(message)
        self._expected.discard(message)
        peer, tag = self._stage(message.source), self._tag(message)
        self._record_receive(peer, tag, self._form, _title(message))
        with self._recorder.paused():
            return torch.zeros_like(self._form)

    @override
    def swap(self, mine: Tensor, peer: int, *, name: str) -> Tensor:
        tag = 3
        self._recorder.record(Post(self._comm, peer, tag))
        self._record_send(peer, tag, mine, name)
        self._record_receive(peer, tag, mine, name)
        return mine.clone()

    def _record_send(self, peer: int, tag: int, data: Tensor, name: str) -> None:
        nbytes = data.numel() * data.element_size()
        self._recorder.record(Send(self._comm, peer, tag, nbytes, name_of(data), name))
        self.stats.messages += 1
        self.stats.sent_nbytes += nbytes

    def _record_receive(self, peer: int, tag: int, data: Tensor, name: str) -> None:
        nbytes = data.numel() * data.element_size()
        self._recorder.record(Receive(self._comm, peer, tag, nbytes, name_of(data), name))


def _title(message: Message) -> str:
    what = "activation" if message.kind == "F" else "gradient"
    return f"{what} of micro-batch {message.micro_batch} for piece {message.piece}"
