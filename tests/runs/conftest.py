"""Two small runs that several files of this folder look at, trained once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hpczero.data import Corpus, TokenFile, prepare
from tests.helpers.runs import steps, train


@pytest.fixture(scope="session")
def books(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two token files of equal vocabularies, in which the same ids stand for other texts."""
    folder = tmp_path_factory.mktemp("books")
    found = []
    for name, words in (("a", "the quick brown fox"), ("b", "jumping lazy dogs over")):
        text = folder / f"{name}.txt"
        text.write_text("".join(f"{words} {n % 97} {words[::-1]}\n" for n in range(3000)))
        prepare(Corpus.of_paths([text]), folder / f"{name}.h5", tokenizer="bpe", vocab_size=290)
        found.append(folder / f"{name}.h5")
    one, other = (TokenFile.open(path) for path in found)
    assert one.vocab_size == other.vocab_size == 290
    assert one.tokenizer.decode([280]) != other.tokenizer.decode([280])
    return found[0], found[1]


@pytest.fixture(scope="session")
def made(books: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs of 6 steps with checkpoints of steps 2, 4 and 6, each trained on a book of its own."""
    folder = tmp_path_factory.mktemp("made")
    for name, book in zip(("r", "o"), books, strict=True):
        train(
            folder, 1, run__name=name, data__path=book, train__steps=6, checkpoint__every=2
        ).ended()
        assert steps(folder, name) == [6, 4, 2]
    return folder


@pytest.fixture(scope="session")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 12 steps with checkpoints of steps 4, 8 and 12, once called r and once default."""
    folder = tmp_path_factory.mktemp("twelve")
    train(folder, ranks=1, train__steps=12, checkpoint__every=4).ended()
    assert steps(folder) == [12, 8, 4]
    shutil.copytree(folder / "r", folder / "default")
    return folder


@pytest.fixture
def runs(made: Path, tmp_path: Path) -> Path:
    """``r`` was lost before it had written its results; ``o`` is finished."""
    shutil.copytree(made, tmp_path / "runs")
    (tmp_path / "runs" / "r" / "model.safetensors").unlink()
    return tmp_path / "runs"
