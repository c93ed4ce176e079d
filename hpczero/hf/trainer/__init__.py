"""Trainer: ``transformers.Trainer`` over MPI, with its model, gradients and optimizer state in shards.

Its parts are three subclasses: of ``TrainingArguments`` (which ranks there are), of accelerate's ``Accelerator`` (what
ranks exchange) and of ``Trainer`` (when checkpoints are saved and loaded). ``torch.distributed`` is never initialised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpczero.lazy import lazy

if TYPE_CHECKING:
    from hpczero.hf.trainer.arguments import HpczeroTrainingArguments
    from hpczero.hf.trainer.trainer import (
        HpczeroSeq2SeqTrainer,
        HpczeroSeq2SeqTrainingArguments,
        HpczeroTrainer,
    )

__all__ = [
    "HpczeroSeq2SeqTrainer",
    "HpczeroSeq2SeqTrainingArguments",
    "HpczeroTrainer",
    "HpczeroTrainingArguments",
]

__getattr__ = lazy(
    __name__,
    {
        "HpczeroSeq2SeqTrainer": "trainer",
        "HpczeroSeq2SeqTrainingArguments": "trainer",
        "HpczeroTrainer": "trainer",
        "HpczeroTrainingArguments": "arguments",
    },
    needs=("transformers>=5.20,<6", "accelerate>=1.15"),
)
