"""StageMessages: tensors from stage to stage of a pipeline, and who waits for whom.

    sender     [form, with the first of a step] [data] ...     each kept until MPI has delivered it
    receiver   posts a receive one action ahead, waits for it when the action begins

The first activation that passes a boundary in a step says shape and dtype; the others of the step must be like it, and
gradients come back in the same form. A wait is watched, by a text that names stage, micro-batch and direction. A stage
that stands still is then named when the watchdog ends the job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor

from hpczero.accelerator import Accelerator
from hpczero.comm.algorithms import CHUNK_BYTES, wait_all
from hpczero.comm.background import can_run_in_background
from hpczero.comm.devices import HostReach, Reach
from hpczero.errors import StepError
from hpczero.job.group import Group

# Progress: messages that go on while a rank computes.
#
# Many MPI libraries move a message that is too large to be sent at once only while both ends call MPI: 64 KiB over TCP
# with Open MPI. A rank that computes for a second then delivers what it has sent a second late.

# Between two calls. A call takes a few microseconds of a core; a link of 1 Gbit/s carries 25 KiB in this time, and what
# the kernel holds for a socket is more than that.
NAP_S = 200e-6


@contextmanager
def progress(group: Group, accelerator: Accelerator) -> Iterator[None]:
    """Context in which messages over any communicator of ``group`` go on by themselves. Not collective.

    It does nothing inside one node, where the receiver fetches what it needs, nor with an MPI that lets one thread call
    it. MPI may copy memory of ``accelerator``.
    """
    if group.num_nodes == 1 or not can_run_in_background():
        yield
        return
    over = threading.Event()

    def poll() -> None:
        accelerator.enter_thread()
        while not over.wait(NAP_S):
            group.comm.Iprobe()

    thread = threading.Thread(target=poll, name="hpczero-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MOST_DIMS = 8
FORM_NUMEL = MOST_DIMS + 3  # a checksum of the settings, dtype, number of dimensions, shape
KINDS = 4  # of tags: activation, gradient, form, tied gradient


class Message(NamedTuple):
    """One tensor on its way from piece to piece of the model.

    Attributes:
        kind: "F", an activation, or "B", a gradient: what the receiver does with it.
        piece: of the model, that takes it.
        micro_batch: from 0.
    """

    kind: Literal["F", "B"]
    piece: int
    micro_batch: int

    @property
    def boundary(self) -> int:
        """Number of the piece above the boundary that it passes."""
        return self.piece if self.kind == "F" else self.piece + 1

    @property
    def source(self) -> int:
        """The piece that sends it."""
        return self.piece - 1 if self.kind == "F" else self.piece + 1


@dataclass
class MessageStats:
    """Accounts of one rank.

    Attributes:
        messages: sent, without forms.
        sent_nbytes: of these.
        waited_s: seconds in which this stage stood still for another one.
    """

    messages: int = 0
    sent_nbytes: int = 0
    waited_s: float = 0.0

    def reset(self) -> None:
        """Start counting anew."""
        self.messages, self.sent_nbytes, self.waited_s = 0, 0, 0.0


class _MessageForm(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{tuple(self.shape)} {self.dtype}"


class _SentMessage(NamedTuple):
    requests: list[MPI.Request]
    memory: object  # of MPI until the requests are complete
    text: str


class _Posted(NamedTuple):
    requests: list[MPI.Request]
    data: Tensor
    memory: Tensor


class StageMessages:
    """The messages of one rank to and from its neighbours in ``group``, and their accounts; rank s of it is stage s.

    Nothing is collective but ``last_says``. Each call on one stage has its counterpart on a neighbour.
    """

    def __init__(self, group: Group, *, chunks: int = 1, reach: Reach | None = None) -> None:
        """Not collective. ``group`` is borrowed; nothing else sends messages with tags over its ``comm``.

        Each stage has ``chunks`` pieces of the model; piece ``c * stages + s`` lies on stage s. ``reach`` says where
        the tensors are, and how MPI gets at them; None for the host's memory.
        """
        self.stats = MessageStats()
        self._group = group
        self._reach = reach or HostReach()
        self._pieces = group.size * chunks
        self._forms: dict[int, _MessageForm] = {}  # by boundary, of this step
        self._coming: dict[int, tuple[list[MPI.Request], np.ndarray]] = {}  # forms, by boundary
        self._posted: dict[Message, _Posted] = {}
        self._sent: list[_SentMessage] = []
        self._settings = 0
        most = group.comm.Get_attr(MPI.TAG_UB)
        self._turns = max((int(most or 32767) + 1) // (KINDS * (self._pieces + 1)), 1)

    def begin(self, settings: int) -> None:
        """Begin a step: forms are sent anew. Neighbours compare ``settings``, a number equal on all stages."""
        self._forms.clear()
        self._settings = settings

    def moving(self) -> AbstractContextManager[None]:
        """Context of a step's actions: between nodes messages go on while this stage computes."""
        return progress(self._group, self._reach.accelerator)

    # --- sending -------------------------------------------------------------------------------------------------

    def send(self, message: Message, data: Tensor) -> None:
        """Start to send ``data``, contiguous floating point; returns at once, and keeps it until it is delivered.

        Raises:
            StepError: its shape or dtype is not that of the first micro-batch of this step, or cannot be sent.
        """
        self.progress()
        self._tell_form(message, _MessageForm(data.dtype, tuple(data.shape)))
        memory = self._reach.outgoing(data)
        requests = [
            self._group.comm.Isend(
                [block, MPI.BYTE], self._stage(message.piece), self._tag(message)
            )
            for block in _blocks(memory)
        ]
        self._sent.append(_SentMessage(requests, memory, self._text(message, sends=True)))
        self.stats.messages += 1
        self.stats.sent_nbytes += data.numel() * data.element_size()

    def _tell_form(self, message: Message, form: _MessageForm) -> None:
        """Send the form with the first activation; refuse another one afterwards."""
        known = self._forms.get(message.boundary)
        where = self._text(message, sends=True)
        if known is not None:
            if known != form:
                raise StepError(
                    f"rank {self._group.rank} of the pipeline, {where}: got {form}, expected {known}, as before in "
                    "this step; give all micro-batches of a step the same shape (pad the last one)"
                )
            return
        if form.dtype not in DTYPES or len(form.shape) > MOST_DIMS:
            raise StepError(
                f"rank {self._group.rank} of the pipeline, {where}: got {form}, expected at most {MOST_DIMS} "
                f"dimensions of {', '.join(map(str, DTYPES))}; let the blocks pass on such a tensor"
            )
        self._forms[message.boundary] = form
        words = np.zeros(FORM_NUMEL, dtype=np.int64)
        words[:3] = self._settings, DTYPES.index(form.dtype), len(form.shape)
        words[3 : 3 + len(form.shape)] = form.shape
        request = self._group.comm.Isend(
            [words, MPI.INT64_T], self._stage(message.piece), self._tag(message, form=True)
        )
        self._sent.append(_SentMessage([request], words, where))

    def progress(self) -> None:
        """Let go of what is delivered. MPI libraries also move messages only while they are called."""
        self._sent = [sent for sent in self._sent if not MPI.Request.Testall(sent.requests)]

    def finish(self) -> None:
        """Return when everything that was sent is delivered."""
        for sent in self._sent:
            self._wait(sent.requests, f"{sent.text}, to be delivered")
        self._sent.clear()

    # --- receiving -----------------------------------------------------------------------------------------------

    def expect(self, message: Message) -> None:
        """Post the receive of a message, so that it may come while this stage computes.

        One whose form is not known yet is posted by ``receive``.
        """
        if message in self._posted:
            return
        form = self._forms.get(message.boundary)
        if form is None:
            self._expect_form(message)
            return
        data = torch.empty(form.shape, dtype=form.dtype, device=self._reach.accelerator.device)
        memory = self._reach.incoming(data)
        source, tag = self._stage(message.source), self._tag(message)
        requests = [
            self._group.comm.Irecv([block, MPI.BYTE], source, tag) for block in _blocks(memory)
        ]
        self._posted[message] = _Posted(requests, data, memory)

    def receive(self, message: Message) -> Tensor:
        """Wait for a message: a new tensor on the device, of the shape and dtype that the sender said.

        Raises:
            StepError: the sender runs the step with other settings.
        """
        self.progress()
        self.expect(message)
        if message not in self._posted:
            self._take_form(message)
            self.expect(message)
        posted = self._posted.pop(message)
        self._wait(posted.requests, self._text(message))
        self._reach.landed(posted.data, posted.memory)
        return posted.data

    def _expect_form(self, message: Message) -> None:
        if message.boundary in self._coming or message.kind == "B":
            return  # a gradient has the form of an activation that this stage is about to send
        words = np.zeros(FORM_NUMEL, dtype=np.int64)
        source, tag = self._stage(message.source), self._tag(message, form=True)
        request = self._group.comm.Irecv([words, MPI.INT64_T], source, tag)
        self._coming[message.boundary] = ([request], words)

    def _take_form(self, message: Message) -> None:
        requests, words = self._coming.pop(message.boundary)
        self._wait(requests, self._text(message))
        settings, dtype, dims = (int(word) for word in words[:3])
        if settings != self._settings:
            raise StepError(
                f"rank {self._group.rank} of the pipeline: stage {self._stage(message.source)} runs this step with "
                "another number of micro-batches, another schedule or for another purpose (step, evaluate) than stage "
                f"{self._group.rank}; make the same calls with the same options on all stages"
            )
        self._forms[message.boundary] = _MessageForm(
            DTYPES[dtype], tuple(words[3 : 3 + dims].tolist())
        )

    # --- between the first and the last stage, and among all -----------------------------------------------------

    def swap(self, mine: Tensor, peer: int, *, name: str) -> Tensor:
        """What stage ``peer`` has where this one has ``mine``, a contiguous tensor on the device; both call it.

        The result is a new tensor of the same shape and dtype. ``name`` is that of the parameter, for messages.
        """
        theirs = torch.empty_like(mine)
        source, target = self._reach.outgoing(mine), self._reach.incoming(theirs)
        comm, tag = self._group.comm, KINDS - 1
        requests = [comm.Irecv([block, MPI.BYTE], peer, tag) for block in _blocks(target)]
        requests += [comm.Isend([block, MPI.BYTE], peer, tag) for block in _blocks(source)]
        self.stats.messages += 1
        self.stats.sent_nbytes += mine.numel() * mine.element_size()
        where = f"stage {self._group.rank} of {self._group.size}"
        self._wait(requests, f"{where}: the gradient of {name!r} that stage {peer} has too")
        self._reach.landed(theirs, target)
        return theirs

    def last_says(self, *numbers: float) -> list[float]:
        """``numbers`` of the last stage, on all, which have equally many. Collective over the group."""
        value, last = np.array(numbers, dtype=np.float64), self._group.size - 1
        where = f"stage {self._group.rank} of {self._group.size}"
        begin = time.perf_counter()
        with self._group.watchdog.collective(f"{where}: the loss of the step from stage {last}"):
            self._group.comm.Bcast(value, root=last)
        self.stats.waited_s += time.perf_counter() - begin
        return [float(each) for each in value]

    # --- parts of the above --------------------------------------------------------------------------------------

    def _stage(self, piece: int) -> int:
        return piece % self._group.size

    def _tag(self, message: Message, *, form: bool = False) -> int:
        """Messages of one tag are sent and taken in one order, so micro-batches may share tags where they run out."""
        kind = 2 if form else "FB".index(message.kind)
        turn = message.micro_batch % self._turns
        return (turn * (self._pieces + 1) + message.boundary) * KINDS + kind

    def _text(self, message: Message, *, sends: bool = False) -> str:
        what, way = (
            ("the activation", "forward") if message.kind == "F" else ("the gradient", "backward")
        )
        peer = f"for stage {self._stage(message.piece)}"
        if not sends:
            peer = f"from stage {self._stage(message.source)}"
        chunk = f", piece {message.piece}" if self._pieces > self._group.size else ""
        return (
            f"stage {self._group.rank} of {self._group.size}: {what} of micro-batch {message.micro_batch} {peer} "
            f"({way}{chunk})"
        )

    def _wait(self, requests: Sequence[MPI.Request], text: str) -> None:
        pending = list(requests)
        if MPI.Request.Testall(pending):
            return
        begin = time.perf_counter()
        with self._group.watchdog.collective(text):
            wait_all(pending)
        self.stats.waited_s += time.perf_counter() - begin


def _blocks(memory: Tensor) -> list[MPI.buffer]:
    """Calls of a size that every MPI library takes; messages of one tag do not overtake each other."""
    nbytes = prod(memory.shape) * memory.element_size()
    starts = range(0, max(nbytes, 1), CHUNK_BYTES)
    return [
        MPI.buffer.fromaddress(memory.data_ptr() + start, min(CHUNK_BYTES, nbytes - start))
        for start in starts
    ]
