"""Trainer: ``transformers.Trainer`` over MPI, with its model, gradients and optimizer state in shards.

Its parts are three subclasses: of ``TrainingArguments`` (which ranks there are), of accelerate's ``Accelerator`` (what
ranks exchange) and of ``Trainer`` (when checkpoints are saved and loaded). ``torch.distributed`` is never initialised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpczero.lazy import lazy

if TYPE_CHECKING:
    from hpczero.hf.trainer.arguments import HpczeroTrainingArguments as HpczeroTrainingArguments
    from hpczero.hf.trainer.trainer import HpczeroSeq2SeqTrainer as HpczeroSeq2SeqTrainer
    from hpczero.hf.trainer.trainer import (
        HpczeroSeq2SeqTrainingArguments as HpczeroSeq2SeqTrainingArguments,
    )
    from hpczero.hf.trainer.trainer import HpczeroTrainer as HpczeroTrainer

_NEEDS = ("transformers>=5.20,<6", "accelerate>=1.15")

__getattr__, __dir__, __all__ = lazy(__name__, __file__, needs=_NEEDS)
