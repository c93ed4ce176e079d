"""Two ranks send device memory to each other: ``mpirun -n 2 python -m hpczero.comm.trial``.

Owns: the trial. Must not know: what is decided by it. It may be killed by a signal; that is what it is for.
"""

from __future__ import annotations

import sys

from hpczero.accelerator import choose_accelerator

NUMEL = 2**20


def main() -> int:
    """Exit code 0 if what arrives is what was sent."""
    accelerator = choose_accelerator("auto")  # before MPI
    import torch
    from mpi4py import MPI

    from hpczero.comm.blocks import Blocks

    comm = MPI.COMM_WORLD
    peer = 1 - comm.rank
    sent = torch.full((NUMEL,), float(comm.rank + 1), device=accelerator.device)
    received = torch.zeros(NUMEL, device=accelerator.device)
    accelerator.finish()
    send, receive = (Blocks.of(tensor, 0, NUMEL, NUMEL, 1).block(0) for tensor in (sent, received))
    comm.Sendrecv([send, MPI.BYTE], peer, recvbuf=[receive, MPI.BYTE], source=peer)
    right = bool((received == float(peer + 1)).all().item())
    return 0 if comm.allreduce(right, MPI.LAND) else 1


if __name__ == "__main__":
    sys.exit(main())
