"""Ranks that would not see the same tokens are refused: each opens a file of its own, by one path."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpczero.data import prepare
from hpczero.data.corpus import Corpus
from hpczero.errors import DataError
from hpczero.job.topology import Topology
from hpczero.options.config import DataOptions
from hpczero.run.starting.reading import open_tokens
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

TEXT = "first line\nsecond line\n" * 100


def make(comm: MPI.Intracomm, folder: Path, text: str, **options: object) -> None:
    """A token file in a folder of this rank's own."""
    own = folder / str(comm.rank)
    own.mkdir()
    (own / "text").write_text(text)
    prepare(Corpus.of_paths([own / "text"]), own / "tokens.h5", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("other", ["text", "split"])
def test_rank_that_opens_another_token_file_is_named(
    comm: MPI.Intracomm,
    topology: Topology,
    folder: Path,
    other: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    odd = comm.rank == 1
    text = TEXT.replace("first", "FIRST") if odd and other == "text" else TEXT
    options = {"validation_fraction": 0.2} if odd and other == "split" else {}
    make(comm, folder, text, **options)
    monkeypatch.chdir(folder / str(comm.rank))
    raises_on_all(
        comm,
        DataError,
        r"on rank\(s\) 1, could not compare .*: tokens.h5: another file",
        lambda: open_tokens(DataOptions(path="tokens.h5"), topology),
    )
    monkeypatch.undo()


def test_copies_of_one_token_file_may_lie_anywhere(
    comm: MPI.Intracomm, topology: Topology, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(comm, folder, TEXT)
    monkeypatch.chdir(folder / str(comm.rank))
    with open_tokens(DataOptions(path="tokens.h5"), topology) as tokens:
        numel = len(tokens.train)
    parallel_assert(comm, comm.allgather(numel) == [numel] * comm.size)
    monkeypatch.undo()
