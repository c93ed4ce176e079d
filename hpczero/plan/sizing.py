"""Sizing: what a model needs before anyone builds it, and what fits.

Two families of functions are never mixed. ``ideal_*`` is the ZeRO paper's arithmetic. The others give what hpczero
itself holds, from the same ``Plan`` that ``zeroify`` uses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from hpczero.errors import ConfigError
from hpczero.models.config import GPTConfig
from hpczero.options.config import DEFAULT_GLOBAL_BATCH, TrainOptions
from hpczero.plan.footprint import Footprint, Named, footprint_of
from hpczero.plan.layout import ShardLayout, UnitSpec
from hpczero.plan.memory import ADAM_STATE_BYTES, MemoryPlan, StateBytes, TrafficPlan
from hpczero.plan.offload import EVERYTHING_KEPT, Activations
from hpczero.plan.plan import FP32_BYTES, Plan, Stage
from hpczero.plan.precision import Precision


@dataclass(frozen=True)
class Batch:
    """Sequences per step, and how they are distributed.

    Attributes:
        global_batch: sequences per step over all ranks.
        micro_batch: sequences per rank in one forward.
        accumulation: forwards per step.
        leaves: micro batches of the step over all ranks, where they are summed one by one (``run.exact``); else None.
    """

    global_batch: int
    micro_batch: int
    accumulation: int
    leaves: int | None = None

    @classmethod
    def resolve(cls, options: TrainOptions, world_size: int, *, exact: bool = False) -> Batch:
        """Any two of the three sizes fix the third: ``global = micro * accumulation * world_size``.

        A global batch alone means one forward per step. If it is neither given nor fixed by the other two, it is the
        default, rounded up to a multiple of the rest. With ``exact`` the number of ranks plays no part in the first
        two: see ``of_leaves``.

        Raises:
            ConfigError: the sizes contradict each other or do not divide.
        """
        if exact:
            return cls.of_leaves(options, world_size)
        micro, accumulation = options.micro_batch, options.accumulation
        whole = options.global_batch
        if whole is None:
            parts = world_size * (micro or 1) * (accumulation or 1)
            fixed = micro is not None and accumulation is not None
            whole = parts if fixed else -(-DEFAULT_GLOBAL_BATCH // parts) * parts
        if micro is None:
            accumulation = accumulation or 1
            micro = cls._divide(
                whole,
                world_size * accumulation,
                f"{world_size} rank(s) x accumulation {accumulation}",
            )
        elif accumulation is None:
            accumulation = cls._divide(
                whole, world_size * micro, f"{world_size} rank(s) x micro_batch {micro}"
            )
        if whole != micro * accumulation * world_size:
            raise ConfigError(
                f"train.global_batch: got {whole}, but micro_batch {micro} x accumulation {accumulation} x "
                f"{world_size} rank(s) is {micro * accumulation * world_size}; "
                "give two of the three and the third follows"
            )
        return cls(global_batch=whole, micro_batch=micro, accumulation=accumulation)

    @classmethod
    def of_leaves(cls, options: TrainOptions, world_size: int) -> Batch:
        """Of an exact run: a micro batch is a leaf, 1 sequence if nothing is said, and ranks share the leaves.

        Raises:
            ConfigError: there are fewer leaves than ranks, or an accumulation is given, which follows from the ranks.
        """
        leaf = options.micro_batch or 1
        whole = options.global_batch or -(-DEFAULT_GLOBAL_BATCH // leaf) * leaf
        leaves = cls._divide(whole, leaf, f"micro_batch {leaf}")
        if options.accumulation is not None:
            raise ConfigError(
                f"train.accumulation: got {options.accumulation} with run.exact, expected none: it follows from the "
                "number of ranks, train.global_batch and train.micro_batch"
            )
        if leaves < world_size:
            raise ConfigError(
                f"run.exact: global_batch {whole} in micro batches of {leaf} is {leaves} micro batches, and "
                f"{world_size} ranks need one each; start at most {leaves} ranks, or take a smaller train.micro_batch"
            )
        return cls(whole, leaf, -(-leaves // world_size), leaves)

    @staticmethod
    def _divide(whole: int, parts: int, what: str) -> int:
        if whole % parts:
            below, above = whole // parts * parts, -(-whole // parts) * parts
            near = f"{below} or {above}" if below else f"{above}"
            raise ConfigError(
                f"train.global_batch: got {whole}, expected a multiple of {what} = {parts}, such as {near}"
            )
        return whole // parts


HALF_BYTES = 2
# fp32 master, momentum and variance of mixed-precision Adam (ZeRO paper, sec. 3.1).
ADAM_FACTOR = 12
# What one block of hpczero's GPT keeps for backward, counted tensor by tensor: two norm inputs and outputs, q, k, v and
# the attention's output; with rotary positions rotated q and k, and v apart from the joint buffer; and of the MLP's
# hidden layer the values before and after the GELU, or of a gated one the gate before and after it, the values, and
# their product.
BLOCK_FFN_FACTOR, GATED_FFN_FACTOR = 2, 4
# Of these, the inputs of both norms, which sequence parallelism cuts, and their outputs, which it gathers.
NORM_INPUTS, NORM_OUTPUTS = 2, 2
# What a block's backward holds beside what its forward kept: the gradients of the residual and of the hidden layer.
BACKWARD_FACTOR = 1
# What selective recomputation keeps beside the input: q, k, v, the outputs of attention and of both projections, and
# the hidden layer before its GELU, with its gate. The projections' outputs are those that backward does not need.
PROJECTIONS = 2
# fp32 logits, their log-softmax and one gradient of a piece of the loss.
LOSS_PIECE_BYTES = 12
LOSS_PIECE_NUMEL, DEVICE_LOSS_PIECE_NUMEL = 2**24, 2**28
MAX_RANKS = 2**20
MAX_MICRO_BATCH = 2**20


# --- the paper -----------------------------------------------------------------------------------------------------


def ideal_state_nbytes(
    stage: int | Stage, numel: int, *, data_parallel: int, model_parallel: int = 1
) -> float:
    """Bytes of model states per device: 2Ψ parameters, 2Ψ gradients and 12Ψ optimizer, each over Nd where sharded.

    ``16Ψ | 4Ψ + 12Ψ/Nd | 2Ψ + 14Ψ/Nd | 16Ψ/Nd``, and everything over Nm.

    Args:
        stage: 0 to 3, or a Stage.
        numel: parameters, Ψ.
        data_parallel: Nd, ranks that share the states.
        model_parallel: Nm, devices that share each copy of the model.

    Source: Rajbhandari et al., ZeRO, SC20 (arXiv 1910.02054), sec. 5 and table 1.
    """
    stage = Stage.of(stage)
    per_parameter = (
        Fraction(HALF_BYTES, data_parallel if stage.shards_parameters else 1)
        + Fraction(HALF_BYTES, data_parallel if stage.shards_gradients else 1)
        + Fraction(ADAM_FACTOR, data_parallel if stage.shards_optimizer else 1)
    )
    return float(per_parameter * numel / model_parallel)


# --- hpczero -------------------------------------------------------------------------------------------------------


def blockwise_plan(
    shapes: Iterable[tuple[str, tuple[int, ...]]],
    *,
    num_shards: int,
    stage: int | Stage,
    precision: str | Precision,
    apart: Collection[str] = (),
) -> Plan:
    """The Plan that ``zeroify`` makes with its default rule, from names and shapes alone.

    Each ``blocks.<n>`` is one unit.

    Args:
        shapes: qualified name and shape of every parameter, a tied weight once.
        num_shards: ranks that share each unit.
        stage: 0 to 3, or a Stage.
        precision: name or Precision.
        apart: parameters that are units by themselves, as a weight that two pipeline stages hold.
    """
    members: dict[str, list[tuple[str, tuple[int, ...]]]] = {"": []}  # root first, as in Plan.build
    for name, shape in shapes:
        block = re.match(r"blocks\.\d+(?=\.)", name)
        module = block.group() if block else name.rpartition(".")[0] if name in apart else ""
        members.setdefault(module, []).append((name, shape))
    units = tuple(
        UnitSpec(
            name=module or "root",
            modules=(module,),
            layout=ShardLayout.pack(held, num_shards),
            groups=(0,) * len(held),
            trainable=True,
        )
        for module, held in members.items()
        if held
    )
    return Plan(Stage.of(stage), Precision.of(precision), num_shards, units)


# What backward still needs of one pipeline stage's forwards: how many are alive, and their bytes.
#
#     of a token and block, in units of the width, ``t`` tensor ranks, ``f`` the MLP's multiple:
#     4 + (4 + 2 f) / t       norms' inputs and outputs are whole; q, k, v, the attention's output and the MLP are cut
#     2 + (6 + 2 f) / t       with sequence parallelism: norms' outputs are gathered, and kept so
#
# Korthikanti et al. count 34 bytes (10 + 24 / t) of 16-bit numbers, two of them for dropout's masks. Without dropout it
# is 32 (8 + 24 / t). With sequence parallelism they gather norms' outputs again in backward and have 34 / t; here it is
# 4 + 28 / t. Their ``5 a s / h`` is of attention scores, which fused attention never stores.
#
# Source: Korthikanti et al., arXiv 2205.05198, table 2.


@dataclass(frozen=True)
class ForwardSizes:
    """Sizes of one rank's forward and backward of hpczero's GPT without dropout.

    Counted from ``hpczero.models.gpt``; tests/plan compares with the memory profiler of torch.

    Attributes:
        model: sizes of the whole model.
        tokens: of one micro-batch, those of this rank where a sample's tokens are shared.
        itemsize: bytes of one activation.
        blocks: of this rank's stage.
        tensor: number of ranks that share each layer.
        sequence_parallel: whether norms share the tokens too.
        checkpointing: whether only inputs of blocks are kept.
        last: whether the stage has the head and the loss.
        on_device: whether it computes there, where pieces of the loss are larger.
        kept: with checkpointing: whether products are kept too, and whether inputs rest elsewhere, without staging.
    """

    model: GPTConfig
    tokens: int
    itemsize: int
    blocks: int
    tensor: int = 1
    sequence_parallel: bool = False
    checkpointing: bool = False
    last: bool = True
    on_device: bool = False
    kept: Activations = EVERYTHING_KEPT

    @property
    def _wide(self) -> int:
        """Elements of one block's input over the whole width."""
        return self.model.hidden * self.tokens

    @property
    def _input_numel(self) -> Fraction:
        return Fraction(self._wide, self.tensor if self.sequence_parallel else 1)

    @property
    def _block_numel(self) -> Fraction:
        """Elements that one block keeps for its backward."""
        model = self.model
        cut = 2 * (model.query_width + model.key_width)  # q and the attention's output; k and v
        cut += (GATED_FFN_FACTOR if model.gated else BLOCK_FFN_FACTOR) * self._ffn
        if model.positions == "rotary":
            cut += model.query_width + 2 * model.key_width
        if model.experts > 1:  # tokens in the order of experts, and what comes back from them
            cut += 2 * model.active * model.hidden
        norms = NORM_INPUTS * self._input_numel + NORM_OUTPUTS * self._wide
        return norms + Fraction(cut * self.tokens, self.tensor)

    @property
    def _ffn(self) -> int:
        """Width of the MLPs that a token passes."""
        return self.model.active * self.model.ffn_width

    def _products_numel(self, outputs: int) -> Fraction:
        """Elements of a block that selective checkpointing keeps beside the input, with so many of ``hidden``."""
        if self.kept.checkpointing != "selective":
            return Fraction(0)
        model = self.model
        cut = 2 * (model.query_width + model.key_width) + outputs * model.hidden
        cut += (1 + model.gated) * self._ffn
        return Fraction(cut * self.tokens, self.tensor)

    @property
    def forward_nbytes(self) -> int:
        """Bytes that the blocks of one forward keep until its backward."""
        if not self.checkpointing:
            return ceil(self._block_numel * self.blocks * self.itemsize)
        inputs = self._input_numel * self.kept.kept(self.blocks)
        products = self._products_numel(PROJECTIONS) * self.blocks
        return ceil((inputs + products) * self.itemsize)

    @property
    def output_nbytes(self) -> int:
        """Bytes of what passes from this stage to the next, and of its gradient."""
        return ceil(self._input_numel * self.itemsize)

    @property
    def _logits(self) -> int:
        return self.tokens * -(-self.model.vocab_size // self.tensor)

    @property
    def head_nbytes(self) -> int:
        """Bytes that the head of one forward keeps: the final norm and the logits; 0 before the last stage."""
        if not self.last:
            return 0
        return ceil((self._input_numel + self._wide + self._logits) * self.itemsize)

    @property
    def working_nbytes(self) -> int:
        """Bytes at the larger of two moments beside what is kept: the loss, and the backward of one block."""
        live = BACKWARD_FACTOR * self._input_numel
        live += Fraction((1 + self.model.gated) * self._ffn * self.tokens, self.tensor)
        if self.checkpointing:
            live += self._block_numel - self._input_numel
            live -= self._products_numel(0)
        if not self.last:
            return ceil(live * self.itemsize)
        width = -(-self.model.vocab_size // self.tensor)
        most = DEVICE_LOSS_PIECE_NUMEL if self.on_device else LOSS_PIECE_NUMEL
        piece = min(self._logits, max(most // width, 1) * width)  # whole rows
        loss = (self._input_numel + self._wide + 2 * self._logits - piece) * self.itemsize
        return ceil(max(loss + LOSS_PIECE_BYTES * piece, live * self.itemsize))

    def peak_nbytes(self, alive: Fraction = Fraction(1)) -> int:
        """Bytes at the peak with so many forwards alive; a part of one is some of its groups of blocks."""
        more = max(alive - 1, Fraction(0)) * self.head_nbytes
        return ceil(alive * self.forward_nbytes + more) + self.working_nbytes


def accumulated_nbytes(
    plan: Plan, accumulation: int, *, footprint: Footprint | None = None, apart: bool = False
) -> int:
    """Bytes of a rank's own whole gradients, which are kept until the last forward of a step.

    In half precision they are summed in fp32. In fp32 the gradient that stage 1 keeps is that sum, and on one rank
    alone the mean is. Where leaves are summed one by one, they are sums of shards.

    Args:
        plan: plan of the model.
        accumulation: forwards of a step.
        footprint: of the transport.
        apart: whether mean gradients rest elsewhere.
    """
    kept = plan.stage.keeps_local_gradients and not plan.precision.has_masters
    item, footprint = plan.precision.param_itemsize, footprint or Footprint()
    if footprint.leaves:
        shards = sum(unit.layout.shard_numel for unit in plan.trainable_units)
        return FP32_BYTES * footprint.carried_sums(plan.num_shards) * shards
    kept = kept or (footprint.sums_in_place(plan.num_shards, item) and not apart)
    if accumulation == 1 or kept:
        return 0
    return FP32_BYTES * sum(unit.layout.padded_numel for unit in plan.trainable_units)


@dataclass(frozen=True)
class Fit:
    """One stage on one machine.

    Attributes:
        stage: 0 to 3.
        memory: what the plan holds, activations excluded.
        traffic: what one rank sends in a step.
        ideal_nbytes: the paper's model states for the same parameters and ranks.
        micro_batch: largest micro batch that fits; 0 if not even one sample does.
        micro_batch_checkpointed: the same with activation checkpointing.
        needed_nbytes: states, buffers and the activations of the micro batch that was asked for, checkpointed only if
            it does not fit otherwise.
        fits: whether ``needed_nbytes`` is within the memory of a rank.
    """

    stage: int
    memory: MemoryPlan
    traffic: TrafficPlan
    ideal_nbytes: float
    micro_batch: int
    micro_batch_checkpointed: int
    needed_nbytes: int
    fits: bool


@dataclass(frozen=True)
class MachineSizes:
    """The machine that the model is to run on.

    Attributes:
        ranks: ranks that share the model.
        memory_nbytes: bytes that each rank may use beside the runtime itself.
        local_size: ranks of a node; None puts all on one node.
        transport: transport between the ranks.
        on_device: whether ranks compute on devices.
    """

    ranks: int
    memory_nbytes: int
    local_size: int | None = None
    transport: Named = "flat"
    on_device: bool = False

    @property
    def footprint(self) -> Footprint:
        """Footprint of the transport."""
        local = self.local_size or self.ranks
        return footprint_of(
            self.transport, ranks=self.ranks, local_size=local, on_device=self.on_device
        )


def fit(
    model: GPTConfig | None,
    plan: Plan,
    machine: MachineSizes,
    *,
    sequence: int = 1,
    micro_batch: int = 1,
    accumulation: int = 1,
    optimizer_bytes: float | StateBytes = ADAM_STATE_BYTES,
    kept: Activations = EVERYTHING_KEPT,
) -> Fit:
    """Whether what ``plan`` holds fits, and with which micro batch.

    Args:
        model: sizes for the activations; None leaves them out, and micro batches are 0.
        plan: of the parameters, over the ranks of the machine.
        machine: ranks and bytes per rank.
        sequence: tokens per sample.
        micro_batch: samples per rank in one forward and backward.
        accumulation: forwards per step. With more than one, ``accumulated_nbytes`` are needed too.
        optimizer_bytes: state per element, as of ``Plan.memory``.
        kept: of blocks, with checkpointing.
    """
    memory = plan.memory(optimizer_bytes=optimizer_bytes, footprint=machine.footprint)
    waiting = accumulated_nbytes(plan, accumulation, footprint=machine.footprint)
    room = machine.memory_nbytes - memory.total - waiting

    def activations(batch: int, checkpointing: bool) -> int:
        if model is None:
            return 0
        return ForwardSizes(
            model,
            sequence * batch,
            plan.precision.param_itemsize,
            model.layers,
            checkpointing=checkpointing,
            on_device=machine.on_device,
            kept=kept,
        ).peak_nbytes()

    most = 0 if model is None else MAX_MICRO_BATCH
    plain = largest(lambda batch: activations(batch, False) <= room, most)
    checkpointed = largest(lambda batch: activations(batch, True) <= room, most)
    needed = memory.total + waiting + activations(micro_batch, plain < micro_batch)
    return Fit(
        stage=int(plan.stage),
        memory=memory,
        traffic=plan.traffic(micro_steps=accumulation, footprint=machine.footprint),
        ideal_nbytes=ideal_state_nbytes(plan.stage, plan.numel, data_parallel=machine.ranks),
        micro_batch=plain,
        micro_batch_checkpointed=checkpointed,
        needed_nbytes=needed,
        fits=needed <= machine.memory_nbytes,
    )


def largest(good: Callable[[int], bool], limit: int) -> int:
    """Largest n in 1..``limit`` with ``good(n)``, or 0; ``good`` must hold up to some n and not beyond it."""
    below, above = 0, limit + 1
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (middle, above) if good(middle) else (below, middle)
    return below


def fewest_ranks(fits: Callable[[int], bool], start: int) -> int | None:
    """Fewest ranks above ``start`` with which ``fits`` holds; None if even ``MAX_RANKS`` are not enough.

    ``fits`` must hold from some count on; alignment padding can break that by a few ranks, never by more.
    """
    if not fits(MAX_RANKS):
        return None
    return largest(lambda ranks: ranks <= start or not fits(ranks), MAX_RANKS) + 1
