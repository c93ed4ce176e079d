"""Trainer: ``transformers.Trainer`` over MPI, with its model, gradients and optimizer state in shards.

Its parts are three subclasses: of ``TrainingArguments`` (which ranks there are), of accelerate's ``Accelerator`` (what
ranks exchange) and of ``Trainer`` (when checkpoints are saved and loaded). ``torch.distributed`` is never initialised.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hpczero.errors import ConfigError

if TYPE_CHECKING:
    from hpczero.hf.trainer.arguments import HpczeroTrainingArguments
    from hpczero.hf.trainer.trainer import (
        HpczeroSeq2SeqTrainer,
        HpczeroSeq2SeqTrainingArguments,
        HpczeroTrainer,
    )

_HOME = {
    "HpczeroSeq2SeqTrainer": "trainer",
    "HpczeroSeq2SeqTrainingArguments": "trainer",
    "HpczeroTrainer": "trainer",
    "HpczeroTrainingArguments": "arguments",
}

__all__ = [
    "HpczeroSeq2SeqTrainer",
    "HpczeroSeq2SeqTrainingArguments",
    "HpczeroTrainer",
    "HpczeroTrainingArguments",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'hpczero.hf.trainer' has no attribute {name!r}")
    try:
        home = importlib.import_module(f"hpczero.hf.trainer.{_HOME[name]}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in ("transformers", "accelerate"):
            raise
        raise ConfigError(
            f"hpczero.hf.trainer.{name} needs {missing}, which is not installed; type: "
            "pip install 'transformers>=5.20,<6' 'accelerate>=1.15'"
        ) from error
    return getattr(home, name)
