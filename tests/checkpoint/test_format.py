"""The format: the table, the grid of slabs, the manifest that tells when it was changed, and what it cannot say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpczero.checkpoint.__main__ import Verdict, verify
from hpczero.checkpoint.disk.format import (
    MANIFEST_FILE,
    STATE_FILE,
    Dataset,
    Manifest,
    Row,
    Table,
    step_folder,
    step_of_folder,
)
from hpczero.checkpoint.disk.stored import BUFFER_ITEMSIZES, Stored
from hpczero.errors import CheckpointMismatch, CorruptCheckpoint
from tests.checkpoint.damage import Change, golden_copy, put, resigned
from tests.checkpoint.programs import Program
from tests.files.test_regular import at_once
from tests.helpers.world import World


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


def test_other_json_is_not_a_manifest() -> None:
    for text in ("[]", "3", "{}", json.dumps({"format": "x", "sha256": "y"})):
        with pytest.raises(CorruptCheckpoint):
            Manifest.from_json(text)


@pytest.mark.parametrize("step", [0, 7, 123_456_789, 9_999_999_999])
def test_step_names_its_folder(step: int) -> None:
    assert step_of_folder(step_folder(step)) == step


# --- what is signed and cannot be: refused by its field, before anything is read


def in_dataset(place: int, **fields: Any) -> Change:
    return lambda body: body["datasets"][place].update(fields)


def in_meta(**fields: Any) -> Change:
    return lambda body: body["meta"].update(fields)


def in_row(column: int, value: Any, row: int = 1) -> Change:
    return lambda body: body["parameters"][row].__setitem__(column, value)


def in_optimizer(**fields: Any) -> Change:
    return lambda body: body["meta"]["optimizer"].update(fields)


def in_group(place: int, **fields: Any) -> Change:
    return lambda body: body["meta"]["optimizer"]["groups"][place].update(fields)


CHANGES: dict[str, Change] = {
    "offset below 0": in_dataset(0, offset=-4096),
    "offset behind the end": in_dataset(0, offset=2**40),
    "offset of very many digits": in_dataset(0, offset=10**4000),
    "offset that is no number": in_dataset(0, offset="0"),
    "offset that is true": in_dataset(0, offset=True),
    "one dataset over another": lambda b: b["datasets"][1].update(
        offset=b["datasets"][0]["offset"]
    ),
    "elements below 0": in_dataset(0, numel=-5, digests=[]),
    "elements without end": in_dataset(0, numel=2**62),
    "slabs of nothing": in_dataset(0, slab_numel=0),
    "slabs larger than memory": in_dataset(0, slab_numel=2**62, digests=["0" * 16]),
    "too few digests": lambda b: b["datasets"][0]["digests"].pop(),
    "no digest": lambda b: b["datasets"][0]["digests"].__setitem__(0, "x"),
    "foreign dtype": in_dataset(0, dtype="<f8"),
    "a dataset twice": lambda b: b["datasets"].append(b["datasets"][0]),
    "a dataset more": lambda b: b["datasets"].append(
        {"name": "/x", "dtype": "<f4", "numel": 0, "slab_numel": 1, "offset": 0, "digests": []}
    ),
    "a dataset less": lambda b: b["datasets"].pop(1),
    "a dataset that is none": lambda b: b["datasets"].append(7),
    "a field more": in_dataset(0, colour="red"),
    "no datasets": lambda b: b.pop("datasets"),
    "file size below 0": lambda b: b["file"].update(nbytes=-1),
    "file that is none": lambda b: b.update(file=[]),
    "step of very many digits": lambda b: b.update(step=10**4000),
    "ranks below 0": lambda b: b.update(world_size=-2),
    "ranks without end": lambda b: b.update(world_size=2**31 - 1),
    "version below 1": lambda b: b.update(version=0),
    "shape below 0": in_row(1, [-1]),
    "shape without end": in_row(1, [2**62, 2**62]),
    "shape that is none": in_row(1, "3"),
    "place of a parameter": in_row(2, 0),
    "tied to nothing": in_row(4, 10**6, -1),
    "tied to itself": in_row(4, 1, 1),
    "a name twice": lambda b: b["parameters"].append(b["parameters"][0]),
    "half a character": in_row(0, "\ud800"),
    "parameters that are none": lambda b: b.update(parameters={}),
    "no meta": lambda b: b.pop("meta"),
    "no optimizer": lambda b: b["meta"].pop("optimizer"),
    "optimizer that is none": in_meta(optimizer=[]),
    "kind that is none": lambda b: b["meta"]["optimizer"]["kinds"].update(exp_avg="x"),
    "kinds without values": in_optimizer(present={}),
    "state of a stranger": lambda b: b["meta"]["optimizer"]["present"]["exp_avg"].update(who=None),
    "groups that are none": in_optimizer(groups=[3]),
    "optimizers that are none": in_optimizer(optimizers="AdamW"),
    "optimizers of which there is one": in_optimizer(optimizers=[["AdamW", 2]]),
    "optimizers without groups": in_optimizer(optimizers=[["AdamW"], ["SGD", 1]]),
    "optimizers with other groups": in_optimizer(optimizers=[["AdamW", 2], ["SGD", 1]]),
    "optimizers with fewer groups than none": in_optimizer(optimizers=[["A", 3], ["B", -1]]),
    "buffer without end": lambda b: b["meta"]["buffers"].append(["x", "float32", [2**40]]),
    "buffer that is none": lambda b: b["meta"]["buffers"].append("x"),
    "buffer of a foreign dtype": lambda b: b["meta"]["buffers"].append(["x", "object", [0]]),
    "streams without end": lambda b: b["meta"]["rng"].append(["x", 2**50]),
    "streams that are none": in_meta(rng=None),
    "extra that is none": in_meta(extra=[]),
    "loss scale below 0": in_meta(loss_scale={"scaled": True, "scale": -1, "good_steps": 0}),
    "loss scale that is none": in_meta(loss_scale=None),
    "skipped steps below 0": in_meta(skipped_steps=-1),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_cannot_be_is_refused_though_it_is_signed(tmp_path: Path, name: str) -> None:
    path = golden_copy(tmp_path)
    resigned(path, CHANGES[name])
    report = verify(path)
    assert report.verdict is Verdict.CORRUPT
    assert len(report.problems[0]) < 600
    with pytest.raises(CorruptCheckpoint, match=r"manifest.json cannot be|bytes, expected"):
        Stored(path)


def test_signing_alone_is_no_harm(tmp_path: Path) -> None:
    path = golden_copy(tmp_path)
    resigned(path, lambda body: None)
    assert verify(path).verdict is Verdict.SOUND


@pytest.mark.parametrize("name", [MANIFEST_FILE, STATE_FILE])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "loop"])
def test_what_is_no_file_is_refused_at_once(tmp_path: Path, name: str, kind: str) -> None:
    path = golden_copy(tmp_path)
    (path / name).unlink()
    put(path / name, kind)
    with at_once():
        assert verify(path).verdict in (Verdict.CORRUPT, Verdict.INCOMPLETE)
        with pytest.raises(CorruptCheckpoint, match=name):
            Stored(path)


def test_every_dtype_that_a_buffer_can_have_has_its_size() -> None:
    """Or a checkpoint of such a model could be saved and not be loaded."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    for dtype in dtypes:
        name = str(dtype).removeprefix("torch.")
        if not name.startswith(("q", "bits", "uint", "int", "float4")) or name in BUFFER_ITEMSIZES:
            assert BUFFER_ITEMSIZES[name] == dtype.itemsize
    assert {
        f"{kind}int{n}" for kind in ("", "u") for n in (8, 16, 32, 64)
    } <= BUFFER_ITEMSIZES.keys()


LIES: dict[str, tuple[type[Exception], Change, str]] = {
    "a rate": (CheckpointMismatch, in_group(1, lr="fast"), "lr of group 1 is 'fast'"),
    "a pair": (CheckpointMismatch, in_group(0, betas=[0.9]), "betas of group 0"),
    "streams": (
        CorruptCheckpoint,
        lambda b: b["meta"]["rng"][0].__setitem__(1, b["meta"]["rng"][0][1] - 1),
        "dataset /rng",
    ),
}


@pytest.mark.mpi
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", LIES)
def test_what_only_a_load_can_judge_is_refused_by_it(
    world: World, program: Program, name: str
) -> None:
    kind, change, said = LIES[name]
    path = program.save(world.folder)
    world.on_root(resigned, path, change)
    world.raises(kind, said, program.load, path)
