"""Bridge: torch.distributed over the ranks of an MPI communicator, for programs and libraries that are written for it.

    from mpi4py import MPI
    import hpczero.bridge

    hpczero.bridge.init(MPI.COMM_WORLD)
    model = torch.nn.parallel.DistributedDataParallel(model)

docs/bridge.md says what runs on it. ``zeroify`` makes the group where the program has not, and does not use it.
"""

from hpczero.bridge.start import BACKEND, init, init_by_default

__all__ = ["BACKEND", "init", "init_by_default"]
