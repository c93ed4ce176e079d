"""Texts that a model writes in an evaluation, compared with plain Seq2SeqTrainer in one process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from hpczero.errors import ConfigError, HpcZeroError
from tests.helpers.cases import EVERYTHING
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(*((1, 2, 3) if EVERYTHING else (2, 3))),
    pytest.mark.limit(300),
    pytest.mark.filterwarnings("ignore", "error:::hpczero"),
]
VOCABULARY, GLOBAL_BATCH = 40, 6
CASES = [("t5", 3, "window")]
if EVERYTHING:
    CASES = [(k, s, t) for k in ("t5", "bart") for s in (0, 2, 3) for t in ("window", "flat")]


def model_of(kind: str) -> Any:
    """An encoder with a decoder; the same weights in every call."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any]
    if kind == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        sizes |= {"vocab_size": VOCABULARY, "dropout_rate": 0.0, "decoder_start_token_id": 0}
        model: Any = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    else:
        sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32}
        sizes |= {"decoder_ffn_dim": 32, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
        sizes |= {"vocab_size": VOCABULARY, "dropout": 0.0, "forced_eos_token_id": None}
        sizes |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
        config = transformers.BartConfig(decoder_start_token_id=1, **sizes)
        model = transformers.BartForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(4.0)
            if kind == "bart" and ("embed_positions" in name or "encoder_attn" in name):
                parameter.mul_(8.0)  # else it writes one token again and again, whatever it reads
    model.generation_config.eos_token_id = [1, *range(25, VOCABULARY)]  # texts end early and late
    return model


def samples(lengths: tuple[int, ...]) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(7)
    found = []
    for length in lengths:
        ids = [*torch.randint(3, VOCABULARY, (length,), generator=generator).tolist(), 1]
        labels = [*ids[::-1][1 : 1 + max(1, length // 2)], 1]
        found.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    return found


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    def padded(name: str, value: int) -> torch.Tensor:
        width = max(len(row[name]) for row in rows)
        return torch.tensor([row[name] + [value] * (width - len(row[name])) for row in rows])

    fillers = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {name: padded(name, value) for name, value in fillers.items()}


TRAINED = samples((5,) * 6)
HELD_OUT = samples((3, 9, 4, 2, 7))  # no multiple of 2 or 3


def options(folder: Path, size: int, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": GLOBAL_BATCH // size,
        "per_device_eval_batch_size": 1,
        "max_steps": 1,
        "learning_rate": 1e-2,
        "optim": "sgd",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "predict_with_generate": True,
        "generation_max_length": 9,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "include_for_metrics": ["inputs", "loss"],
        **changes,
    }


class Metrics:
    """What ``compute_metrics`` was given last."""

    def __init__(self) -> None:
        self.seen: Any = None

    def __call__(self, found: Any) -> dict[str, float]:
        self.seen = found
        return {"rows": float(len(found.predictions)), "sum": float(found.predictions.sum())}


def evaluated(trainer: Any, metrics: Metrics) -> dict[str, Any]:
    """Everything that a script asks of a trainer, trained meanwhile."""
    trainer.train()
    said = trainer.evaluate()
    seen = metrics.seen
    beams = trainer.predict(HELD_OUT, num_beams=2, max_length=7)
    trainer.args.prediction_loss_only = True
    loss = trainer.evaluate()["eval_loss"]
    numbers = [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]
    return {
        "predictions": seen.predictions,
        "labels": seen.label_ids,
        "inputs": seen.inputs,
        "losses": seen.losses,
        "beams": beams.predictions,
        "numbers": np.array([*numbers, loss, said["eval_rows"], said["eval_sum"]]),
    }


def given(metrics: Metrics) -> dict[str, Any]:
    """What any trainer gets."""
    sets = {"train_dataset": TRAINED, "eval_dataset": HELD_OUT}
    return {**sets, "data_collator": collate, "compute_metrics": metrics}


def plain(kind: str, folder: Path) -> dict[str, Any]:
    import transformers
    from accelerate.utils import DistributedType

    from tests.hf.trainer.runs import state_of_accelerate

    with state_of_accelerate(0, 1, DistributedType.NO):
        configured = {"accelerator_config": {"use_configured_state": True}}
        args = transformers.Seq2SeqTrainingArguments(**options(folder, 1, **configured))
        metrics = Metrics()
        trainer = transformers.Seq2SeqTrainer(model_of(kind), args, **given(metrics))
        return evaluated(trainer, metrics)


def over_mpi(kind: str, folder: Path, size: int, metrics: Metrics, **changes: Any) -> Any:
    from hpczero.hf.trainer import HpczeroSeq2SeqTrainer, HpczeroSeq2SeqTrainingArguments

    args = HpczeroSeq2SeqTrainingArguments(**options(folder, size, **changes))
    return HpczeroSeq2SeqTrainer(model_of(kind), args, **given(metrics))


def unlike(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """What differs; columns that only one has are padding."""
    told = []
    for name, value in expected.items():
        mine = found[name]
        if name in ("numbers", "losses"):
            same = mine.shape == value.shape and np.allclose(mine, value, rtol=1e-5, atol=1e-5)
        else:
            width = min(mine.shape[1], value.shape[1])
            rest = {*mine[:, width:].flat, *value[:, width:].flat}
            same = np.array_equal(mine[:, :width], value[:, :width]) and rest <= {-100, 0}
        if not same:
            told.append(f"{name}: {mine} instead of {value}")
    return "; ".join(told)


@pytest.mark.parametrize(("kind", "stage", "transport"), CASES)
def test_written_texts_are_those_of_one_process(
    comm: MPI.Intracomm, folder: Path, kind: str, stage: int, transport: str
) -> None:
    """In order, each once, though ranks write texts of different lengths; with beams; losses and inputs too."""
    from tests.hf.trainer.runs import done_with

    expected = plain(kind, folder / "plain") if comm.rank == 0 else {}
    metrics = Metrics()
    trainer = over_mpi(kind, folder, comm.size, metrics, stage=stage, transport=transport)
    found = evaluated(trainer, metrics)
    done_with(trainer)
    told = unlike(found, expected)
    parallel_assert(comm, not told, told)
    lengths = {int((row > 0).sum()) for row in found["predictions"]}
    parallel_assert(comm, len(lengths) > 1, f"all texts have the same length: {lengths}")


def test_failure_of_one_rank_while_it_writes_is_an_error_of_all(
    comm: MPI.Intracomm, folder: Path
) -> None:
    from tests.hf.trainer.runs import done_with

    trainer = over_mpi("t5", folder, comm.size, Metrics(), stage=3, max_steps=1)
    trainer.train()
    write = trainer.model.generate

    def writes(*args: Any, **named: Any) -> Any:
        if comm.rank == comm.size - 1:
            raise RuntimeError("no more paper")
        return write(*args, **named)

    trainer.model.generate = writes
    with pytest.raises((HpcZeroError, RuntimeError), match="no more paper"):
        trainer.predict(HELD_OUT)
    trainer.model.generate = write
    parallel_assert(comm, len(trainer.predict(HELD_OUT).predictions) == len(HELD_OUT))
    done_with(trainer)


def test_what_cannot_be_is_refused_by_name(comm: MPI.Intracomm, folder: Path) -> None:
    from hpczero.hf.trainer import HpczeroSeq2SeqTrainer, HpczeroTrainingArguments

    trainer = over_mpi("t5", folder, comm.size, Metrics())
    with pytest.raises(ConfigError, match="synced_gpus: is not needed"):
        trainer.predict(HELD_OUT, synced_gpus=True)
    args = HpczeroTrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[])
    with pytest.raises(ConfigError, match="expected HpczeroSeq2SeqTrainingArguments"):
        HpczeroSeq2SeqTrainer(model_of("t5"), args)
