"""Published runs of other programs in layouts that hpczero has, beside what its model says of them.

Machines are data sheets as they are: no constant is fitted to a run. So a ratio says what the model leaves out of the
run, and what the run has that hpczero has not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from hpczero.job.mesh import Mesh
from hpczero.models.config import PRESETS, GPTConfig
from hpczero.plan.spread import Spread
from hpczero.predict.job import Job
from hpczero.predict.machine import load_machine
from hpczero.predict.model import Prediction, predict

Measure = Literal["TFLOP/s", "hardware TFLOP/s", "MFU, %", "tokens/s"]
# A forward, and a backward of two, become four thirds where all of the forward is computed again.
RECOMPUTED = 4 / 3


@dataclass(frozen=True)
class Published:
    """One run."""

    name: str  # in the table
    machine: str  # a file of hpczero/predict/machines
    spread: Spread  # its layout
    measure: Measure  # what was published, per GPU; hardware FLOP/s count what is computed again
    value: float  # the figure
    source: str  # where it is from
    said: str  # what of it is assumed, and what is known to be different
    overlap: bool = True  # whether anything is hidden

    def predicted(self) -> Prediction:
        """A step of it."""
        machine = load_machine(self.machine)
        return predict(Job.of(self.spread, machine, overlap=self.overlap))

    def of(self, found: Prediction) -> float:
        """The measure by a prediction."""
        if self.measure == "tokens/s":
            return found.tokens_per_s / self.spread.mesh.size
        if self.measure == "MFU, %":
            return 100 * found.mfu
        return found.tflops * (RECOMPUTED if self.measure == "hardware TFLOP/s" else 1)


_1T = GPTConfig(vocab_size=51200, context=2048, layers=128, hidden=25600, heads=160)
_530B = GPTConfig(vocab_size=51200, context=2048, layers=105, hidden=20480, heads=128)
# Llama has three matrices in its MLP and fewer keys than queries; as GPTs of as many parameters in products:
_ROTARY: dict[str, Any] = {"positions": "rotary", "tie_embeddings": False}
_LLAMA = partial(GPTConfig, vocab_size=128256, context=8192, **_ROTARY)
_405B = _LLAMA(layers=126, hidden=16384, heads=128)
_70B = _LLAMA(layers=85, hidden=8192, heads=64)
_FLOAT8 = "published with float8, predicted in bf16; 8 micro-batches assumed, the default there"


_bf16 = partial(Spread, precision="bf16")
_1T_SPREAD = _bf16(
    _1T, Mesh(pipeline=64, shard=6, tensor=8), 8, stage=0, accumulation=512, checkpointing=True
)
_530B_SPREAD = _bf16(
    _530B,
    Mesh(pipeline=35, shard=8, tensor=8),
    8,
    stage=0,
    accumulation=280,
    sequence_parallel=True,
    schedule="interleaved",
    interleave=3,
)
_TITAN: dict[str, Any] = {"stage": 3, "checkpointing": True, "sequence_parallel": True}
_70B_SPREAD = _bf16(_70B, Mesh(shard=32, tensor=8), 8, micro_batch=16, **_TITAN)
_405B_SPREAD = _bf16(
    _405B, Mesh(pipeline=8, shard=8, tensor=8), 8, micro_batch=4, accumulation=8, **_TITAN
)
_100B_SPREAD = Spread(
    PRESETS["gpt-100b"],
    Mesh(shard=25, tensor=16),
    16,
    stage=2,
    precision="fp16",
    micro_batch=32,
    checkpointing=True,
)

PUBLISHED = (
    Published(
        "Megatron-LM 1 T, 3,072 A100, tensor 8 x pipeline 64",
        "dgx-a100",
        _1T_SPREAD,
        "hardware TFLOP/s",
        163.0,
        "arXiv 2104.04473, table 1",
        "1f1b assumed; there each tensor rank sends a part of a stage's output, here all of it",
    ),
    Published(
        "Megatron-LM 530 B, 2,240 A100, tensor 8 x pipeline 35",
        "dgx-a100",
        _530B_SPREAD,
        "MFU, %",
        54.2,
        "arXiv 2205.05198, sec. 6.3",
        "attention scores computed again there, fused here",
    ),
    Published(
        "torchtitan 70 B, 256 H100, shard 32 x tensor 8",
        "dgx-h100",
        _70B_SPREAD,
        "tokens/s",
        597.3,
        "pytorch/torchtitan#1299",
        "GPUs at 500 W there, the data sheet's 700 W here; as a GPT of 85 blocks",
    ),
    Published(
        "torchtitan 405 B, 512 H100, shard 8 x tensor 8 x pipeline 8, 1F1B",
        "dgx-h100",
        replace(_405B_SPREAD, schedule="1f1b"),
        "tokens/s",
        100.0,
        "arXiv 2410.06511, table of 3D parallelism",
        _FLOAT8,
    ),
    Published(
        "the same, interleaved",
        "dgx-h100",
        replace(_405B_SPREAD, schedule="interleaved", interleave=2),
        "tokens/s",
        128.0,
        "arXiv 2410.06511, table of 3D parallelism",
        f"{_FLOAT8}; two groups of blocks assumed",
    ),
    Published(
        "ZeRO 100 B, 400 V100, shard 25 x tensor 16, stage 2",
        "dgx-2-v100",
        _100B_SPREAD,
        "TFLOP/s",
        38.0,
        "arXiv 1910.02054v3, sec. 10.2",
        "nothing hidden, as there; inputs of blocks were gathered over tensor ranks there",
        overlap=False,
    ),
)


def compare() -> Iterator[tuple[Published, float]]:
    """Each run with the predicted figure."""
    for run in PUBLISHED:
        yield run, run.of(run.predicted())


def published_text() -> str:
    """A table of all runs, and what is known of each."""
    lines = [
        "Published runs and the model of a step, per GPU; a prediction, nothing was run, nothing fitted.",
        "",
        "| run | measure | predicted | published | ratio |",
        "|---|---|---:|---:|---:|",
    ]
    found = list(compare())
    lines += [
        f"| {run.name} | {run.measure} | {value:,.4g} | {run.value:,.4g} | {value / run.value:.2f} |"
        for run, value in found
    ]
    lines += ["", *(f"- {run.name}: {run.source}; {run.said}." for run, _ in found)]
    return "\n".join(lines)
