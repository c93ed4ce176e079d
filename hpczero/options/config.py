"""What a user may set for a training run: one dataclass for each section of run.toml."""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from hpczero.errors import ConfigError
from hpczero.options.types import MOST, JsonObject, require_amount, require_path, require_positive
from hpczero.options.values import Exactness, Transport, digits, node_shape, require

Schedule = Literal["1f1b", "gpipe", "interleaved"]
MOST_DEGREE = 10**6


@dataclass(frozen=True)
class ShardingOptions:
    """How the state is sharded, and how ranks talk.

    Attributes:
        stage: ZeRO stage. 0 replicates, 1 shards optimizer state, 2 also gradients, 3 also parameters.
        precision: of parameters and activations; bf16 and fp16 keep fp32 masters.
        reduce: of gradients' partial sums that travel between nodes and between replicas; bf16 sends half as much, and
            rounds each node's sum once. int8 and int4 send codes, 1.03 and 0.53 bytes an element, that are drawn so
            that their mean is the sum; norms and biases stay fp32. Sums themselves are fp32.
        gather: at stage 3, of parameters that travel between nodes: exact, or int8 for codes of 1.03 bytes an element,
            with which every rank computes; norms and biases stay as they are.
        sparse_gradients: of embeddings, only the rows that a batch touches travel: of gradients, and at stage 3 of
            parameters, where the embedding is a unit by itself or in the root unit. The result is the same.
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
        threads: of torch on each rank; None: this rank's share of its cores, or 1 with run.exact, whose bits depend on
            it.
    """

    stage: Literal[0, 1, 2, 3] = 3
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    reduce: Literal["fp32", "bf16", "int8", "int4"] = "fp32"
    gather: Literal["exact", "int8"] = "exact"
    sparse_gradients: bool = False
    nodes: str | None = None
    transport: Transport = "auto"
    algorithms: str = "auto"
    overlap: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    auto: bool = False
    deterministic: bool = False
    threads: int | None = None


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
        if self.gather != "exact" and (self.stage != 3 or self.auto):
            got = (
                "parallel.auto, which may choose another stage"
                if self.auto
                else f"stage {self.stage}"
            )
            raise ConfigError(
                f"parallel.gather: got {self.gather} beside {got}; parameters are gathered for forward and backward at "
                "stage 3 alone, expected parallel.stage 3, or parallel.gather exact"
            )
        require_positive("parallel", self, "threads")
        algorithms = self.algorithms
        require(algorithms.isascii(), "parallel.algorithms", algorithms, "names of algorithms")


Medium = Literal["device", "host", "disk"]


@dataclass(frozen=True)
class OffloadOptions:
    """Where what training keeps rests between uses.

    Attributes:
        optimizer: its state, and the fp32 masters of bf16 and fp16: device, where it computes; host, memory of the
            host; or disk. Not at stage 0.
        gradients: mean gradients, from their reduction to the step; device, or where the optimizer is.
        parameters: this rank's shard of them, stage 3 only; device, or where the optimizer is.
        folder: for disk: one on a disk of every node, such as $TMPDIR there; what lies in it is gone when the run ends.
        window: MiB of one block of memory through which everything passes.
        buffers: blocks of each rank.
        ahead: units whose parameters are read before they are used.
        fraction: of all elements, at least so many rest there, in whole units, the last ones first; 0 to 1.
        step: who updates what rests on the host: device, to which it is copied; or host, where it rests.
        delayed: take the host's step while the next batch is computed, one step late: it changes the result.
    """

    optimizer: Medium = "device"
    gradients: Medium = "device"
    parameters: Medium = "device"
    folder: str | None = None
    window: int = 32
    buffers: int = 6
    ahead: int = 2
    fraction: float = 1.0
    step: Literal["device", "host"] = "device"
    delayed: bool = False

    def __post_init__(self) -> None:
        require_path("offload.folder", self.folder)
        require_positive("offload", self, "window", most=2**20)
        require(3 <= self.buffers <= 2**16, "offload.buffers", self.buffers, "3 to 65,536")
        require_amount("offload", self, "ahead")
        require(0 <= self.fraction <= 1, "offload.fraction", self.fraction, "0 to 1")


@dataclass(frozen=True)
class ActivationOptions:
    """What of a forward backward computes again, and where the inputs of blocks rest until then.

    Attributes:
        checkpointing: none; block: keep only the input of each block; selective: also what its products and attention
            give, so that little is computed twice.
        rest: of these inputs: device, where blocks compute; host, memory of the host beside a device; or disk.
        folder: for disk: one on a disk of every node; None: that of offload.
        buffers: blocks of memory of each rank through which inputs pass; all but two read ahead.
    """

    checkpointing: Literal["none", "block", "selective"] = "none"
    rest: Medium = "device"
    folder: str | None = None
    buffers: int = 4

    def __post_init__(self) -> None:
        require_path("activations.folder", self.folder)
        require_positive("activations", self, "buffers", most=2**16)
        require(self.buffers >= 2, "activations.buffers", self.buffers, "at least 2")


@dataclass(frozen=True)
class PlannedModel:
    """The model that the plan command counts, by a name or by its sizes.

    Attributes:
        model: a preset, such as gpt2-xl or gpt-60b.
        layers: transformer blocks; given beside a preset, this and the next three replace its values.
        hidden: width of the residual stream.
        heads: attention heads; they change no byte, but must divide the width.
        vocab: token ids; 50257 (GPT-2) without a preset.
        positions: learned or rotary; None: of the preset, learned without one.
        sequence: tokens per sample; None: the context of the preset, 1024 without one.
        precision: of parameters, activations and the wire; masters and sums are fp32 in any case.
        reduce: of gradients' partial sums that travel between nodes and between replicas: fp32 or bf16.
    """

    model: str | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    vocab: int | None = None
    positions: Literal["learned", "rotary"] | None = None
    sequence: int | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    reduce: Literal["fp32", "bf16"] = "fp32"


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
        exact: require: losses and weights have the same bits on any number of ranks, up to one for each micro-batch;
            what cannot be so is refused. prefer: it then runs as with off, and says so. See docs/exact.md.
    """

    name: str = DEFAULT_RUN
    folder: str = "runs"
    seed: int = 0
    overwrite: bool = False
    exact: Exactness = "off"

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


RateSchedule = Literal["cosine", "linear", "wsd", "constant"]
MOST_SHARE = 2  # with train.balance: times its even share that a rank takes at most, as its activations grow with it


@dataclass(frozen=True)
class TrainOptions:
    """The optimization. Batches are counted in sequences.

    Attributes:
        steps: optimizer steps.
        global_batch: sequences per step over all ranks; None: what the next two make, else 12 or the next number that
            the ranks divide.
        micro_batch: sequences per rank in one forward; None: what the other two make, or 1 with run.exact, of whose
            sums it is a part.
        accumulation: forwards per step; None: 1, or what the other two make.
        learning_rate: peak.
        min_learning_rate: at the end of the schedule; None: a tenth of the peak.
        warmup: steps of linear rise to the peak.
        schedule: of the learning rate after the warm-up: cosine and linear fall until the last step, wsd stays at the
            peak and falls linearly in the last steps, constant stays at the peak.
        decay_steps: of wsd, how many steps fall, at most those after the warm-up; None: a tenth of all steps.
        weight_decay: of AdamW, on weight matrices only.
        betas: of AdamW.
        clip: largest 2-norm of the gradient; 0: no clipping.
        balance: give ranks that work faster more samples of each micro-batch, up to twice their share, by what was
            measured every 10 steps. The samples of a step stay the same; the last bits of its sums do not.
    """

    steps: int = 300
    global_batch: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    learning_rate: float = 1e-3
    min_learning_rate: float | None = None
    warmup: int = 20
    schedule: RateSchedule = "cosine"
    decay_steps: int | None = None
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    balance: bool = False

    def __post_init__(self) -> None:
        require_positive("train", self, "steps", "decay_steps", most=MOST_STEPS)
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
        others = "nothing with this train.schedule, which has no use for it"
        require(low is None or self.schedule != "constant", "train.min_learning_rate", low, others)
        decay = self.decay_steps
        require(decay is None or self.schedule == "wsd", "train.decay_steps", decay, others)
        require(
            all(0 <= beta < 1 for beta in self.betas), "train.betas", self.betas, "0 <= beta < 1"
        )

    def learning_rate_factor(self, step: int) -> float:
        """Learning rate of update ``step`` (from 0) as a share of the peak: linear warm-up, then the schedule.

        Source: of the cosine, Loshchilov and Hutter, SGDR, arXiv 1608.03983, eq. 5, without restarts; of wsd, Hu et
        al., MiniCPM, arXiv 2404.06395, sec. 4, with the linear fall of Haegele et al., arXiv 2405.18392, sec. 3.
        """
        if step < self.warmup:
            return (step + 1) / self.warmup
        if self.schedule == "constant":
            return 1.0
        low, last, begin = self.min_learning_rate, self.steps - 1, self.warmup
        floor = 0.1 if low is None else low / self.learning_rate
        if self.schedule == "wsd":
            begin = max(begin, last - (self.decay_steps or -(-self.steps // 10)))
        progress = min(max(step - begin, 0) / max(1, last - begin), 1.0)
        if self.schedule == "cosine":
            return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2
        return 1 - (1 - floor) * progress


@dataclass(frozen=True)
class LocalOptions:
    """Groups that train apart, each a job of its own, and average their weights.

    Attributes:
        steps: steps between averages; 0: there are no groups.
        groups: how many, of equally many ranks; all of them together have the global batch of a step.
        group: which one this job is, from 0.
        folder: where the groups meet, on a file system that all of them see; a new one for each run.
        patience_s: seconds without a sign of life after which the others go on without a group; more than a step takes.
    """

    steps: int = 0
    groups: int = 2
    group: int = 0
    folder: str | None = None
    patience_s: float = 120.0

    def __post_init__(self) -> None:
        require_amount("local", self, "steps", "group")
        require_path("local.folder", self.folder)
        require(self.groups >= 2, "local.groups", self.groups, "2 or more")
        require(0 < self.patience_s < math.inf, "local.patience_s", self.patience_s, "above 0")
        if not self.steps:
            return
        require(
            self.group < self.groups, "local.group", self.group, f"below {self.groups}, the groups"
        )
        require(self.folder is not None, "local.folder", "none", "a folder that all groups see")


@dataclass(frozen=True)
class EvaluationOptions:
    """Loss on the held-out part of the data.

    Attributes:
        every: steps between evaluations; 0: only after the last step.
        batches: global batches per evaluation; 0: never evaluate.
        patience: end the run when so many evaluations in a row have not found a lower loss; 0: never.
        lm_eval: tasks of lm-evaluation-harness, with commas, of a model of text; None: none.
        lm_eval_path: folder with the YAML files of these tasks; None: those that come with lm_eval.
        lm_eval_every: steps between runs of these tasks; 0: only after the last step.
    """

    every: int = 50
    batches: int = 8
    patience: int = 0
    lm_eval: str | None = None
    lm_eval_path: str | None = None
    lm_eval_every: int = 0

    def __post_init__(self) -> None:
        require_amount("evaluation", self, "every", "batches", "patience", "lm_eval_every")
        require_path("evaluation.lm_eval_path", self.lm_eval_path)
        known = self.lm_eval is None or (self.lm_eval.isascii() and all(self.tasks))
        require(known, "evaluation.lm_eval", self.lm_eval, "names of tasks")
        for name in ("every", "batches"):
            got = getattr(self, name)
            wanted = "above 0 with evaluation.patience, which needs held-out losses"
            require(got > 0 or not self.patience, f"evaluation.{name}", got, wanted)

    @property
    def tasks(self) -> list[str]:
        """Of lm-evaluation-harness."""
        return [] if self.lm_eval is None else [name.strip() for name in self.lm_eval.split(",")]


@dataclass(frozen=True)
class CheckpointOptions:
    """Checkpoints: everything a run needs to go on, in <run folder>/checkpoints.

    Attributes:
        every: steps between checkpoints, and one after the last step; 0: when asked to stop, or at an early end.
        keep: newest checkpoints that stay.
        background: write while training goes on; needs memory for a copy of each rank's shards.
        writer: mpio (parallel HDF5), posix (the same file without MPI-IO); auto: mpio where it is safe.
        required: end the run where a checkpoint cannot be written; otherwise it is a warning.
        stripes: storage targets of Lustre that a checkpoint is spread over; -1: all; 0: as the folder says.
        buddy: steps between copies in memory of two nodes each, for the loss of one node; 0: none.
        buddy_folder: where such copies lie: a folder in memory of every node.
    """

    every: int = 100
    keep: int = 3
    background: bool = False
    writer: Literal["auto", "mpio", "posix"] = "auto"
    required: bool = False
    stripes: int = 0
    buddy: int = 0
    buddy_folder: str = "/dev/shm"

    def __post_init__(self) -> None:
        require(self.stripes >= -1, "checkpoint.stripes", self.stripes, "-1 or more")
        require_amount("checkpoint", self, "every", "buddy")
        require_path("checkpoint.buddy_folder", self.buddy_folder)
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
        wandb: also send the figures of each step to Weights & Biases: offline, into the run folder, or online.
            WANDB_PROJECT and the other variables of wandb say where to.
        mlflow: also send them to MLflow: a folder, or the address of a server; None: not. MLFLOW_EXPERIMENT_NAME names
            the experiment.
        plot: draw the losses every 10 minutes, and at the end.
        page_s: seconds between two writes of watch.html, a page about the run for a browser; 0: there is none.
        peak_tflops: of one rank's hardware in the chosen precision, for MFU; None: by the name of the device, and no
            MFU of one that is not known.
        profile: steps to look into, as 10:13 for steps 10, 11 and 12 of metrics.jsonl: a trace of each rank, and a
            page that says where the time of these steps went; None: none.
        stragglers_every: steps between looks for ranks that are slower than the others, or than they were; 0: never.
        digest_every: with run.exact, steps between lines of digests.jsonl, which python -m hpczero.replay compares;
            0: never.
    """

    every: int = 10
    level: Literal["info", "debug"] = "info"
    progress: Literal["auto", "bar", "lines"] = "auto"
    tensorboard: bool = True
    wandb: Literal["off", "offline", "online"] = "off"
    mlflow: str | None = None
    plot: bool = True
    page_s: float = 10.0
    peak_tflops: float | None = None
    profile: str | None = None
    stragglers_every: int = 100
    digest_every: int = 0

    def __post_init__(self) -> None:
        require_positive("log", self, "every")
        require_amount("log", self, "page_s", "stragglers_every", "digest_every")
        require_path("log.mlflow", self.mlflow)
        peak = self.peak_tflops
        require(
            peak is None or 0 < peak < math.inf, "log.peak_tflops", peak, "a finite number above 0"
        )
        known = self.profile is None or len(self.profiled) > 0
        require(
            known,
            "log.profile",
            self.profile,
            "two steps such as 10:13, the second one after the first",
        )

    @property
    def profiled(self) -> range:
        """The steps to look into, counted from 1."""
        first, _, end = (self.profile or "").partition(":")
        begin, behind = digits(first), digits(end)
        return range(begin or 0, behind or 0) if begin else range(0)


@dataclass(frozen=True)
class CheckOptions:
    """Whether the hardware computes right.

    Attributes:
        leaves: with run.exact, the share of micro-batches that two ranks compute, as 1/1000; a rank whose gradient is
            wrong is named, and the run ends. None: no micro-batch.
    """

    leaves: str | None = None

    def __post_init__(self) -> None:
        text = self.leaves or "1/1"
        one, _, every = text.partition("/")
        known = one == "1" and digits(every)
        require(bool(known), "check.leaves", self.leaves, "a share such as 1/1000")

    @property
    def every(self) -> int:
        """Micro-steps between checks; 0: there are none."""
        return int(self.leaves.partition("/")[2]) if self.leaves else 0


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
        local: groups that train apart and average their weights.
        evaluation: held-out loss.
        checkpoint: when, and how many stay.
        resume: where to begin.
        log: progress and records.
        check: whether the hardware computes right.
    """

    run: RunOptions = field(default_factory=RunOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    train: TrainOptions = field(default_factory=TrainOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    offload: OffloadOptions = field(default_factory=OffloadOptions)
    activations: ActivationOptions = field(default_factory=ActivationOptions)
    local: LocalOptions = field(default_factory=LocalOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    checkpoint: CheckpointOptions = field(default_factory=CheckpointOptions)
    resume: ResumeOptions = field(default_factory=ResumeOptions)
    log: LogOptions = field(default_factory=LogOptions)
    check: CheckOptions = field(default_factory=CheckOptions)

    def __post_init__(self) -> None:
        if self.groups > 1 and self.parallel.auto:
            raise ConfigError(
                "parallel.auto: got true with local.steps; the planner knows nothing of groups; expected false, and "
                "parallel.stage and train.micro_batch as python -m hpczero.plan chooses them for one group"
            )

        for degree in ("pipeline", "context"):
            if self.evaluation.tasks and (got := getattr(self.parallel, degree)) > 1:
                raise ConfigError(
                    f"evaluation.lm_eval: got {self.evaluation.lm_eval} with parallel.{degree} {got}, under which no "
                    f"rank has the logits of a text; expected no tasks, or parallel.{degree} 1"
                )
        exact_alone = {"log.digest_every": self.log.digest_every, "check.leaves": self.check.leaves}
        for name, got in exact_alone.items():
            if got and self.run.exact == "off":
                raise ConfigError(
                    f"{name}: got {got}, and run.exact is off: the gradient of a micro-batch is then nothing that "
                    "another rank could compute again; expected --run.exact require"
                )
        if self.check.leaves and self.parallel.pipeline > 1:
            raise ConfigError(
                f"check.leaves: got {self.check.leaves} with parallel.pipeline {self.parallel.pipeline}, whose stages "
                "compute micro-batches in a fixed order; expected none, or parallel.pipeline 1"
            )
        if self.groups > 1 and self.evaluation.patience:
            raise ConfigError(
                f"evaluation.patience: got {self.evaluation.patience} with local.steps, whose groups find held-out "
                "losses of their own between averages, and would not stop together; expected 0, or no local.steps"
            )
        if self.groups > 1 and self.checkpoint.buddy:
            raise ConfigError(
                f"checkpoint.buddy: got {self.checkpoint.buddy} with local.steps, whose averages lie on the disk and "
                "may be of later steps; expected 0, or no local.steps"
            )
        for name, on in (("train.balance", self.train.balance), ("local.steps", self.groups > 1)):
            if on and self.run.exact != "off":
                raise ConfigError(
                    f"run.exact: got {self.run.exact} with {name}, by which sums depend on the ranks; expected off, or "
                    f"no {name}"
                )

    @property
    def threads(self) -> int | None:
        """Threads of a rank, where they do not follow from its cores."""
        return self.parallel.threads or (None if self.run.exact == "off" else 1)

    @property
    def groups(self) -> int:
        """How many groups of ranks share the global batch; 1: all ranks train together."""
        return self.local.groups if self.local.steps else 1

    def pinned(self, global_batch: int, leaf: int | None = None) -> RunConfig:
        """The same options with the global batch spelled out, so that they mean the same run on any number of ranks.

        Of a micro batch and an accumulation the micro batch stays, because it is what fits into memory. ``leaf``: the
        micro batch of an exact run.
        """
        accumulation = None if self.train.micro_batch else self.train.accumulation
        train = dataclasses.replace(
            self.train,
            global_batch=global_batch,
            micro_batch=leaf or self.train.micro_batch,
            accumulation=accumulation,
        )
        return dataclasses.replace(self, train=train)
