"""Data sets of the library ``datasets`` through ResumableLoader: the rows of one process, an exact resume, by name."""

from __future__ import annotations

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from hpczero.data import Sampler
from hpczero.data.loading import ResumableLoader
from hpczero.errors import ConfigError
from tests.data.test_resumable_loader import rank_of
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero.job.topology import Topology

# Others' code warns of itself; a warning of hpczero's is an error as everywhere.
pytestmark = pytest.mark.filterwarnings("ignore", "error:::hpczero")
ROWS = 29


def dataset(folder: Path, shift: int = 0) -> Any:
    """Saved and loaded, of two files, with an order of its own, and columns of numbers, lists and texts."""
    import datasets

    made = datasets.Dataset.from_dict(
        {
            "number": [n + shift for n in range(ROWS)],
            "x": [[n / 7, n % 3, 1.0] for n in range(ROWS)],
            "text": [f"row {n}" for n in range(ROWS)],
        }
    )
    if not folder.exists():
        made.save_to_disk(folder, num_shards=2)
    return datasets.load_from_disk(folder).shuffle(seed=2, keep_in_memory=True)


def noisy(rows: dict[str, Any]) -> dict[str, Any]:
    """What augmentation draws."""
    return {**rows, "noise": [random.random() + float(torch.rand(())) for _ in rows["number"]]}


def loader(data: Any, rank: int, size: int, **options: Any) -> ResumableLoader:
    given = {"global_batch": 6, "seed": 3, **options}
    return ResumableLoader(data, topology=rank_of(rank, size), **given)


def seen(loaders: list[ResumableLoader], steps: int) -> list[tuple[Any, ...]]:
    """Samples of ``steps`` global batches in the order of ranks, over the ends of epochs."""
    found: list[tuple[Any, ...]] = []
    while steps > 0:
        for parts in zip(*loaders, strict=True):
            for batch in parts:
                columns = [
                    value.tolist() if isinstance(value, torch.Tensor) else value
                    for value in (
                        batch["number"],
                        batch["text"],
                        batch.get("noise", batch["number"]),
                    )
                ]
                found += zip(*columns, strict=True)
            steps -= 1
            if not steps:
                break
    return found


@pytest.mark.parametrize(("before", "after", "taken"), [(1, 3, 5), (3, 2, 2), (2, 1, 4)])
@pytest.mark.parametrize("draws", [True, False])
def test_resume_on_other_ranks_gives_the_rows_that_would_have_come(
    tmp_path: Path, before: int, after: int, taken: int, draws: bool
) -> None:
    data = dataset(tmp_path / "d")
    data = data.with_transform(noisy) if draws else data.with_format("torch")
    whole = seen([loader(data, 0, 1, draws=draws)], 9)
    order = Sampler(ROWS, 3)
    places = [*range(24), *range(ROWS, ROWS + 24)]
    plain = [data[order.sample(place)] for place in places]
    assert [row[1] for row in whole[:48]] == [row["text"] for row in plain]
    first = [loader(data, rank, before, draws=draws) for rank in range(before)]
    assert seen(first, taken) == whole[: taken * 6]
    state = first[-1].state_dict()
    again = dataset(tmp_path / "d")  # of another job, loaded anew
    again = again.with_transform(noisy) if draws else again.with_format("torch")
    second = [loader(again, rank, after, draws=draws) for rank in range(after)]
    for each in second:
        each.load_state_dict(state)
    assert seen(second, 9 - taken) == whole[taken * 6 :]


def test_other_rows_of_the_same_number_are_refused_by_name(tmp_path: Path) -> None:
    state = loader(dataset(tmp_path / "a"), 0, 1).state_dict()
    with pytest.raises(ConfigError, match="of other batches \\(fingerprint was"):
        loader(dataset(tmp_path / "b", shift=1), 0, 1).load_state_dict(state)
    loader(dataset(tmp_path / "a").with_format("numpy"), 0, 1).load_state_dict(state)


def test_streams_are_refused_with_the_reason(tmp_path: Path) -> None:
    stream = dataset(tmp_path / "d").to_iterable_dataset(num_shards=2)
    with pytest.raises(ConfigError, match=r"IterableDataset.*no samples by number.*one process"):
        loader(stream, 0, 1)


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
def test_training_goes_on_from_one_process_as_plain_torch_would(
    comm: MPI.Intracomm, topology: Topology, folder: Path
) -> None:
    """Plain torch trains 7 steps; one process takes 3 of them, all ranks the rest."""
    import hpczero

    if comm.rank == 0:
        dataset(folder / "d")
    comm.Barrier()
    data = dataset(folder / "d").with_format("torch", columns=["number", "x"])

    def model() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1))
        return made, torch.optim.SGD(made.parameters(), lr=1e-2)

    def train(net: nn.Module, optimizer: torch.optim.Optimizer, batches: Any, steps: int) -> None:
        while steps > 0:
            for batch in batches:
                target = batch["number"].float()[:, None] / ROWS
                nn.functional.mse_loss(net(batch["x"]), target).backward()
                optimizer.step(), optimizer.zero_grad()
                steps -= 1
                if not steps:
                    break

    plain, plain_optimizer = model()
    order = Sampler(ROWS, 3)
    places = [*range(24), *range(ROWS, ROWS + 18)]
    rows = [data[order.sample(place)] for place in places]
    batches = [
        torch.utils.data.default_collate(rows[start : start + 6]) for start in range(0, 42, 6)
    ]
    train(plain, plain_optimizer, batches, 7)
    sharded, optimizer = model()
    alone = loader(data, 0, 1)
    train(sharded, optimizer, alone, 3)
    sharded = hpczero.zeroify(sharded, optimizer, stage=3, topology=topology)
    mine = ResumableLoader(data, global_batch=6, topology=topology, seed=3)
    mine.load_state_dict(alone.state_dict())
    train(sharded, optimizer, mine, 4)
    found = hpczero.full_state_dict(sharded) or {}
    wrong = {
        name: float((value - plain.state_dict()[name]).abs().max())
        for name, value in found.items()
        if not torch.allclose(plain.state_dict()[name], value, atol=1e-6, rtol=0)
    }
    parallel_assert(comm, not wrong and mine.taken == 7, f"{wrong}")
    parallel_assert(comm, np.isfinite(sum(float(v.sum()) for v in found.values())))
