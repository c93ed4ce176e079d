"""The plan of a run compared with the memory of its nodes, before anything is allocated.

A run is refused only if a low estimate does not fit. If a high estimate does not fit, that is a warning. All ranks
decide together.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from socket import gethostname

from hpczero.accelerator import Accelerator
from hpczero.comm.uneven import carriers_of
from hpczero.errors import ConfigError, OutOfMemory, is_out_of_memory
from hpczero.job.limits import ProcessMemory, Room, rooms, usage
from hpczero.job.mesh import Mesh
from hpczero.job.topology import Topology
from hpczero.models import PRESETS, GPTConfig, parameter_count
from hpczero.options.config import MOST_SHARE, RunConfig
from hpczero.options.environment import Environment
from hpczero.plan.alternatives import alternatives, command_line, on_these_ranks
from hpczero.plan.footprint import fastest_transport
from hpczero.plan.peak import PlannedRun
from hpczero.plan.plan import Stage
from hpczero.plan.sizing import Batch
from hpczero.planner.choice import nbytes as gb
from hpczero.run.starting.precheck import activations_of, offload_of


def run_of(
    config: RunConfig, model: GPTConfig, batch: Batch, topology: Topology, *, is_host: bool
) -> PlannedRun:
    """What is about to be trained, as the plan counts it. Not collective.

    Raises:
        ConfigError: HPCZERO_TRANSPORT is not a transport.
        PlanError: what is offloaded does not fit the stage; inputs of blocks elsewhere would save nothing.
    """
    offload, kept = offload_of(config.offload), activations_of(config)
    offload.check(Stage.of(config.parallel.stage))
    kept.check(on_host=is_host)
    transport = config.parallel.transport
    if transport == "auto":
        transport = Environment.read().transport
    if transport == "auto":
        transport = fastest_transport(
            topology.shard.local_size,
            topology.shard.num_nodes,
            on_host=is_host,
            rectangular=topology.shard.is_rectangular,
        )
    run = PlannedRun(
        model,
        Mesh(shard=topology.size),
        topology.local_size,
        transport=transport,
        stage=config.parallel.stage,
        precision=config.parallel.precision,
        reduce=config.parallel.reduce,
        gather=config.parallel.gather,
        micro_batch=batch.micro_batch * (MOST_SHARE if config.train.balance else 1),
        accumulation=batch.accumulation,
        leaves=batch.leaves or 0,
        checkpointing=model.checkpoint_activations or kept.checkpointing != "none",
        copies=config.checkpoint.background,
        laid_out=config.parallel.nodes is not None or Environment.read().fake_nodes is not None,
        offload=offload,
        kept=kept,
        carriers=carriers_of(topology.shard),
        on_device=not is_host,
    )
    kept.check_saves(inputs=model.layers, input_nbytes=run.input_nbytes)
    mesh, layout = topology.mesh, config.parallel
    if mesh.shard == topology.size:
        return run
    stages = [mesh.coordinates(rank)[0] for rank in topology.world.nodes[topology.node_index]]
    return dataclasses.replace(  # a part of the model, or one of several copies of everything
        run,
        mesh=mesh,
        sequence_parallel=layout.sequence,
        secondary=layout.secondary and run.stage == 3,
        schedule=layout.order,
        interleave=layout.interleave,
        layout=layout,
        place=topology.pipeline.rank,
        near=tuple(stages),
    )


logger = logging.getLogger("hpczero.room")

# What Python, torch and MPI take after this check at most: threads, stacks, heaps, workspaces of kernels, modules not
# yet imported; in bytes, measured (docs/running.md, Memory before a run). At least they take nothing that counts.
GROWTH = {"resident": 450e6, "mapped": 700e6, "private": 500e6, "shared": 10e6, "device": 1500e6}
SIZES = ("layers", "hidden", "heads", "context", "positions")  # a preset gives all of them
# Freed blocks that no other tensor fits into, as a share of the activations.
FRAGMENTED = 0.2


@dataclass(frozen=True)
class Bound:
    """A room as this rank sees it, with the number of ranks that share it, and the bytes that they hold already."""

    room: Room
    members: int
    own: float

    def least(self, run: PlannedRun) -> float:
        """Low estimate of what the members hold at the peak of ``run``."""
        return self.own + _mean(self._least_of_run(each) for each in self._held(run))

    def most(self, run: PlannedRun, *, members: int | None = None) -> float:
        """High estimate of what the members hold; with another number of ``members``, as if each were like these."""
        now, many = self.members, members or self.members
        held = self._held(run)
        spread = GROWTH[self.room.kind] + FRAGMENTED * _mean(each.activations for each in held)
        of_run = _mean(self._most_of_run(each, many) for each in held)
        return self.own * many / now + many * spread + of_run

    def _held(self, run: PlannedRun) -> Sequence[PlannedRun]:
        """One run for each of the members, where they hold different parts; else the one of all."""
        if self.members == 1 or run.layout is None:
            return (run,)
        return [dataclasses.replace(run, place=place) for place in run.near]

    def free(self, *, strictly: bool) -> float:
        """Bytes that the members may have together. ``strictly``: bytes that others might give back are theirs."""
        others = max(self.room.used - self.own, 0.0)
        return self.room.nbytes - (others if strictly or not self.room.yields else 0.0)

    def _least_of_run(self, run: PlannedRun) -> float:
        kind, many = self.room.kind, self.members
        if kind == "shared":
            return many * run.least_shared
        if kind == "mapped":
            return run.least_mapped
        at = run.moments
        if kind == "private":
            return max(at.loss, at.step, at.end) - run.shared
        if kind == "device":
            return many * (max(at.loss, at.step) - run.tiered)
        return many * max(at.loss, at.step, at.end)

    def _most_of_run(self, run: PlannedRun, many: int) -> float:
        kind = self.room.kind
        if kind == "shared":
            return many * run.shared
        ends = run.most_at_end
        if kind == "mapped":
            return max(run.mapped, run.mapped - run.most + ends)
        if kind == "private":
            return max(run.most, ends) - run.shared
        if kind == "device":
            return many * (run.most - run.tiered)
        return many * max(run.most, ends)


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


class RoomCheck:
    """Context manager around a run. It compares the run with the memory there is, and explains memory that runs out.

    Attributes:
        run: what was checked; None before.
    """

    def __init__(
        self,
        topology: Topology,
        accelerator: Accelerator,
        *,
        title: str,
        overridden: Sequence[str] = (),
    ) -> None:
        """Not collective. ``overridden`` are options of the model that were given beside the preset, its ``title``."""
        self.run: PlannedRun | None = None
        self._overridden = [name for name in overridden if name in SIZES]
        self._for_each: int | None = None
        self._topology = topology
        self._accelerator = accelerator
        self._title = title

    def check(self, run: PlannedRun, found: list[Room] | None = None) -> None:
        """Refuse what does not fit the memory of its nodes; warn of what may not. Collective over world.

        ``found`` are limits of this rank; None reads them.

        Raises:
            ConfigError: on every rank; the message has what is needed, which limit there is, and what would fit.
        """
        topology, is_host = self._topology, self._accelerator.is_host
        if found is None:
            found = found_rooms(self._accelerator)
        bounds = gather_bounds(found, usage(), topology)
        bounds = [bound for bound in bounds if concerns(bound.room, run, is_host)]
        with topology.agreed("hold the plan against the memory"):
            short = [b for b in bounds if b.least(run) > b.free(strictly=False)]
            if short:
                worst = max(short, key=lambda b: b.least(run) / max(b.free(strictly=False), 1.0))
                raise ConfigError(refusal(run, worst, bounds, self._title, self._overridden))
        self.run = run
        self._for_each = min(map(_for_each, bounds), default=None)
        tight = [b for b in bounds if b.most(run) > b.free(strictly=True)]
        warned = topology.gather(float(bool(tight)))
        if tight and topology.rank == warned.index(1.0):
            self._warn(run, tight[0])

    def _warn(self, run: PlannedRun, bound: Bound) -> None:
        logger.warning(
            "memory is tight: this run may need up to %s %s, and %s leaves %s; `%s` says what fits",
            gb(bound.most(run)),
            _whose(bound),
            bound.room.name,
            gb(bound.free(strictly=True)),
            command_line(run, self._title, memory_nbytes=_for_each(bound)),
        )

    def __enter__(self) -> RoomCheck:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Raise OutOfMemory if torch or Python ran out of memory."""
        run = self.run
        if run is None or not isinstance(error, Exception) or not is_out_of_memory(error):
            return
        first = "".join(f": {line}" for line in str(error).splitlines()[:1])
        explained = OutOfMemory(
            f"{type(error).__name__}{first}. Memory ran out: stage {run.stage} on {run.ranks} rank(s) needs up to "
            f"{gb(run.most)} per rank beside Python, torch and MPI, of which {gb(run.memory.states)} are parameters, "
            f"gradients and optimizer state, {gb(run.activations)} activations; "
            f"`{command_line(run, self._title, memory_nbytes=self._for_each)}` says what fits"
        )
        explained.agreed = getattr(error, "agreed", False)
        raise explained from error


def found_rooms(accelerator: Accelerator) -> list[Room]:
    """Limits of this rank: of its host and process, and of its device if it has one. Not collective."""
    found = rooms()
    device = accelerator.usage()
    if not accelerator.is_host and device.get("total"):
        scope = f"device {accelerator.identity}"
        name = f"the memory of {accelerator.device}"
        found.append(Room(name, scope, "device", device["total"], 0))
    return found


def fitting_on(
    run: PlannedRun, topology: Topology, accelerator: Accelerator
) -> Callable[[PlannedRun], bool]:
    """Whether other settings of ``run`` fit what this rank sees of its machine, by a high estimate. Collective.

    The function that is returned is not collective, and may answer otherwise on another rank.
    """
    found, is_host = found_rooms(accelerator), accelerator.is_host
    bounds = gather_bounds(found, usage(), topology)
    bounds = [b for b in bounds if b.room.kind == "shared" or concerns(b.room, run, is_host)]
    return lambda other: is_roomy(other, run, bounds)


def concerns(room: Room, run: PlannedRun, is_host: bool) -> bool:
    """Whether what the run holds counts against ``room``. With a device, the host holds nothing of it."""
    if room.kind == "device":
        return not is_host
    return is_host and (room.kind != "shared" or run.transport == "window")


def gather_bounds(found: list[Room], own: ProcessMemory, topology: Topology) -> list[Bound]:
    """Which ranks share each room, and what they hold in it already. Collective over world.

    Ranks may have different rooms: one of them alone may be under ``ulimit``, or nodes may differ.
    """
    held = {room.scope: own.of(room.kind) for room in found if room.scope}
    said = [
        json.loads(text) for text in topology.world.gather_text(json.dumps([gethostname(), held]))
    ]
    bounds = []
    for room in found:
        if not room.scope:  # of this process alone
            bounds.append(Bound(room, 1, own.of(room.kind)))
            continue
        members = {
            rank: nbytes[room.scope]
            for rank, (host, nbytes) in enumerate(said)
            if host == gethostname() and room.scope in nbytes
        }
        bounds.append(Bound(room, len(members), sum(members.values())))
    return bounds


def refusal(
    run: PlannedRun, bound: Bound, bounds: list[Bound], title: str, overridden: Sequence[str]
) -> str:
    """One paragraph: what is needed, what there is, which limit binds, what would fit."""
    there, needed = bound.free(strictly=False), bound.least(run)
    states = run.memory.states + run.accumulated
    by = "states" if states > run.activations else "activations"
    where = f"{run.ranks} rank{'s' * (run.ranks > 1)}"
    others = bound.room.nbytes - there
    taken = f", {gb(others)} of {gb(bound.room.nbytes)} being others'" if others > 0 else ""
    options = (
        "model.preset, model.layers, model.hidden"
        if by == "states"
        else "train.micro_batch, model.context"
    )
    fitting = "" if run.layout else what_fits(run, bounds)
    remedy = f"; {fitting} would fit" if fitting else ""
    if run.layout:
        degrees = ", ".join(run.layout.changed)
        where += f" ({degrees})"
        remedy = (
            "; take a higher stage, more tensor or pipeline ranks, fewer replicas or a smaller micro-batch: the "
            "command at the end says what this layout holds at every stage"
        )
    elif not fitting:
        smaller = smaller_model(run, bounds, overridden)
        choose = f"{smaller} would fit" if smaller else "choose a smaller model"
        remedy = f"; no stage, micro-batch or number of such nodes makes it fit; {choose}"
    return (
        f"{options}: {title} ({run.whole_numel:,} parameters) at stage {run.stage} on {where} with micro-batch "
        f"{run.micro_batch} needs {gb(needed)} {_whose(bound)}, which has {gb(there)} ({bound.room.name}{taken})"
        f"{remedy}. Most of it are {by}: each rank needs {gb(run.memory.states)} for parameters, gradients and "
        f"optimizer state, {gb(run.memory.unsharded + run.memory.exchange + run.accumulated)} for buffers, "
        f"{gb(run.activations)} for activations. More: {command_line(run, title, memory_nbytes=_for_each(bound))}"
    )


def what_fits(run: PlannedRun, bounds: list[Bound]) -> str:
    """Alternatives that fit even by a high estimate, in words; empty if there is none."""
    if any(cannot_gather(run, bound) for bound in bounds):
        return ""  # told at once: there are hundreds of alternatives
    cores = os.cpu_count() or 1
    found = alternatives(run, lambda other: is_roomy(other, run, bounds), cores=cores)
    return ", or ".join(alternative.words for alternative in found)


def cannot_gather(run: PlannedRun, bound: Bound) -> bool:
    """Whether one whole unit, which every rank gathers of any sharding, does not fit beside the process itself."""
    if bound.room.kind not in ("resident", "mapped"):
        return False
    largest = max(unit.layout.numel for unit in run.plan.units)
    nbytes = run.plan.precision.param_itemsize * largest
    return nbytes + bound.own + GROWTH[bound.room.kind] > bound.free(strictly=True)


def smaller_model(run: PlannedRun, bounds: list[Bound], overridden: Sequence[str]) -> str:
    """The largest preset that fits on the same ranks, in words; empty if none does."""
    vocab_size, most = run.model.vocab_size, run.plan.numel
    models = {
        name: dataclasses.replace(preset, vocab_size=vocab_size) for name, preset in PRESETS.items()
    }
    for name in sorted(models, key=lambda name: parameter_count(models[name]), reverse=True):
        model = models[name]
        if parameter_count(model) >= most:
            continue
        other = dataclasses.replace(run, model=model, sequence=0)
        hit = on_these_ranks(other, lambda other: is_roomy(other, run, bounds))
        if hit is not None:
            how = f" with {hit.words}" if hit.words else ""
            options = ", ".join(f"--model.{option}" for option in overridden)
            without = f" without {options}" if options else ""
            numel = f"{parameter_count(model):,} parameters"
            return f"{name} ({numel}, --model.preset {name}{without}){how}"
    return ""


def is_roomy(other: PlannedRun, run: PlannedRun, bounds: list[Bound]) -> bool:
    """Whether a high estimate of ``other`` is within the bounds that were found for ``run``."""
    grown = other.ranks_per_node / run.ranks_per_node
    return all(
        bound.most(other, members=round(bound.members * grown) if bound.room.scope else 1)
        <= bound.free(strictly=True)
        for bound in bounds
        if bound.room.kind != "shared" or other.transport == "window"
    )


def _whose(bound: Bound) -> str:
    if not bound.room.scope:
        return "in this process"
    if bound.room.kind == "device":
        return "on this device"
    return "on this host"


def _for_each(bound: Bound) -> int:
    """Bytes that one rank may have of the bound beside what it holds already."""
    growth = bound.members * GROWTH[bound.room.kind]
    left = bound.free(strictly=True) - bound.own - growth
    return max(int(left / bound.members), 1)
