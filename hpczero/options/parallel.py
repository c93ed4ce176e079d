"""Options of how ranks share a model: ``[parallel]``.

Owns: this section, and which of its own values go together. Must not know: ranks, nodes, models (``plan.degrees`` holds
the options against them), MPI, torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from hpczero.errors import ConfigError
from hpczero.options.requirements import require_positive
from hpczero.options.values import Transport, digits, node_shape, require

Schedule = Literal["1f1b", "gpipe", "interleaved"]
MOST_DEGREE = 10**6


@dataclass(frozen=True)
class ShardingOptions:
    """How the state is sharded, and how ranks talk.

    Attributes:
        stage: ZeRO stage. 0 replicates, 1 shards optimizer state, 2 also gradients, 3 also parameters.
        precision: of parameters and activations; bf16 and fp16 keep fp32 masters.
        reduce: of gradients' partial sums that travel between nodes and between replicas; bf16 sends half as much, and
            rounds each node's sum once. Sums themselves are fp32.
        nodes: treat the ranks as GxL, G nodes of L ranks, such as 2x2; None: HPCZERO_FAKE_NODES, else ask MPI.
        transport: how ranks exchange parameters and gradients: flat, hierarchical (between nodes, then inside), window
            (the same with shared memory inside), ipc (the same with peers' device memory inside); auto:
            HPCZERO_TRANSPORT, else the fastest that works.
        algorithms: between nodes; auto: HPCZERO_ALGORITHMS, else what is fastest by a measurement at the first start;
            measure: measure anew; default: do not measure; or as in all_gather=ring,reduce_scatter=pairwise.
        overlap: between nodes and on devices, gather the next unit and reduce the last one while the model computes.
        device: cpu; cuda, one device for each rank of a node; auto: cuda where there is one.
        auto: whether to measure the machine at the start, and to choose what trains fastest within its memory: stage,
            offload, checkpointing of activations, and the micro-batch of the global batch. What is set to another
            value than the default stays. Parts rest on a disk only if offload.folder is given.
        deterministic: on a device, only operations that give the same bits every time, which are slower; one that
            cannot is an error. On the host they all do.
    """

    stage: Literal[0, 1, 2, 3] = 3
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    reduce: Literal["fp32", "bf16"] = "fp32"
    nodes: str | None = None
    transport: Transport = "auto"
    algorithms: str = "auto"
    overlap: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    auto: bool = False
    deterministic: bool = False


@dataclass(frozen=True)
class LayoutOptions:
    """Which ranks share what: the degrees of a mesh. The micro-batches of a pipeline are train.accumulation.

    Attributes:
        tensor: ranks that share each layer's products; on one node.
        pipeline: stages of consecutive blocks; the forwards of a step, train.accumulation, are their micro-batches.
        context: ranks that share the tokens of a sample; must divide the heads.
        shard: ranks that share parameters, gradients and optimizer state: world, all that other degrees leave; node,
            those of them on one node; or a number. Copies of it, replicas, take the rest.
        secondary: at stage 3, keep a second shard of the parameters inside the node, gathered for backward.
        sequence: beside tensor, share norms and dropout too: each rank has a part of the tokens between products.
        schedule: order of the pipeline's forwards and backwards: 1f1b, gpipe, interleaved; None: 1f1b, or interleaved
            with interleave.
        interleave: groups of blocks on each stage of an interleaved schedule.
        spread_tensor: allow ranks of one tensor group on several nodes, which is slow.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    shard: str = "world"
    secondary: bool = False
    sequence: bool = False
    schedule: Schedule | None = None
    interleave: int = 1
    spread_tensor: bool = False

    def __post_init__(self) -> None:
        degrees = ("tensor", "pipeline", "context", "interleave")
        require_positive("parallel", self, *degrees, most=MOST_DEGREE)
        number = digits(self.shard)
        require(
            self.shard in ("world", "node") or (number is not None and 1 <= number <= MOST_DEGREE),
            "parallel.shard",
            self.shard,
            f"world, node or a number from 1 to {MOST_DEGREE}",
        )

    @property
    def changed(self) -> tuple[str, ...]:
        """Names and values of these options that are not the default; with none all ranks share one set of shards."""
        names = [
            each.name for each in fields(LayoutOptions) if getattr(self, each.name) != each.default
        ]
        return tuple(f"{name} {getattr(self, name)}" for name in names)

    @property
    def order(self) -> Schedule:
        """The schedule of the pipeline, chosen or not."""
        return self.schedule or ("interleaved" if self.interleave > 1 else "1f1b")

    def check(self, *, stage: int, auto: bool = False) -> None:
        """Refuse values that have no meaning together, whatever the model and the ranks are.

        Args:
            stage: ZeRO stage.
            auto: whether settings are to be chosen.

        Raises:
            ConfigError: names both options and what to change.
        """
        if auto and self.changed:
            raise ConfigError(
                f"parallel.auto: got true beside {', '.join(self.changed)}, but it chooses only among settings where "
                "all ranks share one set of shards; expected parallel.auto false, or none of the others (python -m "
                "hpczero.plan --auto --layouts compares layouts)"
            )
        if self.secondary and stage != 3:
            raise ConfigError(
                f"parallel.secondary: got true at stage {stage}, where parameters are whole on every rank and nothing "
                "is gathered for backward; expected parallel.stage 3, or parallel.secondary false"
            )
        if self.secondary and self.pipeline > 1:
            raise ConfigError(
                f"parallel.secondary: got true under a pipeline of {self.pipeline} stages, whose parameters stay whole "
                "for all micro-batches of a step, so nothing is gathered for backward; expected parallel.secondary "
                "false, or parallel.pipeline 1"
            )
        if self.sequence and self.tensor == 1:
            raise ConfigError(
                "parallel.sequence: got true without tensor parallelism, which it belongs to; expected parallel.tensor "
                "above 1, or parallel.context to share the tokens of a sample by itself"
            )
        if self.pipeline == 1 and (self.schedule is not None or self.interleave > 1):
            got = f"schedule {self.schedule}" if self.schedule else f"interleave {self.interleave}"
            raise ConfigError(
                f"parallel: got {got} without a pipeline, so there is nothing to order; expected parallel.pipeline "
                "above 1, or neither of them"
            )
        if (self.order == "interleaved") != (self.interleave > 1):
            raise ConfigError(
                f"parallel.interleave: got {self.interleave} group(s) of blocks per stage with schedule {self.order}; "
                "expected 2 or more with schedule interleaved, and 1 with any other"
            )


@dataclass(frozen=True)
class ParallelOptions(LayoutOptions, ShardingOptions):
    """How ranks share the model and its state."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nodes is not None:
            node_shape(self.nodes, "parallel.nodes")
        algorithms = self.algorithms
        require(algorithms.isascii(), "parallel.algorithms", algorithms, "names of algorithms")
