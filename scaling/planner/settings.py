"""What is planned and trained: models, batches and limits of memory, and the training of one candidate."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from hpczero.accelerator import HostAccelerator
from hpczero.activations import Checkpointing
from hpczero.adapters.gpt import GPTAdapter
from hpczero.job.mesh import Mesh
from hpczero.job.topology import Topology
from hpczero.models.config import GPTConfig
from hpczero.plan.footprint import fastest_transport
from hpczero.plan.offload import MIB, Offload
from hpczero.plan.peak import PlannedRun
from scaling.contenders.training import GPTTraining, random_samples
from scaling.contenders.workload import SEED, gpt_sizes

WINDOW_MIB = 8


@dataclass(frozen=True)
class Setting:
    """What a user would ask for.

    Attributes:
        layers: of the model.
        hidden: of the model.
        context: tokens of a sample.
        sequences: samples of a rank in one step.
        room: bytes of a rank: 0 is what the smallest candidate needs, 1 what stage 3 in memory does.
    """

    layers: int
    hidden: int
    context: int
    sequences: int
    room: float = 10.0

    @property
    def name(self) -> str:
        """For tables."""
        tight = f", room {self.room:g}" if self.room < 1 else ""
        return f"{self.layers} x {self.hidden}, {self.sequences} x {self.context} tokens{tight}"

    @property
    def model(self) -> GPTConfig:
        """Sizes of the network."""
        return gpt_sizes(self.layers, self.hidden, self.hidden // 64, 8192, self.context)

    def asked(self, topology: Topology, folder: Path) -> PlannedRun:
        """What the planner starts from."""
        return PlannedRun(
            self.model,
            Mesh(shard=topology.size),
            topology.local_size,
            transport=fastest_transport(topology.local_size, topology.num_nodes),
            precision="fp32",
            micro_batch=self.sequences,
            offload=Offload(folder=folder, window=WINDOW_MIB * MIB),
        )

    def limit(self, asked: PlannedRun, candidates: Iterable[PlannedRun]) -> float:
        """Bytes of a rank beside Python, torch and MPI."""
        least = min(run.most for run in candidates)
        return least + self.room * (asked.most - least)


SETTINGS = (
    Setting(8, 512, 128, 2),
    Setting(8, 512, 128, 2, room=0.5),
    Setting(8, 512, 64, 8, room=0.25),
    Setting(4, 768, 64, 4),
    Setting(4, 768, 64, 8, room=0.4),
    Setting(12, 512, 128, 2),
    Setting(12, 512, 128, 2, room=0.3),
    Setting(6, 768, 128, 2, room=0.1),
    Setting(16, 256, 256, 4, room=0.3),
    Setting(24, 256, 256, 2, room=0.15),
    Setting(2, 1024, 64, 4),
    Setting(12, 384, 128, 4, room=0.6),
)


class Training(GPTTraining):
    """One candidate, in memory until it is closed. Collective over the topology."""

    def __init__(self, topology: Topology, setting: Setting, run: PlannedRun) -> None:
        torch.manual_seed(SEED)
        device, away = HostAccelerator(), run.checkpointing and run.kept.away
        adapter = GPTAdapter(setting.model).with_checkpointing(run.checkpointing and not away)
        super().__init__(
            adapter,
            topology,
            lambda *step: random_samples((*step, topology.rank), run.micro_batch, setting.model),
            accumulation=run.accumulation,
            device=device,
            stage=run.stage,
            transport=run.transport,
            offload=run.offload,
        )
        self._checkpointing: Checkpointing | None = None
        if away:
            with topology.agreed("open the memory tier of block inputs"):
                self._checkpointing = Checkpointing.create(
                    run.kept.rest,
                    folder=run.kept.folder,
                    device=device,
                    window=run.kept.block_nbytes(run.input_nbytes),
                    buffers=run.kept.buffers,
                )
                adapter.call_blocks_by(self.model, self._checkpointing)
            self._checkpointing.join(self.model)

    def close(self) -> None:
        """Give everything back."""
        if self._checkpointing is not None:
            self._checkpointing.close()
        super().close()
