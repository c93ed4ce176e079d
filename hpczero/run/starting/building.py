"""The model of a run in shards, and its optimizer: what the adapter must be, and how both are made."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import math
import numbers
import os
import sys
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

import hpczero
from hpczero.accelerator import Accelerator
from hpczero.activations import Checkpointing, keep_products
from hpczero.adapters.base import Adapter
from hpczero.errors import ConfigError
from hpczero.files.regular import shown
from hpczero.job.topology import Topology
from hpczero.models.config import GPTConfig
from hpczero.options.config import LayoutOptions, ModelOptions, RunConfig, TrainOptions
from hpczero.options.reading import to_toml
from hpczero.parallel.pipeline.stages import cut
from hpczero.parallel.tensor import share_sequence, split
from hpczero.plan.plan import UnitRule
from hpczero.plan.precision import Precision
from hpczero.plan.rules import default_rule
from hpczero.run.starting.precheck import activations_of, offload_of
from hpczero.run.starting.room_check import RoomCheck


def check_same_options(config: RunConfig, topology: Topology) -> None:
    """Refuse ranks that were started with other options: they would train another model. Collective.

    Raises:
        ConfigError: on every rank; the message names the ranks that differ from rank 0.
    """
    unlike = ConfigError(
        "got other options than rank 0; give every rank the same command line and file"
    )
    topology.same(to_toml(config), "agree on the options", unlike)


def check_kind(adapter: Adapter, topology: Topology) -> None:
    """Hold against the contract what decides how a run begins. Collective over the topology's world.

    Raises:
        ConfigError: on every rank.
    """
    name = type(adapter).__name__
    with topology.agreed("ask the adapter what it reads"):
        said: dict[str, Any] = {"class": f"{type(adapter).__module__}.{type(adapter).__qualname__}"}
        for member in ("reads_text", "on_meta"):
            said[member] = got = getattr(adapter, member)
            _demand(isinstance(got, bool), name, member, got, "True or False")
    check_same(said, topology, of=name)


def check_numbers(adapter: Adapter, topology: Topology) -> None:
    """Hold the rest of it against the contract, once the vocabulary is known. Collective over the topology's world.

    Raises:
        ConfigError: on every rank.
    """
    name = type(adapter).__name__
    with topology.agreed("ask the adapter for its numbers"):
        unit, metric, context = adapter.unit, adapter.metric_name, adapter.context
        flops, sizes = adapter.flops_per_token, adapter.transformer
        _demand(isinstance(unit, str) and unit != "", name, "unit", unit, "a word")
        _demand(isinstance(metric, str), name, "metric_name", metric, "a word")
        counts = "the tokens in one sample, or 1 where samples themselves are counted"
        whole = _is_number(numbers.Integral, context) and context >= 1
        _demand(whole, name, "context", context, f"a whole number of at least 1: {counts}")
        real = _is_number(numbers.Real, flops) and 0 < float(flops or 0) < math.inf
        counted = "a number above 0, or None: torch counts them"
        _demand(flops is None or real, name, "flops_per_token", flops, counted)
        if not (sizes is None or isinstance(sizes, GPTConfig)):
            raise ConfigError(
                f"model.factory: {name}.transformer is {type(sizes).__name__}, expected an hpczero.models.GPTConfig, "
                "or None"
            )
        said = {
            "unit": unit,
            "metric_name": metric,
            "context": int(context),
            "flops_per_token": None if flops is None else float(flops),
            "transformer": None if sizes is None else dataclasses.asdict(sizes),
        }
    check_same(said, topology, of=name)


def check_card(card: Mapping[str, Any], topology: Topology, *, of: str) -> None:
    """Refuse ranks whose models have different cards. Collective over the topology's world.

    Raises:
        ConfigError: on every rank.
    """
    check_same({f"card()[{key!r}]": value for key, value in card.items()}, topology, of=of)


def check_same(said: Mapping[str, Any], topology: Topology, *, of: str) -> None:
    """Refuse ranks of which one says something else than rank 0. Collective over the topology's world.

    Raises:
        ConfigError: on every rank; names what ``of`` says differently.
    """
    text = json.dumps(dict(said))
    first, mine = json.loads(topology.broadcast_text(text)), json.loads(text)
    with topology.agreed(f"compare what {of} says with rank 0"):
        for name in {**first, **mine}:
            if name not in mine or name not in first or mine[name] != first[name]:
                here, there = (
                    shown(each[name]) if name in each else "missing" for each in (mine, first)
                )
                raise ConfigError(
                    f"model.factory: {of}.{name} is {here}, where rank 0 has {there}; it must be the same on every "
                    "rank, so take nothing from the rank, the host or the clock"
                )


def an_adapter(given: object, what: str) -> Adapter:
    """``given``, which ``what`` of an adapter gave. Not collective.

    Raises:
        ConfigError: it is no adapter.
    """
    if isinstance(given, Adapter):
        return given
    raise ConfigError(
        f"model.factory: {what} gave {type(given).__name__}, expected an hpczero.Adapter, of the same model"
    )


def _demand(holds: bool, name: str, member: str, got: Any, expected: str) -> None:
    """Refuse what a member of the adapter ``name`` is, unless the condition holds."""
    if not holds:
        raise ConfigError(f"model.factory: {name}.{member} is {shown(got)}, expected {expected}")


def _is_number(kind: type, got: Any) -> bool:
    return isinstance(got, kind) and not isinstance(got, bool)


def made_by_factory(options: ModelOptions) -> Adapter:
    """What ``model.factory`` returns for ``model.arguments``. Not collective; the same on every rank by contract.

    The current folder is searched for modules too, as by ``python -m``. A ValueError
    of the factory is one of its arguments; other errors pass.

    Raises:
        ConfigError: there is no such module or function, it does not take the arguments, or gives no adapter.
    """
    assert options.factory is not None, "asked for a factory"
    name, _, called = options.factory.partition(":")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        is_own = f"{name}.".startswith(f"{missing}.")
        where = repr(missing) if is_own else f"a module {missing!r} that it imports"
        raise ConfigError(
            f"model.factory: {options.factory}: no module {where} in the current folder {here} nor among what is "
            "installed; start the command where it lies, install it, or set PYTHONPATH"
        ) from error
    factory = getattr(module, called, None)
    if not callable(factory):
        known = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise ConfigError(
            f"model.factory: {name} has no function {called!r}; it has {', '.join(known) or 'none'}"
        )
    arguments = {} if options.arguments is None else options.arguments.value
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise ConfigError(
            f"model.arguments: {options.factory}{inspect.signature(factory)} {error}"
        ) from error
    except ValueError:  # of a function in C nothing is known before it is called
        pass
    try:
        adapter = factory(**arguments)
    except ValueError as error:  # what Python's own functions say of a value that cannot be
        raise ConfigError(f"model.arguments: {options.factory}: {error}") from error
    if not isinstance(adapter, Adapter):
        raise ConfigError(
            f"model.factory: {options.factory} gave {type(adapter).__name__}, expected an hpczero.Adapter, whose "
            "build() makes the module and whose samples() gives its data (docs/models.md)"
        )
    return adapter


def divide(
    options: LayoutOptions, adapter: Adapter, model: nn.Module, topology: Topology
) -> nn.Module:
    """Keep this rank's part of ``model``, in place, before its optimizer is made. Collective over the topology's world.

    ``options`` are those of the topology's mesh. Returns ``model``, which is whole and on the meta device, itself.

    Raises:
        PlanError: the model cannot be divided so; the same on every rank.
    """
    if options.pipeline > 1:
        cut(model, topology, adapter.stages(model), interleave=options.interleave)
    if options.tensor > 1:
        split(model, topology, adapter.tensor_rule(), sequence=options.sequence)
    if options.context > 1:
        share_sequence(model, topology)
    return model


def build(
    config: RunConfig,
    adapter: Adapter,
    topology: Topology,
    accelerator: Accelerator,
    *,
    resumes: bool = False,
) -> tuple[nn.Module, AdamW]:
    """Make the model in shards, with its initial weights, and its optimizer. Collective over the topology's world.

    Where the run ``resumes``, a checkpoint must be loaded next, and no weights are drawn.
    """
    found = adapter.pretrained(topology, config.run.seed)
    model, fill = found or (_whole(adapter, config.run.seed, topology), None)
    # Weights and samples have generators of their own; this is for whatever else a model draws.
    torch.manual_seed(seed_of(config.run.seed, topology))
    divide(config.parallel, adapter, model, topology)
    optimizer = AdamW(
        decay_groups(model, adapter, config.train.weight_decay),
        lr=config.train.learning_rate,
        betas=config.train.betas,
        fused=True,
    )
    hpczero.zeroify(
        model,
        optimizer,
        stage=config.parallel.stage,
        topology=topology,
        precision=Precision.of(
            config.parallel.precision,
            reduce=config.parallel.reduce,
            gather=config.parallel.gather,
        ),
        rule=_rule(adapter),
        transport=config.parallel.transport,
        algorithms=config.parallel.algorithms,
        overlap=config.parallel.overlap,
        secondary=config.parallel.secondary,
        sparse_gradients=config.parallel.sparse_gradients,
        device=accelerator,
        initialize=hpczero.loaded_later
        if resumes
        else fill or adapter.initializer(model, config.run.seed),
        offload=offload_of(config.offload),
        exact=config.run.exact,
    )
    for module in compiled_modules(config, model):
        module.compile()
    return model, optimizer


def compiled_modules(config: RunConfig, model: nn.Module) -> list[nn.Module]:
    """What is compiled of a zeroified model: the modules of its units, or itself where it is one unit; or nothing."""
    if not config.model.compile:
        return []
    units = hpczero.sharding(model).plan.units
    names = dict.fromkeys(name for unit in units for name in unit.modules if name)
    return [model.get_submodule(name) for name in names or ("",)]


def _whole(adapter: Adapter, seed: int, topology: Topology) -> nn.Module:
    """The whole model, before its first values. Collective over the topology's world."""
    with topology.agreed("build the model"):
        if adapter.on_meta:
            # A model on the meta device holds nothing; zeroify fills the shards of this rank.
            with torch.device("meta"):
                return _checked(adapter, adapter.build())
        torch.manual_seed(seed)  # the same values on every rank, and in a program of one process
        return _checked(adapter, adapter.build())


def _checked(adapter: Adapter, model: object) -> nn.Module:
    """The model, or a ConfigError where nothing of it can be trained."""
    what = f"{type(adapter).__name__}.build()"
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model.factory: {what} gave {type(model).__name__}, expected a torch.nn.Module"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"model.factory: {what} gave a {type(model).__name__} in which no parameter requires gradients, expected "
            "one that can be trained"
        )
    return model


def _rule(adapter: Adapter) -> UnitRule:
    """The adapter's rule for units, or the default one where it has none."""

    def rule(model: nn.Module) -> list[tuple[str, ...]]:
        own = adapter.units(model)
        return default_rule(model) if own is None else [*own]

    return rule


def seed_of(seed: int, topology: Topology) -> int:
    """The seed of what a model draws on this rank, dropout above all. Not collective.

    Ranks that have other samples, other tokens or other blocks draw other numbers. Tensor ranks draw the same: what is
    whole on all of them must be dropped alike. Where only a part lies on each, ``parallel.tensor.masks`` takes care.
    """
    words = f"{seed} {topology.data_sequence.rank}"
    if topology.pipeline.rank:  # the first stage draws what a rank without a pipeline does
        words += f" stage {topology.pipeline.rank}"
    return zlib.crc32(words.encode())


def decay_groups(
    model: nn.Module, adapter: Adapter, weight_decay: float
) -> list[dict[str, object]]:
    """Two optimizer groups: parameters that decay, then the others."""
    parameters = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    decaying = [parameter for name, parameter in parameters if adapter.decays(name, parameter)]
    others = [parameter for name, parameter in parameters if not adapter.decays(name, parameter)]
    return [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]


def set_options(optimizer: AdamW, options: TrainOptions) -> None:
    """Give the optimizer the current options, whatever a checkpoint has restored."""
    decays = (options.weight_decay, 0.0)  # as in decay_groups
    for group, weight_decay in zip(optimizer.param_groups, decays, strict=True):
        rate = options.learning_rate
        group.update(lr=rate, initial_lr=rate, betas=options.betas, weight_decay=weight_decay)


def recompute_blocks(
    config: RunConfig, adapter: Adapter, model: nn.Module, accelerator: Accelerator, room: RoomCheck
) -> Checkpointing | None:
    """Have the blocks of a zeroified model computed again in backward, as the options say. Collective.

    Returns:
        What calls them, which its user closes; None where nothing is computed again.

    Raises:
        TierError, ConfigError, OutOfMemory: the tier cannot be had; on every rank.
        PlanError: the adapter knows of no blocks; on every rank.
    """
    asked = activations_of(config)
    if asked.checkpointing == "none":
        return None
    if room.run is None and asked.away:
        raise ConfigError(
            f"activations.rest: got {asked.rest}, and of {config.model.title} nobody knows how large the inputs of its "
            "blocks are; leave them on the device"
        )
    input_nbytes = room.run.input_nbytes if room.run is not None else 1
    with hpczero.sharding(model).topology.agreed("open the memory tier of block inputs"):
        checkpointing = Checkpointing.create(
            asked.rest,
            folder=asked.folder,
            policy=keep_products if asked.checkpointing == "selective" else None,
            device=accelerator,
            window=asked.block_nbytes(input_nbytes),
            buffers=asked.buffers,
        )
        adapter.call_blocks_by(model, checkpointing)
    checkpointing.join(model)
    return checkpointing
