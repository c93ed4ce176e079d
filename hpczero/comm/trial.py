"""Two ranks send device memory to each other: ``mpirun -n 2 python -m hpczero.comm.trial``.

A signal may kill it; its caller expects that.
"""

from __future__ import annotations

import sys

from hpczero.accelerator import choose_accelerator

NUMEL = 2**20


def main() -> int:
    """Exit code 0 if what arrives is what was sent, by a message and by the collectives that transports use."""
    accelerator = choose_accelerator("auto")  # before MPI
    import torch
    from mpi4py import MPI

    from hpczero.comm.algorithms import Blocks, LibraryExchange, LibraryGather
    from hpczero.comm.devices import DirectReach

    comm = MPI.COMM_WORLD
    peer = 1 - comm.rank
    sent = torch.full(
        (NUMEL,), float(comm.rank + 1), device=accelerator.device, dtype=torch.float32
    )
    received = torch.zeros(NUMEL, device=accelerator.device, dtype=torch.float32)
    accelerator.finish()
    send, receive = (Blocks.of(tensor, 0, NUMEL, NUMEL, 1).block(0) for tensor in (sent, received))
    comm.Sendrecv([send, MPI.BYTE], peer, recvbuf=[receive, MPI.BYTE], source=peer)
    right = bool((received == float(peer + 1)).all().item())

    # Blocks with gaps between them: datatypes go other ways through a library than plain bytes.
    reach, block, stride = DirectReach(accelerator), NUMEL // 4, NUMEL // 2
    gathered, answers = (
        sent.clone(),
        torch.zeros(NUMEL, device=accelerator.device, dtype=torch.float32),
    )
    reach.gather(LibraryGather, comm)(Blocks.of(gathered, 0, block, stride, 2))
    exchange = reach.exchange(LibraryExchange, comm)
    exchange(Blocks.of(sent, 0, block, stride, 2), Blocks.of(answers, 0, block, stride, 2))
    exchange.finish()
    theirs = slice(peer * stride, peer * stride + block)
    right = right and bool((gathered[theirs] == float(peer + 1)).all().item())
    right = right and bool((answers[theirs] == float(peer + 1)).all().item())
    return 0 if comm.allreduce(right, MPI.LAND) else 1


if __name__ == "__main__":
    sys.exit(main())
