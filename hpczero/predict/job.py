"""What is trained, and how it is spread over a machine.

Owns: the arithmetic of ranks, nodes and slices. Must not know: how long anything takes (`hpczero.predict.model`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from hpczero.errors import ConfigError
from hpczero.models.config import GPTConfig, parameter_shapes
from hpczero.plan.footprint import Footprint
from hpczero.plan.offload import EVERYTHING_KEPT, NOTHING_AWAY, Activations, Offload
from hpczero.plan.offloaded import OffloadedPlan, Sides
from hpczero.plan.plan import Plan
from hpczero.plan.precision import DType, Precision
from hpczero.plan.sizing import Fit, activation_nbytes, blockwise_plan, fit
from hpczero.plan.sizing import MachineSizes as Room
from hpczero.predict.machine import Kernels, Machine, Roofline


@dataclass(frozen=True)
class Pass:
    """Forwards or backwards of a step that are alike.

    Attributes:
        backward: whether they are backwards.
        reduces: whether gradients are reduced.
        times: how many there are.
    """

    backward: bool
    reduces: bool
    times: int


@dataclass(frozen=True)
class Job:
    """What is trained, and how it is distributed.

    Attributes:
        model: sizes of the model.
        machine: each node is one like it.
        ranks: the world size.
        stage: ZeRO stage, over the ranks that hold the same slice of the model.
        precision: precision of parameters and activations.
        micro_batch: sequences of one forward on one data-parallel rank.
        accumulation: forwards of one step.
        checkpointing: whether only block inputs are kept.
        transport: as in ``zeroify``.
        overlap: whether communication between nodes is hidden where possible.
        model_parallel: ranks that share every layer.
        kernels: kernels of one rank; None takes a roofline of the machine.
        ranks_per_node: of the job; None takes that of the machine.
        offload: what rests on a memory tier.
        kept: with checkpointing: where inputs of blocks rest.
        reduce: dtype of gradients' partial sums between nodes.
    """

    model: GPTConfig
    machine: Machine
    ranks: int
    stage: int
    precision: str
    micro_batch: int
    accumulation: int = 1
    checkpointing: bool = False
    transport: Literal["flat", "hierarchical", "window", "ipc"] = "hierarchical"
    overlap: bool = True
    model_parallel: int = 1
    kernels: Kernels | None = field(default=None, repr=False)
    ranks_per_node: int | None = None
    offload: Offload = NOTHING_AWAY
    kept: Activations = EVERYTHING_KEPT
    reduce: DType = "fp32"

    def __post_init__(self) -> None:
        per_node = self.ranks_per_node or self.machine.ranks_per_node
        if self.ranks > per_node and self.ranks % per_node:
            raise ConfigError(
                f"ranks: got {self.ranks}, expected a multiple of the {per_node} ranks of a node of "
                f"{self.machine.name}, or fewer than that"
            )
        if self.ranks % self.model_parallel:
            raise ConfigError(
                f"model_parallel: got {self.model_parallel}, which does not divide {self.ranks} ranks"
            )

    @property
    def data_parallel(self) -> int:
        """Ranks that share the states of a slice."""
        return self.ranks // self.model_parallel

    @property
    def norms_cut(self) -> int:
        """Ranks that share norms and sums of blocks; with sequence parallelism they are those that share products."""
        return 1

    @property
    def local(self) -> int:
        """How many of the data-parallel ranks are on one node."""
        on_node = min(self.ranks_per_node or self.machine.ranks_per_node, self.ranks)
        return max(on_node // self.model_parallel, 1)

    @property
    def nodes(self) -> int:
        """Number of nodes that the data-parallel ranks are on."""
        return self.data_parallel // self.local

    @property
    def tokens(self) -> int:
        """Tokens of one forward."""
        return self.micro_batch * self.model.context

    @property
    def passes(self) -> tuple[Pass, ...]:
        """Of one step: gradients are reduced in its last backward."""
        before = self.accumulation - 1
        return (
            Pass(False, False, before + 1),
            Pass(True, False, before),
            Pass(True, True, 1),
        )

    @property
    def plan(self) -> Plan:
        """Plan of one slice of the model."""
        precision = Precision.of(self.precision, reduce=self.reduce)
        return plan_of(self.model, self.model_parallel, self.data_parallel, self.stage, precision)

    @property
    def offloaded(self) -> OffloadedPlan:
        """The plan with what rests elsewhere."""
        return OffloadedPlan(self.plan, self.offload)

    @property
    def inputs_nbytes(self) -> int:
        """Bytes of inputs of blocks that rest elsewhere in one forward: all but the newest."""
        if not self.checkpointing or not self.kept.away:
            return 0
        item = self.plan.precision.param_itemsize
        layers = self.model.layers
        return (layers - self.kept.kept(layers)) * self.tokens * self.model.hidden * item

    @property
    def room(self) -> Room:
        """The same machine as `hpczero.plan.sizing` sees it."""
        return Room(
            self.data_parallel,
            self.machine.usable,
            local_size=self.local,
            transport=self.transport,
            on_device=not self.machine.shares_memory,
        )

    @property
    def footprint(self) -> Footprint:
        """Footprint of the transport, with these parameters."""
        return self.offloaded.footprint(self.room.footprint)

    @property
    def work(self) -> Kernels:
        """Kernels of one rank."""
        return self.kernels or Roofline(
            self.machine, self.precision, self.plan.precision.param_itemsize
        )

    @property
    def fit(self) -> Fit:
        """Bytes and the largest micro batch, without model parallelism.

        Raises:
            ConfigError: with model parallelism, whose activations `hpczero.plan` does not know.
        """
        if self.model_parallel > 1:
            raise ConfigError("hpczero has no model parallelism; expected model_parallel 1")
        return fit(
            self.model,
            self.plan,
            self.room,
            sequence=self.model.context,
            micro_batch=self.micro_batch,
        )

    @property
    def needed_nbytes(self) -> int:
        """Bytes of a rank: states, buffers and activations, which are checkpointed if and only if this job says so.

        Raises:
            ConfigError: with model parallelism, as ``fit``.
        """
        return self.fit.memory.total + activation_nbytes(
            self.model,
            sequence=self.model.context,
            batch=self.micro_batch,
            itemsize=self.plan.precision.param_itemsize,
            checkpointing=self.checkpointing,
            on_device=self.room.on_device,
        )


@lru_cache(maxsize=16)  # many jobs are tried with one model
def plan_of(model: GPTConfig, cut: int, ranks: int, stage: int, precision: Precision) -> Plan:
    """Plan of one of ``cut`` slices of a model over so many ranks."""
    shapes = [(name, _sliced(shape, cut)) for name, shape in parameter_shapes(model)]
    return blockwise_plan(shapes, num_shards=ranks, stage=stage, precision=precision)


def _sliced(shape: tuple[int, ...], cut: int) -> tuple[int, ...]:
    """Matrices are cut along their longer side; vectors are whole on every rank."""
    if len(shape) < 2:
        return shape
    longest = max(range(len(shape)), key=lambda axis: shape[axis])
    return tuple(-(-size // cut) if axis == longest else size for axis, size in enumerate(shape))


# How long an update takes of which the host takes a part, and which part lets both sides end together.
#
# Source: Ren et al., ZeRO-Offload, ATC21, sec. 4; `hpczero.plan.offloaded`.


def sides_of(machine: Machine, work: Kernels, *, up: float) -> Sides | None:
    """What an update costs on either side. Gradients come down behind backward, so they cost nothing here.

    Args:
        machine: with its host; None is the answer where that is not known.
        work: kernels of the device.
        up: bytes of an element that go back to the device.
    """
    down_rate, up_rate = machine.host_write, machine.host_read
    if not (machine.host_update and down_rate and up_rate):
        return None
    on_device = 1 / work.update_s(1)
    return Sides(machine.host_update, on_device, 0.0, up, down_rate, up_rate)


def balance_of(machine: Machine, work: Kernels, *, up: float) -> float | None:
    """The fraction of all elements with which host and device end their updates together; None: no such host is known.

    Args:
        machine: with its host.
        work: kernels of the device.
        up: bytes of an element that go back to the device.
    """
    sides = sides_of(machine, work, up=up)
    return None if sides is None else sides.balance


def update_s(job: Job, owned: int) -> float:
    """Seconds of the norm and the optimizer, ways to and from a tier left out.

    Args:
        job: with what rests elsewhere, and who steps on it.
        owned: elements of which a rank has the optimizer's state.
    """
    sides = sides_of(job.machine, job.work, up=0.0) if job.offload.on_host else None
    if sides is None or not owned:
        return job.work.update_s(owned)
    away = sum(unit.layout.shard_numel for unit in job.offloaded.away)
    return sides.step_s(owned, away / owned)
