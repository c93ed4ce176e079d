"""Rows of data sets become the token file that a plain loop over them makes; none is lost, divided or misread."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from hpczero.data import Corpus, TokenFile, prepare
from hpczero.data import rows as rows_of
from hpczero.data.rows import corpus_of
from hpczero.data.tokenize import LibraryTokenizer
from hpczero.errors import ConfigError, DataError
from hpczero.job.team import Ranks
from tests.helpers.mpirun import run_ranks
from tests.helpers.parallel import on_root, parallel_assert
from tests.helpers.small_models import raises_on_all

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero.job.topology import Topology

# Others' code warns of itself; a warning of hpczero's is an error as everywhere.
pytestmark = pytest.mark.filterwarnings("ignore", "error:::hpczero")


def texts(number: int, seed: int = 1) -> list[str]:
    """Of 0 to 330 bytes; some are empty, as rows may be."""
    rng = np.random.default_rng(seed)
    return [
        f"row {n} naïve ☃\n" * int(rng.integers(0, 15)) + "x" * int(rng.integers(0, 30)) * (n % 5)
        for n in range(number)
    ]


def dataset(rows: list[Any], **more: Any) -> Any:
    import datasets

    return datasets.Dataset.from_dict({"label": [*range(len(rows))], "text": rows}, **more)


def write(folder: Path, form: str, rows: list[str]) -> list[Path]:
    """The same rows in each form; batches and row groups end at odd places."""
    import datasets
    import pyarrow as pa

    made = dataset(rows)
    path = folder / form
    if form == "saved":
        made.save_to_disk(path, num_shards=3)
    elif form == "dict":
        other = dataset(["of the other split"] * 9)
        datasets.DatasetDict(train=made, test=other).save_to_disk(path)
    elif form == "shuffled":  # what is saved then has indices
        backwards = dataset(rows[::-1])
        backwards.select(range(len(rows) - 1, -1, -1)).save_to_disk(path, num_shards=2)
    elif form == ".parquet":
        made.to_parquet(path.with_suffix(form), batch_size=17)
        return [path.with_suffix(form)]
    else:
        table = made.data.table.combine_chunks()
        if form == "dictionary.arrow":
            table = table.set_column(1, "text", table.column("text").dictionary_encode())
        make = pa.ipc.new_stream if form == "stream.arrow" else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=23)
    return [path]


FORMS = ["saved", "dict", "shuffled", ".parquet", "stream.arrow", "file.arrow", "dictionary.arrow"]


def split_of(form: str) -> str | None:
    return "train" if form == "dict" else None


def library_tokenizer(rows: list[str], folder: Path) -> Path:
    """A tokenizer.json of words, whose ids of a text are not those of its parts; it adds, cuts and fills."""
    import tokenizers
    from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

    made = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["[UNK]", "[CLS]", "<end>"]
    made.train_from_iterator(
        rows, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special)
    )
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 1)]
    )
    made.enable_truncation(5)
    made.enable_padding(length=7)
    made.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def held(path: Path) -> tuple[list[int], list[int]]:
    with TokenFile.open(path) as file:
        for split in (file.train, file.validation):
            split.check()
        return file.train[:].tolist(), file.validation[:].tolist()


def expected(rows: list[str], encode: Any, separator: int, share: float = 0.05) -> list[list[int]]:
    """Tokens of a plain loop: of the training rows, and of those held out, which are whole and the last."""
    kept = [row for row in rows if row]
    ends = [*itertools.accumulate(len(row.encode()) for row in kept)]
    cut = round(ends[-1] * (1 - share))
    found: list[list[int]] = [[], []]
    for row, end in zip(kept, ends, strict=True):
        found[end > cut] += [*encode(row), separator]
    return found


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("form", FORMS)
def test_rows_are_the_bytes_that_a_plain_loop_gives(tmp_path: Path, form: str) -> None:
    rows = texts(211)
    prepare(corpus_of(write(tmp_path, form, rows), "text", split_of(form)), tmp_path / "t.h5")
    assert [*held(tmp_path / "t.h5")] == expected(rows, str.encode, 256)
    with TokenFile.open(tmp_path / "t.h5") as file:
        counted = file.train.documents + file.validation.documents
        assert counted == sum(1 for row in rows if row) < len(rows)
        nbytes = file.train.text_nbytes + file.validation.text_nbytes
        assert nbytes == sum(len(row.encode()) for row in rows)


@pytest.mark.usefixtures("small_parts")
def test_long_rows_are_looked_at_once_or_twice_whatever_a_part_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.parquet"
    dataset(["long " * 200] * 64).to_parquet(path)  # a row is more than a block
    asked = []
    plain = rows_of._File.rows

    def counted(self: Any, column: str, part: int, first: int, count: int) -> Any:
        asked.append(count)
        return plain(self, column, part, first, count)

    monkeypatch.setattr(rows_of._File, "rows", counted)
    corpus_of([path], "text")
    assert 64 <= sum(asked) <= 2 * 64


@pytest.mark.mpi
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("form", ["saved", ".parquet"])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe", "library"])
def test_file_has_the_same_bytes_on_any_number_of_ranks(
    comm: MPI.Intracomm, topology: Topology, folder: Path, form: str, tokenizer: Any
) -> None:
    import tokenizers

    rows = texts(157)
    options: dict[str, Any] = {"tokenizer": tokenizer}
    paths = comm.bcast(write(folder, form, rows) if comm.rank == 0 else None)
    file = str(folder / "tokenizer.json")
    on_root(comm, library_tokenizer, rows, folder)
    if tokenizer == "bpe":
        options["vocab_size"] = 300
    if tokenizer == "library":
        options["tokenizer"] = LibraryTokenizer.of_file(file, "<end>")
    if comm.rank == 0:
        prepare(corpus_of(paths, "text"), folder / "alone.h5", **options)
    team = Ranks(topology)
    prepare(corpus_of(paths, "text", team=team), folder / "together.h5", **options, team=team)
    comm.Barrier()
    same = (folder / "alone.h5").read_bytes() == (folder / "together.h5").read_bytes()
    parallel_assert(comm, same, "other bytes")
    if tokenizer == "library":
        plain = tokenizers.Tokenizer.from_file(file)
        plain.no_truncation()
        plain.no_padding()

        def encode(row: str) -> list[int]:
            return list(plain.encode(row, add_special_tokens=False).ids)

        wanted = expected(rows, encode, plain.token_to_id("<end>") or -1)
        parallel_assert(comm, [*held(folder / "together.h5")] == wanted, "other ids")


def test_command_on_ranks_writes_the_file_of_one_process(tmp_path: Path) -> None:
    rows = texts(90)
    (path,) = write(tmp_path, "dict", rows)
    tokenizer = library_tokenizer(rows, tmp_path)
    model = LibraryTokenizer.of_file(str(tokenizer), "<end>")
    prepare(corpus_of([path], "text", "train"), tmp_path / "alone.h5", tokenizer=model)
    out = tmp_path / "together.h5"
    words = f"-m hpczero.data prepare {path} --column text --split train --out {out}"
    words += f" --separator <end> --tokenizer-file {tokenizer}"
    run_ranks(2, words.split(), timeout=90).ended()
    assert out.read_bytes() == (tmp_path / "alone.h5").read_bytes()
    with TokenFile.open(out) as file:
        said = file.tokenizer.decode(file.train[:40].tolist()).decode()
        assert "row" in said


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("harm", "said"),
    [
        ("null", r"row 40 of column 'text' is null, expected text"),
        ("changed", r"holds other rows than a moment ago"),
        ("longer", r"holds other rows than a moment ago"),
    ],
)
def test_what_one_rank_meets_is_the_error_of_all_and_leaves_nothing(
    comm: MPI.Intracomm, topology: Topology, folder: Path, harm: str, said: str
) -> None:
    rows: list[Any] = texts(50)
    rows[40] = None if harm == "null" else "text"
    path = folder / "x.parquet"
    on_root(comm, dataset(rows).to_parquet, path, batch_size=9)
    team = Ranks(topology)

    def whole() -> None:
        found = corpus_of([path], "text", team=team)
        comm.Barrier()
        if comm.rank == 0:
            rows[3] = "other rows" if harm == "changed" else "other rows" * 900
            dataset(rows).to_parquet(folder / "y", batch_size=9)
            (folder / "y").replace(path)
        comm.Barrier()
        prepare(found, folder / "t.h5", team=team)

    raises_on_all(comm, DataError, said, whole)
    comm.Barrier()
    parallel_assert(comm, [each.name for each in folder.iterdir()] == ["x.parquet"])


def harmed(folder: Path, how: str) -> tuple[list[Path], str, str | None]:
    rows = texts(60)
    (saved,) = write(folder, "saved", rows)
    if how == "cut":
        file = next(saved.glob("*.arrow"))
        file.write_bytes(file.read_bytes()[:1500])
    if how == "state":
        (saved / "state.json").write_text("{")
    if how == "missing":
        next(saved.glob("*.arrow")).unlink()
    if how == "folder":
        return [folder], "text", None
    if how == "dict":
        return write(folder, "dict", rows), "text", None
    if how == "number":
        return [saved], "label", None
    if how == "empty":
        dataset(["", ""]).save_to_disk(folder / "none")
        return [folder / "none"], "text", None
    if how == "text":
        (folder / "a.parquet").write_text("no parquet")
        return [folder / "a.parquet"], "text", None
    if how == "kind":
        (folder / "a.txt").write_text("text")
        return [folder / "a.txt"], "text", None
    if how == "page":
        import pyarrow.parquet as pq

        path = folder / "a.parquet"
        pq.write_table(dataset(rows).data.table, path, write_page_checksum=True)
        data = bytearray(path.read_bytes())
        data[data.index("naïve".encode())] ^= 1
        path.write_bytes(data)
        return [path], "text", None
    return [saved], "words" if how == "column" else "text", "train" if how == "split" else None


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("cut", "cannot be read as rows|datasets cannot load it"),
        ("state", "datasets cannot load it"),
        ("missing", "datasets cannot load it|no such file"),
        ("folder", "is a folder without state.json.*train-"),
        ("dict", "got split None, expected one of test, train; give --split"),
        ("split", "got split 'train', and no path is a folder with several splits"),
        ("column", "got column 'words', expected one of label, text"),
        ("number", "column 'label' is int64, expected strings or bytes"),
        ("empty", "column 'text' holds no text"),
        ("text", "cannot be read as rows"),
        ("kind", "got a file of another kind, expected .arrow or .parquet"),
        ("page", "cannot be read as rows"),
    ],
)
def test_what_is_no_data_set_with_such_text_is_named(tmp_path: Path, how: str, said: str) -> None:
    paths, column, split = harmed(tmp_path, how)
    with pytest.raises(DataError, match=said):
        corpus_of(paths, column, split)


@pytest.mark.parametrize("form", ["saved", ".parquet"])
def test_rows_are_not_read_as_text(tmp_path: Path, form: str) -> None:
    (path,) = write(tmp_path, form, texts(20))
    with pytest.raises(DataError, match=r"is a file of rows, not text.*--column NAME"):
        Corpus.of_paths([path])


@pytest.fixture
def without_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing:
        def find_spec(self, name: str, *_: object) -> None:
            if name.partition(".")[0] in ("datasets", "pyarrow"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [*sys.modules]:
        if name.partition(".")[0] in ("datasets", "pyarrow"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])


@pytest.mark.usefixtures("without_datasets")
def test_missing_library_is_named_with_the_line_that_installs_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pip install 'datasets>=5'"):
        corpus_of([tmp_path / "x.parquet"], "text")


def test_separator_that_the_tokenizer_does_not_know_is_named(tmp_path: Path) -> None:
    path = str(library_tokenizer(texts(20), tmp_path))
    with pytest.raises(DataError, match=r"no token '</s>'.*'\[UNK\]', '\[CLS\]', '<end>'"):
        LibraryTokenizer.of_file(path, "</s>")
    with pytest.raises(DataError, match=r"is no tokenizer.json"):
        LibraryTokenizer.of_file(str(tmp_path / "no.json"), "</s>")
