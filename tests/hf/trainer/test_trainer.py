"""HpczeroTrainer beside plain Trainer in one process, and beside plain Trainer with DDP over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hpczero.errors import HpcZeroError
from tests.checkpoint.damage import flip
from tests.helpers.parallel import on_root, parallel_assert, told

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(1, 2, 3),
    pytest.mark.limit(300),
    # Others' code warns of itself; a warning of hpczero's is an error as everywhere.
    pytest.mark.filterwarnings("ignore", "error:::hpczero"),
]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("transport", ["auto", "flat"])
@pytest.mark.parametrize("max_grad_norm", [0.5, 0.0])
def test_equals_plain_trainer(
    comm: MPI.Intracomm, folder: Path, stage: int, transport: str, max_grad_norm: float
) -> None:
    """Weights, loss, norm, rate and loss of evaluation: clipped, accumulated, with unequal numbers of labels."""
    from tests.hf.trainer import runs

    sharding = {"stage": stage, "transport": transport}
    trainer, found, expected = runs.beside_plain(
        comm, folder, sharding=sharding, max_grad_norm=max_grad_norm
    )
    parallel_assert(comm, not found.differs(expected), found.differs(expected))
    moved = runs.furthest(found.weights, runs.llama().state_dict())
    parallel_assert(comm, moved > 1e-3, f"nothing was trained: {moved}")
    clipped = max(each.get("grad_norm", 0.0) for each in found.log)
    parallel_assert(comm, clipped > 0.5, f"nothing was clipped: {clipped}")
    runs.done_with(trainer)


@pytest.mark.parametrize("stage", [0, 3])
def test_data_sets_of_datasets_equal_plain_trainer(
    comm: MPI.Intracomm, folder: Path, stage: int
) -> None:
    """With columns that the model does not take, and steps after the last log."""
    import datasets

    from tests.hf.trainer import runs

    def columns(rows: list[Any]) -> Any:
        listed = [{key: value.tolist() for key, value in row.items()} for row in rows]
        return datasets.Dataset.from_list([{"text": f"row {n}", **e} for n, e in enumerate(listed)])

    sets = {name: columns(rows) for name, rows in runs.data().items()}
    mine = runs.plain(folder / "plain", 6, logging_steps=3) if comm.rank == 0 else None
    expected: Any = comm.bcast(mine)  # by lists
    trainer = runs.trainer_over_mpi(
        folder / "mpi", 6 // comm.size, datasets=sets, stage=stage, logging_steps=3
    )
    problem = runs.train(trainer, comm).differs(expected)
    parallel_assert(comm, not problem, problem)
    runs.done_with(trainer)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", [0, 3])
def test_equals_ddp_where_the_last_batch_is_incomplete(
    comm: MPI.Intracomm, folder: Path, stage: int
) -> None:
    """An incomplete round is filled with samples of the start, so one process is no reference for it."""
    from tests.hf.trainer import runs

    sets = runs.data(47, 17)
    expected = runs.with_ddp(comm, folder / "ddp", 3, datasets=sets)
    trainer = runs.trainer_over_mpi(folder / "mpi", 3, datasets=sets, stage=stage)
    problem = runs.train(trainer, comm).differs(expected)
    parallel_assert(comm, not problem, problem)
    runs.done_with(trainer)


@pytest.mark.ranks(2, 3)
def test_model_without_a_number_of_items_equals_ddp(comm: MPI.Intracomm, folder: Path) -> None:
    """Its loss is a mean over its own samples; gradients are means over ranks."""
    from tests.hf.trainer import runs

    generator = torch.Generator().manual_seed(6)
    widths = {"features": 7, "labels": 3}
    samples = [
        {name: torch.randn(width, generator=generator) for name, width in widths.items()}
        for _ in range(31)
    ]
    sets = {"train_dataset": samples, "eval_dataset": samples[:11]}
    expected = runs.with_ddp(comm, folder / "ddp", 2, runs.NoLossArguments(), sets)
    trainer = runs.trainer_over_mpi(folder / "mpi", 2, runs.NoLossArguments(), sets)
    problem = runs.train(trainer, comm).differs(expected)
    parallel_assert(comm, not problem, problem)
    runs.done_with(trainer)


def test_goes_on_from_the_newest_sound_checkpoint_at_another_stage(
    comm: MPI.Intracomm, folder: Path
) -> None:
    """The newest was damaged where only its values are; dropout shows that random streams go on too."""
    from tests.hf.trainer import runs

    saving = {"save_strategy": "steps", "save_steps": 3}

    def trainer_at(stage: int) -> Any:
        model = runs.llama(attention_dropout=0.1)
        return runs.trainer_over_mpi(folder, 6 // comm.size, model, stage=stage, **saving)

    trainer = trainer_at(3)
    expected = runs.train(trainer, comm)
    runs.done_with(trainer)
    for step in (6, 8):
        path = folder / "checkpoints" / f"step-{step:09d}" / "state.h5"
        on_root(comm, flip, path, path.stat().st_size // 2, 0)
    trainer = trainer_at(1)
    found = runs.train(trainer, comm, resume=True)
    for run in (found, expected):
        parallel_assert(comm, "train_loss" in run.log.pop(), "the mean loss of the process is last")
    problem = found.differs(expected)
    parallel_assert(comm, not problem, problem)
    runs.done_with(trainer)


@pytest.mark.ranks(2)
def test_one_ranks_wish_to_stop_stops_all(comm: MPI.Intracomm, folder: Path) -> None:
    from transformers import TrainerCallback

    from tests.hf.trainer import runs

    class Tired(TrainerCallback):
        """Rank 1 wants to end, in the middle of a step."""

        def on_substep_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            control.should_training_stop = state.global_step == 2 and comm.rank == 1

    trainer = runs.trainer_over_mpi(folder, 3, given={"callbacks": [Tired()]})
    runs.train(trainer, comm)
    parallel_assert(comm, trainer.state.global_step == 2, str(trainer.state.global_step))
    runs.done_with(trainer)


@pytest.mark.ranks(2)
def test_unequal_arguments_and_data_are_refused_on_all_ranks(
    comm: MPI.Intracomm, folder: Path
) -> None:
    from tests.hf.trainer import runs

    for said, changes in (
        ("learning_rate=", {"learning_rate": 1e-3 + comm.rank}),
        ("rank 1 has lengths", {"datasets": runs.data(48 - comm.rank)}),
    ):
        text = told(HpcZeroError, runs.trainer_over_mpi, folder, 3, **changes)
        parallel_assert(comm, said in text, text)


@pytest.mark.ranks(2)
def test_ranks_with_fewer_batches_are_named_instead_of_waited_for(
    comm: MPI.Intracomm, folder: Path
) -> None:
    from torch.utils.data import IterableDataset

    from tests.hf.trainer import runs

    class Uneven(IterableDataset):
        def __iter__(self) -> Any:
            return iter(runs.rows(24 - 12 * comm.rank, 1))

    sets = {"train_dataset": Uneven(), "eval_dataset": runs.rows(6, 2)}
    trainer = runs.trainer_over_mpi(folder, 3, datasets=sets, max_steps=4)
    text = told(HpcZeroError, trainer.train)
    parallel_assert(comm, "count the batches" in text or "ranks have" in text, text)
