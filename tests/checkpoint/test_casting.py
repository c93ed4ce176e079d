"""Values in another dtype: rounded as torch rounds them, and every one that the dtype cannot hold is found."""

from __future__ import annotations

import pytest
import torch

from hpczero.checkpoint.foreign import weight_files
from hpczero.errors import CheckpointMismatch

SHAPES = ((), (3001,), (7, 433), (1, 5000), (40, 3, 30))


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_value_beyond_the_dtype_is_found_anywhere_in_a_large_tensor(
    shape: tuple[int, ...], turned: bool, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_files, "CHECKED_NUMEL", 1000)
    values = torch.linspace(-9, 9, torch.Size(shape).numel()).view(shape)
    seen = values.movedim(0, -1) if turned and shape else values
    assert torch.equal(weight_files.cast(seen, torch.float16, "w"), seen.half())
    values.view(-1)[0 if place == "first" else -1] = 70000.0
    with pytest.raises(CheckpointMismatch, match=r"w holds 70000, which torch\.float16 cannot"):
        weight_files.cast(seen, torch.float16, "w")


def test_an_infinite_value_stays_infinite() -> None:
    values = torch.tensor([float("inf"), 1.0])
    assert torch.equal(weight_files.cast(values, torch.float16, "w"), values.half())


def test_a_whole_number_that_would_change_is_found() -> None:
    with pytest.raises(CheckpointMismatch):
        weight_files.cast(torch.arange(2**24, 2**24 + 3), torch.float32, "w")
