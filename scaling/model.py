"""How long a training step will take: compute by a roofline, collectives by their formulas, bytes by the Plan.

Owns: the terms and their sum. Must not know: torch, MPI, where a machine's numbers come from, how a prediction is
shown.

    step = forward + backward + what of the communication they do not hide + update

Assumptions, all of them:

- every rank is as fast as every other, and the network has no other traffic: noise and stragglers are not in the model;
- a block's work is its matrix products, its attention and its memory-bound passes, one after the other; causal
  attention is counted whole, as in the FLOP count;
- all-gather between nodes: the faster of a ring and, for powers of two, recursive doubling, then inside the node;
  reduce-scatter: first inside, then pairwise between nodes; all ranks of a node share its NICs. Rounds of one
  exchange overlap, so that latency counts once for each message;
- with more than one node the next unit's all-gather and the last unit's reduction are hidden by one unit's compute,
  as in `hpczero.schedule`; without, nothing is hidden;
- bytes and shards are those of `hpczero.plan`; checkpointed activations cost one more forward of each block;
- ``model_parallel`` > 1 is Megatron's, which hpczero does not have: it serves the runs of the ZeRO paper.

Source of the formulas: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH
(2005), sec. 4, per level; Shoeybi et al., Megatron-LM, arXiv 1909.08053, sec. 3, for model parallelism.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from hpczero.errors import ConfigError
from hpczero.layout import Sharing
from hpczero.models.config import GPTConfig, flops_per_token, parameter_shapes
from hpczero.plan.plan import Plan, UnitSpec
from hpczero.plan.sizing import Fit, blockwise_plan, fit
from hpczero.plan.sizing import Machine as Room
from scaling.machine import Kernels, Machine, Roofline

AGREEMENTS = 3  # small collectives of a step: loss, finite check and norm, flags
FORWARD_CALLS, BACKWARD_CALLS = 16, 24  # operations of a block that are started one by one
FP32_BYTES = 4


@dataclass(frozen=True)
class Job:
    """What is trained, and how it is spread.

    Attributes:
        model: its sizes.
        machine: of every node.
        ranks: all of them.
        stage: of ZeRO, over the ranks that hold the same slice of the model.
        precision: of parameters and activations.
        micro_batch: sequences of one forward on one data-parallel rank.
        accumulation: forwards of one step.
        checkpointing: block inputs are kept only.
        transport: as in ``zeroify``.
        overlap: between nodes, hide what can be hidden.
        model_parallel: ranks that share every layer.
        kernels: of one rank; None: a roofline of the machine.
    """

    model: GPTConfig
    machine: Machine
    ranks: int
    stage: int
    precision: str
    micro_batch: int
    accumulation: int = 1
    checkpointing: bool = False
    transport: Literal["flat", "hierarchical", "window"] = "hierarchical"
    overlap: bool = True
    model_parallel: int = 1
    kernels: Kernels | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        per_node = self.machine.ranks_per_node
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
    def local(self) -> int:
        """Of those, how many are on one node."""
        on_node = min(self.machine.ranks_per_node, self.ranks)
        return max(on_node // self.model_parallel, 1)

    @property
    def nodes(self) -> int:
        """Over which those are spread."""
        return self.data_parallel // self.local

    @property
    def tokens(self) -> int:
        """Of one forward."""
        return self.micro_batch * self.model.context

    @cached_property
    def plan(self) -> Plan:
        """Of a slice."""
        shapes = [(name, self._sliced(shape)) for name, shape in parameter_shapes(self.model)]
        return blockwise_plan(
            shapes, num_shards=self.data_parallel, stage=self.stage, precision=self.precision
        )

    @property
    def room(self) -> Room:
        """The same machine as `hpczero.plan.sizing` sees it."""
        return Room(
            self.data_parallel,
            self.machine.usable,
            local_size=None if self.transport == "flat" else self.local,
            shares_memory=self.transport == "window",
        )

    @property
    def sharing(self) -> Sharing:
        """What ranks of a node hold together."""
        return self.room.sharing

    @property
    def work(self) -> Kernels:
        """Of one rank."""
        return self.kernels or Roofline(
            self.machine, self.precision, self.plan.precision.param_itemsize
        )

    @property
    def fit(self) -> Fit:
        """Bytes, and the largest micro-batch; without model parallelism.

        Raises:
            ConfigError: with model parallelism, whose activations `hpczero.plan` does not know.
        """
        if self.model_parallel > 1:
            raise ConfigError("hpczero has no model parallelism; expected model_parallel 1")
        return fit(
            self.model,
            parameter_shapes(self.model),
            self.room,
            stage=self.stage,
            precision=self.precision,
            sequence=self.model.context,
            micro_batch=self.micro_batch,
        )

    def _sliced(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Matrices are cut along their longer side; vectors are whole on every rank."""
        if len(shape) < 2:
            return shape
        longest = max(range(len(shape)), key=lambda axis: shape[axis])
        return tuple(
            -(-size // self.model_parallel) if axis == longest else size
            for axis, size in enumerate(shape)
        )


@dataclass(frozen=True)
class Prediction:
    """One step, on every rank.

    Attributes:
        job: of which.
        forward_s, backward_s: without any wait; recomputation is part of backward.
        communication_s: that nothing hides.
        hidden_s: communication behind forward and backward.
        update_s: norm of the gradient, optimizer.
    """

    job: Job
    forward_s: float
    backward_s: float
    communication_s: float
    hidden_s: float
    update_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.forward_s + self.backward_s + self.communication_s + self.update_s

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks."""
        job = self.job
        return job.tokens * job.accumulation * job.data_parallel / self.step_s

    @property
    def tflops(self) -> float:
        """Model FLOP/s of one rank in 1e12; recomputation does not count."""
        return self.tokens_per_s * flops_per_token(self.job.model) / self.job.ranks / 1e12

    @property
    def mfu(self) -> float:
        """Share of the peak."""
        return self.tflops * 1e12 / self.job.machine.peak_of(self.job.precision)


def predict(job: Job) -> Prediction:
    """One step of ``job``. Pure."""
    wires = Wires(job)
    block_f, block_b = (_block_s(job, backward) for backward in (False, True))
    head_f, head_b = (_head_s(job, backward) for backward in (False, True))
    sliced_f, sliced_b = wires.model_parallel_s()
    block_f += sliced_f
    block_b += sliced_b + (block_f if job.checkpointing else 0.0)
    layers, steps = job.model.layers, job.accumulation
    exposed, whole = wires.exposed(block_f, block_b, head_b)
    owned = sum(_owned(job, unit) for unit in job.plan.units)
    return Prediction(
        job=job,
        forward_s=steps * (layers * block_f + head_f),
        backward_s=steps * (layers * block_b + head_b),
        communication_s=exposed,
        hidden_s=max(whole - exposed, 0.0),
        update_s=job.work.update_s(owned),
    )


def _block_s(job: Job, backward: bool) -> float:
    """One block: its products, attention, memory-bound passes, and the start of each operation."""
    work, tokens, model = job.work, job.tokens, job.model
    hidden, ffn, cut = model.hidden, model.ffn_multiple * model.hidden, job.model_parallel
    products = [
        (tokens, hidden, 3 * hidden // cut),
        (tokens, hidden // cut, hidden),
        (tokens, hidden, ffn // cut),
        (tokens, ffn // cut, hidden),
    ]
    seconds = _products_s(work, products, backward)
    seconds += work.attention_s(tokens, model.context, hidden // cut, backward=backward)
    numel = {
        "norm": 2 * hidden,
        "gelu": ffn // cut,
        "add": 2 * hidden,
        "fork": 2 * hidden,
        "bias": (3 * hidden + ffn) // cut + 2 * hidden,
        "copy": (4 if backward else 1) * hidden // cut,  # heads back beside each other; q, k, v
    }
    if model.positions == "rotary":
        numel["copy"] += 4 * hidden // cut  # q and k, twice
    for kind, per_token in numel.items():
        seconds += tokens * per_token * work.element_s(kind, backward=backward)
    if backward:  # gradients go into the flat buffer
        unit = next(unit for unit in job.plan.units if not unit.is_root)
        seconds += unit.layout.numel * work.element_s("copy", backward=False)
    return seconds + (BACKWARD_CALLS if backward else FORWARD_CALLS) * work.dispatch_s


def _head_s(job: Job, backward: bool) -> float:
    """Embedding, final norm, head and loss; the loss is computed once more in backward."""
    work, tokens, model = job.work, job.tokens, job.model
    vocab = model.vocab_size // job.model_parallel
    seconds = _products_s(work, [(tokens, model.hidden, vocab)], backward)
    seconds += tokens * vocab * work.element_s("loss", backward=backward)
    seconds += tokens * model.hidden * work.element_s("norm", backward=backward)
    if backward:  # the embedding's gradient is as large as its table, and is added to the head's
        table = vocab * model.hidden
        seconds += 2 * table * work.element_s("copy", backward=False)
        seconds += job.plan.units[0].layout.numel * work.element_s("copy", backward=False)
    return seconds


def _products_s(work: Kernels, products: list[tuple[int, int, int]], backward: bool) -> float:
    if not backward:
        return sum(work.matmul_s(m, k, n) for m, k, n in products)
    # dx = dy W^T and dW = x^T dy
    return sum(work.matmul_s(m, n, k) + work.matmul_s(k, m, n) for m, k, n in products)


def _owned(job: Job, unit: UnitSpec) -> int:
    """Elements of which this rank has the optimizer's state."""
    layout = unit.layout
    return layout.shard_numel if job.plan.stage.shards_optimizer else layout.padded_numel


class Wires:
    """Seconds of the collectives of one job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self._machine = job.machine
        self._nodes, self._local = job.nodes, job.local
        self._item = job.plan.precision.param_itemsize

    def gather_s(self, shard_nbytes: int, *, shared: bool = True) -> float:
        """All-gather of one shard of every rank: between nodes, then inside.

        Args:
            shard_nbytes: of one rank.
            shared: where ranks of a node share memory, they need no copy of it.
        """
        machine, nodes, local = self._machine, self._nodes, self._local
        if self.job.transport == "flat" and nodes > 1:
            return self._flat_s(shard_nbytes)
        rounds = nodes - 1
        if nodes & (nodes - 1) == 0:
            rounds = nodes.bit_length() - 1
        rail = rounds * machine.nic_latency + (nodes - 1) * shard_nbytes / machine.rail_rate
        return rail + self._inside_s(nodes * shard_nbytes, local, shared=shared)

    def reduce_s(self, shard_numel: int) -> float:
        """Reduce-scatter: blocks inside the node, a sum, partial sums between nodes, a sum."""
        machine, nodes, local, work = self._machine, self._nodes, self._local, self.job.work
        mine = nodes * shard_numel
        if self.job.transport == "flat":
            copies = mine * local * work.element_s("copy", backward=False)
            wires = self._flat_s(shard_numel * self._item) if nodes > 1 else 0.0
            wires = wires or self._inside_s(mine * self._item, local, shared=False)
            return copies + wires + work.sum_s(nodes * local, shard_numel)
        wire = self._item if local == 1 else FP32_BYTES
        rail = (nodes - 1) * (machine.nic_latency + shard_numel * wire / machine.rail_rate)
        inside = self._inside_s(mine * self._item, local, shared=True) + work.sum_s(local, mine)
        return inside + rail + (work.sum_s(nodes, shard_numel) if nodes > 1 else 0.0)

    def model_parallel_s(self) -> tuple[float, float]:
        """What slicing each block costs (forward, backward): two all-reduces each.

        With checkpointing also an all-gather of the block's input, which is kept cut (ZeRO paper, sec. 6.1).
        """
        job, machine, cut = self.job, self._machine, self.job.model_parallel
        if cut == 1:
            return 0.0, 0.0
        nbytes = job.tokens * job.model.hidden * self._item
        on_one_node = cut <= machine.ranks_per_node
        # over several nodes one ring, which crosses between two nodes by one NIC
        rate = machine.node_rate if on_one_node else machine.nic_rate
        latency = machine.node_latency if on_one_node else machine.nic_latency
        one_way = (cut - 1) * (latency + nbytes / cut / rate)
        return 2 * 2 * one_way, 2 * 2 * one_way + (one_way if job.checkpointing else 0.0)

    def exposed(self, block_f: float, block_b: float, head_b: float) -> tuple[float, float]:
        """(seconds of communication that nothing hides, of all communication) in one step."""
        job, stage = self.job, self.job.plan.stage
        steps, sharing = job.accumulation, job.sharing
        root, *blocks = job.plan.units
        hides = job.overlap and job.nodes > 1
        gathers = stage.shards_parameters and not sharing.lasting
        exposed = whole = AGREEMENTS * self._agreement_s()
        for step in range(steps):
            last = step == steps - 1
            for backward in (False, True):
                compute = block_b if backward else block_f
                costs = [
                    (
                        self._gather_of(unit) if gathers else 0.0,
                        self._reduce_of(unit) if backward and last else 0.0,
                    )
                    for unit in (root, *blocks)
                ]
                total = sum(map(sum, costs))
                whole += total
                exposed += _not_hidden(costs, compute, head_b * backward) if hides else total
        if stage.shards_optimizer and not gathers:  # the updated parameters
            after = sum(self._gather_of(unit) for unit in (root, *blocks))
            exposed, whole = exposed + after, whole + after
        return exposed, whole

    def _gather_of(self, unit: UnitSpec) -> float:
        return self.gather_s(unit.layout.shard_numel * self._item)

    def _reduce_of(self, unit: UnitSpec) -> float:
        shard = unit.layout.shard_numel
        seconds = self.reduce_s(shard)
        if not self.job.plan.stage.shards_optimizer:  # every rank needs the reduced gradient
            seconds += self.gather_s(shard * FP32_BYTES, shared=False)
        return seconds

    def _inside_s(self, block_nbytes: int, local: int, *, shared: bool) -> float:
        """Each of ``local`` ranks gives a block to each other."""
        if local == 1:
            return 0.0
        if shared and self.job.transport == "window":
            return self._machine.node_latency  # they wait for each other, and read where it lies
        rate = self._machine.node_rate
        return (local - 1) * (self._machine.node_latency + block_nbytes / rate)

    def _flat_s(self, shard_nbytes: int) -> float:
        """Pairwise over all ranks, whatever the nodes: most partners are on other nodes."""
        machine = self._machine
        far = (self._nodes - 1) * self._local
        seconds = far * (machine.nic_latency + shard_nbytes / machine.rail_rate)
        return seconds + (self._local - 1) * (
            machine.node_latency + shard_nbytes / machine.node_rate
        )

    def _agreement_s(self) -> float:
        """A few bytes of every rank to every rank."""
        machine = self._machine
        inside = math.ceil(math.log2(max(self._local, 1))) * machine.node_latency
        return inside + math.ceil(math.log2(max(self._nodes, 1))) * machine.nic_latency


def _not_hidden(costs: list[tuple[float, float]], compute: float, head_b: float) -> float:
    """Of (gather, reduction) of the root and of the blocks, in one pass; each block hides that of its neighbour.

    Nothing runs before the first gathers. In backward the head's own work hides the first block's gather, and nothing
    hides the last reductions.
    """
    (root_gather, root_reduce), *blocks = costs
    if not blocks:
        return root_gather + root_reduce
    first, last = blocks[0], blocks[-1]
    between = sum(max(gather + reduce - compute, 0.0) for gather, reduce in blocks[1:])
    return root_gather + max(first[0] - head_b, 0.0) + between + last[1] + root_reduce


def largest_micro_batch(job: Job) -> tuple[int, bool]:
    """(sequences, whether activations must be checkpointed) of the largest forward that fits; 0 if none does.

    Without checkpointing where at least one sequence fits so, as recomputing costs a third.
    """
    found = job.fit
    if found.micro_batch and not job.checkpointing:
        return found.micro_batch, False
    return found.micro_batch_checkpointed, True
