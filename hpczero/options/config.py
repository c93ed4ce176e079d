"""Options: what they are called, what they may be, and where they come from.

Owns: every option of the training command, each exactly once. Must not know: MPI, torch, models, data, environment
variables (``environment.py``), and how options are read: that is ``reading.py``.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from hpczero.options.parallel import ParallelOptions as ParallelOptions
from hpczero.options.requirements import require_amount, require_path, require_positive
from hpczero.options.tiers import ActivationOptions, OffloadOptions
from hpczero.options.types import MOST, JsonObject
from hpczero.options.values import require

DEFAULT_RUN = "default"
DEFAULT_PRESET = "gpt-nano"
MOST_STEPS = 10**15
MOST_SAMPLES = 2**31 - 1
DEFAULT_GLOBAL_BATCH = 12  # 1, 2, 3, 4, 6 and 12 ranks divide it


@dataclass(frozen=True)
class RunOptions:
    """Where results go, and the one seed.

    Attributes:
        name: of the run; its files lie in <folder>/<name>.
        folder: parent of all run folders.
        seed: of initial weights and order of samples; results depend on it alone, not on the number of ranks.
        overwrite: delete an earlier run of this name, but what it had set aside; with resume.from PATH it is set aside
            itself. One called "default" is otherwise moved to a name with the date.
    """

    name: str = DEFAULT_RUN
    folder: str = "runs"
    seed: int = 0
    overwrite: bool = False

    def __post_init__(self) -> None:
        require(
            re.fullmatch(r"[\w.+-]+", self.name) is not None and self.name.strip(".") != "",
            "run.name",
            self.name,
            "letters, digits and . _ + - only, because it names a folder",
        )
        require_path("run.name", self.name)
        require_path("run.folder", self.folder)
        require(0 <= self.seed <= MOST, "run.seed", self.seed, f"0 to {MOST}")

    @property
    def path(self) -> Path:
        """The folder of the run; it need not exist."""
        return Path(self.folder, self.name)


@dataclass(frozen=True)
class ModelOptions:
    """A preset and what differs from it, or a model of your own.

    Attributes:
        preset: gpt-micro, gpt-nano, gpt2, gpt2-xl, gpt-8b ... gpt-170b.
        layers: transformer blocks; None: of the preset.
        hidden: width; None: of the preset.
        heads: attention heads, must divide hidden; None: of the preset.
        context: tokens in a sequence; None: of the preset.
        positions: learned or rotary position embeddings; None: of the preset.
        checkpoint_activations: keep only the input of each block and compute the block again in backward; the same
            as activations.checkpointing block.
        compile: have torch.compile make one graph of each block; losses differ in their last digits.
        factory: package.module:function that returns an hpczero.Adapter, instead of a preset.
        arguments: of the factory, by name: a JSON object, or a table in TOML; None: none.
    """

    preset: str = DEFAULT_PRESET
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    context: int | None = None
    positions: Literal["learned", "rotary"] | None = None
    checkpoint_activations: bool = False
    compile: bool = False
    factory: str | None = None
    arguments: JsonObject | None = None

    def __post_init__(self) -> None:
        require_positive("model", self, "layers", "hidden", "heads", "context")
        if self.factory is None:
            require(
                self.arguments is None,
                "model.arguments",
                self.arguments,
                "model.factory beside it, whose arguments these are",
            )
            return
        require(
            re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*", self.factory) is not None,
            "model.factory",
            self.factory,
            "package.module:function",
        )
        defaults = {"preset": DEFAULT_PRESET, "checkpoint_activations": False}
        for name, value in {**self.overrides(), "preset": self.preset}.items():
            require(
                value == defaults.get(name),
                f"model.{name}",
                value,
                "nothing beside model.factory, because it belongs to presets; what the factory takes goes into "
                "model.arguments",
            )

    def overrides(self) -> dict[str, Any]:  # Any: each has the type of its field
        """Fields of the preset to replace, by name."""
        others = ("preset", "compile", "factory", "arguments")
        chosen = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {n: value for n, value in chosen.items() if value is not None and n not in others}

    @property
    def title(self) -> str:
        """What the model is called: its preset or its factory."""
        return self.factory or self.preset


@dataclass(frozen=True)
class DataOptions:
    """What the model reads.

    Attributes:
        path: token file (.h5) of "python -m hpczero.data prepare", or a text file, or a folder of text files, or a
            .toml that names several token files with weights; None: the text of the installed Python standard library.
        tokenizer: how text becomes tokens; a token file brings its own.
        cache: folder that keeps the token files made from text.
        documents: joined: a sample is one text, whatever ends in it; separate: attention and positions stay within the
            documents of a sample.
    """

    path: str | None = None
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    cache: str = "runs/tokens"
    documents: Literal["joined", "separate"] = "joined"

    def __post_init__(self) -> None:
        require_path("data.path", self.path)
        require_path("data.cache", self.cache)


@dataclass(frozen=True)
class TrainOptions:
    """The optimization. Batches are counted in sequences.

    Attributes:
        steps: optimizer steps.
        global_batch: sequences per step over all ranks; None: what the next two make, else 12 or the next number that
            the ranks divide.
        micro_batch: sequences per rank in one forward; None: what the other two make.
        accumulation: forwards per step; None: 1, or what the other two make.
        learning_rate: peak.
        min_learning_rate: at the end of the cosine; None: a tenth of the peak.
        warmup: steps of linear rise to the peak.
        weight_decay: of AdamW, on weight matrices only.
        betas: of AdamW.
        clip: largest 2-norm of the gradient; 0: no clipping.
    """

    steps: int = 300
    global_batch: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    learning_rate: float = 1e-3
    min_learning_rate: float | None = None
    warmup: int = 20
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0

    def __post_init__(self) -> None:
        require_positive("train", self, "steps", most=MOST_STEPS)
        batch = ("global_batch", "micro_batch", "accumulation")
        require_positive("train", self, *batch, most=MOST_SAMPLES)
        require_amount("train", self, "learning_rate", "warmup", "weight_decay", "clip")
        peak = self.learning_rate
        require(0 < peak < math.inf, "train.learning_rate", peak, "a finite number above 0")
        low = self.min_learning_rate
        require(
            low is None or 0 <= low <= self.learning_rate,
            "train.min_learning_rate",
            low,
            f"between 0 and train.learning_rate, which is {self.learning_rate}",
        )
        require(
            all(0 <= beta < 1 for beta in self.betas), "train.betas", self.betas, "0 <= beta < 1"
        )

    def learning_rate_factor(self, step: int) -> float:
        """Learning rate of update ``step`` (from 0) as a share of the peak: linear warm-up, then half a cosine.

        Source: Loshchilov and Hutter, SGDR, arXiv 1608.03983, eq. 5, without restarts.
        """
        if step < self.warmup:
            return (step + 1) / self.warmup
        low = self.min_learning_rate
        floor = 0.1 if low is None else low / self.learning_rate
        progress = (step - self.warmup) / max(1, self.steps - 1 - self.warmup)
        return floor + (1 - floor) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2


@dataclass(frozen=True)
class EvaluationOptions:
    """Loss on the held-out part of the data.

    Attributes:
        every: steps between evaluations; 0: only after the last step.
        batches: global batches per evaluation; 0: never evaluate.
    """

    every: int = 50
    batches: int = 8

    def __post_init__(self) -> None:
        require_amount("evaluation", self, "every", "batches")


@dataclass(frozen=True)
class CheckpointOptions:
    """Checkpoints: everything a run needs to go on, in <run folder>/checkpoints.

    Attributes:
        every: steps between checkpoints, and one after the last step; 0: only when the run is asked to stop.
        keep: newest checkpoints that stay.
        background: write while training goes on; needs memory for a copy of each rank's shards.
        writer: mpio (parallel HDF5), posix (the same file without MPI-IO); auto: mpio where it is safe.
        required: end the run where a checkpoint cannot be written; otherwise it is a warning.
        stripes: storage targets of Lustre that a checkpoint is spread over; -1: all; 0: as the folder says.
    """

    every: int = 100
    keep: int = 3
    background: bool = False
    writer: Literal["auto", "mpio", "posix"] = "auto"
    required: bool = False
    stripes: int = 0

    def __post_init__(self) -> None:
        require(self.stripes >= -1, "checkpoint.stripes", self.stripes, "-1 or more")
        require_amount("checkpoint", self, "every")
        require_positive("checkpoint", self, "keep")


@dataclass(frozen=True)
class ResumeOptions:
    """Where a run begins.

    Attributes:
        from_: auto: the newest sound checkpoint of this run, if it has one; never: from the start; or a checkpoint, or
            a folder of them.
    """

    from_: Annotated[str, tyro.conf.arg(name="from")] = "auto"

    def __post_init__(self) -> None:
        require_path("resume.from", self.from_)


@dataclass(frozen=True)
class LogOptions:
    """What a run tells about itself.

    Attributes:
        every: steps between progress lines; metrics.jsonl has every step.
        level: debug adds lines of every rank.
        progress: bar on a terminal, lines in a log; auto: a bar if standard output is a terminal with a width.
        tensorboard: write TensorBoard event files.
        plot: draw the losses every 10 minutes, and at the end.
        peak_tflops: of one rank's hardware in the chosen precision, for MFU; None: no MFU.
        stragglers_every: steps between looks for ranks that are slower than the others, or than they were; 0: never.
    """

    every: int = 10
    level: Literal["info", "debug"] = "info"
    progress: Literal["auto", "bar", "lines"] = "auto"
    tensorboard: bool = True
    plot: bool = True
    peak_tflops: float | None = None
    stragglers_every: int = 100

    def __post_init__(self) -> None:
        require_positive("log", self, "every")
        require_amount("log", self, "stragglers_every")
        peak = self.peak_tflops
        require(
            peak is None or 0 < peak < math.inf, "log.peak_tflops", peak, "a finite number above 0"
        )


@dataclass(frozen=True)
class RunConfig:
    """Everything a training run was asked for.

    Attributes:
        run: name, folder, seed.
        model: the network.
        data: the text.
        train: batch, optimizer, learning rate.
        parallel: ZeRO stage, precision, nodes, and which ranks share what.
        offload: what rests in memory of the host or on disk.
        activations: what backward computes again, and where inputs of blocks rest.
        evaluation: held-out loss.
        checkpoint: when, and how many stay.
        resume: where to begin.
        log: progress and records.
    """

    run: RunOptions = field(default_factory=RunOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    activations: ActivationOptions = field(default_factory=ActivationOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    resume: ResumeOptions = field(default_factory=ResumeOptions)
    log: LogOptions = field(default_factory=LogOptions)

    def pinned(self, global_batch: int) -> RunConfig:
        """The same options with the global batch spelled out, so that they mean the same run on any number of ranks.

        Of a micro batch and an accumulation the micro batch stays, because it is what fits into memory.
        """
        accumulation = None if self.train.micro_batch else self.train.accumulation
        train = dataclasses.replace(
            self.train, global_batch=global_batch, accumulation=accumulation
        )
        return dataclasses.replace(self, train=train)
