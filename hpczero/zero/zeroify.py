"""zeroify: joins plan, units, schedule and step around a plain torch model; the public calls on such a model."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import logging
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from typing_extensions import Never

from hpczero.accelerator import Accelerator, accelerator_of, choose_accelerator
from hpczero.bridge import init_by_default
from hpczero.comm import Collectives, check_transport_name, choose
from hpczero.errors import ConfigError, PlanError, explain_exhaustion
from hpczero.job.mesh import DATA_SEQUENCE
from hpczero.job.topology import Topology
from hpczero.memory.buffers import CPU, DTYPES
from hpczero.memory.pages import give_back_freed_memory, keep_freed_memory
from hpczero.options.environment import Environment
from hpczero.options.values import Exactness, check_algorithms, require
from hpczero.plan import Plan, Stage
from hpczero.plan.layout import Codec
from hpczero.plan.offload import Offload
from hpczero.plan.offloaded import ADAM_STATES, ITEM, OffloadedPlan, windows_of
from hpczero.plan.placement import part_of
from hpczero.plan.plan import UnitRule
from hpczero.plan.precision import CODES, Precision
from hpczero.plan.rules import default_rule, tables_of, with_tables
from hpczero.tier import DiskTier, HostTier, InPlaceTier, Tier
from hpczero.zero.buffers import persistent_buffers
from hpczero.zero.exact import Exact, sums_of_nodes_are_branches, why_inexact
from hpczero.zero.filling import Initializer, KnownValues, bind, fill, loaded_later, way_of
from hpczero.zero.refusals import check_degrees, check_gradients, check_modules, check_part
from hpczero.zero.sharding import KEY, Sharding
from hpczero.zero.units.away_shard import (
    GRADIENT,
    NOTHING_AWAY,
    VALUES,
    Ascent,
    Away,
    AwayShard,
    UnitStore,
)
from hpczero.zero.update.optimizer_state import state_names
from hpczero.zero.update.optimizers import (
    OptimizerSet,
    check_optimizer,
    check_uncut,
    rounds_by_place,
)
from hpczero.zero.update.parts import method_behind
from hpczero.zero.update.streamed import leaves_choice


def need(offloaded: OffloadedPlan, topology: Topology) -> str:
    """What the plan takes, for a program whose memory runs out; without what its transport lets ranks share."""
    plan, memory = offloaded.plan, offloaded.memory()
    held, buffers = memory.states / 1e9, (memory.unsharded + memory.exchange) / 1e9
    return (
        f"{plan.numel:,} parameters at stage {int(plan.stage)} on {topology.size} rank(s) take {held:,.2f} GB per rank "
        f"with Adam, {buffers:,.2f} GB of buffers in a step, and the activations of the model; take a higher stage, "
        "more ranks on more nodes or smaller batches: `python -m hpczero.plan --memory GB_OF_A_RANK --ranks "
        f"{topology.size} --ranks-per-node {topology.local_size} --precision {plan.precision.param} --layers ... "
        "--hidden ...` says what fits"
    )


logger = logging.getLogger("hpczero.offload")


def parts_of(offload: Offload, plan: Plan, optimizers: OptimizerSet) -> list[str]:
    """What of every element rests on the tier, fp32 each; empty where nothing is offloaded.

    Raises:
        PlanError: what is asked for does not go together, or saves nothing.
    """
    offload.check(plan.stage)
    if not offload.any:
        return []
    if not len(optimizers):
        raise PlanError(
            "offload: got a model without an optimizer, expected one: what is offloaded is what training keeps"
        )
    if offload.delayed and len(optimizers) > 1:
        raise PlanError(
            f"offload: got delayed=True and {len(optimizers)} optimizers, expected one: their updates would be of "
            "different batches"
        )
    for index, optimizer in enumerate(optimizers):
        if method_behind(optimizer) is None:
            raise PlanError(
                f"offload: {optimizers.name(index)} is a {type(optimizer).__name__}, expected one of torch's own "
                "elementwise optimizers with its own step, which can be taken window by window; leave it on the device"
            )
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise PlanError(
                f"offload: {optimizers.name(index)} has differentiable=True, expected False: state that rests "
                "elsewhere has no graph"
            )
        if offload.on_host and any(group.get("capturable") for group in optimizer.param_groups):
            raise PlanError(
                f"offload: {optimizers.name(index)} has capturable=True, expected False: the host takes its step, "
                "which no graph of a device can hold; or let the device step"
            )
    planned = OffloadedPlan(plan, offload)
    values, gradient = planned.values, planned.gradients
    names = dict.fromkeys(name for optimizer in optimizers for name in state_names(optimizer))
    parts = [*([VALUES] if values else []), *([GRADIENT] if gradient else []), *names]
    leaves = plan.precision.has_masters or planned.parameters or gradient or names
    if not leaves:
        raise PlanError(
            f"offload: optimizer on {offload.optimizer} saves nothing: {', '.join(optimizers.classes)} keeps no "
            "state of every element, and in fp32 the parameters are their own masters; leave it on the device"
        )
    return parts


def tell(offload: Offload, optimizers: OptimizerSet) -> None:
    """Say what an offload does that a program does not ask for in so many words; on one rank."""
    if offload.delayed:
        logger.warning(
            "offload: the update of each step is taken while the next batch is computed, so parameters are one step "
            "late; this changes the result (delayed=True)"
        )
    unchosen = [i for i, optimizer in enumerate(optimizers) if leaves_choice(optimizer)]
    if offload.on_host and unchosen:
        names = ", ".join(optimizers.name(i) for i in unchosen)
        logger.info(
            "offload: the host steps with the fused implementation of %s, which names none; fused=False or "
            "foreach=True names another",
            names,
        )


def open_away(
    offload: Offload,
    plan: Plan,
    parts: Sequence[str],
    accelerator: Accelerator,
    rank: int,
    *,
    exact: bool,
) -> Away:
    """The tier of this rank, with room for its shard of every unit that rests there; not collective.

    Args:
        offload: checked.
        plan: the units.
        parts: of ``parts_of``.
        accelerator: that computes.
        rank: whose shards.
        exact: whether bits must not depend on where a shard begins.

    Raises:
        TierError, ConfigError, OutOfMemory: it cannot be had, or there is not so much room.
    """
    blocks, nbytes = offload.buffers, offload.window
    tier: Tier
    planned = OffloadedPlan(plan, offload)
    ascent = None
    if offload.medium == "host":
        kind = InPlaceTier if offload.on_host else HostTier
        tier = kind(blocks=blocks, block_nbytes=nbytes, accelerator=accelerator)
        device = accelerator.device
        ascent = Ascent(accelerator, tier.traffic) if offload.on_host else None
    else:
        assert offload.folder is not None, "checked"
        tier = DiskTier(
            Path(offload.folder), blocks=blocks, block_nbytes=nbytes, accelerator=accelerator
        )
        device = CPU
    store = UnitStore(
        tier,
        blocks=blocks,
        window_nbytes=nbytes,
        device=device,
        ascent=ascent,
        delayed=offload.delayed,
    )
    near = offload.parameters == "device"
    element_nbytes = ITEM * len(parts) + planned.mirror
    try:
        shards = {
            spec.name: AwayShard(
                spec.name,
                windows_of(spec.layout, spec.groups, rank, nbytes, element_nbytes, by_shard=exact),
                store=store,
                parts=parts,
                near=near,
                mirror=DTYPES[plan.precision.param] if planned.mirror else None,
            )
            for spec in planned.away
        }
    except BaseException:
        tier.close()
        raise
    return Away(shards, store, 0 if near else offload.ahead)


def codec_of(
    quantize: str | None, stage: Stage, topology: Topology, *, secondary: bool
) -> Codec | None:
    """The codec that ``quantize`` names; None for the parameters' own dtype.

    Raises:
        ConfigError: there is no such form.
        PlanError: parameters stay whole, are cut in two ways, or nodes keep a copy; says what to do.
    """
    codec = Codec.of(quantize)
    if codec is None:
        return None
    if not stage.shards_parameters:
        raise PlanError(
            f"quantize: stage {int(stage)} keeps parameters whole, and codes are for sharded ones; use stage=3, or "
            "leave it out"
        )
    if topology.tensor.size > 1:
        raise PlanError(
            f"quantize: {topology.tensor.size} tensor ranks have parts of each matrix, whose blocks would not be those "
            "of the whole; use a mesh without tensor parallelism, or leave it out"
        )
    if secondary:
        raise PlanError(
            "quantize: with secondary=True nodes keep gathered parameters, and codes are not kept so; leave one of the "
            "two out"
        )
    return codec


def check_equal_plans(
    plan: Plan,
    model: nn.Module,
    optimizers: OptimizerSet,
    topology: Topology,
    away: Sequence[str],
    way: str,
) -> None:
    """All ranks must have built the same, or later collectives would mix up buffers and masters would drift apart.

    Parts of a model differ between tensor ranks and stages. What they have in common: stage, precision, number of
    optimizers, and the way to first values.
    """
    buffers = [(tuple(buffer.shape), buffer.dtype) for buffer in persistent_buffers(model).values()]
    common = {
        "the stage": plan.stage,
        "the precision": plan.precision,
        "the number of optimizers": len(optimizers),
        "initialize": way,
    }
    decisions = common | {
        "parameters, their order, or the units that a rule makes of them": plan.units,
        "buffers": buffers,
        "the optimizer or its groups": optimizers.describe(),
        "offload": away,
    }
    mine = np.array([float(zlib.crc32(repr(value).encode())) for value in decisions.values()])
    plans = topology.data_sequence.share(mine)
    ranks = topology.mesh.members(topology.rank, *DATA_SEQUENCE)
    odd = {rank for rank, other in zip(ranks, plans, strict=True) if (other != plans[0]).any()}
    parts = topology.world.share(mine[: len(common)])
    odd |= {rank for rank, other in enumerate(parts) if (other != parts[0]).any()}
    unequal = (plans != plans[0]).any(axis=0)
    unequal[: len(common)] |= (parts != parts[0]).any(axis=0)
    with topology.agreed("agree on the plan"):
        if odd:
            names = [name for name, differs in zip(decisions, unequal, strict=True) if differs]
            raise PlanError(
                f"rank(s) {sorted(odd)[:8]} built another model, optimizer, stage or precision than rank {ranks[0]}, "
                f"or has another kind of initialize. What differs: {'; '.join(names) or 'see the other ranks'}. Every "
                "rank must build the same"
            )


MISSING: Any = object()  # the optimizer was forgotten, as by users of FSDP; None means inference


def zeroify(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = MISSING,
    stage: int | Stage = 3,
    *,
    topology: Topology | None = None,
    precision: str | Precision = "fp32",
    rule: UnitRule | None = None,
    transport: str | Collectives = "auto",
    algorithms: str = "auto",
    overlap: bool = True,
    secondary: bool = False,
    sparse_gradients: bool = False,
    device: str | Accelerator | None = None,
    initialize: Initializer | None = None,
    offload: Offload | None = None,
    quantize: str | None = None,
    exact: Exactness = "off",
    **unknown: Never,
) -> nn.Module:
    """Shard ``model`` and its optimizers over the ranks, in place. Collective over the topology's world.

    Afterwards train as with plain torch: ``loss.backward()``, ``optimizer.step()``, ``optimizer.zero_grad()``.
    Gradients are means over ranks. Parameter names and objects stay; at stage 3 a parameter's value is there while
    its unit runs, or inside ``gathered``.

    Args:
        model: on the CPU, on its device, or on the meta device (then ``initialize`` is needed). Values of rank 0 are
            given to all ranks.
        optimizer: a stock elementwise torch optimizer over the model's parameters, before its first step; or a tuple or
            list of several, each trainable parameter in one of them, which step and zero their gradients one by one,
            in any order, in the same order on every rank. None for inference: all parameters are frozen.
        stage: 0 replicates, 1 shards optimizer state, 2 also gradients, 3 also parameters.
        topology: the ranks; None takes MPI's world, until ``release``.
        precision: "fp32", "bf16", "fp16" or a Precision.
        rule: which modules form units; None: ``plan.rules.default_rule``.
        sparse_gradients: of embeddings that are units by themselves, only the rows that a batch touches travel: of
            gradients, and at stage 3 of parameters. Modules with ``sparse=True`` need no such word. The bits are those
            of whole tables, sent without codes. See ``plan.rules.tables_of``.
        transport: "flat", "hierarchical", "window", "ipc", "auto" (the fastest that works), or a Collectives over
            ``topology``.
        algorithms: between nodes: "auto" (measured at the first start), "measure", "default", or by name, as in
            "all_gather=ring,reduce_scatter=pairwise".
        overlap: between nodes and on devices, gather the next unit and reduce the last one while the model computes,
            on a thread of its own; holds one unit more. Never changes a bit of the result.
        secondary: at stage 3, each node keeps one copy of the parameters that forward has gathered, for backward.
            Backward then gathers inside the node. Nothing on one node. Never changes a bit of the result.
        device: where it trains: "cpu", "cuda" (the device of this rank's place on its node), or what
            ``choose_accelerator`` gave before MPI was started; None: where the model lies, which is the CPU for meta.
        initialize: fills one whole fp32 parameter in place, given its name; must give the same values on every rank.
            Used for every parameter, unit by unit, so that no rank holds the whole model. Of a model that is a part of
            one, names and shapes are those of the whole model. One that can ``fill_range`` (``RangeInitializer``, as
            ``GPT.initial_weights``) is asked by each rank for its own shard alone. ``hpczero.loaded_later``: a
            checkpoint is loaded next, and nothing is drawn.
        offload: what of this rank's shards rests in the memory of the host or on disk between uses; None: nothing.
        quantize: at stage 3, the form in which frozen matrices of units other than the root rest and travel: "int8" or
            "nf4", 1.0625 and 0.5625 bytes per element, decoded to the parameters' dtype where they are used. None:
            that dtype. It rounds the values, once.
        exact: "require": steps have the same bits on any number of ranks; forward and backward run inside ``Leaves``,
            and what cannot be exact is refused. "prefer": what cannot be exact runs as with "off", and says so once.
        unknown: refused by name.

    Returns:
        ``model`` itself.

    Raises:
        ConfigError: unknown stage, precision, form or keyword.
        PlanError: the model or an optimizer cannot be sharded, or is none, or two share a parameter; the same on every
            rank.

    ``zeroify`` initialises torch.distributed over the ranks of the job (``hpczero.bridge``), unless the program has
    done so or HPCZERO_DISTRIBUTED=0 is set. Modules and libraries that ask for the ranks find them.

    Source: Rajbhandari et al., ZeRO, SC20, sec. 5.
    """
    name, given = (transport, None) if isinstance(transport, str) else ("", transport)
    owns_topology = topology is None and given is None
    topology = topology or (_topology_of(given) if given else Topology.of_world())
    with _frozen(model, optimizer is None), topology.agreed("plan the model"):
        _check_keywords(unknown)
        _check_arguments(model, optimizer, offload)
        check_degrees(model, topology.mesh)
        check_part(model)
        optimizers = OptimizerSet.of(optimizer)
        environment = Environment.read()
        precision = Precision.of(precision)
        stage = Stage.of(stage)
        if given is not None:
            _check_transport(given, topology, precision)
        else:
            check_transport_name(name)
            check_algorithms(algorithms)
            check_algorithms(environment.algorithms)
        accelerator = given.reach.accelerator if given is not None else _accelerator(model, device)
        _check_fresh(model, initialize, accelerator)
        bind(initialize, model, part_of(model))
        trains = len(optimizers) > 0
        check_modules(model, precision)
        if trains:
            for each in optimizers:
                check_optimizer(each)
            check_uncut(optimizers, model, part_of(model))
            check_gradients(model)
            groups = optimizers.number_parameters(model)
        else:
            groups = {}
        check_codes(precision, topology, stage, offload, given)
        codec = codec_of(quantize, stage, topology, secondary=secondary)
        if secondary and not stage.shards_parameters:
            raise PlanError(
                f"secondary: a copy of gathered parameters, and stage {int(stage)} keeps them whole; use stage=3, or "
                "leave it out"
            )
        exactly = exactness(
            exact,
            model,
            topology,
            precision,
            transport=name or type(given).__name__.lower(),
            sparse=sparse_gradients,
        )
        for each in optimizers:
            if exactly is not None and rounds_by_place(each):
                exactly.refuse(
                    f"optimizer {type(each).__name__} is a class of the program's own, and operations such as pow and "
                    "exp round the last elements of a tensor in another way",
                    "if its step has sums, products, quotients and square roots alone, set the class attribute "
                    "hpczero_exact = True",
                )
        if (
            exactly is not None
            and name == "auto"
            and not sums_of_nodes_are_branches(topology.shard)
        ):
            name = "flat"
        offload, rule = offload or Offload(), rule or default_rule
        tables: dict[str, int] = {}
        if exactly is None:
            tables = row_tables(model, rule, topology, offload, asked=sparse_gradients)
        plan = Plan.build(
            model,
            num_shards=topology.shard.size,
            stage=stage,
            precision=precision,
            rule=with_tables(rule, tables),
            groups=groups,
            codec=codec,
            tables=tables,
        )
        parts = parts_of(offload, plan, optimizers)
    chosen = [*parts, repr(dataclasses.replace(offload, folder=None))]
    check_equal_plans(plan, model, optimizers, topology, chosen, way_of(initialize))
    init_by_default(topology)
    explain_exhaustion(need(OffloadedPlan(plan, offload, ADAM_STATES if trains else 0), topology))
    collectives = given or choose(
        topology,
        environment.transport if name == "auto" else name,
        strict=environment.strict,
        node_dtype=DTYPES[precision.node_dtype],
        algorithms=environment.algorithms if algorithms == "auto" else algorithms,
        overlap=overlap and environment.overlap,
        secondary=secondary,
        accelerator=accelerator,
    )
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.data = buffer.data.to(accelerator.device)
    away = NOTHING_AWAY
    with ExitStack() as undone:
        if parts:
            with topology.agreed("open the memory tier"):
                away = open_away(
                    offload,
                    plan,
                    parts,
                    accelerator,
                    topology.shard_index,
                    exact=exactly is not None,
                )
                undone.callback(away.close)  # also where another rank has none
            if topology.is_root:
                tell(offload, optimizers)
        sharding = Sharding(
            model,
            optimizers,
            plan,
            topology,
            collectives,
            owns_topology=owns_topology,
            away=away,
            exact=exactly,
        )
        fill(sharding.units, topology, collectives, initialize, part_of(model))
        undone.pop_all()
    sharding.shared_buffers.share()
    sharding.attach()
    if initialize is not None and not (
        initialize is loaded_later or isinstance(initialize, KnownValues)
    ):
        sharding.advice.about_buffers(sharding.buffers)
    if accelerator.is_host:
        (give_back_freed_memory if parts else keep_freed_memory)(environment)
    return model


def sharding(model: nn.Module) -> Sharding:
    """The object behind a zeroified model.

    Raises:
        PlanError: the model was not zeroified.
    """
    found = model.__dict__.get(KEY)
    if not isinstance(found, Sharding):
        raise PlanError(
            f"{type(model).__name__} was not zeroified; pass the very model that hpczero.zeroify returned"
        )
    return found


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward inside adds to this rank's own whole gradients; the next one outside reduces the sum.

    Saves communication when micro-batches accumulate; holds whole gradients meanwhile, in fp32. Not collective.
    """
    state = sharding(model)
    schedule = state.schedule
    if state.exact is not None:
        state.exact.refuse("no_sync adds up gradients of one rank")
    before, schedule.backward.sync = schedule.backward.sync, False
    try:
        yield
    finally:
        schedule.backward.sync = before


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> float:
    """Scale the gradients so that their norm over all parameters is at most ``max_norm``. Collective over world.

    Args:
        model: zeroified; after backward, before ``optimizer.step()``.
        max_norm: above 0; ``inf`` only measures.
        norm_type: 2.0 or inf.

    Returns:
        The norm of the mean gradient before clipping, the same bits on every rank.

    Raises:
        ConfigError: a bad ``max_norm`` or ``norm_type``.
        StepError: gradients of ``no_sync`` wait for a reduction.
    """
    return sharding(model).step.clip(float(max_norm), float(norm_type))


# --- setting up ------------------------------------------------------------------------------------------------------


@contextmanager
def _frozen(model: nn.Module, freeze: bool) -> Iterator[None]:
    """Freeze all parameters if ``freeze``; those that trained train again where the block raises."""
    freeze = freeze and isinstance(model, nn.Module)  # else it is refused inside
    trained = [p for p in model.parameters() if p.requires_grad] if freeze else []
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    except BaseException:
        for parameter in trained:
            parameter.requires_grad_(True)
        raise


def _check_keywords(unknown: Iterable[str]) -> None:
    for name in unknown:
        known = [each for each in inspect.signature(zeroify).parameters if each != "unknown"]
        near = difflib.get_close_matches(name, known, n=1) or [
            each for each in known if each in name or name in each
        ]
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"zeroify got an unknown keyword {name!r}; {meant}It takes {', '.join(known)}"
        )


def _check_arguments(model: object, optimizer: object, offload: object) -> None:
    """Refuse what is no model and no optimizer. If the two are swapped, the message shows it."""
    if optimizer is MISSING:
        raise PlanError(
            "zeroify(model, optimizer) got no optimizer; make it before, over model.parameters(), and pass it "
            "(None for a model that is not trained)"
        )
    found = f"zeroify(model, optimizer): got {type(model).__name__} and {type(optimizer).__name__}"
    if not isinstance(model, nn.Module):
        raise PlanError(f"{found}, expected a torch.nn.Module and a torch optimizer, in this order")
    if optimizer is not None and not isinstance(optimizer, (Optimizer, tuple, list)):
        raise PlanError(
            f"{found}, expected a torch.optim.Optimizer, or None for a model that is not trained"
        )
    if offload is not None and not isinstance(offload, Offload):
        raise PlanError(
            f"offload: got {offload!r}, expected hpczero.Offload(...) such as Offload('host'), or None"
        )


def _accelerator(model: nn.Module, device: str | Accelerator | None) -> Accelerator:
    if isinstance(device, Accelerator):
        return device
    if device is not None:
        return choose_accelerator(device)
    first = next(model.parameters(), None)
    return accelerator_of(torch.device("cpu") if first is None else first.device)


def _check_fresh(
    model: nn.Module, initialize: Initializer | None, accelerator: Accelerator
) -> None:
    """Refuse what cannot be sharded before anything is changed."""
    for name, module in model.named_modules():
        if KEY in module.__dict__:
            raise PlanError(f"module {name or 'model'!r} was zeroified already; call zeroify once")
    kept = [(n, t) for f in (model.named_parameters, model.named_buffers) for n, t in f()]
    made = next(
        (
            f"{name!r} was made"
            for name, tensor in kept
            if not is_lazy(tensor) and tensor.is_inference()
        ),
        None,
    )
    made = "zeroify was called" if torch.is_inference_mode_enabled() else made
    if made:
        raise PlanError(
            f"{made} inside torch.inference_mode(), expected outside: what is made there cannot be written to "
            "later; build and zeroify the model outside, and run it inside"
        )
    meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if meta and initialize is None:
        raise PlanError(
            f"{len(meta)} parameter(s) are on the meta device, first {meta[0]!r}; pass "
            "initialize=f(name, tensor) that fills one parameter, or build the model on the CPU"
        )
    buffers = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if buffers:
        raise PlanError(
            f"{len(buffers)} buffer(s) are on the meta device, first {buffers[0]!r}; create buffers on the CPU "
            "(build the module outside torch.device('meta'), or compute the table in forward)"
        )
    kept_by_id = {id(buffer) for buffer in persistent_buffers(model).values()}
    for name, buffer in model.named_buffers():
        odd = buffer.layout is not torch.strided or buffer.is_quantized
        if odd and id(buffer) in kept_by_id:
            form = "quantized" if buffer.is_quantized else str(buffer.layout)
            raise PlanError(
                f"buffer {name!r} is {form}, expected a dense tensor, whose bytes rank 0 gives to all ranks; "
                "register it with persistent=False (it then stays each rank's own, and is not saved), or keep it dense"
            )
    known = (torch.device("cpu"), torch.device("meta"), accelerator.device)
    elsewhere = [(n, p.device) for n, p in model.named_parameters() if p.device not in known]
    if elsewhere:
        name, found = elsewhere[0]
        raise PlanError(
            f"parameter {name!r} is on {found}, expected the CPU or {accelerator.device}; move the whole model to one "
            "device first"
        )


def _topology_of(collectives: Collectives) -> Topology:
    if collectives.topology is None:
        raise PlanError(
            "the transport was made over a group of ranks; give zeroify its topology too"
        )
    return collectives.topology


def _check_transport(collectives: Collectives, topology: Topology, precision: Precision) -> None:
    """Refuse a transport over other ranks, or one that rounds sums elsewhere than the precision says."""
    if collectives.group is not topology.shard or (
        collectives.everybody is not topology.data_sequence
    ):
        raise PlanError("collectives move data over another topology than the one given; pass one")
    expected = DTYPES[precision.node_dtype]
    if collectives.node_dtype != expected:
        raise PlanError(
            f"collectives round each node's sum to {collectives.node_dtype}, but precision.reduce is "
            f"{precision.reduce!r}; give the transport node_dtype={expected}"
        )


def check_codes(
    precision: Precision,
    topology: Topology,
    stage: Stage,
    offload: Offload | None,
    given: Collectives | None,
) -> None:
    """Refuse codes between nodes where they are not sent, or where ranks would come apart by them.

    Raises:
        ConfigError: names the option and what it cannot be combined with.
    """
    wrong = ""
    if topology.data_sequence.size > topology.shard.size:
        wrong = "replicas of the shards (parallel.shard), which sum their gradients in a dtype"
    elif topology.tensor.size > 1:
        wrong = "tensor parallelism, whose ranks hold some matrices several times and would draw them differently"
    elif not topology.shard.is_rectangular:
        wrong = "nodes with different numbers of ranks"
    elif given is not None and not given.sends_codes:
        wrong = f"the transport {type(given).__name__}, which sends none"
    if precision.reduce in CODES and wrong:
        raise ConfigError(
            f"precision.reduce: got {precision.reduce} and {wrong}; expected fp32 or bf16 there"
        )
    if not wrong and not stage.shards_parameters:
        wrong = f"stage {int(stage)}, where parameters stay whole"
    if not wrong and offload is not None and offload.parameters != "device":
        wrong = "offloaded parameters, whose gathers tell of a failed tier"
    if precision.gather != "exact" and wrong:
        raise ConfigError(
            f"precision.gather: got {precision.gather} and {wrong}; expected exact there"
        )


def exactness(
    asked: Exactness,
    model: nn.Module,
    topology: Topology,
    precision: Precision,
    *,
    transport: str,
    sparse: bool,
) -> Exact | None:
    """That steps are exact, if it was ``asked`` and can be; says once if it cannot. Not collective.

    Raises:
        ConfigError: it was required, and cannot be; names what is in the way, and what to do.
    """
    require(asked in get_args(Exactness), "exact", asked, "require, prefer or off")
    if asked == "off":
        return None
    problem = why_inexact(model, topology, precision, sparse=sparse, transport=transport)
    if not problem:
        return Exact(topology, asked)
    if asked == "require":
        raise ConfigError(f"exact='require': {problem}; or zeroify with exact='prefer'")
    if topology.is_root:
        logger.warning("exact='prefer': steps depend on the number of ranks: %s", problem)
    return None


def row_tables(
    model: nn.Module, rule: UnitRule, topology: Topology, offload: Offload, *, asked: bool
) -> dict[str, int]:
    """Weights of which only the rows that a batch touches travel, as of ``tables_of``; ``asked``: sparse_gradients.

    Raises:
        ConfigError: rows cannot travel alone here, and were asked for; names what they cannot be combined with.
    """
    wrong = ""
    if topology.data_sequence.size > topology.shard.size:
        wrong = "replicas of the shards (parallel.shard)"
    elif topology.tensor.size > 1:
        wrong = "tensor parallelism, which cuts tables itself"
    elif offload.any:
        wrong = "offloaded shards"
    if asked and wrong:
        raise ConfigError(
            f"sparse_gradients: got True and {wrong}; leave one of the two out (modules with sparse=True work there, "
            "and their whole gradients travel)"
        )
    alone = topology.shard.size == 1  # nothing travels
    return {} if wrong or alone else tables_of(model, rule, every=asked)


def release(model: nn.Module, *, whole: bool = False) -> None:
    """Take hooks and communicators away from a model. Collective over world.

    At stages 0 to 2 its parameters are whole afterwards, this rank's own and ordinary ones, in the dtype of training.
    At stage 3 they are so with ``whole``; otherwise their values are gone, and whatever needs them raises.

    A topology that was passed to ``zeroify`` stays; free it with ``topology.free()``.

    Args:
        model: zeroified.
        whole: gather parameters that are sharded.

    Raises:
        StepError: on every rank, inside of ``gathered``.
    """
    sharding(model).detach(whole=whole)
