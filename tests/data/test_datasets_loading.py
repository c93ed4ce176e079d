"""Data sets of the library ``datasets`` through ResumableLoader: the rows of one process, an exact resume, by name."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from hpczero.data import Sampler
from hpczero.data.loading import ResumableLoader
from hpczero.errors import ConfigError
from tests.data.test_resumable_loader import check_resume, rank_of, taken

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
    """Samples of ``steps`` global batches."""
    found: list[tuple[Any, ...]] = []
    for batch in taken(loaders, steps):
        columns = (batch["number"], batch["text"], batch.get("noise", batch["number"]))
        lists = [c.tolist() if isinstance(c, torch.Tensor) else c for c in columns]
        found += zip(*lists, strict=True)
    return found


@pytest.mark.parametrize(("before", "after", "steps"), [(1, 3, 5), (3, 2, 2), (2, 1, 4)])
@pytest.mark.parametrize("draws", [True, False])
def test_resume_on_other_ranks_gives_the_rows_that_would_have_come(
    tmp_path: Path, before: int, after: int, steps: int, draws: bool
) -> None:
    def data() -> Any:
        """Loaded anew, as by another job."""
        loaded = dataset(tmp_path / "d")
        return loaded.with_transform(noisy) if draws else loaded.with_format("torch")

    def make(rank: int, size: int) -> ResumableLoader:
        return loader(data(), rank, size, draws=draws)

    whole = seen([make(0, 1)], 9)
    order, plain = Sampler(ROWS, 3), data()
    places = [*range(24), *range(ROWS, ROWS + 24)]
    assert [row[1] for row in whole[:48]] == [plain[order.sample(n)]["text"] for n in places]
    check_resume(seen, whole, make, before, after, steps)


def test_other_rows_of_the_same_number_are_refused_by_name(tmp_path: Path) -> None:
    state = loader(dataset(tmp_path / "a"), 0, 1).state_dict()
    with pytest.raises(ConfigError, match="of other batches \\(fingerprint was"):
        loader(dataset(tmp_path / "b", shift=1), 0, 1).load_state_dict(state)
    loader(dataset(tmp_path / "a").with_format("numpy"), 0, 1).load_state_dict(state)


def test_streams_are_refused_with_the_reason(tmp_path: Path) -> None:
    stream = dataset(tmp_path / "d").to_iterable_dataset(num_shards=2)
    with pytest.raises(ConfigError, match=r"IterableDataset.*no samples by number.*one process"):
        loader(stream, 0, 1)
