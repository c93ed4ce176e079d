"""Refusals: options of transformers that cannot work over MPI, by name and before anything is started.

Owns: the list and the ways out. Must not know: MPI, models.
"""

from __future__ import annotations

from typing import Any

from hpczero.errors import ConfigError

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
# Of accelerator_config, by what must be set.
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
    """Refuse options that cannot work.

    Args:
        args: training arguments as they were given, before transformers has changed any.

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

    Args:
        args: training arguments, filled.
        size: number of ranks.

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
