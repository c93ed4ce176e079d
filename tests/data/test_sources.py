"""Tokens of other programs, and several files with weights: exact shares, equal samples on any ranks, exact resume."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from hpczero.data import Corpus, prepare
from hpczero.data.sources import MixedBatches, Sources, Turns
from hpczero.data.tokenize import IdsTokenizer, from_json
from hpczero.errors import ConfigError, DataError
from tests.data.test_rows import library_tokenizer
from tests.helpers.killed import Job
from tests.helpers.runs import losses, options, train

VOCAB = 500


def ids(seed: int, numel: int = 3001) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(0, VOCAB, numel)


def sources(folder: Path, *entries: str, tokenizer: str = f"vocab_size = {VOCAB}") -> Path:
    file = folder / "sources.toml"
    tables = "".join(f"[[source]]\n{entry}\n" for entry in entries)
    file.write_text(tables + (f"[tokenizer]\n{tokenizer}\n" if tokenizer else ""))
    return file


def megatron(folder: Path, tokens: np.ndarray[Any, Any], code: int, lengths: list[int]) -> None:
    """As Megatron-LM's builder writes them."""
    tokens.tofile(folder / "m.bin")
    starts = np.cumsum([0, *lengths[:-1]]) * tokens.itemsize
    with (folder / "m.idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + (1).to_bytes(8, "little") + bytes([code]))
        file.write(len(lengths).to_bytes(8, "little") + (len(lengths) + 1).to_bytes(8, "little"))
        file.write(np.array(lengths, "<i4").tobytes() + starts.astype("<i8").tobytes())
        file.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())


# --- flat files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form", ["bin", "bin uint32", "npy int64", "megatron uint16", "megatron int32"]
)
def test_flat_file_gives_its_tokens_and_holds_out_its_end(tmp_path: Path, form: str) -> None:
    expected = ids(1)
    entry = 'path = "m.bin"'
    if form.startswith("megatron"):
        code, kind = (8, "<u2") if form.endswith("16") else (4, "<i4")
        megatron(tmp_path, expected.astype(kind), code, [1000, 2000, 1])
    elif form.startswith("npy"):
        np.save(tmp_path / "m.npy", expected)
        entry = 'path = "m.npy"'
    else:
        kind = "<u4" if form.endswith("32") else "<u2"
        expected.astype(kind).tofile(tmp_path / "m.bin")
        entry += '\ndtype = "uint32"' if form.endswith("32") else ""
    with Sources.open(sources(tmp_path, entry)) as found:
        (only,) = found.sources
        assert len(found.train) == 2851
        assert len(found.validation) == 150
        assert only.train[:].tolist() == expected[:2851].tolist()
        assert only.validation[:].tolist() == expected[2851:].tolist()
        assert only.train[5:9].tolist() == expected[5:9].tolist()
        assert found.vocab_size == VOCAB
        only.train.check()
        # a sample is read as a sample of any file is
        batches = found.batches(16, 4, 0)
        x, y = batches.micro_batch(0, 0, 0, 1)
        for inputs, targets in zip(x, y, strict=True):
            (start,) = [n for n in range(0, 2836, 16) if (expected[n : n + 16] == inputs).all()]
            assert targets.tolist() == expected[start + 1 : start + 17].tolist()


def test_validation_file_is_taken_instead_of_the_end(tmp_path: Path) -> None:
    ids(1).astype("<u2").tofile(tmp_path / "a.bin")
    ids(2, 77).astype("<u2").tofile(tmp_path / "v.bin")
    with Sources.open(sources(tmp_path, 'path = "a.bin"\nvalidation = "v.bin"')) as found:
        assert (len(found.train), len(found.validation)) == (3001, 77)
        assert found.sources[0].validation[:].tolist() == ids(2, 77).tolist()
        assert found.validation.bytes_per_token is None


def test_id_outside_of_the_vocabulary_is_refused_when_it_is_read(tmp_path: Path) -> None:
    tokens = ids(1)
    tokens[100] = -3
    np.save(tmp_path / "a.npy", tokens)
    with Sources.open(sources(tmp_path, 'path = "a.npy"')) as found:
        assert len(found.sources[0].train[:100]) == 100
        said = r"a.npy\[0:101\] hold token id \d+, and the vocabulary has 500"
        with pytest.raises(DataError, match=said):
            found.sources[0].train[:101]


BAD: dict[str, tuple[str, str]] = {
    "no such file": ('path = "none.bin"', "none.bin: not a flat token file"),
    "odd length": ('path = "odd.bin"', "no whole number of uint16"),
    "empty": ('path = "empty.bin"', "not a flat token file"),
    "two rows": ('path = "two.npy"', r"holds uint16 of shape \(2, 3\)"),
    "floats": ('path = "float.npy"', "holds float64"),
    "another dtype": ('path = "two.npy"\ndtype = "uint32"', "shape"),
    "unknown dtype": ('path = "odd.bin"\ndtype = "float16"', "source 1 has dtype 'float16'"),
    "unknown key": ('path = "odd.bin"\nwheight = 3', "source 1 has wheight = 3"),
    "no path": ("weight = 3", "source 1 has no path"),
    "text as weight": ('path = "odd.bin"\nweight = "3"', "source 1 has weight = '3'"),
    "cut index": ('path = "cut.bin"', "cut.idx beside it is no index|cut.idx is cut short"),
    "index without its documents": ('path = "few.bin"', "few.idx is cut short"),
    "lengths below zero": ('path = "below.bin"', "tells of other tokens"),
    "waiting index": ('path = "fifo.bin"', "is a FIFO, expected a regular file"),
    "archive of arrays": ('path = "many.npy"', "magic string is not correct"),
    "header that is no Python": ('path = "header.npy"', "its header cannot be read"),
    "other index": ('path = "other.bin"', "tells of other tokens"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_source_is_refused_by_name(tmp_path: Path, name: str) -> None:
    (tmp_path / "odd.bin").write_bytes(b"abc")
    (tmp_path / "empty.bin").touch()
    np.save(tmp_path / "two.npy", np.zeros((2, 3), np.uint16))
    np.save(tmp_path / "float.npy", np.zeros(3))
    megatron(tmp_path, ids(1, 9).astype("<u2"), 8, [4, 5])
    index = (tmp_path / "m.idx").read_bytes()
    np.savez(tmp_path / "many", ids(1, 9))
    (tmp_path / "many.npz").rename(tmp_path / "many.npy")
    (tmp_path / "header.npy").write_bytes(b"\x93NUMPY\x01\x00\x76\x00" + b"[" * 117 + b"\n")
    ids(1, 10).astype("<u2").tofile(tmp_path / "fifo.bin")
    os.mkfifo(tmp_path / "fifo.idx")
    megatron(tmp_path, ids(1, 10).astype("<u2"), 8, [12, -2])
    below = (tmp_path / "m.idx").read_bytes()
    for stem, data in (
        ("cut", index[:40]),
        ("few", index[:-1]),
        ("below", below),
        ("other", index),
    ):
        (tmp_path / f"{stem}.idx").write_bytes(data)
        ids(1, 10).astype("<u2").tofile(tmp_path / f"{stem}.bin")
    entry, said = BAD[name]
    with pytest.raises(DataError, match=said):
        Sources.open(sources(tmp_path, entry))


def test_file_of_sources_that_waits_or_is_too_deep_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.toml")
    (tmp_path / "deep.toml").write_text("a = " + "[" * 100_000)
    for name, said in (("fifo", "is a FIFO"), ("deep", "nested too deeply")):
        with pytest.raises(DataError, match=said):
            Sources.open(tmp_path / f"{name}.toml")


def test_file_that_is_cut_while_it_is_mapped_is_an_error_and_no_crash(tmp_path: Path) -> None:
    file = tmp_path / "a.bin"
    ids(1, 100_000).astype("<u2").tofile(file)
    with Sources.open(sources(tmp_path, 'path = "a.bin"')) as found:
        with file.open("ab") as end:
            end.write(b"\xff" * 10_000)
        file.rename(tmp_path / "moved.bin")
        assert (
            found.sources[0].train[90_000:90_009].tolist()
            == ids(1, 100_000)[90_000:90_009].tolist()
        )
        os.truncate(tmp_path / "moved.bin", 4096)
        with pytest.raises(DataError, match=r"a.bin: is shorter than when it was opened"):
            found.sources[0].train[90_000:90_009]


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        ("", "say whose tokens they are"),
        ("vocab_size = 0", "say whose tokens they are"),
        ("vocab_size = 5\nseparator = 5", "say whose tokens they are"),
        ("vocab_size = 5\nseparator = 'x'", "say whose tokens they are"),
        ('file = "none.json"', "none.json: is no tokenizer.json"),
        ("size = 5", "tokenizer has size = 5"),
    ],
)
def test_tokens_without_a_vocabulary_are_refused(tmp_path: Path, tokenizer: str, said: str) -> None:
    ids(1).astype("<u2").tofile(tmp_path / "a.bin")
    with pytest.raises(DataError, match=said):
        Sources.open(sources(tmp_path, 'path = "a.bin"', tokenizer=tokenizer))


@pytest.mark.parametrize("separator", ['separator = "<end>"', ""])
def test_tokenizer_of_the_library_is_taken_without_what_it_adds_cuts_and_fills(
    tmp_path: Path, separator: str
) -> None:
    text = "some words and some more words"
    plain = tokenizers.Tokenizer.from_file(str(library_tokenizer([text] * 20, tmp_path)))
    plain.no_truncation()
    plain.no_padding()
    expected = plain.encode(text, add_special_tokens=False).ids
    np.save(tmp_path / "a.npy", np.array(expected * 50))
    table = f'file = "tokenizer.json"\n{separator}'
    with Sources.open(sources(tmp_path, 'path = "a.npy"', tokenizer=table)) as found:
        ours = from_json(found.tokenizer.to_json())
        assert ours.encode(text.encode()).tolist() == expected
        assert ours.vocab_size == plain.get_vocab_size()
        if separator:
            assert ours.separator == plain.token_to_id("<end>")
            return
        with pytest.raises(DataError, match="without a separator of documents"):
            _ = ours.separator


def test_ids_alone_say_that_they_are_no_text() -> None:
    found = from_json(IdsTokenizer(50_257, 50_256).to_json())
    assert (found.vocab_size, found.separator) == (50_257, 50_256)
    with pytest.raises(DataError, match="came without a tokenizer"):
        found.decode([1])
    with pytest.raises(DataError, match="without a separator"):
        _ = IdsTokenizer(5).separator


# --- mixtures --------------------------------------------------------------------------------------------------------


@given(
    weights=st.lists(
        st.integers(1, 40) | st.sampled_from([0.1, 0.25, 2.5]), min_size=1, max_size=5
    ),
    start=st.integers(0, 10**12),
)
def test_every_period_has_exact_shares_and_every_source_counts_on(
    weights: list[float], start: int
) -> None:
    turns = Turns(weights)
    places = np.arange(start, start + turns.period)
    source, before = turns.of(places)
    shares = Counter(source.tolist())
    whole = sum(Fraction(str(weight)) for weight in weights)
    for index, weight in enumerate(weights):
        assert Fraction(shares[index], turns.period) == Fraction(str(weight)) / whole
        mine = before[source == index]
        assert (np.diff(mine) == 1).all(), "no sample is skipped or taken twice"
        ideal = start * Fraction(str(weight)) / whole
        assert abs(int(mine[0]) - ideal) <= len(weights)
    one_by_one = [turns.of(np.array([place])) for place in places[:7]]
    assert [int(s[0]) for s, _ in one_by_one] == source[:7].tolist()


@pytest.mark.parametrize("weights", [[], [0.0], [1, -1], [float("nan")], [0.1234567, 1]])
def test_weights_that_cannot_be_are_refused(weights: list[float]) -> None:
    with pytest.raises(ConfigError, match="got weights"):
        Turns(weights)


class Rows:
    """Samples that say which they are."""

    def __init__(self, name: int, num: int) -> None:
        self.name, self.num = name, num

    def __len__(self) -> int:
        return self.num

    def rows(self, samples: Any, /) -> tuple[Any, Any]:
        x = np.stack([np.full(len(samples), self.name), samples], axis=1)
        return x, x + 1


@pytest.mark.parametrize(("size", "accumulation"), [(2, 1), (3, 2), (6, 1), (1, 4)])
def test_mixed_batch_is_the_same_for_any_number_of_ranks(size: int, accumulation: int) -> None:
    batches = MixedBatches([Rows(0, 7), Rows(1, 1000), Rows(2, 5)], [5, 3, 0.5], 12, seed=4)
    seen: list[tuple[int, int]] = []
    for step in range(40):
        whole, targets = batches.micro_batch(step, 0, 0, 1)
        parts = [
            batches.micro_batch(step, micro, rank, size, accumulation)[0]
            for micro in range(accumulation)
            for rank in range(size)
        ]
        assert np.concatenate(parts).tolist() == whole.tolist()
        assert targets.tolist() == (whole + 1).tolist()
        seen += [(name, sample) for name, sample in whole.tolist()]
    counts = Counter(name for name, _ in seen)
    assert (counts[0], counts[1], counts[2]) == pytest.approx(
        (480 * 10 / 17, 480 * 6 / 17, 480 / 17), abs=3
    )
    first = [sample for name, sample in seen if name == 0]
    assert sorted(first[:7]) == sorted(first[7:14]) == [*range(7)], (
        "each epoch has each sample once"
    )
    assert first[:7] != first[7:14]


def two_sources(folder: Path, **changes: float) -> Path:
    """A token file and a flat one, of one vocabulary."""
    (folder / "text").write_text("".join(f"line {n} of the text\n" for n in range(900)))
    if not (folder / "a.h5").exists():
        prepare(Corpus.of_paths([folder / "text"]), folder / "a.h5")
    (ids(3, 9000) % 257).astype("<u2").tofile(folder / "b.bin")
    weights = {"a": 3, "b": 1, **changes}
    entries = [
        f'path = "a.h5"\nweight = {weights["a"]}',
        f'path = "b.bin"\nweight = {weights["b"]}',
    ]
    return sources(folder, *entries, tokenizer="")


def test_token_files_bring_their_tokenizer_and_must_have_one(tmp_path: Path) -> None:
    file = two_sources(tmp_path)
    with Sources.open(file) as found:
        assert found.tokenizer.decode([108, 105]) == b"li"
        total = sum(
            part.num_samples
            for part in found.held_out(16, 10_000).batches(micro_batch=7, rank=0, world_size=1)
        )
        assert total == sum((len(source.validation) - 1) // 16 for source in found.sources)
    prepare(
        Corpus.of_paths([tmp_path / "text"]), tmp_path / "c.h5", tokenizer="bpe", vocab_size=270
    )
    with pytest.raises(DataError, match="have different tokenizers"):
        Sources.open(sources(tmp_path, 'path = "a.h5"', 'path = "c.h5"', tokenizer=""))
    with pytest.raises(DataError, match=r"take the .tokenizer. table out"):
        Sources.open(sources(tmp_path, 'path = "a.h5"'))


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_run_goes_on_with_the_next_sample_of_a_mix_on_other_ranks(tmp_path: Path) -> None:
    file = two_sources(tmp_path)
    given = {"data__path": file, "evaluation__batches": 1, "train__steps": 12}
    whole = train(tmp_path / "whole", 1, **given).ended()
    assert "75.0% of the samples from" in whole.stdout
    assert "nats per byte" not in whole.stdout, "flat tokens do not say how long their text is"
    killed = tmp_path / "killed"
    words = options(killed, **given, checkpoint__every=2)[2:]
    with Job.start(tmp_path / "log", words, ranks=2) as job:
        assert job.wait_for("saved "), job.said
        for pid in job.ranks:
            os.kill(pid, signal.SIGKILL)
        assert job.wait() != 0
    done = train(killed, 3, **given).ended()
    assert re.search(r"step-0+\d+", done.stdout), "it goes on from a checkpoint"
    assert losses(killed) == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    other = train(
        killed, 1, **{**given, "data__path": two_sources(tmp_path, a=2), "train__steps": 14}
    ).ended(78)
    assert "belongs to a run that saw other samples: data was" in other.stderr


def test_sources_that_are_wrong_are_refused_before_mpi_is_up(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(
        '[[source]]\npath = "none.bin"\n[tokenizer]\nvocab_size = 9\n'
    )
    done = train(tmp_path, 2, data__path=tmp_path / "bad.toml").ended(78)
    assert done.stderr.count("none.bin: not a flat token file") == 1, done
