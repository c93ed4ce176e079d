"""Bridge: torch.distributed over the ranks of an MPI communicator, for programs and libraries that are written for it.

    from mpi4py import MPI
    import hpczero.bridge

    hpczero.bridge.init(MPI.COMM_WORLD)
    model = torch.nn.parallel.DistributedDataParallel(model)

docs/bridge.md says what runs on it. The engine of ``zeroify`` does not use it.
"""

from hpczero.bridge.start import BACKEND, init

__all__ = ["BACKEND", "init"]
