"""The text that a vocabulary is learned from: all of a small one, blocks at even distances of a large one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpczero.data import BPETokenizer, ByteTokenizer, Corpus, TokenFile, corpus, prepare
from hpczero.errors import ConfigError


def make(text: Path, out: Path, **options: Any) -> None:
    prepare(Corpus.of_paths([text]), out, **options)


@pytest.mark.parametrize("mib", [1, 3, 100])
def test_bpe_learns_from_blocks_at_even_distances_of_a_large_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mib: int
) -> None:
    monkeypatch.setattr(corpus, "BLOCK_NBYTES", 2**16)
    lines = [b"%06d %s\n" % (n, b"abcdefgh" * 20) for n in range(45_000)]  # 7.2 MiB
    (tmp_path / "text").write_bytes(b"".join(lines))
    seen: list[bytes] = []
    train: Callable[..., BPETokenizer] = BPETokenizer.train

    def spy(texts: Any, vocab_size: int, **options: Any) -> BPETokenizer:
        seen.extend(texts)
        return train([b"abc"], vocab_size)

    monkeypatch.setattr(BPETokenizer, "train", spy)
    out = tmp_path / "t.h5"
    make(tmp_path / "text", out, tokenizer="bpe", vocab_size=290, vocab_text_mib=mib)
    numbers = [int(line[:6]) for line in b"".join(seen).splitlines()]
    with TokenFile.open(out) as file:
        training = bytes(file.tokenizer.decode(file.train[: len(file.train)].tolist()))
    last = int(training.splitlines()[-1][:6])
    if mib == 100:
        assert numbers == list(range(last + 1))
        return
    assert mib * 2**20 <= sum(map(len, seen)) <= mib * 2**20 + 2**17
    gaps = [after - before for before, after in itertools.pairwise([-1, *numbers, last])]
    block = 2**16 // len(lines[0]) + 1
    assert max(gaps) <= block * (len(training) // (mib * 2**20) + 2)
    assert numbers[-1] <= last


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"tokenizer": "bpe", "vocab_text_mib": 0}, "expected at least 1"),
        ({"tokenizer": "bpe", "vocab_text_mib": -3}, "expected at least 1"),
        ({"tokenizer": "bytes", "vocab_text_mib": 3}, "only the bpe tokenizer learns one"),
        ({"tokenizer": ByteTokenizer(), "vocab_text_mib": 3}, "only the bpe tokenizer learns one"),
    ],
)
def test_text_of_the_vocabulary_that_means_nothing_is_refused(
    tmp_path: Path, options: dict[str, Any], what: str
) -> None:
    (tmp_path / "text").write_text("some lines\n" * 100)
    with pytest.raises(ConfigError, match=what):
        make(tmp_path / "text", tmp_path / "tokens.h5", **options)
