"""Plan: which parameters form a unit, and the prediction of bytes held and bytes sent, before a byte is allocated.

Modules are walked by their public names only, without torch. `rules` picks the modules; `Unit` carries a UnitSpec out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import TYPE_CHECKING

from hpczero.errors import ConfigError, PlanError
from hpczero.plan.footprint import FP32_BYTES as FP32_BYTES
from hpczero.plan.footprint import (
    Footprint,
    coded_chunk,
    coded_nbytes,
    exchange_chunk,
    places_in_turn,
    pulled_nbytes,
    rail_chunk,
    replicas_nbytes,
)
from hpczero.plan.layout import DEFAULT_ALIGN, Codec, Coding, ShardLayout, UnitSpec, owners
from hpczero.plan.memory import (
    ADAM_STATE_BYTES,
    MemoryPlan,
    StateBytes,
    TrafficPlan,
    UnitPeak,
    largest_together,
    unit_traffic,
)
from hpczero.plan.placement import ModelPart, part_of
from hpczero.plan.precision import CODES, ITEMSIZE, Precision

if TYPE_CHECKING:
    from torch import nn

UnitRule = Callable[["nn.Module"], list[tuple[str, ...]]]


@dataclass(frozen=True)
class Stage:
    """What is sharded over the data-parallel ranks (Rajbhandari et al., ZeRO, SC20, sec. 5).

    It is data, not code paths.
    """

    shards_optimizer: bool
    shards_gradients: bool
    shards_parameters: bool

    @classmethod
    def of(cls, stage: int | Stage) -> Stage:
        """Stage 0 replicates, 1 shards optimizer state, 2 also gradients, 3 also parameters.

        Raises:
            ConfigError: the value is neither 0, 1, 2 or 3 nor a Stage.
        """
        if isinstance(stage, Stage):
            return stage
        if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
            raise ConfigError(
                f"stage: got {stage!r}, expected 0 (replicate), 1 (shard optimizer state), "
                "2 (also gradients) or 3 (also parameters)"
            )
        return cls(stage >= 1, stage >= 2, stage >= 3)

    def __int__(self) -> int:
        return self.shards_optimizer + self.shards_gradients + self.shards_parameters

    @property
    def keeps_local_gradients(self) -> bool:
        """Whether a rank's own whole gradient stays allocated between steps, beside its reduced shard."""
        return self.shards_optimizer and not self.shards_gradients


@dataclass(frozen=True)
class Plan:
    """What ``zeroify`` is about to do. It is frozen, equal on every rank, and built without communication."""

    stage: Stage
    precision: Precision
    num_shards: int
    units: tuple[UnitSpec, ...]

    @classmethod
    def build(
        cls,
        model: nn.Module,
        *,
        num_shards: int,
        stage: int | Stage,
        precision: str | Precision = "fp32",
        rule: UnitRule,
        groups: Mapping[str, int] | None = None,
        codec: Codec | None = None,
        tables: Mapping[str, int] | None = None,
    ) -> Plan:
        """Group the parameters of ``model`` into units. Allocates and communicates nothing; not collective.

        A parameter that modules of two units use (a tied weight) belongs to the root unit, so that it is whole for
        both.

        Args:
            model: any module; parameters may be on the meta device.
            num_shards: ranks that share each unit.
            stage: 0 to 3, or a Stage.
            precision: name or Precision.
            rule: which modules form units (``hpczero.plan.rules``).
            groups: optimizer group of each trainable parameter by qualified name; None puts all into group 0.
            codec: form of frozen parameters of two dimensions or more, outside of the root unit; they are units of
                their own then.
            tables: parameters of which only rows travel, by qualified name, and elements of a row
                (``plan.rules.tables_of``); ``rule`` makes each a unit.

        Raises:
            ConfigError: the stage or precision is unknown.
            PlanError: units overlap, or a unit has mixed or unusable dtypes, or ``codec`` finds no such parameter.
        """
        precision = Precision.of(precision)
        tables = tables or {}
        owner = owners(model, rule(model))
        part = part_of(model) or ModelPart(())
        members: dict[tuple[tuple[str, ...], bool, bool], list[str]] = {}
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            trainable, modules = bool(parameter.requires_grad), owner[name]
            coded = codec is not None and not trainable and parameter.dim() > 1 and modules != ("",)
            members.setdefault((modules, trainable, coded), []).append(name)
        if codec is not None and not any(coded for _, _, coded in members):
            raise PlanError(
                f"quantize: the model has no frozen matrix outside of its root unit, which {codec.name} is for; freeze "
                "the base model before zeroify (finetune.lora, peft), or leave quantize out"
            )
        units = []
        for (modules, trainable, coded), names in sorted(
            members.items(), key=lambda item: item[0][0] != ("",)
        ):  # stable: the root unit first, then registration order
            group = {n: (groups or {}).get(n, 0) if trainable else -1 for n in names}
            form = codec if coded else None
            title = (modules[0] or "root") + ("" if trainable else " (frozen)")
            title += f" ({form.name})" if form is not None else ""
            _check_dtype(title, {n: str(parameters[n].dtype) for n in names}, precision)
            shapes = [(n, tuple(parameters[n].shape)) for n in names]
            placed = [part.placement(name, shape) for name, shape in shapes]
            units.append(
                UnitSpec(
                    name=title,
                    modules=modules,
                    layout=ShardLayout.pack(
                        shapes, num_shards, align=lcm(DEFAULT_ALIGN, tables.get(names[0], 1))
                    ),
                    groups=tuple(group[n] for n in names),
                    trainable=trainable,
                    uncounted=tuple(i for i, each in enumerate(placed) if not each.counted),
                    partial=tuple(i for i, each in enumerate(placed) if each.partial),
                    kept=tuple(
                        i for i, each in enumerate(placed) if part.names and each.dim is None
                    ),
                    codec=form,
                    row=tables.get(names[0], 0),
                )
            )
        return cls(Stage.of(stage), precision, num_shards, tuple(units))

    @cached_property
    def trainable_units(self) -> tuple[UnitSpec, ...]:
        """Units that have gradients, in unit order."""
        return tuple(unit for unit in self.units if unit.trainable)

    @cached_property
    def _summed(self) -> tuple[UnitSpec, ...]:
        """Units whose whole gradients are summed: of tables rows are."""
        return tuple(unit for unit in self.trainable_units if not unit.row)

    @property
    def numel(self) -> int:
        """Parameters of the model, padding excluded (Ψ)."""
        return sum(unit.layout.numel for unit in self.units)

    @property
    def padding_numel(self) -> int:
        """Elements added so that every unit divides into equal shards."""
        return sum(unit.layout.padded_numel - unit.layout.numel for unit in self.units)

    def memory(
        self,
        *,
        optimizer_bytes: float | StateBytes = ADAM_STATE_BYTES,
        footprint: Footprint | None = None,
        apart: bool = False,
    ) -> MemoryPlan:
        """Bytes that each rank holds, padding included, of which optimizer state has none; docs/zero.md has the table.

        Ranks differ by the state of their padding; these are those of the first, which has the least of it.

        Args:
            optimizer_bytes: state per element: 8 for Adam, 4 for SGD with momentum, 0 for plain SGD; of what is not one
                number, as codes in 8 bits, from ``hpczero.plan.memory``.
            footprint: of the transport (``Collectives.footprint``). None means that ranks share nothing.
            apart: whether some mean gradients rest elsewhere, so that nothing is summed in place.

        Source: Rajbhandari et al., ZeRO, SC20, sec. 5. It differs from the paper's 16Ψ because reduced gradients are
        fp32.
        """
        footprint = footprint or Footprint()
        stage, item = self.stage, self.precision.param_itemsize
        plain = [unit for unit in self.units if unit.codec is None]
        full = sum(unit.layout.padded_numel for unit in plain)
        trainable = sum(unit.layout.padded_numel for unit in self.trainable_units)
        tables = sum(unit.layout.padded_numel for unit in self.trainable_units if unit.row)
        frozen = full - trainable
        owned = trainable // self.num_shards if stage.shards_optimizer else trainable
        if stage.shards_optimizer and (footprint.lasting or not stage.shards_parameters):
            # Each rank of a node counts a part of each whole unit, which need not divide.
            at_rest = [unit for unit in plain if not (unit.row and stage.shards_parameters)]
            parameters = sum(
                -(-item * unit.layout.padded_numel // footprint.copies) for unit in at_rest
            )
            if stage.shards_parameters and not self.precision.has_masters:
                parameters += FP32_BYTES * tables // self.num_shards
        elif stage.shards_parameters:
            # At rest only masters exist; in fp32 the master is the parameter.
            parameters = item * frozen // self.num_shards
            parameters += 0 if self.precision.has_masters else FP32_BYTES * owned
        else:
            parameters = item * full
        codes = [unit.rest_nbytes or 0 for unit in self.units]
        each = (self.num_shards, footprint.copies) if footprint.lasting else (1, 1)
        parameters += sum(-(-each[0] * nbytes // each[1]) for nbytes in codes)
        in_place = footprint.sums_in_place(self.num_shards, item) and not apart
        kept = stage.keeps_local_gradients and not in_place
        gradients = FP32_BYTES * owned + (item * (trainable - tables) if kept else 0)
        states, trained = StateBytes.of(optimizer_bytes), [u.layout for u in self.trainable_units]
        return MemoryPlan(
            parameters=parameters,
            master=FP32_BYTES * owned if self.precision.has_masters else 0,
            gradients=gradients,
            optimizer=states.held(trained, sharded=stage.shards_optimizer),
            unsharded=self._unsharded_nbytes(footprint, local=not (in_place or kept)),
            exchange=self.exchange_nbytes(footprint),
            stepping=states.stepping(trained, sharded=stage.shards_optimizer),
        )

    def _unsharded_nbytes(self, footprint: Footprint, *, local: bool) -> int:
        """Peak of whole parameters and (``local``) gradients in use: those of the root unit and of the largest modules.

        ``plan.unit_peak`` says what of others is there beside a module that runs.
        """
        live: dict[tuple[str, ...], UnitPeak] = {}
        for unit in self.units:
            peak = live.setdefault(unit.modules, UnitPeak())
            peak.add(
                unit, self.precision.param_itemsize, footprint, sharded=self.stage.shards_parameters
            )
            if unit.trainable and not unit.row and local and not footprint.reads_peers:
                peak.gradients += unit.layout.padded_numel * self.precision.param_itemsize
        root = live.pop(("",), UnitPeak()).alone
        return root + largest_together(list(live.values()), overlap=footprint.overlap)

    def exchange_nbytes(self, footprint: Footprint | None = None) -> int:
        """Bytes of the buffers through which gradients come to the ranks that sum them."""
        largest = max((unit.layout.shard_numel for unit in self._summed), default=0)
        over_replicas = replicas_nbytes(footprint, largest, self.node_itemsize) if footprint else 0
        return self._shards_nbytes(footprint) + over_replicas

    def _shards_nbytes(self, footprint: Footprint | None) -> int:
        if self.num_shards == 1:
            return 0
        if footprint is not None and (footprint.ranks > 1 or footprint.nodes > 1):
            return self._place_nbytes(footprint)
        largest = max((unit.layout.shard_numel for unit in self._summed), default=0)
        return exchange_chunk(largest, self.num_shards, self.precision.param_itemsize) * (
            self.num_shards * self.precision.param_itemsize
        )

    def _place_nbytes(self, footprint: Footprint) -> int:
        """Bytes of the places or messages by which peers get gradients, and of partial sums between nodes."""
        item = self.precision.param_itemsize
        sizes = [unit.layout.padded_numel * item for unit in self._summed]
        private = not footprint.reads_peers
        places = [] if private or self.stage.keeps_local_gradients else places_in_turn(sizes)
        if footprint.pulls and self.stage.shards_optimizer:
            parts = [unit.layout.padded_numel * item // footprint.ranks for unit in self.units]
            places = [*places, pulled_nbytes(parts)]
        if footprint.pulls and not self.stage.keeps_local_gradients:
            # the spare place, which is exported with the others
            places = [*places, max(sizes, default=0)]
        if footprint.nodes == 1:
            return sum(places)
        wire = self.wire_itemsize(footprint)
        rail = (footprint.nodes, wire, footprint.round_nbytes)
        alone = wire == item and self.num_shards == footprint.nodes
        codings = [c for unit in self._summed if (c := self.coding(unit)) is not None]
        plain = {u.layout.shard_numel for u in self._summed if self.coding(u) is None}
        between = (footprint.nodes, footprint.round_nbytes)
        held = [footprint.rail_nbytes(shard, wire, alone=alone) for shard in plain]
        held += [coded_nbytes(coding, *between) for coding in codings]
        chunks = [rail_chunk(shard, *rail) for shard in plain]
        chunks += (of_codes := [coded_chunk(coding, *between) for coding in codings])
        sums = 2 * footprint.nodes * FP32_BYTES * max(of_codes, default=0)
        inside = footprint.rows_of_peers(self.num_shards) * item * max(chunks, default=0)
        return (
            sum(places) + max(held, default=0) + sums + inside + self._rows_nbytes(footprint.nodes)
        )

    def _rows_nbytes(self, nodes: int) -> int:
        """Bytes of the rows of codes in which the shards of a rail arrive, and of a shard before and after."""
        found = [c for unit in self.units if (c := self.coding(unit, gathers=True)) is not None]
        shard = max((c.layout.shard_numel for c in found), default=0)
        rows = max((c.nbytes(c.layout.shard_numel) for c in found), default=0)
        return nodes * rows + shard * (self.precision.param_itemsize + FP32_BYTES)

    def coding(self, unit: UnitSpec, *, gathers: bool = False) -> Coding | None:
        """As what the gradient of ``unit``, or its parameters in gathers, travel between nodes; None: in a dtype."""
        form = self.precision.gather if gathers else self.precision.reduce
        coded = unit.trainable and not unit.row and form in CODES
        return Coding.of(unit.layout, form) if coded else None

    @property
    def node_itemsize(self) -> int:
        """Bytes of an element of a node's partial sum."""
        return ITEMSIZE[self.precision.node_dtype]

    def wire_itemsize(self, footprint: Footprint) -> int:
        """Bytes of an element between nodes; one rank of a node alone sends its gradient as it is, if not wider."""
        alone = self.num_shards == footprint.nodes
        return (
            min(self.precision.param_itemsize, self.node_itemsize) if alone else self.node_itemsize
        )

    def traffic(
        self, *, micro_steps: int = 1, synced: int = 1, footprint: Footprint | None = None
    ) -> TrafficPlan:
        """What each rank sends in one optimizer step.

        Args:
            micro_steps: forward-backward passes in the step.
            synced: how many of them reduce gradients, i.e. run outside ``no_sync``.
            footprint: of the transport (``Collectives.footprint``). None means that everything is a message.

        Source: Rajbhandari et al., ZeRO, SC20, sec. 7: 2Ψ for stages 0 to 2, 3Ψ for stage 3, times (N-1)/N.
        """
        steps, way = {"micro_steps": micro_steps, "synced": synced}, footprint or Footprint()
        return sum((unit_traffic(self, unit, way, **steps) for unit in self.units), TrafficPlan())

    def describe(
        self,
        footprint: Footprint | None = None,
        *,
        memory: MemoryPlan | None = None,
        of: str = "",
        sent: str = "",
    ) -> str:
        """A few lines for a run header: units, bytes held, bytes sent by a transport of this footprint.

        Args:
            footprint: of the transport.
            memory: bytes held, where they are not those of this plan alone.
            of: what of a whole model the parameters are, where they are not all of it.
            sent: the line about bytes sent, where they are not those of this plan alone.
        """
        memory = memory or self.memory(footprint=footprint)
        traffic = self.traffic(footprint=footprint)
        sizes = sorted({unit.layout.numel for unit in self.units})
        spread = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
        mib = 2**20
        sent_as = (("parameters", self.precision.gather), ("gradients", self.precision.reduce))
        coded = " and ".join(f"{what} as {form}" for what, form in sent_as if form in CODES)
        tables = sum(unit.row > 0 for unit in self.units)
        units = (
            f"plan: stage {int(self.stage)}, {self.precision.param} parameters, "
            + (f"between nodes {coded}, " if coded else "")
            + f"{self.numel:,} parameters{of} (+{self.padding_numel:,} padding) in "
            f"{len(self.units)} units of {spread} over {self.num_shards} shards"
            + (f"; of {tables} tables the rows that a batch touches travel" if tables else "")
        )
        staging = f" + staging {memory.staging / mib:,.1f}" if memory.staging else ""
        held = (
            f"  held per rank: {memory.states / mib:,.1f} MiB = parameters "
            f"{memory.parameters / mib:,.1f} + master {memory.master / mib:,.1f} + gradients "
            f"{memory.gradients / mib:,.1f} + optimizer {memory.optimizer / mib:,.1f}{staging}; in flight up to "
            f"{memory.unsharded / mib:,.1f} unsharded + {memory.exchange / mib:,.1f} exchange"
        )
        if sent:
            return "\n".join((units, held, sent))
        sent = (
            f"  sent per rank and step: {traffic.nbytes / mib:,.1f} MiB in "
            f"{traffic.all_gathers} all-gathers and {traffic.reduce_scatters} reduce-scatters"
            + (", and rows of tables" if tables else "")
        )
        if footprint is not None and footprint.ranks > 1:
            as_messages = self.traffic().nbytes / mib
            sent += f"; {as_messages:,.1f} MiB if the ranks of a node shared no memory"
        return "\n".join((units, held, sent))


def _check_dtype(unit: str, dtypes: Mapping[str, str], precision: Precision) -> None:
    """Refuse mixed dtypes in a unit, and dtypes the precision cannot represent exactly."""
    if len(set(dtypes.values())) > 1:
        first: dict[str, str] = {}
        for name, dtype in dtypes.items():
            first.setdefault(dtype, name)
        listed = ", ".join(f"{dtype} ({name})" for dtype, name in first.items())
        raise PlanError(
            f"unit {unit!r} holds {listed}, expected one dtype; split the unit or cast the "
            "parameters before zeroify"
        )
    names = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
    dtype = next(iter(dtypes.values()))
    if names.get(dtype) not in ("fp32", precision.param):
        raise PlanError(
            f"unit {unit!r} holds {dtype}, expected torch.float32 (or the dtype of precision "
            f"{precision.param!r}); call model.float() before building the optimizer"
            + (f", and pass precision={names[dtype]!r} to train in it" if dtype in names else "")
        )
