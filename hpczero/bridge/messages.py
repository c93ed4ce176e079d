"""Messages from one rank of a process group to another: send, receive, receive from anybody.

A message starts where the program starts it, on a communicator of its own. In the line of collectives a receive would
hold up the send behind it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor
from torch.futures import Future
from typing_extensions import override

from hpczero.bridge.line import BridgeWork, until
from hpczero.bridge.tensors import check, check_apart, fill, flat
from hpczero.comm.sums import as_bytes
from hpczero.errors import CommError
from hpczero.job.watchdog import Watchdog

MESSAGE_NBYTES = 2**30  # MPI counts in 32 bits
NAP_S = 50e-6
LOOKS = 200  # before a wait sleeps between looks


class MessageWork(BridgeWork):
    """A message under way: what ``isend`` and ``irecv`` return."""

    def __init__(
        self,
        what: str,
        requests: list[MPI.Request],
        tensor: Tensor,
        watchdog: Watchdog,
        end: Callable[[list[MPI.Status]], None],
    ) -> None:
        """Not collective. ``end`` is called once with what MPI says of each request, when all are done."""
        super().__init__(what, [tensor])
        self._requests, self._watchdog, self._end = requests, watchdog, end
        self._lock = threading.Lock()
        self._over = False
        self._source = -1

    @override
    def is_completed(self) -> bool:
        """Whether it has arrived. What it brought is then in its place."""
        with self._lock:
            if self._over:
                return True
            statuses = [MPI.Status() for _ in self._requests]
            try:
                if not MPI.Request.Testall(self._requests, statuses):
                    return False
                self._source = statuses[0].Get_source() if statuses else -1
                with torch.no_grad():
                    self._end(statuses)
            except MPI.Exception as error:
                self._error = CommError(
                    f"{self._what}: MPI says {error}; a tensor that is larger than what is received does this"
                )
            except CommError as error:
                self._error = error
            self._over = True
            return True

    @override
    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Return when the message has been sent or received.

        Args:
            timeout: how long to wait; zero or less waits for as long as the group's timeout allows.

        Raises:
            CommError: not in time, or another number of bytes than expected has come.
        """
        limit_s = timeout.total_seconds()
        with self._watchdog.watch(self._what):
            at_once = any(self.is_completed() for _ in range(LOOKS))
            if not at_once and not until(
                self.is_completed, limit_s if limit_s > 0 else math.inf, nap_s=NAP_S
            ):
                raise CommError(
                    f"{self._what} has not ended within {limit_s:g} s: the other rank has not made "
                    "the matching call"
                )
        if self._error is not None:
            raise self._error
        return True

    @override
    def get_future(self) -> Future[Any]:
        """A future of the message, on a thread that waits for it."""
        trigger: Future[Any] = Future()
        future = self.future(trigger)
        threading.Thread(target=trigger.set_result, args=(None,), daemon=True).start()
        return future

    @override
    def source_rank(self) -> int:
        """Rank of the group that a received message came from."""
        return self._source

    @override
    def _source_rank(self) -> int:
        return self._source


class GroupMessages:
    """Messages between the ranks of one group."""

    def __init__(self, comm: MPI.Intracomm, watchdog: Watchdog, name: str) -> None:
        """Not collective. ``comm``, borrowed, carries nothing else. ``name`` is that of the group."""
        self._comm, self._watchdog, self._name = comm, watchdog, name
        self._most_tag = int(comm.Get_attr(MPI.TAG_UB) or 32767)
        # MPI uses their memory, also if the program forgets them.
        self._under_way: list[MessageWork] = []

    def send(self, tensor: Tensor, rank: int, tag: int) -> MessageWork:
        """Start to send ``tensor``, of any dtype and strides, to ``rank``. Not collective."""
        what = self._words("send", tensor, rank, tag)
        source = as_bytes(flat(tensor))

        def end(_: list[MPI.Status]) -> None:
            _keep = source  # until MPI has read it

        with self._watchdog.collective(what):
            requests = [
                self._comm.Isend([piece.numpy(), MPI.BYTE], rank, tag) for piece in _pieces(source)
            ]
            return self._started(MessageWork(what, requests, tensor, self._watchdog, end))

    def receive(self, tensor: Tensor, rank: int | None, tag: int) -> MessageWork:
        """Start to receive into ``tensor``, of any dtype and strides, and of as many bytes as are sent. Not collective.

        ``rank`` None takes a message of any rank.
        """
        what = self._words("receive", tensor, rank, tag)
        check_apart(what, [tensor])
        values = flat(tensor)
        pieces = _pieces(as_bytes(values))
        source = MPI.ANY_SOURCE if rank is None else rank
        if rank is None and len(pieces) > 1:
            raise CommError(
                f"{what}: {MESSAGE_NBYTES:,} bytes at most can be received from any rank; name the sender"
            )

        def end(statuses: list[MPI.Status]) -> None:
            for piece, status in zip(pieces, statuses, strict=True):
                came = status.Get_count(MPI.BYTE)
                if came != piece.numel():
                    raise CommError(
                        f"{what}: {came} bytes have come, expected {piece.numel()}; sender and receiver need "
                        "tensors of one size"
                    )
            fill(tensor, values)

        with self._watchdog.collective(what):
            requests = [
                self._comm.Irecv([piece.numpy(), MPI.BYTE], source, tag) for piece in pieces
            ]
            return self._started(MessageWork(what, requests, tensor, self._watchdog, end))

    def drain(self, limit_s: float) -> bool:
        """Whether all messages have ended within ``limit_s`` seconds. Not collective."""
        return until(lambda: all(each.is_completed() for each in self._under_way), limit_s)

    def _started(self, message: MessageWork) -> MessageWork:
        self._under_way = [other for other in self._under_way if not other.is_completed()]
        self._under_way.append(message)
        return message

    def _words(self, verb: str, tensor: Tensor, rank: int | None, tag: int) -> str:
        """What is sent or received, for messages. Raises CommError for what cannot be."""
        way = "to" if verb == "send" else "from"
        where = f"{way} any rank" if rank is None else f"{way} rank {rank}"
        shape = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        what = f"{verb} of {shape} {where}, tag {tag}, over process group {self._name}"
        check(what, [tensor])
        if rank is not None and not 0 <= rank < self._comm.size:  # below 0 MPI means something else
            raise CommError(f"{what}: expected a rank from 0 to {self._comm.size - 1}")
        if not 0 <= tag <= self._most_tag:
            raise CommError(
                f"{what}: got tag {tag}, expected 0 to {self._most_tag}, as this MPI has"
            )
        return what


def _pieces(flat_bytes: Tensor) -> list[Tensor]:
    """At least one, so that empty tensors are sent too."""
    return list(torch.split(flat_bytes, MESSAGE_NBYTES))
