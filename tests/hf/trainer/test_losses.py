"""Losses that do not use the number of items of the whole batch, and clipping of a part of a model, by the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import hpczero
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(1, 2, 3),
    pytest.mark.filterwarnings("ignore", "error:::hpczero"),
]


def _bert() -> Any:
    import transformers

    sizes: Any = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1}
    off: Any = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=61, num_attention_heads=3, **sizes, **off)
    torch.manual_seed(3)
    return transformers.BertForMaskedLM(config)


def _t5() -> Any:
    import transformers

    sizes: Any = {"d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 1, "num_heads": 3}
    ends: Any = {"decoder_start_token_id": 0, "pad_token_id": 0}
    config = transformers.T5Config(vocab_size=61, dropout_rate=0.0, **sizes, **ends)
    torch.manual_seed(3)
    return transformers.T5ForConditionalGeneration(config)


def _mean(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A program's own loss."""
    return torch.nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


def _whole(number: int, seed: int) -> list[dict[str, Tensor]]:
    """Samples all of whose labels count, so that a mean of ranks' means is that of all."""
    from tests.hf.trainer.runs import rows

    return [{**row, "labels": row["input_ids"].clone()} for row in rows(number, seed)]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
# T5 makes its decoder's inputs from the labels, which plain Trainer keeps for a loss function of the program.
@pytest.mark.parametrize(("make", "loss"), [(_bert, None), (_bert, _mean), (_t5, None)])
def test_a_mean_over_samples_equals_one_process(
    comm: MPI.Intracomm, folder: Path, make: Any, stage: int, accumulation: int, loss: Any
) -> None:
    from tests.hf.trainer import runs

    sets = {"train_dataset": _whole(24, 1), "eval_dataset": _whole(12, 2)}
    changes = {"gradient_accumulation_steps": accumulation, "num_train_epochs": 1, "eval_steps": 2}
    trainer, found, expected = runs.beside_plain(
        comm,
        folder,
        make,
        {**sets, "compute_loss_func": loss},
        sharding={"stage": stage},
        **changes,
    )
    problem = found.differs(expected, 2e-6)
    parallel_assert(comm, not problem, problem)
    runs.done_with(trainer)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_accelerator_clips_the_parameters_it_is_given(
    comm: MPI.Intracomm, folder: Path, stage: int
) -> None:
    from tests.hf.trainer import runs

    trainer = runs.trainer_over_mpi(folder, 3, stage=stage, max_steps=1, eval_strategy="no")
    runs.train(trainer, comm)
    model, row = trainer.model, runs.rows(1, comm.rank)[0]
    model(**{name: value[None] for name, value in row.items()}).loss.backward()
    before = {name: value.clone() for name, value in hpczero.full_gradients(model).items()}
    head = {name: p for name, p in model.named_parameters() if name.startswith("lm_head")}
    norm = trainer.accelerator.clip_grad_norm_(head.values(), 0.01)
    expected = torch.stack([before[name].norm() for name in head]).norm()
    after = hpczero.full_gradients(model)
    of_head = torch.stack([after[name].norm() for name in head]).norm()
    parallel_assert(comm, bool(head) and torch.isclose(norm, expected) and expected > 0.01)
    parallel_assert(comm, of_head.item() == pytest.approx(0.01, rel=1e-3), f"{of_head}")
    same = all(after[name].equal(before[name]) for name in before if name not in head)
    parallel_assert(comm, same, "others were clipped")
    trainer.accelerator.clip_grad_value_(model.parameters(), 1e-4)
    largest = max(value.abs().max().item() for value in hpczero.full_gradients(model).values())
    parallel_assert(comm, 0.0 < largest <= 1.001e-4, f"{largest}")
    model.zero_grad()
    runs.done_with(trainer)
