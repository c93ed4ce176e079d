"""Token files of version 1, which carry no digests: read with a warning, refused where they cannot be."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpczero.data import ByteTokenizer, TokenFile, seal
from hpczero.errors import ConfigError, DataError
from tests.data.test_token_damage import content


def old_file(path: Path, ids: list[int] | None = None) -> Path:
    """As version 1 was written: by h5py alone."""
    with h5py.File(path, "w") as made:
        made.attrs.update({"format": "hpczero tokens", "version": 1, "source_sha256": "ab"})
        made.attrs["tokenizer"] = ByteTokenizer().to_json()
        for split in ("train", "validation"):
            group = made.create_group(split)
            group.attrs.update({"documents": 1, "text_nbytes": 5})
            row = np.array(ids or [*b"hello", 256], dtype=np.uint16)
            group.create_dataset("tokens", data=row, chunks=(4,), maxshape=(None,))
    return path


def test_old_file_is_read_with_a_warning_that_says_what_to_do(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = old_file(tmp_path / "old.h5")
    with caplog.at_level(logging.WARNING), TokenFile.open(path) as found:
        assert found.version == 1
        assert found.train[:].tolist() == [*b"hello", 256]
        assert (found.validation.documents, found.source_sha256) == (1, "ab")
    (warned,) = caplog.records
    assert f"python -m hpczero.data seal {path}" in warned.getMessage()
    before = content(path)
    caplog.clear()
    seal(path)
    assert not caplog.records[1:]  # but for the reading of the old one
    with TokenFile.open(path) as found:
        assert found.version == 2
        found.train.check()
    assert content(path) == before
    with pytest.raises(ConfigError, match="has digests already"):
        seal(path)


def test_old_file_with_foreign_ids_is_refused_when_read(tmp_path: Path) -> None:
    path = old_file(tmp_path / "old.h5", [1, 2, 300])
    with TokenFile.open(path) as found:
        assert found.train[:2].tolist() == [1, 2]
        with pytest.raises(DataError, match="hold token id 300"):
            found.train[1:3]
    with pytest.raises(DataError, match="hold token id 300"):
        seal(path)
    with TokenFile.open(path) as found:  # is as it was
        assert found.version == 1


def external_link(file: h5py.File, other: Path) -> None:
    del file["train"]
    file["train"] = h5py.ExternalLink(other, "/train")


def external_tokens(file: h5py.File, other: Path) -> None:
    del file["train/tokens"]
    file["train/tokens"] = h5py.ExternalLink(other, "/train/tokens")


def soft_link(file: h5py.File, other: Path) -> None:
    file["elsewhere"] = h5py.ExternalLink(other, "/train")
    del file["train"]
    file["train"] = h5py.SoftLink("/elsewhere")


def external_storage(file: h5py.File, other: Path) -> None:
    del file["train/tokens"]
    file["train"].create_dataset("tokens", (6,), "<u2", external=[(str(other), 0, 12)])


def virtual(file: h5py.File, other: Path) -> None:
    del file["train/tokens"]
    layout = h5py.VirtualLayout((6,), "<u2")
    layout[:] = h5py.VirtualSource(other, "train/tokens", (6,))
    file["train"].create_virtual_dataset("tokens", layout)


@pytest.mark.parametrize(
    ("lead_out", "said"),
    [
        (external_link, "train is a link to the file '.*other.h5', expected to be in itself"),
        (external_tokens, "tokens is a link to the file '.*other.h5'"),
        (soft_link, "train is a link to '/elsewhere'"),
        (external_storage, "/train/tokens keeps its tokens in '.*other.h5'"),
        (virtual, "/train/tokens is put together of other datasets"),
    ],
)
def test_what_leads_out_of_the_file_is_refused_by_name(
    tmp_path: Path, lead_out: Callable[[h5py.File, Path], None], said: str
) -> None:
    other, path = old_file(tmp_path / "other.h5"), old_file(tmp_path / "old.h5")
    with h5py.File(path, "r+") as opened:
        lead_out(opened, other)
    with pytest.raises(DataError, match=rf"old.h5: not a usable token file: {said}"):
        TokenFile.open(path)


def remove(name: str) -> Callable[[h5py.File], None]:
    def damage(opened: h5py.File) -> None:
        if name in opened.attrs:
            del opened.attrs[name]
        else:
            del opened[name]

    return damage


def set_attribute(name: str, value: object) -> Callable[[h5py.File], None]:
    return lambda opened: opened.attrs.__setitem__(name, value)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (remove("format"), "its format is None, expected 'hpczero tokens'"),
        (set_attribute("version", 3), "it has version 3, this hpczero reads up to version 2"),
        (set_attribute("version", "x"), "invalid literal"),
        (set_attribute("tokenizer", "{"), "malformed tokenizer description"),
        (set_attribute("tokenizer", "[" * 50_000), "malformed tokenizer description"),
        (remove("tokenizer"), "tokenizer"),
        (remove("train"), "train"),
        (remove("train/tokens"), "tokens"),
        (
            lambda opened: opened["validation/tokens"].resize(0, axis=0),
            r"/validation/tokens has dtype uint16 and shape \(0,\)",
        ),
    ],
)
def test_damaged_old_files_are_refused_with_the_fault(
    tmp_path: Path, damage: Callable[[h5py.File], None], said: str
) -> None:
    path = old_file(tmp_path / "old.h5")
    with h5py.File(path, "r+") as opened:
        damage(opened)
    with pytest.raises(DataError, match=rf"old.h5: not a usable token file: .*{said}"):
        TokenFile.open(path)
