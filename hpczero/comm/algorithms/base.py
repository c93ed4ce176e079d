"""The two contracts: gather blocks in place, exchange blocks.

Owns: chunking, and what every algorithm shares. Must not know: any algorithm.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from mpi4py import MPI

from hpczero.comm.algorithms.blocks import CHUNK_BYTES, Blocks, BlockTypes

# How long a rank polls before it naps between polls, and how long a nap is: where ranks outnumber cores, the one that
# polls keeps the core from the one it waits for.
POLL_S = 100e-6
NAP_S = 50e-6


Prepare = Callable[[int, int], None]
"""Fills blocks ``first .. first + count - 1``, given ``first`` and ``count``."""
Meanwhile = Callable[[], None]


def wait_all(requests: Sequence[MPI.Request]) -> None:
    """Return when all requests are complete."""
    patient_from = time.perf_counter() + POLL_S
    while not MPI.Request.Testall(requests):
        if time.perf_counter() > patient_from:
            time.sleep(NAP_S)


class _Algorithm:
    """One algorithm on one communicator, which it borrows. ``free`` frees what the algorithm made.

    Attributes:
        messages: that this rank has sent; 0 where the MPI library decides.
    """

    name: ClassVar[str]
    in_rounds: ClassVar[bool] = False  # whether it pays to cut blocks into short rounds

    def __init__(self, comm: MPI.Intracomm, *, chunk_nbytes: int = CHUNK_BYTES) -> None:
        """Not collective.

        Args:
            comm: must outlive the algorithm. It carries nothing else while the algorithm runs.
            chunk_nbytes: most bytes of one block that a single MPI call moves.
        """
        self.comm = comm
        self.chunk_nbytes = chunk_nbytes
        self.types = BlockTypes()
        self.messages = 0

    @classmethod
    def fits(cls, size: int) -> bool:
        """Whether the algorithm works on ``size`` ranks."""
        return size >= 1

    def free(self) -> None:
        """Free datatypes. Not collective."""
        self.types.free()


class Gather(_Algorithm, ABC):
    """All-gather of equal blocks, in place."""

    def __call__(self, blocks: Blocks, *, round_nbytes: int = CHUNK_BYTES) -> None:
        """Fill every block from its owner: rank i owns block i. Collective over the communicator.

        Args:
            blocks: one for each rank.
            round_nbytes: bytes of a block that travel in one round, if no more than ``chunk_nbytes``.
        """
        if blocks.count > 1:
            for piece in blocks.pieces(min(self.chunk_nbytes, round_nbytes)):
                self._gather(piece)
            self._finish()

    def _finish(self) -> None:
        """Return when every piece has arrived. Algorithms override it if pieces may still be on their way."""
        return

    @abstractmethod
    def _gather(self, blocks: Blocks) -> None: ...


class Exchange(_Algorithm, ABC):
    """All-to-all of equal blocks. Calls may overlap: each call completes the one before, ``finish`` the last one."""

    in_rounds = True
    takes_gaps: ClassVar[bool] = False  # blocks to send may lie apart, at no cost

    def __call__(
        self,
        send: Blocks,
        receive: Blocks,
        *,
        prepare: Prepare = lambda first, count: None,
        meanwhile: Meanwhile = lambda: None,
    ) -> None:
        """Send block i of ``send`` to rank i; what rank i sends arrives in block i of ``receive``.

        Collective over the communicator. This rank's own block of ``receive`` has no defined content; read it from
        ``send``.

        Args:
            send: one block for each rank, none longer than ``chunk_nbytes``.
            receive: as many blocks, no overlap with ``send``.
            prepare: fills neighbouring blocks of ``send`` shortly before they leave. Every block is filled once, this
                rank's own included.
            meanwhile: called once, when the call before is complete and messages of this one are on their way.
        """
        self._exchange(send, receive, prepare, meanwhile)

    def finish(self) -> None:
        """Return when the last call is complete. Collective over the communicator."""
        return

    @abstractmethod
    def _exchange(
        self, send: Blocks, receive: Blocks, prepare: Prepare, meanwhile: Meanwhile
    ) -> None: ...
