"""The format: the table, the grid of slabs, the manifest that tells when it was changed."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.checkpoint.disk.format import (
    Dataset,
    Manifest,
    Row,
    Table,
    step_folder,
    step_of_folder,
)
from hpczero.errors import CheckpointMismatch, CorruptCheckpoint


def table() -> Table:
    return Table.build(
        [("a", (3, 2), 0), ("cold", (4,), -1), ("b", (), 1), ("empty", (0, 5), 0)], {"again": "a"}
    )


def manifest() -> Manifest:
    dataset = Dataset("/state/master", "<f4", 11, 4, 2048, ("0" * 16, "1" * 16, "2" * 16))
    return Manifest(
        7, "2026-01-01T00:00:00+00:00", 3, table(), (dataset,), 4096, "f" * 16, {"x": 1.5}
    )


def test_parameters_lie_end_to_end_trainable_ones_first() -> None:
    rows = {row.name: row for row in table().rows}
    assert [row.name for row in table().rows] == ["a", "b", "empty", "cold", "again"]
    assert [rows[name].offset for name in ("a", "b", "empty", "cold")] == [0, 6, 7, 7]
    assert (table().numel, table().trainable_numel) == (11, 7)
    assert rows["again"] == Row("again", (3, 2), 0, 0, tied_to=0)
    assert rows["cold"].frozen
    assert not rows["a"].frozen


def test_range_is_named_by_its_parameters() -> None:
    assert table().overlapping(4, 8) == ["a[4:6]", "b[0:1]", "cold[0:1]"]
    assert table().overlapping(11, 20) == []


@given(
    numel=st.integers(0, 10_000),
    slab=st.integers(1, 4000),
    size=st.integers(1, 40),
)
def test_slabs_tile_the_dataset_and_ranks_tile_the_slabs(numel: int, slab: int, size: int) -> None:
    dataset = Dataset("/x", "<f4", numel, slab)
    elements = [element for i in range(dataset.num_slabs) for element in dataset.slab(i)]
    assert elements == list(range(numel))
    shares = [dataset.slabs_of(rank, size) for rank in range(size)]
    assert [slab for share in shares for slab in share] == list(range(dataset.num_slabs))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_manifest_says_what_it_said() -> None:
    assert Manifest.from_json(manifest().to_json()) == manifest()


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_manifest_that_is_not_whole_is_corrupt(cut: int) -> None:
    with pytest.raises(CorruptCheckpoint, match="not whole"):
        Manifest.from_json(manifest().to_json()[:cut])


def test_any_change_of_the_manifest_is_found() -> None:
    text = manifest().to_json()
    for place in range(len(text)):
        changed = text[:place] + chr(ord(text[place]) ^ 1) + text[place + 1 :]
        with pytest.raises((CorruptCheckpoint, CheckpointMismatch)):
            Manifest.from_json(changed)


def test_later_version_asks_for_an_upgrade() -> None:
    later = Manifest(**{**manifest().__dict__, "version": 2})
    with pytest.raises(CheckpointMismatch, match=r"format version is 2.*upgrade hpczero"):
        Manifest.from_json(later.to_json())


def test_other_json_is_not_a_manifest() -> None:
    for text in ("[]", "3", "{}", json.dumps({"format": "x", "sha256": "y"})):
        with pytest.raises(CorruptCheckpoint):
            Manifest.from_json(text)


@pytest.mark.parametrize("step", [0, 7, 123_456_789, 9_999_999_999])
def test_step_names_its_folder(step: int) -> None:
    assert step_of_folder(step_folder(step)) == step


@pytest.mark.parametrize(
    "name", ["step-7", "step-xyz", ".tmp-step-000000007", "step-0000000007", "step-000000007.bak"]
)
def test_other_names_are_not_ours(name: str) -> None:
    assert step_of_folder(name) is None
