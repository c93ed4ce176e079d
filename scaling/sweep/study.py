"""What a study is, weak or strong scaling or one of layouts: its points, and what makes two points the same.

Strong: the model and the global batch are fixed, ranks grow. Weak: the batch of each rank is fixed, ranks grow, with
one model; or, with ``grow``, one model for each number of ranks, larger with the ranks. Layouts: the model, the global
batch and the ranks are fixed, and ranks share other things.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hpczero.errors import ConfigError
from hpczero.models.config import GPTConfig
from hpczero.options.config import LayoutOptions
from hpczero.options.reading import parse_command_line
from hpczero.plan.degrees import check_micro_batches, check_model, mesh_of
from scaling.contenders.workload import SEED, find_model

Kind = Literal["weak", "strong", "layouts"]
DEFINITIONS = {
    "strong": "Strong scaling: fixed model and fixed global batch; efficiency E(N) = T(N0) N0 / (T(N) N).",
    "weak": "Weak scaling: fixed model and fixed batch per rank, so the global batch grows with the ranks; efficiency "
    "E(N) = T(N0) / T(N).",
    "weak-grown": "Weak scaling: fixed batch per rank, and a larger model on more ranks; efficiency is model FLOP/s "
    "per rank over those at N0.",
    "layouts": "Layouts: fixed model, global batch and number of ranks; each layout over the first one, T / T(first).",
}
PROGRAM = "python -m scaling.sweep"
PLAIN = LayoutOptions()
PARTS = ("compute", "communication", "optimizer", "data", "other")  # of a step
ALL_PARTS = (*PARTS, "checkpoint")
FILLED = 2  # micro-batches of a pipeline for each stage, where the batch has so many
DEFAULT_STEPS = 30  # after warm-up; Hoefler and Belli, SC15, and enough for a 95 % interval
DEFAULT_BATCH = 4  # sequences of a rank in a weak study
DEFAULT_MICRO_BATCH = 8  # most of one forward, where the batch is not given


@dataclass(frozen=True)
class Point:
    """One measurement: a model on some ranks.

    Attributes:
        model: name of the sizes.
        config: the sizes.
        stage: ZeRO stage.
        ranks: all of them.
        nodes: over which they are spread equally.
        batch: sequences of one step and rank with samples of its own.
        micro_batch: sequences of one forward.
        precision: of parameters and activations.
        transport: as in ``zeroify``.
        warm_up: steps before the first that counts.
        steps: that count.
        checkpoint_every: steps between checkpoints; 0: none.
        threads: of each rank, the same whatever the ranks; 0: as many as it has cores.
        device: cpu, cuda, or auto: cuda where torch sees one.
        job: number among jobs that measure the same.
        layout: which ranks share what.
    """

    model: str
    config: GPTConfig
    stage: int
    ranks: int
    nodes: int
    batch: int
    micro_batch: int
    precision: str = "fp32"
    transport: str = "auto"
    warm_up: int = 5
    steps: int = DEFAULT_STEPS
    checkpoint_every: int = 0
    threads: int = 0
    job: int = 0
    seed: int = SEED
    device: str = "cpu"  # of records that say nothing of it
    layout: LayoutOptions = PLAIN

    @property
    def data(self) -> int:
        """Ranks with samples of their own."""
        return data_ranks(self.layout, self.ranks)

    @property
    def global_batch(self) -> int:
        """Sequences of all ranks in one step."""
        return self.batch * self.data

    @property
    def ranks_per_node(self) -> int:
        """Of every node."""
        return self.ranks // self.nodes

    def key(self, commit: str, setting: Mapping[str, str] | None = None) -> str:
        """16 hexadecimal digits that are equal for equal measurements of the same commit.

        Args:
            commit: of the code.
            setting: what `scaling.sweep.setting` knows beforehand of where and how it will run.
        """
        circumstances = {"commit": commit, "setting": dict(setting or {})}
        text = json.dumps({**self.as_json(), **circumstances}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        """For ``of_json``. The plain layout is left out, so that points of old stay what they were."""
        values = dataclasses.asdict(self)
        if self.layout == PLAIN:
            del values["layout"]
        return values

    @classmethod
    def of_json(cls, values: dict[str, Any]) -> Point:
        """What ``as_json`` wrote. Raises ConfigError: it did not."""
        try:
            layout = LayoutOptions(**values.get("layout", {}))
            return cls(**{**values, "config": GPTConfig(**values["config"]), "layout": layout})
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"not a point of a sweep: {error!r} in {values!r}") from error

    def describe(self) -> str:
        """One line for the screen."""
        again = f", job {self.job}" if self.job else ""
        return (
            f"{self.model}, stage {self.stage}, {self.ranks} rank(s) on {self.nodes} node(s), batch {self.batch} per "
            f"rank{self.shared}{again}"
        )

    @property
    def shared(self) -> str:
        """The layout for names of curves and lines; empty for the plain one."""
        return "".join(f", {word}" for word in self.layout.changed)


@dataclass(frozen=True)
class Grid:
    """What is varied.

    Attributes:
        kind: of study.
        grow: weak only: the n-th model runs on the n-th number of ranks.
        models: names in ``WORKLOADS`` or ``PRESETS``.
        stages: ZeRO stages.
        ranks: numbers of ranks; the smallest is the base, N0.
        batches: weak: sequences per rank; strong: sequences of all ranks; None: ``default_batch``.
        ranks_per_node: most ranks of one node, each value a curve of its own; None: all ranks on one node.
        jobs: how often each point is measured, each time in a job of its own.
        micro_batch: most sequences of one forward; None: as many as a rank has, fewer where a pipeline wants several.
        layouts: which ranks share what, each a curve of its own.
    """

    kind: Kind
    grow: bool
    models: Sequence[str]
    stages: Sequence[int]
    ranks: Sequence[int]
    batches: Sequence[int] | None = None
    ranks_per_node: Sequence[int] | None = None
    jobs: int = 1
    micro_batch: int | None = None
    layouts: Sequence[LayoutOptions] = (PLAIN,)

    @property
    def definition(self) -> str:
        """A sentence for reports."""
        return DEFINITIONS["weak-grown" if self.grow else self.kind]

    @property
    def default_batch(self) -> int:
        """Weak: of a rank. Strong: what all numbers of ranks divide, two sequences or more for each of the most."""
        if self.kind == "weak":
            return DEFAULT_BATCH
        step = math.lcm(*self.ranks)
        return step * -(-2 * max(self.ranks) // step)

    def points(self, **settings: Any) -> list[Point]:  # Any: fields of Point
        """All of them, each once, those of fewest ranks first; ``settings`` are equal for all.

        Raises:
            ConfigError: numbers that do not divide, an unknown model, a model that is missing.
        """
        ranks = sorted(set(self.ranks))
        if self.kind == "layouts" and len(ranks) > 1:
            raise ConfigError(f"--ranks: got {ranks}, expected one number, which all layouts share")
        if self.grow and len(self.models) != len(ranks):
            raise ConfigError(
                f"--grow: got {len(self.models)} models for {len(ranks)} numbers of ranks, expected one for each"
            )
        found: dict[Point, None] = {}
        for job in range(self.jobs):
            for index, size in enumerate(ranks):
                models = [self.models[index]] if self.grow else self.models
                placements = [nodes_of(size, most) for most in self.ranks_per_node or (None,)]
                cells = itertools.product(
                    models, self.stages, self._batches, placements, self.layouts
                )
                for model, stage, batch, nodes, layout in cells:
                    mine = self._batch_per_rank(batch, data_ranks(layout, size))
                    point = Point(
                        model=model,
                        config=find_model(model),
                        stage=stage,
                        ranks=size,
                        nodes=nodes,
                        batch=mine,
                        micro_batch=self._micro_batch(mine, layout),
                        job=job,
                        layout=layout,
                        **settings,
                    )
                    _check(point)
                    found[point] = None  # few ranks lie in the same way whatever a node may hold
        return list(found)

    @property
    def _batches(self) -> Sequence[int]:
        return (self.default_batch,) if self.batches is None else self.batches

    def _batch_per_rank(self, batch: int, ranks: int) -> int:
        if self.kind == "weak":
            return batch
        if batch % ranks:
            step = math.lcm(*self.ranks)
            raise ConfigError(
                f"--batches: got a global batch of {batch}, which {ranks} ranks do not divide; strong scaling keeps "
                f"the global batch, so it must be a multiple of every number of ranks: {step * -(-batch // step)} "
                f"would do, as would any other multiple of {step}"
            )
        return batch // ranks

    def _micro_batch(self, batch: int, layout: LayoutOptions) -> int:
        if layout.pipeline > 1 and self.micro_batch is None:
            most = max(batch // (FILLED * layout.pipeline), 1)
        elif self.batches is None:
            # A batch that nobody chose need not fit into memory at once, and divides as it happens to.
            most = min(self.micro_batch or DEFAULT_MICRO_BATCH, batch)
        else:
            most = min(self.micro_batch or batch, batch)
            if batch % most:
                raise ConfigError(
                    f"--micro_batch: got {most}, which does not divide the {batch} sequences of a rank"
                )
        return max(size for size in range(1, most + 1) if batch % size == 0)


def data_ranks(layout: LayoutOptions, ranks: int) -> int:
    """How many of ``ranks`` have samples of their own; 1 or more, whether or not the degrees divide."""
    return max(ranks // (layout.tensor * layout.pipeline * layout.context), 1)


def _check(point: Point) -> None:
    """Refuse a layout that the model, the ranks or the batch do not suit, before any job is started."""
    if point.layout == PLAIN:
        return
    point.layout.check(stage=point.stage)
    mesh_of(point.layout, point.ranks, point.ranks_per_node)
    check_model(point.layout, point.config)
    if point.layout.pipeline > 1:
        check_micro_batches(point.layout, point.batch // point.micro_batch)


def parse_layout(text: str) -> LayoutOptions:
    """``tensor=2,sequence=true`` or ``pipeline=4,shard=node`` as options; ``plain`` is the default.

    Raises:
        ConfigError: no such option, or a value that it cannot be.
    """
    words = [] if text == "plain" else text.split(",")
    given = [part for word in words for part in f"--{word}".partition("=")[::2]]
    try:
        return parse_command_line(LayoutOptions, given, prog=PROGRAM, description="")
    except ConfigError as error:
        names = ", ".join(each.name for each in dataclasses.fields(LayoutOptions))
        raise ConfigError(
            f"--layouts: got {text!r}, expected plain, or name=value with a name of {names}: {error}"
        ) from error


def nodes_of(ranks: int, ranks_per_node: int | None) -> int:
    """Nodes that so many ranks fill, ``ranks_per_node`` at most on each; None: one node.

    Raises:
        ConfigError: they would not fill them equally.
    """
    if ranks_per_node is None or ranks <= ranks_per_node:
        return 1
    if ranks % ranks_per_node:
        raise ConfigError(
            f"--ranks: got {ranks}, expected a multiple of --ranks_per_node {ranks_per_node} (or fewer than that)"
        )
    return ranks // ranks_per_node
