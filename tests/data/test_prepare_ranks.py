"""Text prepared by several ranks: the file of one rank byte for byte, one verdict, and nothing that looks whole."""

from __future__ import annotations

import importlib
import itertools
import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hpczero.data import Corpus, TokenFile, prepare
from hpczero.data import token_writer as tokenwriter
from hpczero.errors import DataError
from hpczero.job.team import Ranks
from tests.data.blocks import blocks_of
from tests.helpers.killed import Job
from tests.helpers.mpirun import run_ranks
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero.job.topology import Topology

preparing = importlib.import_module("hpczero.data.prepare")  # the package has the function


def text(seed: int, num_lines: int) -> str:
    return "".join(
        f"def f{seed * 7919 + n}(x):\n    return {n}  # naïve ☃\n" for n in range(num_lines)
    )


def write_texts(folder: Path) -> Path:
    """One file of many blocks, one of a single line, and small ones; sizes that nothing divides."""
    folder.mkdir()
    (folder / "long").write_text(text(1, 701))
    (folder / "line").write_text(text(2, 97).replace("\n", " "))
    for n in range(23):
        (folder / str(n)).write_text(text(n, 1 + n % 5))
    return folder


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_file_has_the_same_bytes_on_any_number_of_ranks(
    comm: MPI.Intracomm, topology: Topology, folder: Path, tokenizer: Any
) -> None:
    texts = folder / "texts"
    options = {"tokenizer": tokenizer, "vocab_size": {"bytes": None, "bpe": 300}[tokenizer]}
    if comm.rank == 0:
        alone = Corpus.of_paths([write_texts(texts)])
        prepare(alone, folder / "alone.h5", **options)
    comm.Barrier()
    team = Ranks(topology)
    found = Corpus.of_paths([texts], team=team)
    prepare(found, folder / "together.h5", **options, team=team)
    comm.Barrier()
    same = (folder / "alone.h5").read_bytes() == (folder / "together.h5").read_bytes()
    parallel_assert(comm, same, "other bytes")
    with TokenFile.open(folder / "together.h5") as file:
        for split in (file.train, file.validation):
            split.check()
        ids = [*file.train[:].tolist(), *file.validation[:].tolist()]
        expected = b"".join(b"".join(blocks_of(document)) for document in found.documents)
        parallel_assert(comm, file.tokenizer.decode(ids) == expected, "other text")
        parallel_assert(comm, file.train.documents + file.validation.documents == 25)
    parallel_assert(
        comm, {path.name for path in folder.iterdir()} == {"texts", "alone.h5", "together.h5"}
    )


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("not UTF-8", r"bad: byte 0xff at offset 300 is not UTF-8"),
        ("changed", r"bad: has 301|bad: holds another text than a moment ago"),
        ("full disk", r"on rank\(s\) 1, could not write tokens: .*No space left on device"),
        ("too little", "too few to hold out"),
    ],
)
def test_what_one_rank_meets_is_the_error_of_all_and_leaves_nothing(
    comm: MPI.Intracomm,
    topology: Topology,
    folder: Path,
    harm: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = folder / "texts"
    if comm.rank == 0:
        write_texts(texts)
        end = b"\xff" if harm == "not UTF-8" else b"!"
        (texts / "bad").write_bytes(b"q" if harm == "too little" else b"good line\n" * 30 + end)
    comm.Barrier()
    team = Ranks(topology)
    found = Corpus.of_paths([texts / "bad" if harm == "too little" else texts], team=team)
    if harm == "changed" and comm.rank == 0:
        (texts / "bad").write_bytes(b"other line" * 30 + b"!")
    comm.Barrier()
    if harm == "full disk" and comm.rank == 1:

        def fail(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", fail)
    options: Any = {"tokenizer": "bpe", "vocab_size": 300} if harm == "not UTF-8" else {}
    out = folder / "t.h5"
    raises_on_all(comm, DataError, said, lambda: prepare(found, out, **options, team=team))
    monkeypatch.undo()
    comm.Barrier()
    parallel_assert(comm, [path.name for path in folder.iterdir()] == ["texts"])


def test_command_on_ranks_writes_the_file_of_one_process(tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts")
    prepare(Corpus.of_paths([texts]), tmp_path / "alone.h5")
    out = tmp_path / "together.h5"
    done = run_ranks(2, ["-m", "hpczero.data", "prepare", texts, "--out", out], timeout=90).ended()
    assert done.stdout.count("together.h5: ByteTokenizer") == 1, "rank 0 alone says it"
    assert out.read_bytes() == (tmp_path / "alone.h5").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_job_that_is_ended_leaves_nothing_that_looks_whole_and_the_next_one_makes_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    texts = write_texts(tmp_path / "texts")
    (texts / "huge").write_text(text(3, 20_000) * 240)  # of several seconds
    out = tmp_path / "out" / "tokens.h5"
    out.parent.mkdir()
    words = ["-m", "hpczero.data", "prepare", str(texts), "--out", str(out)]
    with Job.launch(tmp_path / "log", words, ranks=2) as job:
        while not any(path.stat().st_size > 2**20 for path in out.parent.iterdir()):
            assert job.process.poll() is None, job.said
            time.sleep(0.002)
        if number == signal.SIGKILL:
            for pid in job.ranks:
                os.kill(pid, number)
        else:
            job.process.send_signal(number)  # as a batch system does; mpirun passes it on
        job.process.wait(60)
    left = list(out.parent.iterdir())
    # mpirun kills a second after SIGTERM, which may be too soon where the machine does other work.
    assert len(left) in ([1] if number == signal.SIGKILL else [0, 1])
    for path in left:
        assert re.fullmatch(r"\.tokens\.h5\.[0-9a-f]{32}\.tmp", path.name)
        with pytest.raises(DataError, match="not a usable token file"):
            TokenFile.open(path)
    (texts / "huge").unlink()
    prepare(Corpus.of_paths([texts]), out)
    with TokenFile.open(out) as file:
        file.train.check()


@pytest.mark.usefixtures("small_parts")
def test_prepare_that_is_asked_to_end_takes_its_file_away_before_its_encoders_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, out = write_texts(tmp_path / "texts"), tmp_path / "out" / "tokens.h5"
    encode, calls = preparing._encoded, itertools.count()
    left: list[Path] = []

    def late(*args: Any) -> Iterator[Any]:
        if next(calls):  # the first is waited for
            until = time.monotonic() + 20
            while list(out.parent.glob(".*.tmp")) and time.monotonic() < until:
                time.sleep(0.002)
            left.extend(out.parent.iterdir())
        yield from encode(*args)

    def asked(self: object, error: object = None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(preparing, "_encoded", late)
    monkeypatch.setattr(tokenwriter.TokenWriter, "exchange", asked)
    with pytest.raises(KeyboardInterrupt):
        prepare(Corpus.of_paths([texts]), out)
    assert next(calls) > 1
    assert left == []


@pytest.mark.parametrize(
    "numel", [(1, 1), (2047, 1), (2048, 2049), (100_001, 7), (5_000_000_000, 3)]
)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_place_of_tokens_is_known_before_how_many_there_are(
    numel: tuple[int, int], dtype: type[np.unsignedinteger[Any]]
) -> None:
    counts = {"documents": 3, "text_nbytes": 2**40}
    attributes: dict[str, str | int] = {"tokenizer": "x" * (numel[0] % 1_000_000), "version": 2}
    datasets = tuple(tokenwriter.TokenDataset(n, counts) for n in numel)
    made = tokenwriter.structure_of(np.dtype(dtype), datasets, attributes)
    assert made.places == tokenwriter.places(np.dtype(dtype), numel[0])
    assert made.places[0] == tokenwriter.places(np.dtype(dtype), 1)[0]
    taken = [
        (place, place + n * np.dtype(dtype).itemsize)
        for place, n in zip(made.places, numel, strict=True)
    ]
    # Superblock is written twice
    taken += [(place, place + len(data)) for place, data in made.pieces if place]
    assert made.places[0] % 4096 == made.places[1] % 4096 == 0
    tokens, rest = sorted(taken[:2]), taken[2:]
    for start, stop in rest:
        assert all(stop <= begin or start >= end for begin, end in tokens)
