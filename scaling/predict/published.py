"""Published runs of other programs in layouts that hpczero has, beside what its model says of them.

Machines are data sheets with ranges; no constant is fitted to a run of ``PUBLISHED``. The ranges are from other makers'
runs and measurements: those of products from ``one_node``, by ``implied``; all of them with their sources in
docs/scale.md. So a ratio says what the model leaves out of a run, and what the run has that hpczero has not.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from typing_extensions import override

from hpczero.job.mesh import Mesh
from hpczero.models.config import PRESETS, DecoderConfig, GPTConfig
from hpczero.plan.offload import Activations
from hpczero.plan.spread import Spread
from hpczero.predict.job import Job
from hpczero.predict.machine import Machine, Roofline, load_machine
from hpczero.predict.model import Prediction, StepRange, predict

Measure = Literal["TFLOP/s", "hardware TFLOP/s", "MFU, %", "tokens/s"]
# A forward, and a backward of two, become four thirds where all of the forward is computed again.
RECOMPUTED = 4 / 3


@dataclass(frozen=True)
class StoredScores(Roofline):
    """Kernels of a program whose attention stores the scores, as all did before FlashAttention.

    In bytes of a score and 16 bits: forward writes a product, reads and writes a softmax, reads it and writes what
    dropout leaves with a mask, and reads that, 13; backward as much the other way, 17.
    """

    head_size: int
    score_nbytes: tuple[int, int]  # forward, backward

    @override
    def attention_s(self, tokens: int, sequence: int, width: int, *, backward: bool) -> float:
        scores = tokens * sequence * width // self.head_size
        moved = scores * self.score_nbytes[backward] / self.machine.memory_rate
        return super().attention_s(tokens, sequence, width, backward=backward) + moved


STORED, STORED_AGAIN = (13, 17), (13, 17 + 13)


@dataclass(frozen=True)
class Published:
    """One run."""

    name: str  # in the table
    machine: str  # a file of hpczero/predict/machines
    spread: Spread  # its layout
    measure: Measure  # what was published, per GPU; hardware FLOP/s count what is computed again
    value: float  # the figure
    source: str  # where it is from
    said: str = ""  # what of it is assumed, and what is known to be different
    overlap: bool = True  # whether anything is hidden
    scores: tuple[int, int] = (0, 0)  # as of ``StoredScores``
    memory_rate: float = 0.0  # of its GPUs, where it is not the sheet's
    comparable: bool = True  # whether hpczero has all of it; else it does not count

    def predicted(self) -> StepRange:
        """A step of it, fast, likely and slow."""
        machine = load_machine(self.machine)
        machine = replace(machine, memory_rate=self.memory_rate or machine.memory_rate)
        ends = (machine.at_end(slow=False), machine, machine.at_end(slow=True))
        return StepRange(*map(self._on, ends))

    def _on(self, machine: Machine) -> Prediction:
        itemsize, head = self.spread.itemsize, self.spread.model.head_size
        work = StoredScores(machine, self.spread.precision, itemsize, head, self.scores)
        return predict(Job.of(self.spread, machine, overlap=self.overlap, kernels=work))

    def of(self, found: Prediction) -> float:
        """The measure by a prediction."""
        if self.measure == "tokens/s":
            return found.tokens_per_s / self.spread.mesh.size
        if self.measure == "MFU, %":
            return 100 * found.mfu
        return found.tflops * (RECOMPUTED if self.measure == "hardware TFLOP/s" else 1)


_bf16 = partial(Spread, precision="bf16", on_device=True)


def _megatron(layers: int, hidden: int, heads: int) -> GPTConfig:
    return GPTConfig(vocab_size=51200, context=2048, layers=layers, hidden=hidden, heads=heads)


# Narayanan et al., arXiv 2104.04473, table 1: billions of parameters, layers, width, heads, tensor, pipeline, GPUs,
# batch, TFLOP/s per GPU. FLOPs count the recomputation of everything. Micro-batches and groups of blocks are not given.
_TABLE_1 = (
    ("1.7", 24, 2304, 24, 1, 1, 32, 512, 137),
    ("3.6", 30, 3072, 32, 2, 1, 64, 512, 138),
    ("7.5", 36, 4096, 32, 4, 1, 128, 512, 142),
    ("18.4", 40, 6144, 48, 8, 1, 256, 1024, 135),
    ("39.1", 48, 8192, 64, 8, 2, 512, 1536, 138),
    ("76.1", 60, 10240, 80, 8, 4, 1024, 1792, 140),
    ("145.6", 80, 12288, 96, 8, 8, 1536, 2304, 148),
    ("310.1", 96, 16384, 128, 8, 16, 1920, 2160, 155),
    ("529.6", 105, 20480, 128, 8, 35, 2520, 2520, 163),
    ("1,008", 128, 25600, 160, 8, 64, 3072, 3072, 163),
)


def _narayanan() -> Iterator[Published]:
    for size, layers, hidden, heads, tensor, pipeline, gpus, batch, value in _TABLE_1:
        data = gpus // tensor // pipeline
        micro = 1 if pipeline > 1 else 4
        spread = _bf16(
            _megatron(layers, hidden, heads),
            Mesh(pipeline=pipeline, shard=data, tensor=tensor),
            8,
            stage=0,
            micro_batch=micro,
            accumulation=batch // data // micro,
            checkpointing=True,
        )
        layout = f"tensor {tensor} x pipeline {pipeline}"
        yield Published(
            f"Megatron-LM {size} B, {gpus:,} A100, {layout}",
            "dgx-a100",
            spread,
            "hardware TFLOP/s",
            value,
            "arXiv 2104.04473, table 1",
            f"micro-batches of {micro} and 1f1b assumed",
            scores=STORED,
        )


# Korthikanti et al., arXiv 2205.05198, tables 3 and 5, and sec. 6.3: layers, width, heads, pipeline, groups, data,
# batch, micro-batch, MFU. Attention is computed again; its products once more are left out here.
_TABLE_5 = (
    ("22", 48, 6144, 64, 1, 1, 1, 4, 4, 41.5),
    ("175", 96, 12288, 96, 8, 3, 1, 64, 1, 51.4),
    ("530", 105, 20480, 128, 35, 3, 1, 280, 1, 56.0),
    ("530", 105, 20480, 128, 35, 3, 8, 2240, 1, 54.2),
    ("1,000", 128, 25600, 160, 64, 1, 1, 512, 1, 56.3),
)


def _korthikanti() -> Iterator[Published]:
    for size, layers, hidden, heads, pipeline, groups, data, batch, micro, value in _TABLE_5:
        spread = _bf16(
            _megatron(layers, hidden, heads),
            Mesh(pipeline=pipeline, shard=data, tensor=8),
            8,
            stage=0,
            micro_batch=micro,
            accumulation=batch // data // micro,
            sequence_parallel=True,
            schedule="interleaved" if groups > 1 else "1f1b",
            interleave=groups,
        )
        yield Published(
            f"Megatron-LM {size} B, {8 * pipeline * data:,} A100, tensor 8 x pipeline {pipeline}, sequence parallel",
            "dgx-a100",
            spread,
            "MFU, %",
            value,
            f"arXiv 2205.05198, {'sec. 6.3' if data > 1 else 'table 5'}",
            scores=STORED_AGAIN,
        )


def _llama(layers: int, hidden: int, heads: int, ffn: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=128256,
        context=8192,
        layers=layers,
        hidden=hidden,
        heads=heads,
        key_value_heads=8,
        ffn=ffn,
    )


_8B, _70B = _llama(32, 4096, 32, 14336), _llama(80, 8192, 64, 28672)
_405B = _llama(126, 16384, 128, 53248)
_SELECTIVE = Activations(checkpointing="selective")
_500W = "GPUs at 500 W there, the data sheet's 700 W here"
_HBM2E = 2.4e12  # their memory, as they say
_TITAN, _2024 = "pytorch/torchtitan", "benchmarks/llama3_h100_202412_torchtitan.md"
_FSDP: dict[str, Any] = {"stage": 3, "checkpointing": True}
_2D: dict[str, Any] = {**_FSDP, "sequence_parallel": True}
_405B_SPREAD = _bf16(
    _405B, Mesh(pipeline=8, shard=8, tensor=8), 8, micro_batch=4, accumulation=8, **_2D
)
_INTERLEAVED: dict[str, Any] = {
    "sequence_parallel": True,
    "schedule": "interleaved",
    "interleave": 4,
}
_FLOAT8 = "published with float8, predicted in bf16; 8 micro-batches assumed, the default there"


def _titan() -> Iterator[Published]:
    for gpus, eager, compiled in ((8, 5762, 6667), (128, 5605, 6514)):
        spread = _bf16(_8B, Mesh(shard=gpus), 8, micro_batch=2, kept=_SELECTIVE, **_FSDP)
        for value, how in ((eager, ""), (compiled, ", compiled")):
            yield Published(
                f"torchtitan 8 B, {gpus} H100, FSDP{how}",
                "dgx-h100",
                spread,
                "tokens/s",
                value,
                f"{_TITAN}, {_2024}",
                _500W,
                memory_rate=_HBM2E,
            )
    for model, size, value, kept in (
        (_8B, 8, 2973, _SELECTIVE),
        (_70B, 70, 331, Activations(checkpointing="block")),
    ):
        yield Published(
            f"torchtitan {size} B, 64 A100, FSDP",
            "dgx-a100",
            _bf16(model, Mesh(shard=64), 8, kept=kept, **_FSDP),
            "tokens/s",
            value,
            f"{_TITAN}, docs/performance.md of 2024",
        )


PUBLISHED = (
    *_narayanan(),
    *_korthikanti(),
    *_titan(),
    Published(
        "torchtitan 70 B, 256 H100, shard 32 x tensor 8",
        "dgx-h100",
        _bf16(_70B, Mesh(shard=32, tensor=8), 8, micro_batch=16, **_2D),
        "tokens/s",
        597.3,
        "pytorch/torchtitan#1299",
        _500W,
        memory_rate=_HBM2E,
    ),
    Published(
        "Llama 3 405 B, 8,192 H100, tensor 8 x pipeline 16",
        "dgx-h100",
        _bf16(
            _405B,
            Mesh(pipeline=16, shard=64, tensor=8),
            8,
            stage=1,
            accumulation=32,
            **_INTERLEAVED,
        ),
        "MFU, %",
        43.0,
        "arXiv 2407.21783, table 4",
        "micro-batches of 1 and 4 groups of blocks assumed",
    ),
    Published(
        "Llama 3 405 B, 16,384 H100, tensor 8 x pipeline 16",
        "dgx-h100",
        _bf16(
            _405B,
            Mesh(pipeline=16, shard=128, tensor=8),
            8,
            stage=1,
            accumulation=16,
            **_INTERLEAVED,
        ),
        "MFU, %",
        41.0,
        "arXiv 2407.21783, table 4",
        "micro-batches of 1 and 4 groups of blocks assumed",
    ),
    Published(
        "ZeRO 100 B, 400 V100, shard 25 x tensor 16, stage 2",
        "dgx-2-v100",
        Spread(
            PRESETS["gpt-100b"],
            Mesh(shard=25, tensor=16),
            16,
            stage=2,
            precision="fp16",
            micro_batch=32,
            checkpointing=True,
        ),
        "TFLOP/s",
        38.0,
        "arXiv 1910.02054v3, sec. 10.2",
        "nothing hidden, as there; inputs of blocks were gathered over tensor ranks there",
        overlap=False,
    ),
    Published(
        "torchtitan 405 B, 512 H100, shard 8 x tensor 8 x pipeline 8, 1F1B",
        "dgx-h100",
        replace(_405B_SPREAD, schedule="1f1b"),
        "tokens/s",
        100.0,
        f"{_TITAN}, {_2024}",
        _FLOAT8,
        comparable=False,
    ),
    Published(
        "the same, interleaved",
        "dgx-h100",
        replace(_405B_SPREAD, schedule="interleaved", interleave=2),
        "tokens/s",
        128.0,
        f"{_TITAN}, {_2024}",
        f"{_FLOAT8}; two groups of blocks assumed",
        comparable=False,
    ),
)


# Where the ranges of products come from: runs on one node, in which little is sent. machine, model, sequence,
# micro-batch, accumulation, whether all is computed again, tokens per second and GPU; sizes are the makers' own.
_MPT = {
    name: (layers, hidden, heads)
    for name, layers, hidden, heads in (
        ("1b", 24, 2048, 16),
        ("3b", 32, 2560, 20),
        ("7b", 32, 4096, 32),
        ("13b", 40, 5120, 40),
        ("30b", 48, 7168, 56),
    )
}
# mosaicml/llm-foundry, scripts/train/benchmarking/README.md: all sizes from 1b on, at 2,048 and 8,192 tokens where both
# are there, else at the nearest length.
_MPT_RUNS = (
    ("dgx-a100", "1b", 2048, 14, 4, False, 20513),
    ("dgx-a100", "1b", 8192, 3, 4, False, 13814),
    ("dgx-a100", "3b", 2048, 10, 2, False, 10811),
    ("dgx-a100", "3b", 8192, 3, 6, False, 7695),
    ("dgx-a100", "7b", 2048, 6, 2, False, 4641),
    ("dgx-a100", "7b", 8192, 8, 2, True, 3206),
    ("dgx-a100", "13b", 2048, 2, 3, False, 2262),
    ("dgx-a100", "13b", 8192, 5, 3, True, 1795),
    ("dgx-a100", "30b", 2048, 3, 21, True, 916),
    ("dgx-a100", "30b", 8192, 1, 21, True, 574),
    ("slingshot-a100", "1b", 2048, 8, 8, False, 19271),
    ("slingshot-a100", "1b", 8192, 2, 8, False, 13474),
    ("slingshot-a100", "3b", 2048, 5, 8, False, 10065),
    ("slingshot-a100", "3b", 8192, 1, 8, False, 7149),
    ("slingshot-a100", "7b", 2048, 12, 4, True, 3679),
    ("slingshot-a100", "7b", 8192, 3, 4, True, 2887),
    ("slingshot-a100", "13b", 2048, 4, 16, True, 1668),
    ("slingshot-a100", "13b", 8192, 1, 16, True, 1407),
    ("dgx-h100", "1b", 2048, 14, 1, False, 45455),
    ("dgx-h100", "1b", 8192, 3, 4, False, 29157),
    ("dgx-h100", "3b", 1024, 20, 6, False, 27046),
    ("dgx-h100", "3b", 8192, 3, 6, False, 16578),
    ("dgx-h100", "7b", 2048, 6, 1, False, 10643),
    ("dgx-h100", "7b", 8192, 8, 2, True, 6935),
    ("dgx-h100", "13b", 2048, 2, 1, False, 4792),
    ("dgx-h100", "13b", 4096, 10, 3, True, 4717),
    ("dgx-h100", "30b", 2048, 3, 21, True, 2002),
    ("dgx-h100", "30b", 8192, 1, 21, True, 1384),
)
# KempnerInstitute/KempnerForge, benchmarks/mfu_scaling: runs without tensor parallelism on one node of four H200, which
# have the peak of H100 and 4.8 TB/s of memory.
_KEMPNER_RUNS = ((1, 10471.0), (2, 9364.0), (4, 9746.0))
_H200 = 4.8e12


@dataclass(frozen=True)
class OneNode:
    """A run on one node that says how fast products were."""

    name: str  # in the table
    machine: Machine
    spread: Spread
    tokens_per_s: float  # per GPU

    @property
    def implied(self) -> float:
        """The share of the peak at which products give the published figure, by the model."""
        wanted = self.tokens_per_s * self.spread.mesh.size

        def inverse(share: float) -> float:
            machine = replace(self.machine, matmul_efficiency=share)
            return 1 / predict(Job.of(self.spread, machine)).tokens_per_s

        below, above = 0.2, 1.0
        for _ in range(4):  # nearly linear in 1 / share
            first, second = inverse(below), inverse(above)
            slope = (first - second) / (1 / below - 1 / above)
            share = 1 / (1 / above + (1 / wanted - second) / slope)
            below, above = share * 0.99, share * 1.01
        return share


def one_node() -> Iterator[OneNode]:
    """The runs that the ranges of products are from, machine by machine."""
    for name, size, length, micro, times, again, value in _MPT_RUNS:
        machine = replace(load_machine(name), ranks_per_node=8)
        layers, hidden, heads = _MPT[size]
        model = GPTConfig(
            vocab_size=50368, context=length, layers=layers, hidden=hidden, heads=heads
        )
        spread = _bf16(
            model,
            Mesh(shard=8),
            8,
            micro_batch=micro,
            accumulation=times,
            checkpointing=again,
            transport="ipc",
        )
        yield OneNode(f"MPT {size}, {length:,} tokens", machine, spread, value)
    for gpus, rate in _KEMPNER_RUNS:
        machine = replace(load_machine("dgx-h100"), ranks_per_node=4, nics=4, memory_rate=_H200)
        spread = _bf16(
            replace(_8B, context=4096),
            Mesh(shard=gpus),
            gpus,
            micro_batch=4,
            accumulation=2,
            transport="ipc",
            **_FSDP,
        )
        yield OneNode(f"Llama 8 B, {gpus} of 4 H200", machine, spread, rate)


def ranges() -> dict[str, tuple[float, float, float]]:
    """Of each machine the least, the median and the most share that ``one_node`` implies."""
    shares: dict[str, list[float]] = {}
    for each in one_node():
        shares.setdefault(each.machine.name, []).append(each.implied)
    return {
        name: (min(found), statistics.median(found), max(found)) for name, found in shares.items()
    }


def compare() -> Iterator[tuple[Published, float, float, float]]:
    """Each run with what is predicted: at the slow end, as is likely, at the fast end."""
    for run in PUBLISHED:
        found = run.predicted()
        yield run, run.of(found.slow), run.of(found.likely), run.of(found.fast)


def published_text() -> str:
    """A table of all runs, what is known of each, and how many are within their range."""
    lines = [
        "Published runs and the model of a step, per GPU; a prediction, nothing was run, nothing fitted to these runs.",
        "",
        "| run | measure | low | likely | high | published | likely / published | |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    counted, held = 0, 0
    found = list(compare())
    for run, low, likely, high in found:
        within = low <= run.value <= high
        counted += run.comparable
        held += within and run.comparable
        said = "" if within else "outside" if run.comparable else "outside, not counted"
        values = " | ".join(f"{value:,.4g}" for value in (low, likely, high, run.value))
        lines.append(
            f"| {run.name} | {run.measure} | {values} | {likely / run.value:.2f} | {said} |"
        )
    lines += ["", f"{held} of {counted} within their range.", ""]
    lines += [
        f"- {run.name}: {'; '.join(filter(None, (run.source, run.said)))}." for run, *_ in found
    ]
    lines += ["", "Shares of the peak that products reach, implied by runs on one node:", ""]
    lines += [f"- {each.machine.name}, {each.name}: {each.implied:.3f}" for each in one_node()]
    lines += [
        f"- {name}: {low:.3f}, median {likely:.3f}, {high:.3f}"
        for name, (low, likely, high) in ranges().items()
    ]
    return "\n".join(lines)
