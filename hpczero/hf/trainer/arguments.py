"""HpczeroTrainingArguments: ``TrainingArguments`` whose ranks are those of MPI.

[Note: accelerate's state]
accelerate keeps rank, size and device once per process (``PartialState``). By itself it reads them from the launcher's
variables and starts ``torch.distributed``: under mpirun it begins gloo, under srun it takes every rank for a run of its
own. It is therefore filled from MPI before anything asks it. The type NO says that no process group of torch is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from transformers import TrainingArguments

import hpczero
from hpczero.accelerator.choice import choose_accelerator
from hpczero.errors import ConfigError, DataError
from hpczero.job.group import unlike
from hpczero.job.messages import ChunkedExchange
from hpczero.job.topology import Topology

# Options that must keep their default, and what to do instead.
REFUSED = {
    "auto_find_batch_size": "ranks would settle on different sizes; set per_device_train_batch_size",
    "bf16_full_eval": "shards cannot be cast as a whole; train with bf16=True, and evaluation is in bf16 too",
    "ddp_backend": "there is no torch.distributed; leave it out, and choose transport=...",
    "ddp_broadcast_buffers": "buffers are those of rank 0 after every step; leave it out",
    "ddp_bucket_cap_mb": "there are no buckets; leave it out",
    "ddp_find_unused_parameters": "unused parameters are found by hpczero; leave it out",
    "ddp_static_graph": "leave it out",
    "deepspeed": "hpczero does what it does; leave it out, and set stage=...",
    "enable_jit_checkpoint": "one rank would save alone; send the signal to rank 0 and set should_save in a callback",
    "fp16": "use bf16=True",
    "fp16_full_eval": "shards cannot be cast as a whole; leave it out",
    "fsdp": "hpczero shards the model; leave it out, and set stage=...",
    "parallelism_config": "leave it out; the ranks share all parameters",
    "save_on_each_node": "a checkpoint is one file of all ranks; write to a file system that all nodes see",
    "torch_compile": "a model in shards is not compiled; leave it out",
    "torch_compile_backend": "a model in shards is not compiled; leave it out",
    "torch_compile_mode": "a model in shards is not compiled; leave it out",
}
# Fields of accelerator_config that must keep one of these values, and why.
CONFIGURED = {
    "dispatch_batches": (
        (None, False),
        "rank 0 would send batches by torch.distributed; leave it out: each rank reads its own",
    ),
    "use_configured_state": ((False,), "the state comes from MPI; leave it out"),
}
# Where there are several ranks.
CONFIGURED_FOR_MANY = {
    "even_batches": (
        (True,),
        "ranks with one batch less would leave the others waiting; leave it out",
    ),
    "use_seedable_sampler": (
        (True,),
        "each rank would shuffle by its own random stream; leave it out",
    ),
}


def check_options(args: Any) -> None:
    """Refuse options that cannot work, of training arguments that transformers has not changed yet.

    Raises:
        ConfigError: one of them is set; the message says what to do instead.
    """
    for name, remedy in REFUSED.items():
        value = getattr(args, name, None)
        if value not in (None, False, "", [], {}):
            raise ConfigError(
                f"{name}: got {value!r}, which HpczeroTrainingArguments cannot do: {remedy}"
            )
    if args.push_to_hub and str(getattr(args.hub_strategy, "value", args.hub_strategy)) != "end":
        raise ConfigError(
            f"hub_strategy: got {args.hub_strategy!r}: checkpoints are hpczero's own and are not uploaded; set "
            "hub_strategy='end', which uploads the final weights"
        )


def check_sampling(args: Any, size: int) -> None:
    """Refuse ways to share samples among ranks by which ranks would get other samples than each other expects.

    Raises:
        ConfigError: the message names the option.
    """
    refused = {**CONFIGURED, **(CONFIGURED_FOR_MANY if size > 1 else {})}
    for name, (allowed, remedy) in refused.items():
        value = getattr(args.accelerator_config, name, allowed[0])
        if value not in allowed:
            raise ConfigError(
                f"accelerator_config: {name}: got {value!r}, which HpczeroTrainingArguments cannot do: {remedy}"
            )
    if args.accelerator_config.dispatch_batches is None:
        args.accelerator_config.dispatch_batches = False
    if size > 1 and args.train_sampling_strategy == "group_by_length":
        raise ConfigError(
            "train_sampling_strategy: got 'group_by_length', whose order each rank would draw by itself; use "
            "'batch_rebalance', which knows of ranks"
        )


# What ranks may set differently: it changes what they say, not what they compute.
OWN = {"dataloader_num_workers", "dataloader_pin_memory", "disable_tqdm", "hub_token", "local_rank"}
OWN |= {"log_level", "log_level_replica", "project", "report_to", "run_name"}


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
        # Each rank would take its stream's, which a resume sets anew
        if given["data_seed"] is None:
            given["data_seed"] = self.seed
        check_sampling(self, self.topology.size)

    @cached_property
    def _setup_devices(self) -> torch.device:
        """This rank's device, with accelerate's state filled: see [Note: accelerate's state]."""
        kind = "cpu" if self.use_cpu else "auto"
        device = choose_accelerator(kind).device  # before MPI is started
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
        """Raise ConfigError where something has reset accelerate's state. Not collective."""
        state, topology = PartialState._shared_state, self.topology
        found = (state.get("process_index"), state.get("num_processes"))
        if found != (topology.rank, topology.size):
            raise ConfigError(
                f"rank {topology.rank}: accelerate's state says process {found[0]} of {found[1]}, expected "
                f"{topology.rank} of {topology.size}: something has reset it since HpczeroTrainingArguments was made, "
                "such as a plain TrainingArguments or an Accelerator; make the HpczeroTrainingArguments last"
            )

    def _ranks(self) -> Topology:
        _ = self.device
        return self.topology

    world_size = property(lambda self: self._ranks().size)
    process_index = property(lambda self: self._ranks().rank)
    local_process_index = property(lambda self: self._ranks().local_rank)
    place_model_on_device = property(lambda _: False)  # zeroify moves the model

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


def check_topology(topology: Topology, args: HpczeroTrainingArguments) -> None:
    """Refuse a topology on which ranks of MPI would not each train on samples of their own. Not collective.

    Raises:
        ConfigError: it has other ranks, or degrees of a model's parts.
    """
    if (topology.size, topology.rank) != (args.world_size, args.process_index):
        raise ConfigError(
            f"topology: this is rank {topology.rank} of {topology.size}, expected {args.process_index} of "
            f"{args.world_size}: the trainer works on all ranks of MPI's world"
        )
    if topology.data.size != topology.size:
        raise ConfigError(
            f"topology: {topology.data.size} of {topology.size} ranks train on samples of their own, expected all; "
            "leave tensor, sequence and pipeline degrees out of the mesh"
        )


def check_equal(
    exchange: ChunkedExchange,
    args: HpczeroTrainingArguments,
    positional: Any,
    named: Mapping[str, Any],
) -> None:
    """Refuse ranks whose arguments or data sets differ. Collective over the world.

    ``positional`` and ``named`` are arguments of the trainer.

    Raises:
        ConfigError: arguments differ; on every rank.
        DataError: lengths of data sets differ; on every rank.
    """
    topology = exchange.topology
    found = unlike(topology.world, args.lines())
    with topology.agreed("compare the arguments of the trainer"):
        if found is not None:
            raise ConfigError(
                f"args: rank {topology.rank} has {found[0]}, and rank 0 {found[1]}; make them equal on all ranks (a "
                "folder named after the time is made once, and broadcast)"
            )
    lengths = {}
    for name, value in (*enumerate(positional), *named.items()):
        if name in (1, "train_dataset", 2, "eval_dataset"):
            with suppress(TypeError, NotImplementedError):
                lengths[str(name)] = len(value)
    everywhere = exchange.objects(lengths, "compare the lengths of data sets")
    odd = next((rank for rank, other in enumerate(everywhere) if other != everywhere[0]), None)
    if odd is not None:
        raise DataError(
            f"data sets: rank {odd} has lengths {everywhere[odd]}, and rank 0 {everywhere[0]}; give every rank the "
            "same data set: each takes its own part of it"
        ).on_all_ranks()
