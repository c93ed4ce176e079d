"""Line: messages of one rank that are under way, step by step, of any memory that a ``Reach`` reaches.

Owns: the requests, the memory that MPI sees meanwhile, and when what came is where it belongs. Must not know: nodes,
who needs what, sums.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from mpi4py import MPI
from torch import Tensor

from hpczero.comm.algorithms.base import wait_all
from hpczero.comm.devices.access import Reach

IN_FLIGHT = 2  # steps that MPI knows of at a time, as of ``algorithms.pairwise``


class Line:
    """Steps under way, oldest first. Between two ranks messages arrive in the order in which they were sent.

    Attributes:
        sent: messages so far.
    """

    def __init__(self, comm: MPI.Intracomm, reach: Reach, *, in_flight: int = IN_FLIGHT) -> None:
        """Not collective; ``comm`` is borrowed, and carries nothing else meanwhile."""
        self.comm = comm
        self.sent = 0
        self._reach = reach
        self._most = in_flight
        self._requests: list[MPI.Request] = []
        self._landings: list[Callable[[], None]] = []
        # The memory of the messages stays alive until they are complete.
        self._memory: list[Tensor] = []
        self._under_way: deque[tuple[list[MPI.Request], list[Callable[[], None]], list[Tensor]]] = (
            deque()
        )

    def send(self, data: Tensor, rank: int) -> None:
        """Send a contiguous tensor with the next step. Nobody writes to it before that is complete."""
        memory = self._reach.outgoing(data)
        self._requests.append(self.comm.Isend([_buffer(memory), MPI.BYTE], rank))
        self._memory += (data, memory)
        self.sent += 1

    def receive(self, into: Tensor, rank: int) -> None:
        """Receive into a contiguous tensor with the next step. Nobody reads or writes it before that is complete."""
        memory = self._reach.incoming(into)
        self._requests.append(self.comm.Irecv([_buffer(memory), MPI.BYTE], rank))
        self._memory += (into, memory)
        self._landings.append(partial(self._reach.landed, into, memory))

    def step(self) -> None:
        """End the step. Returns when few enough are under way; a step without messages counts as one."""
        self._under_way.append((self._requests, self._landings, self._memory))
        self._requests, self._landings, self._memory = [], [], []
        self.wait(self._most)

    def wait(self, left: int = 0) -> None:
        """Return when at most ``left`` steps are under way."""
        while len(self._under_way) > left:
            requests, landings, _ = self._under_way[0]
            wait_all(requests)
            for landed in landings:
                landed()
            self._under_way.popleft()


def _buffer(memory: Tensor) -> MPI.buffer:
    return MPI.buffer.fromaddress(memory.data_ptr(), memory.numel() * memory.element_size())
