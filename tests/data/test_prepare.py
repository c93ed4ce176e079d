"""Token files: written whole, read with plain h5py, split without a leak, refused when damaged."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.data import (
    BPETokenizer,
    ByteTokenizer,
    Corpus,
    TokenFile,
    corpus,
    default_token_file,
    prepare,
)
from hpczero.data import token_writer as tokenwriter
from hpczero.data.prepare import training_length
from hpczero.errors import ConfigError, DataError
from hpczero.job.long_work import LongWork, Progress
from tests.data.blocks import blocks_of


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """40 documents of 100 to 490 bytes; each line names its document."""
    for index in range(40):
        text = "".join(f"{index:02} ünter\n" for _ in range(10 + index))
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{index}.txt").write_text(text, encoding="utf-8")
    return tmp_path / "text"


def make(folder: Path, out: Path, **options: Any) -> Path:
    prepare(Corpus.of_paths([folder]), out, **options)
    return out


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The texts that a vocabulary is learned from; it is that of another text."""
    seen: list[bytes] = []
    train: Callable[..., BPETokenizer] = BPETokenizer.train

    def spy(texts: Any, vocab_size: int, **options: Any) -> BPETokenizer:
        seen.extend(texts)
        return train([b"abc"], vocab_size)

    monkeypatch.setattr(BPETokenizer, "train", spy)
    return seen


def test_file_read_with_plain_h5py_is_the_corpus(folder: Path, tmp_path: Path) -> None:
    out = make(folder, tmp_path / "new/tokens.h5", validation_fraction=0.2)
    corpus = Corpus.of_paths([folder])
    expected = [[*b"".join(blocks_of(document)), 256] for document in corpus.documents]
    with h5py.File(out, "r") as file:
        assert json.loads(file.attrs["tokenizer"]) == {"kind": "bytes"}
        assert file.attrs["format"] == "hpczero tokens"
        assert file.attrs["version"] == 2
        assert file.attrs["source_sha256"] == corpus.digest
        train, validation = file["train"], file["validation"]
        assert train["tokens"].dtype == validation["tokens"].dtype == np.uint16
        together = np.concatenate([train["tokens"][:], validation["tokens"][:]])
        assert together.tolist() == list(itertools.chain(*expected))
        assert train.attrs["documents"] + validation.attrs["documents"] == 40
        held_out = int(validation.attrs["text_nbytes"])
        assert train.attrs["text_nbytes"] + held_out == corpus.nbytes
        # the cut moves to the end of its line, at most 10 bytes
        assert 0 <= corpus.nbytes * 0.2 - held_out <= 10
    assert [path.name for path in out.parent.iterdir()] == ["tokens.h5"]


def test_reader_gives_slices_counts_and_ratio(folder: Path, tmp_path: Path) -> None:
    with TokenFile.open(make(folder, tmp_path / "tokens.h5")) as file:
        assert file.vocab_size == 257
        assert file.train[3:7].tolist() == file.train[0:10].tolist()[3:7]
        first = file.tokenizer.decode(file.train[:10].tolist()).decode()
        assert re.fullmatch(r"\d\d ünter\n", first)
        separators = file.train[: len(file.train)].tolist().count(256)
        assert separators == file.train.documents > 30
        assert file.train.bytes_per_token == 1 - separators / len(file.train)


def test_documents_are_held_out_whole_but_for_one(folder: Path, tmp_path: Path) -> None:
    with TokenFile.open(make(folder, tmp_path / "tokens.h5", validation_fraction=0.3)) as file:
        lines = [
            set(file.tokenizer.decode(split[: len(split)].tolist()).splitlines())
            for split in (file.train, file.validation)
        ]
    assert all(len(kind) > 8 for kind in lines)
    assert len(lines[0] & lines[1]) <= 1
    assert len(lines[0] | lines[1]) == 40


def test_end_of_a_single_file_is_held_out(tmp_path: Path) -> None:
    text = b"".join(b"line %d\n" % index for index in range(100))
    (tmp_path / "book.txt").write_bytes(text)
    with TokenFile.open(make(tmp_path / "book.txt", tmp_path / "book.h5")) as file:
        train, held_out = (
            file.tokenizer.decode(split[: len(split)].tolist())
            for split in (file.train, file.validation)
        )
        assert (file.train.documents, file.validation.documents) == (0, 1)
    assert train + held_out == text
    assert train.endswith(b"\n")
    assert held_out.endswith(b"line 99\n")


@given(block=st.text("aé☃\n", min_size=1, max_size=12).map(str.encode), at=st.integers(-3, 40))
def test_cut_never_divides_a_character_and_prefers_the_end_of_a_line(block: bytes, at: int) -> None:
    length = training_length(block, at)
    block[:length].decode()
    block[length:].decode()
    if not 0 < at < len(block):
        assert length == min(max(at, 0), len(block))
    elif b"\n" in block[at:-1]:
        assert length > at
        assert block[length - 1 : length] == b"\n"
    else:
        assert at - 2 <= length <= at


@given(junk=st.integers(1, 40), at=st.integers(1, 39))
def test_cut_of_what_is_no_text_stays_where_it_is(junk: int, at: int) -> None:
    assert training_length(b"\x80" * junk, at) == min(at, junk)


@pytest.mark.parametrize("at", [5_000, 99_000])  # learned from, and held out
def test_text_that_is_not_utf8_is_told_with_file_and_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    monkeypatch.setattr(corpus, "BLOCK_NBYTES", 1000)
    text = bytearray(b"hello world\n" * 8334)
    text[at] = 0xFF
    (tmp_path / "bad.txt").write_bytes(text)
    told = re.escape(f"{tmp_path}/bad.txt: byte 0xff at offset {at:,} is not UTF-8")
    with pytest.raises(DataError, match=told):
        make(tmp_path / "bad.txt", tmp_path / "t.h5", tokenizer="bpe", vocab_size=300)


def test_long_words_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "long.txt").write_bytes(b"a" * 200_000)
    (tmp_path / "texts" / "good.txt").write_bytes(b"hello world\n" * 100)
    make(tmp_path / "texts", tmp_path / "t.h5", tokenizer="bpe", vocab_size=300)
    told = [record.getMessage() for record in caplog.records if "has a word" in record.getMessage()]
    assert len(told) == 1
    assert f"{tmp_path}/texts/long.txt: has a word of more than 256 characters" in told[0]


def test_every_file_is_a_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long each look at a file takes, no two of them are without a sign between."""
    for name in range(20):
        (tmp_path / f"{name}.txt").write_text(f"text number {name}\n")
    progress, looks, most = Progress(), 0, 0

    def looked(call: Callable[..., Any]) -> Callable[..., Any]:
        def look(*args: Any, **options: Any) -> Any:
            nonlocal looks, most
            looks = 0 if progress.got_on.is_set() else looks + 1
            progress.got_on.clear()
            most = max(most, looks)
            return call(*args, **options)

        return look

    monkeypatch.setattr(Path, "stat", looked(Path.stat))
    monkeypatch.setattr(Path, "resolve", looked(Path.resolve))
    found = Corpus.of_paths([tmp_path], progress)
    (tmp_path / "t.h5").write_bytes(b"")
    with suppress(DataError):  # it is no token file; all sources were looked at before
        prepare(found, tmp_path / "t.h5", progress=progress)
    assert most <= 2  # one path may be looked at twice


def test_words_of_one_long_block_are_no_hang_while_they_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    train: Callable[..., BPETokenizer] = BPETokenizer.train

    def spy(texts: Any, vocab_size: int, **options: Any) -> BPETokenizer:
        seen.append(progress.is_computing and not progress.is_silent)
        return train(texts, vocab_size, **options)

    monkeypatch.setattr(BPETokenizer, "train", spy)
    (tmp_path / "a.txt").write_text("text\n" * 1000)
    progress = Progress()
    found = Corpus.of_paths([tmp_path / "a.txt"])
    prepare(found, tmp_path / "t.h5", tokenizer="bpe", vocab_size=300, progress=progress)
    assert seen == [True]
    assert not progress.is_computing


def test_long_wait_for_encoders_is_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While another thread computes, processor time is a sign of life, and the work is not left alone."""
    begun, let_go = threading.Event(), threading.Event()
    encode_all: Callable[..., Any] = ByteTokenizer.encode_all

    def slow(self: ByteTokenizer, texts: Any) -> Any:
        begun.set()
        while not let_go.is_set():
            hashlib.sha256(bytes(2**20)).digest()
        return encode_all(self, texts)

    monkeypatch.setattr(ByteTokenizer, "encode_all", slow)
    (tmp_path / "a.txt").write_text("text\n" * 1000)
    found = Corpus.of_paths([tmp_path / "a.txt"])
    task = LongWork(lambda progress: prepare(found, tmp_path / "t.h5", progress=progress))
    assert begun.wait(20)
    task.has_got_on()
    assert any(task.has_got_on() or task.wait(0.1) for _ in range(100))
    assert not task.progress.is_silent
    let_go.set()
    task.result()


def test_bpe_file_decodes_to_the_text_and_has_its_vocabulary(folder: Path, tmp_path: Path) -> None:
    plain = make(folder, tmp_path / "plain.h5")
    merged = make(folder, tmp_path / "merged.h5", tokenizer="bpe", vocab_size=290)
    with TokenFile.open(plain) as by_bytes, TokenFile.open(merged) as by_pairs:
        for name in ("train", "validation"):
            one, other = getattr(by_bytes, name), getattr(by_pairs, name)
            assert len(other) < len(one) / 2
            assert other.text_nbytes == one.text_nbytes
            assert by_pairs.tokenizer.decode(other[: len(other)].tolist()) == (
                by_bytes.tokenizer.decode(one[: len(one)].tolist())
            )
        assert 257 < by_pairs.vocab_size <= 290
        assert by_pairs.train.dtype == np.uint16


def test_large_vocabularies_get_wider_tokens(tmp_path: Path) -> None:
    class Wide(ByteTokenizer):
        vocab_size = 70_000

    with tokenwriter.create(tmp_path / "wide.h5", Wide(), "") as writer:
        for split in (0, 1):
            writer.append(split, writer.checked(np.array([69_999, 0]), split))
    with h5py.File(tmp_path / "wide.h5") as file:
        assert file["train/tokens"].dtype == np.uint32
        assert file["train/tokens"][:].tolist() == [69_999, 0]


def test_failure_leaves_no_file_and_keeps_the_old_one(tmp_path: Path, folder: Path) -> None:
    out = make(folder, tmp_path / "out/tokens.h5")
    before = out.read_bytes()
    (folder / "bad").write_bytes(b"\xff" * 5000)
    with pytest.raises(DataError, match="not UTF-8"):
        make(folder, out, tokenizer="bpe", vocab_size=290)
    corpus = Corpus.of_paths([folder])
    (folder / "bad").write_bytes(b"\xff")  # shorter than when it was measured
    with pytest.raises(DataError, match="had 5000 a moment ago"):
        prepare(corpus, out)
    assert out.read_bytes() == before
    assert list(out.parent.iterdir()) == [out]


ENOUGH = "some lines\n" * 100
BPE: dict[str, Any] = {"tokenizer": "bpe"}
OWN: dict[str, Any] = {"tokenizer": ByteTokenizer()}


@pytest.mark.parametrize(
    ("text", "out", "options", "said"),
    [
        *(
            (ENOUGH, "t.h5", {"validation_fraction": fraction}, r"expected 0 < fraction < 1")
            for fraction in (0.0, 1.0, -0.1, float("nan"))
        ),
        (ENOUGH, "t.h5", {"vocab_size": 300}, "vocabulary of 300 for the bytes tokenizer"),
        (ENOUGH, "t.h5", {**BPE, "vocab_text_mib": 0}, "expected at least 1"),
        (ENOUGH, "t.h5", {**BPE, "vocab_text_mib": -3}, "expected at least 1"),
        (ENOUGH, "t.h5", {"vocab_text_mib": 3}, "only the bpe tokenizer learns one"),
        (ENOUGH, "t.h5", {**OWN, "vocab_text_mib": 3}, "only the bpe tokenizer learns one"),
        (ENOUGH, "text/t.h5", {}, "cannot be written"),
        ("tiny", "t.h5", {}, r"the corpus has 4 bytes, too few to hold out 0.05"),
        ("☃", "t.h5", {"validation_fraction": 0.5}, "was there enough text for both splits"),
    ],
)
def test_options_places_and_texts_that_cannot_be_are_refused(
    tmp_path: Path, text: str, out: str, options: dict[str, Any], said: str
) -> None:
    (tmp_path / "text").write_text(text)
    with pytest.raises((ConfigError, DataError), match=said):
        make(tmp_path / "text", tmp_path / out, **options)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_default_file_is_made_once_and_found_again(tmp_path: Path) -> None:
    path = default_token_file(tmp_path / "cache")
    made = path.stat()
    assert default_token_file(tmp_path / "cache") == path
    assert path.stat().st_mtime_ns == made.st_mtime_ns
    assert path.stat().st_ino == made.st_ino
    with TokenFile.open(path) as file:
        assert file.vocab_size == 257
        assert len(file.train) > 15 * len(file.validation) > 15 * 100_000


def test_processes_that_make_the_default_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    code = f"from pathlib import Path; from hpczero.data import *; default_token_file(Path({str(tmp_path)!r}))"
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait(timeout=60) for process in started] == [0, 0, 0]
    (path,) = tmp_path.iterdir()
    with TokenFile.open(path) as file:
        assert file.source_sha256 == Corpus.standard_library().digest


def test_what_a_killed_writer_left_goes_and_what_another_is_writing_stays(tmp_path: Path) -> None:
    out, text = tmp_path / "t.h5", tmp_path / "text"
    text.write_text("some text\n" * 99)
    old, new = (tmp_path / f".t.h5.{letter * 32}.tmp" for letter in "ab")
    other = tmp_path / f".u.h5.{'a' * 32}.tmp"
    for file in (old, new, other):
        file.touch()
    for file in (old, other):
        os.utime(file, (time.time() - 3700,) * 2)
    prepare(Corpus.of_paths([text]), out)
    assert {file.name for file in tmp_path.iterdir()} == {"text", "t.h5", new.name, other.name}


# --- the text that a vocabulary is learned from


@pytest.mark.parametrize("mib", [1, 3, 100])
def test_bpe_learns_from_blocks_at_even_distances_of_a_large_text_and_never_from_what_is_held_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learned: list[bytes], mib: int
) -> None:
    monkeypatch.setattr(corpus, "BLOCK_NBYTES", 2**16)
    lines = [b"%06d %s\n" % (n, b"abcdefgh" * 20) for n in range(45_000)]  # 7.2 MiB
    (tmp_path / "text").write_bytes(b"".join(lines))
    out = tmp_path / "t.h5"
    make(tmp_path / "text", out, tokenizer="bpe", vocab_size=290, vocab_text_mib=mib)
    numbers = [int(line[:6]) for line in b"".join(learned).splitlines()]
    with TokenFile.open(out) as file:
        training = bytes(file.tokenizer.decode(file.train[: len(file.train)].tolist()))
    last = int(training.splitlines()[-1][:6])
    if mib == 100:
        assert numbers == list(range(last + 1))
        return
    assert mib * 2**20 <= sum(map(len, learned)) <= mib * 2**20 + 2**17
    gaps = [after - before for before, after in itertools.pairwise([-1, *numbers, last])]
    block = 2**16 // len(lines[0]) + 1
    assert max(gaps) <= block * (len(training) // (mib * 2**20) + 2)
    assert numbers[-1] <= last
