"""Runs of a tiny Llama by the trainer of transformers: plain in one process, plain with DDP over gloo, over MPI."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch import Tensor, nn

import hpczero
from hpczero.hf.trainer import HpczeroTrainer, HpczeroTrainingArguments
from tests.helpers.gloo import gloo

if TYPE_CHECKING:  # importing MPI would start it where tests are only collected
    from mpi4py import MPI

VOCABULARY, LENGTH = 61, 12
GLOBAL_BATCH = 6  # of a micro batch of all ranks
COMPARED = ("loss", "grad_norm", "learning_rate", "eval_loss", "train_loss", "epoch", "total_flos")


@dataclass(frozen=True)
class Run:
    """What a run left: weights by name, and what it logged."""

    weights: dict[str, Tensor]
    log: list[dict[str, float]]

    @classmethod
    def of(cls, trainer: Any, weights: Any) -> Run:
        """``weights`` of a trainer that is done."""
        kept = {name: value.clone() for name, value in weights.items()}
        log = trainer.state.log_history
        return cls(kept, [{k: v for k, v in each.items() if k in COMPARED} for each in log])

    def differs(self, other: Run, tolerance: float = 1e-6) -> str:
        """Where two runs differ by more; empty if nowhere."""
        if self.weights.keys() != other.weights.keys() or len(self.log) != len(other.log):
            return f"{len(self.log)} and {len(other.log)} lines, {self.weights.keys() ^ other.weights.keys()}"
        far = {k: (v - other.weights[k]).abs().max().item() for k, v in self.weights.items()}
        said = [f"{name}: {by}" for name, by in far.items() if not by <= tolerance]
        for mine, theirs in zip(self.log, other.log, strict=True):
            for name in mine.keys() | theirs.keys():
                a, b = mine.get(name, 1e9), theirs.get(name, 1e9)
                if not abs(a - b) <= tolerance * max(1.0, abs(a)):
                    said.append(f"{name}: {a} and {b}")
        return "; ".join(said)


def llama(**changes: Any) -> Any:
    """The same initial weights in every call."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    }
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **changes}))


def rows(number: int, seed: int) -> list[dict[str, Tensor]]:
    """Samples of which each has another number of labels that count."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(number):
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        labels = ids.clone()
        labels[: int(torch.randint(0, LENGTH - 2, (1,), generator=generator))] = -100
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return found


def options(folder: Path, batch: int, **changes: Any) -> dict[str, Any]:
    """Arguments of a run of 8 steps over ``rows(48, 1)`` with 6 samples in a micro batch of all ranks."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": batch,
        "num_train_epochs": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 5,
        **changes,
    }


def data(number: int = 48, held_out: int = 18) -> dict[str, Any]:
    """Data sets of a trainer."""
    return {"train_dataset": rows(number, 1), "eval_dataset": rows(held_out, 2)}


@contextlib.contextmanager
def state_of_accelerate(rank: int, size: int, kind: DistributedType) -> Iterator[None]:
    """Context: accelerate takes this process for rank ``rank`` of ``size``, whatever a launcher's variables say."""
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._shared_state.update(
        _cpu=True,
        backend="gloo" if size > 1 else None,
        debug=False,
        device=torch.device("cpu"),
        distributed_type=kind,
        fork_launched=False,
        local_process_index=rank,
        num_processes=size,
        process_index=rank,
    )
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def plain(folder: Path, batch: int, model: Any = None, datasets: Any = None, **changes: Any) -> Run:
    """By plain Trainer in one process, which sees all samples."""
    with state_of_accelerate(0, 1, DistributedType.NO):
        trainer = _plain_trainer(folder, batch, model, datasets, changes)
        trainer.train()
    return Run.of(trainer, trainer.model.state_dict())


def with_ddp(
    comm: MPI.Intracomm,
    folder: Path,
    batch: int,
    model: Any = None,
    datasets: Any = None,
    **changes: Any,
) -> Run:
    """By plain Trainer with DDP over gloo, on the ranks of ``comm``. Collective."""
    with gloo(comm), state_of_accelerate(comm.rank, comm.size, DistributedType.MULTI_CPU):
        trainer = _plain_trainer(folder, batch, model, datasets, changes)
        trainer.train()
        found = Run.of(trainer, trainer.model.state_dict())
        # Else DDP would outlive its process group, whose threads then wait for the lock that its end holds.
        trainer.accelerator.free_memory()
        trainer.model_wrapped = trainer.accelerator = None
        del trainer
        gc.collect()
        return found


def _plain_trainer(folder: Path, batch: int, model: Any, datasets: Any, changes: Any) -> Any:
    configured = {"accelerator_config": {"use_configured_state": True}}
    args = transformers.TrainingArguments(**options(folder, batch, **configured, **changes))
    return transformers.Trainer(model or llama(), args, **(datasets or data()))


def trainer_over_mpi(
    folder: Path,
    batch: int,
    model: Any = None,
    datasets: Any = None,
    *,
    given: Any = None,
    **changes: Any,
) -> HpczeroTrainer:
    """A trainer on all ranks of MPI; ``given`` are keywords of it. Collective."""
    args = HpczeroTrainingArguments(**options(folder, batch, **changes))
    return HpczeroTrainer(model or llama(), args, **(datasets or data()), **(given or {}))


def train(trainer: HpczeroTrainer, comm: MPI.Intracomm, resume: Any = None) -> Run:
    """Train, and what it left, on every rank. Collective."""
    trainer.train(resume_from_checkpoint=resume)
    return result(trainer, comm)


def beside_plain(
    comm: MPI.Intracomm,
    folder: Path,
    make: Callable[[], Any] | None = None,
    datasets: Any = None,
    *,
    sharding: Any = None,
    **changes: Any,
) -> tuple[HpczeroTrainer, Run, Run]:
    """A trainer that has trained, what it left, and what plain Trainer left in one process. Collective.

    Args:
        comm: MPI's world.
        folder: of both, which get ``mpi`` and ``plain`` in it.
        make: a model, ``llama`` by default; each gets its own.
        datasets: of both.
        sharding: arguments of the trainer alone.
        changes: arguments of both.
    """
    made = make or llama
    mine = None
    if comm.rank == 0:
        mine = plain(folder / "plain", GLOBAL_BATCH, made(), datasets, **changes)
    expected: Run = comm.bcast(mine)
    options = {**changes, **(sharding or {})}
    batch = GLOBAL_BATCH // comm.size
    trainer = trainer_over_mpi(folder / "mpi", batch, made(), datasets, **options)
    return trainer, train(trainer, comm), expected


def furthest(mine: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest difference of weights of the same names."""
    return max((mine[name] - other[name]).abs().max().item() for name in other)


def result(trainer: HpczeroTrainer, comm: MPI.Intracomm) -> Run:
    """What a trainer holds now, with the log of rank 0. Collective."""
    weights: Any = hpczero.full_state_dict(trainer.model)
    found: Run = comm.bcast(Run.of(trainer, weights) if comm.rank == 0 else None)
    return found


def done_with(trainer: HpczeroTrainer) -> None:
    """Give back what its model holds of the ranks. Collective."""
    hpczero.release(trainer.model)


class NoLossArguments(nn.Module):
    """A regression whose forward takes no number of items, so its loss is the mean over its own samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))

    def forward(self, features: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(features)
        return {"loss": nn.functional.mse_loss(logits, labels), "logits": logits}
