"""HpczeroTrainingArguments: ``TrainingArguments`` whose ranks are those of MPI.

Owns: which process of how many this is, for transformers and accelerate alike. Must not know: models, checkpoints.

[Note: accelerate's state]
accelerate keeps rank, size and device once per process (``PartialState``). By itself it reads them from the launcher's
variables and starts ``torch.distributed``: under mpirun it begins gloo, under srun it takes every rank for a run of its
own. It is therefore filled from MPI before anything asks it. The type NO says that no process group of torch is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from transformers import TrainingArguments

import hpczero
from hpczero.accelerator.choice import choose_accelerator
from hpczero.errors import ConfigError
from hpczero.hf.trainer.refusals import check_options, check_sampling

if TYPE_CHECKING:
    from hpczero.job.topology import Topology

# What ranks may set differently: it changes what they say, not what they compute.
OWN = frozenset(
    {
        *(
            "dataloader_num_workers",
            "dataloader_pin_memory",
            "disable_tqdm",
            "hub_token",
            "local_rank",
        ),
        *("log_level", "log_level_replica", "project", "report_to", "run_name"),
    }
)


@cache
def world() -> Topology:
    """All ranks of MPI, once per process, as accelerate's state is one per process. Collective at the first call."""
    return hpczero.Topology.of_world()


_TrainingArguments: Any = TrainingArguments  # its annotations are not strict


@dataclass
class HpczeroTrainingArguments(_TrainingArguments):  # type: ignore[misc]
    """``TrainingArguments`` for ``HpczeroTrainer``: all its options, and how the model is sharded.

    Making one is collective over MPI's world, and so is the trainer made with it.

    Attributes:
        stage: of ZeRO: 0 replicates, 1 shards optimizer state, 2 also gradients, 3 also parameters.
        transport: as of ``hpczero.zeroify``.

    Raises:
        ConfigError: an option that cannot work over MPI; the message names it and the way out.
        TopologyError: the launcher has started several ranks, and MPI sees one: each would train alone.
    """

    stage: int = field(default=3, metadata={"help": "Stage of ZeRO, 0 to 3."})
    transport: str = field(default="auto", metadata={"help": "How hpczero moves shards."})

    def __post_init__(self) -> None:
        check_options(self)
        super().__post_init__()
        mixed = str(vars(self)["mixed_precision"])
        if mixed not in ("no", "bf16"):
            raise ConfigError(
                f"mixed precision: got {mixed!r} (from ACCELERATE_MIXED_PRECISION), expected no or "
                "bf16; unset that variable"
            )
        # accelerate would autocast; hpczero keeps fp32 masters, and computes in bf16.
        self.precision = "bf16" if mixed == "bf16" else "fp32"
        self.mixed_precision = "no"
        given: Any = vars(self)
        if given["data_seed"] is None:
            given["data_seed"] = (
                self.seed
            )  # else each rank takes its stream's, which a resume sets anew
        check_sampling(self, self.topology.size)

    @cached_property
    def _setup_devices(self) -> torch.device:
        """This rank's device, with accelerate's state filled: see [Note: accelerate's state]."""
        device = choose_accelerator(
            "cpu" if self.use_cpu else "auto"
        ).device  # before MPI is started
        self.topology = world()
        self.accelerator_config.pop("use_configured_state", None)
        self._fill_state(device)
        self._n_gpu = 0 if device.type == "cpu" else 1  # more would be nn.DataParallel
        return device

    def _fill_state(self, device: torch.device) -> None:
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._shared_state.update(
            _cpu=device.type == "cpu",
            backend=None,
            debug=False,
            device=device,
            distributed_type=DistributedType.NO,
            fork_launched=False,
            local_process_index=self.topology.local_rank,
            num_processes=self.topology.size,
            process_index=self.topology.rank,
        )
        self.distributed_state = PartialState(cpu=device.type == "cpu")

    def check_state(self) -> None:
        """Refuse to go on if something has reset accelerate's state. Not collective.

        Raises:
            ConfigError: it says other ranks than MPI.
        """
        state, topology = PartialState._shared_state, self.topology
        found = (state.get("process_index"), state.get("num_processes"))
        if found != (topology.rank, topology.size):
            raise ConfigError(
                f"rank {topology.rank}: accelerate's state says process {found[0]} of {found[1]}, expected "
                f"{topology.rank} of {topology.size}: something has reset it since HpczeroTrainingArguments was made, "
                "such as a plain TrainingArguments or an Accelerator; make the HpczeroTrainingArguments last"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        _ = self.device
        return self.topology.size

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        _ = self.device
        return self.topology.rank

    @property
    def local_process_index(self) -> int:
        """Place of this rank on its node."""
        _ = self.device
        return self.topology.local_rank

    @property
    def place_model_on_device(self) -> bool:
        """Whether the trainer moves the model: ``zeroify`` does."""
        return False

    @contextmanager
    def main_process_first(self, local: bool = True, desc: str = "work") -> Iterator[None]:
        """Rank 0, or the first rank of each node, runs the block before the others. Collective over the world."""
        first = self.local_process_index == 0 if local else self.process_index == 0
        if not first:
            self.topology.barrier()
        yield
        if first:
            self.topology.barrier()

    def lines(self) -> list[str]:
        """What all ranks must have set alike, one line an option."""
        options = {name: value for name, value in self.to_dict().items() if name not in OWN}
        return [f"{name}={json.dumps(options[name], default=str)}" for name in sorted(options)]

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to this process, for ``training_args.bin``; it is found anew where it is loaded."""
        own = ("topology", "distributed_state", "_setup_devices", "_n_gpu")
        return {name: value for name, value in vars(self).items() if name not in own}
