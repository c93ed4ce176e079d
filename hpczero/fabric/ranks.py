"""MpiRanks: the ranks of MPI as a cluster environment of Lightning Fabric.

Owns: who this process is, for Fabric. Must not know: models. Without it Fabric looks for a launcher by itself: under
SLURM it insists on its own options, and under mpirun on several processes of torch.
"""

from __future__ import annotations

from typing import Any

from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment

from hpczero.errors import ConfigError
from hpczero.job.topology import Topology

_ClusterEnvironment: Any = ClusterEnvironment  # its annotations are not strict


class MpiRanks(_ClusterEnvironment):  # type: ignore[misc]
    """Ranks of a topology. Not collective."""

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self._topology = topology

    @property
    def creates_processes_externally(self) -> bool:
        """Whether a launcher has started the processes: mpirun or srun has."""
        return True

    @property
    def main_address(self) -> str:
        """Refused: there is no process group of torch that would meet there."""
        raise ConfigError("main_address: ranks meet by MPI; leave torch.distributed out")

    @property
    def main_port(self) -> int:
        """Refused, as ``main_address``."""
        raise ConfigError("main_port: ranks meet by MPI; leave torch.distributed out")

    @staticmethod
    def detect() -> bool:
        """Whether Fabric may choose it by itself: never, a strategy brings it."""
        return False

    def world_size(self) -> int:
        """Number of ranks."""
        return self._topology.size

    def set_world_size(self, size: int) -> None:
        """Nothing: it is MPI's."""

    def global_rank(self) -> int:
        """Rank of this process."""
        return self._topology.rank

    def set_global_rank(self, rank: int) -> None:
        """Nothing: it is MPI's."""

    def local_rank(self) -> int:
        """Place of this rank on its node."""
        return self._topology.local_rank

    def node_rank(self) -> int:
        """Number of this rank's node."""
        return self._topology.node_index
