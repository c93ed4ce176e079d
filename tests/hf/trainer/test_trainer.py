"""HpczeroTrainer beside plain Trainer in one process, and beside plain Trainer with DDP over gloo."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hpczero.errors import HpcZeroError
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

    from tests.hf.trainer.runs import Run

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(1, 2, 3),
    pytest.mark.limit(300),
    # Others' code warns of itself; a warning of hpczero's is an error as everywhere.
    pytest.mark.filterwarnings("ignore", "error:::hpczero"),
]
GLOBAL_BATCH = 6


def reference(comm: MPI.Intracomm, folder: Path, batch: int = GLOBAL_BATCH, **changes: Any) -> Run:
    """Plain Trainer on rank 0, for all ranks."""
    from tests.hf.trainer.runs import plain

    mine = plain(folder / "plain", batch, **changes) if comm.rank == 0 else None
    found: Run = comm.bcast(mine)
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("transport", ["auto", "flat"])
@pytest.mark.parametrize("max_grad_norm", [0.5, 0.0])
def test_equals_plain_trainer(
    comm: MPI.Intracomm, folder: Path, stage: int, transport: str, max_grad_norm: float
) -> None:
    """Weights, loss, norm, rate and loss of evaluation: clipped, accumulated, with unequal numbers of labels."""
    from tests.hf.trainer.runs import done_with, llama, train, trainer_over_mpi

    expected = reference(comm, folder, max_grad_norm=max_grad_norm)
    trainer = trainer_over_mpi(
        folder / "mpi",
        GLOBAL_BATCH // comm.size,
        stage=stage,
        transport=transport,
        max_grad_norm=max_grad_norm,
    )
    found = train(trainer, comm)
    parallel_assert(comm, not found.differs(expected), found.differs(expected))
    start = llama().state_dict()
    moved = max((found.weights[name] - start[name]).abs().max().item() for name in start)
    parallel_assert(comm, moved > 1e-3, f"nothing was trained: {moved}")
    clipped = max(each.get("grad_norm", 0.0) for each in found.log)
    parallel_assert(comm, clipped > 0.5, f"nothing was clipped: {clipped}")
    done_with(trainer)


@pytest.mark.parametrize("stage", [0, 3])
def test_data_sets_of_datasets_equal_plain_trainer(
    comm: MPI.Intracomm, folder: Path, stage: int
) -> None:
    """With columns that the model does not take, and steps after the last log; plain Trainer is given lists."""
    import datasets

    from tests.hf.trainer.runs import data, done_with, train, trainer_over_mpi

    expected = reference(comm, folder, logging_steps=3)
    sets = {
        name: datasets.Dataset.from_list(
            [
                {"text": f"row {n}", **{key: value.tolist() for key, value in row.items()}}
                for n, row in enumerate(rows)
            ]
        )
        for name, rows in data().items()
    }
    trainer = trainer_over_mpi(
        folder / "mpi", GLOBAL_BATCH // comm.size, datasets=sets, stage=stage, logging_steps=3
    )
    found = train(trainer, comm)
    problem = found.differs(expected)
    parallel_assert(comm, not problem, problem)
    done_with(trainer)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", [0, 3])
def test_equals_ddp_where_the_last_batch_is_incomplete(
    comm: MPI.Intracomm, folder: Path, stage: int
) -> None:
    """An incomplete round is filled with samples of the start, so one process is no reference for it."""
    from tests.hf.trainer.runs import data, done_with, train, trainer_over_mpi, with_ddp

    expected = with_ddp(comm, folder / "ddp", 3, datasets=data(47, 17))
    trainer = trainer_over_mpi(folder / "mpi", 3, datasets=data(47, 17), stage=stage)
    found = train(trainer, comm)
    problem = found.differs(expected)
    parallel_assert(comm, not problem, problem)
    done_with(trainer)


@pytest.mark.ranks(2, 3)
def test_model_without_a_number_of_items_equals_ddp(comm: MPI.Intracomm, folder: Path) -> None:
    """Its loss is a mean over its own samples; gradients are means over ranks."""
    from tests.hf.trainer.runs import NoLossArguments, done_with, train, trainer_over_mpi, with_ddp

    generator = torch.Generator().manual_seed(6)
    samples = [
        {
            "features": torch.randn(7, generator=generator),
            "labels": torch.randn(3, generator=generator),
        }
        for _ in range(31)
    ]
    sets = {"train_dataset": samples, "eval_dataset": samples[:11]}
    expected = with_ddp(comm, folder / "ddp", 2, model=NoLossArguments(), datasets=sets)
    trainer = trainer_over_mpi(folder / "mpi", 2, model=NoLossArguments(), datasets=sets)
    found = train(trainer, comm)
    problem = found.differs(expected)
    parallel_assert(comm, not problem, problem)
    done_with(trainer)


def test_goes_on_from_the_newest_sound_checkpoint_at_another_stage(
    comm: MPI.Intracomm, folder: Path
) -> None:
    """The newest was damaged where only its values are; dropout shows that random streams go on too."""
    from tests.hf.trainer.runs import done_with, llama, train, trainer_over_mpi

    batch = GLOBAL_BATCH // comm.size
    saving = {"save_strategy": "steps", "save_steps": 3}
    model = {"attention_dropout": 0.1}
    trainer = trainer_over_mpi(folder / "mpi", batch, llama(**model), stage=3, **saving)
    expected = train(trainer, comm)
    done_with(trainer)
    if comm.rank == 0:
        for step in (6, 8):
            path = folder / "mpi" / "checkpoints" / f"step-{step:09d}" / "state.h5"
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
    comm.Barrier()
    trainer = trainer_over_mpi(folder / "mpi", batch, llama(**model), stage=1, **saving)
    found = train(trainer, comm, resume=True)
    lost = [name for each in found.log for name in ("train_loss",) if name in each]
    parallel_assert(comm, len(lost) == 1, str(found.log))
    for run in (found, expected):
        run.log.pop()  # the mean loss since the start of the process
    problem = found.differs(expected)
    parallel_assert(comm, not problem, problem)
    done_with(trainer)


@pytest.mark.ranks(2)
def test_one_ranks_wish_to_stop_stops_all(comm: MPI.Intracomm, folder: Path) -> None:
    from transformers import TrainerCallback

    from tests.hf.trainer.runs import done_with, train, trainer_over_mpi

    class Tired(TrainerCallback):
        """Rank 1 wants to end, in the middle of a step."""

        def on_substep_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            control.should_training_stop = state.global_step == 2 and comm.rank == 1

    trainer = trainer_over_mpi(folder, 3, given={"callbacks": [Tired()]})
    train(trainer, comm)
    parallel_assert(comm, trainer.state.global_step == 2, str(trainer.state.global_step))
    done_with(trainer)


@pytest.mark.ranks(2)
def test_unequal_arguments_and_data_are_refused_on_all_ranks(
    comm: MPI.Intracomm, folder: Path
) -> None:
    from tests.hf.trainer.runs import data, trainer_over_mpi

    for said, changes in (
        ("learning_rate=", {"learning_rate": 1e-3 + comm.rank}),
        ("rank 1 has lengths", {"datasets": data(48 - comm.rank)}),
    ):
        text = ""
        try:
            trainer_over_mpi(folder, 3, **changes)
        except HpcZeroError as error:
            text = str(error)
        parallel_assert(comm, said in text, text)


@pytest.mark.ranks(2)
def test_ranks_with_fewer_batches_are_named_instead_of_waited_for(
    comm: MPI.Intracomm, folder: Path
) -> None:
    from torch.utils.data import IterableDataset

    from tests.hf.trainer.runs import rows, trainer_over_mpi

    class Uneven(IterableDataset):
        def __iter__(self) -> Any:
            return iter(rows(24 - 12 * comm.rank, 1))

    sets = {"train_dataset": Uneven(), "eval_dataset": rows(6, 2)}
    trainer = trainer_over_mpi(folder, 3, datasets=sets, max_steps=4)
    text = ""
    try:
        trainer.train()
    except HpcZeroError as error:
        text = str(error)
    parallel_assert(comm, "count the batches" in text or "ranks have" in text, text)
