"""Seq2seq: ``Seq2SeqTrainer`` over MPI, which evaluates texts that the model writes.

Owns: that ranks may write texts of different lengths, and that no sample counts twice. Must not know: checkpoints,
how parameters are made whole.

[Note: Lengths of texts]
A rank is done when the texts of its own batch have ended, so ranks take different numbers of forwards. A forward of a
sharded model is collective. The parameters are therefore whole on every rank while texts are written.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

import hpczero
from hpczero.errors import ConfigError
from hpczero.hf.trainer.accelerator import is_sharded
from hpczero.hf.trainer.arguments import HpczeroTrainingArguments
from hpczero.hf.trainer.trainer import HpczeroTrainer

# Their annotations are not strict.
_Trainer: Any = Seq2SeqTrainer
_Arguments: Any = Seq2SeqTrainingArguments


@dataclass
class HpczeroSeq2SeqTrainingArguments(HpczeroTrainingArguments, _Arguments):  # type: ignore[misc]
    """``Seq2SeqTrainingArguments`` for ``HpczeroSeq2SeqTrainer``, as ``HpczeroTrainingArguments``. Collective."""


class HpczeroSeq2SeqTrainer(HpczeroTrainer, _Trainer):  # type: ignore[misc]
    """``Seq2SeqTrainer``, on the ranks of MPI, as ``HpczeroTrainer``. All methods are collective over the world.

    With ``predict_with_generate`` each rank writes the texts of its own samples. Meanwhile it has all parameters, in
    the dtype that the model computes in.
    """

    def __init__(self, model: Any = None, args: Any = None, *positional: Any, **named: Any) -> None:
        """As ``HpczeroTrainer``. Collective over the world.

        Args:
            model: as there.
            args: must be ``HpczeroSeq2SeqTrainingArguments``.
            positional: as there.
            named: as there.

        Raises:
            ConfigError: as there, or other arguments.
        """
        if not isinstance(args, HpczeroSeq2SeqTrainingArguments):
            raise ConfigError(
                f"args: got {type(args).__name__}, expected HpczeroSeq2SeqTrainingArguments"
            )
        super().__init__(model, args, *positional, **named)

    def evaluation_loop(self, *args: Any, **named: Any) -> Any:
        """As ``Seq2SeqTrainer`` does in one process: samples that fill up the last batch do not count.

        Raises:
            ConfigError: ranks shall write in step, which needs ``torch.distributed``.
        """
        if vars(self).get("_gen_kwargs", {}).get("synced_gpus"):
            raise ConfigError(
                "synced_gpus: is not needed, since every rank has all parameters while it writes; leave it out"
            )
        self.gather_function = partial(  # else samples come twice, as they do with DDP
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )
        return super().evaluation_loop(*args, **named)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **named: Any
    ) -> Any:
        """As ``Seq2SeqTrainer`` does; see [Note: Lengths of texts]. If a rank fails, all do."""
        writes = self.args.predict_with_generate and not prediction_loss_only
        if not writes or not is_sharded(self.model):
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **named)
        with hpczero.gathered(self.model), self._exchange.topology.agreed("write texts"):
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **named)
