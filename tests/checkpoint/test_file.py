"""What other programs find: plain h5py and the tools of HDF5 read ``state.h5``; both writers make the same file."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import hpczero
from hpczero.checkpoint import writing
from hpczero.checkpoint.__main__ import Verdict, verify
from hpczero.checkpoint.disk import h5file
from hpczero.checkpoint.disk.folder import LATEST, read_manifest
from hpczero.checkpoint.disk.format import STATE_FILE, Dataset, Table
from hpczero.checkpoint.disk.rawfile import write_direct
from hpczero.checkpoint.writing import PosixWriter
from hpczero.files.direct import PAGE, filesystem_of, open_direct
from tests.checkpoint.damage import golden_copy
from tests.checkpoint.programs import Net, Program
from tests.helpers.world import World


def tool(*command: str | os.PathLike[str]) -> str:
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]}: it is in Debian's package hdf5-tools")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# --- without MPI


def test_h5dump_shows_what_is_in_it(tmp_path: Path) -> None:
    path = golden_copy(tmp_path)
    text = tool("h5dump", "-H", path / STATE_FILE)
    assert 'ATTRIBUTE "format_version"' in text
    assert 'ATTRIBUTE "meta"' in text
    assert 'GROUP "params"' in text
    assert 'DATASET "exp_avg_sq"' in text
    master = tool("h5dump", "-d", "/state/master", "-w", "1", "-y", path / STATE_FILE)
    lines = [line.strip(" ,") for line in master.partition("DATA {")[2].splitlines()]
    found = [float(line) for line in lines if line and line != "}"]
    with h5py.File(path / STATE_FILE) as file:
        np.testing.assert_allclose(found, file["state/master"][:], rtol=1e-5)


def test_h5repack_makes_another_of_it(tmp_path: Path) -> None:
    path = golden_copy(tmp_path)
    tool("h5repack", "-f", "GZIP=1", path / STATE_FILE, tmp_path / "small.h5")
    with h5py.File(path / STATE_FILE) as one, h5py.File(tmp_path / "small.h5") as other:
        for dataset in read_manifest(path).datasets:
            assert np.array_equal(one[dataset.name], other[dataset.name])


def test_large_datasets_lie_on_whole_stripes_and_cost_nothing_to_make(tmp_path: Path) -> None:
    """400 GB of them: only headers are written, and only a large dataset is worth a gap."""
    numel = 10**11
    file = tmp_path / STATE_FILE
    table = Table.build([("w", (numel,), 0)], {})
    wanted = [Dataset.of("/state/master", "<f4", numel), Dataset.of("/rng", "|u1", 50_000)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(h5file, "_reserve", lambda _: False)
        meta = {"note": "x" * 100_000}
        (master, rng), reserved = h5file.create(file, wanted, table, meta, step=1)
    assert not reserved
    assert master.offset % h5file.ALIGNMENT == 0
    assert rng.offset % h5file.ALIGNMENT
    stat = file.stat()
    assert stat.st_size > 4 * numel
    assert stat.st_blocks * 512 < 2**20
    with h5py.File(file) as made:
        assert made["state/master"].shape == (numel,)
        assert made["state/master"].id.get_offset() == master.offset


def test_an_existing_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / STATE_FILE).write_text("mine")
    with pytest.raises(FileExistsError):
        h5file.create(tmp_path / STATE_FILE, [], Table(()), {}, step=1)
    assert (tmp_path / STATE_FILE).read_text() == "mine"


def test_names_of_any_length_and_alphabet_are_in_the_manifest(tmp_path: Path) -> None:
    names = ["x" * 300, "größe.\N{SNOWMAN}", "é" * 200]
    table = Table.build([(name, (1,) * 9, 0) for name in names], {})
    h5file.create(tmp_path / STATE_FILE, [], table, {}, step=1)
    rows = Table.from_json(json.loads(json.dumps(table.to_json()))).rows
    assert [row.name for row in rows] == names
    with h5py.File(tmp_path / STATE_FILE) as file:
        shown = [name.decode(errors="replace") for name in file["params/name"]]
        assert shown[:2] == [names[0][:256], names[1]]
        assert file["params/ndim"][0] == 9


def test_a_writer_lets_go_of_its_file_once(tmp_path: Path) -> None:
    """Where one rank fails to close, the others give up after they have closed: the number may be in use again."""
    (tmp_path / "file").write_bytes(b"")
    writer = PosixWriter(tmp_path / "file")
    writer.close()
    with (tmp_path / "file").open("rb") as other:  # gets the same number
        writer.abandon()
        os.fstat(other.fileno())


# --- of a model


@pytest.mark.mpi
@pytest.mark.ranks(1, 3)
def test_plain_h5py_reads_it(world: World, program: Program) -> None:
    program.train(2)
    path = program.save(world.folder)
    values = hpczero.full_state_dict(program.model)
    if world.rank:
        return
    with h5py.File(path / STATE_FILE) as file:
        meta = json.loads(file.attrs["meta"])
        assert (file.attrs["format"], file.attrs["format_version"]) == ("hpczero checkpoint", 1)
        assert (file.attrs["step"], meta["extra"]["sample"]) == (2, 120)
        assert meta == read_manifest(path).meta
        check_table({name: file["params"][name][:] for name in file["params"]})
        master = file["state/master"][:]
        assert {name: file[f"state/{name}"].dtype.str for name in file["state"]} == dict.fromkeys(
            ("exp_avg", "exp_avg_sq", "master"), "<f4"
        )
        for index, name in enumerate(file["params/name"][:]):
            places = (file[f"params/{x}"][index] for x in ("offset", "numel", "ndim"))
            begin, numel, ndim = map(int, places)
            shape = file["params/shape"][index][:ndim]
            found = master[begin : begin + numel].reshape(shape)
            assert values is not None
            assert np.array_equal(found, values[name.decode()].numpy()), name
        for dataset in read_manifest(path).datasets:
            assert file[dataset.name].id.get_offset() == (dataset.offset or None)
            assert file[dataset.name].shape == (dataset.numel,)
    assert (world.folder / LATEST).read_text() == f"{path.name}\n"


def check_table(columns: dict[str, Any]) -> None:
    """The table of parameters, against the model itself."""
    model = Net()
    names = [name.decode() for name in columns["name"]]
    parameters = dict(model.named_parameters(remove_duplicate=False))
    assert set(names) == set(parameters)
    for index, name in enumerate(names):
        parameter = parameters[name]
        assert columns["numel"][index] == parameter.numel()
        assert tuple(columns["shape"][index][: columns["ndim"][index]]) == tuple(parameter.shape)
        assert bool(columns["frozen"][index]) is not parameter.requires_grad
        tied_to = columns["tied_to"][index]
        tie = names[tied_to] if tied_to >= 0 else None
        assert tie == ("embed.weight" if name == "back.weight" else None)


@pytest.mark.mpi
@pytest.mark.ranks(1)
def test_no_object_of_the_file_keeps_the_time(world: World, program: Program) -> None:
    program.train(1)
    path = program.save(world.folder / "saved") / STATE_FILE
    kept: list[str] = []

    def look(name: str, thing: h5py.Group | h5py.Dataset) -> None:
        if h5py.h5g.get_objinfo(thing.id).mtime:
            kept.append(name)

    with h5py.File(path) as file:
        file.visititems(look)
    world.check(not kept, str(kept))


@pytest.mark.mpi
@pytest.mark.ranks(1, 3)
def test_both_writers_make_the_same_file(
    world: World, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hpczero.checkpoint.snapshot._provenance", dict)
    program.train(2)
    mpio, posix = (
        program.save(world.folder / writer, writer=writer) for writer in ("mpio", "posix")
    )
    world.check(read_manifest(mpio).datasets == read_manifest(posix).datasets)
    same = (mpio / STATE_FILE).read_bytes() == (posix / STATE_FILE).read_bytes()
    world.check(same)
    world.check(verify(mpio).verdict is verify(posix).verdict is Verdict.SOUND)


MOUNTS = """\
/dev/a / ext4 rw 0 0
fs@tcp:/one /scratch lustre rw 0 0
tmpfs /scratch/ram tmpfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/scratch/x/y", "lustre"), ("/scratch/ram/x", "tmpfs"), ("/scratchy", "ext4")],
)
def test_file_system_is_that_of_the_innermost_mount(path: str, kind: str) -> None:
    assert filesystem_of(Path(path), MOUNTS) == kind


def test_mpi_io_is_taken_on_parallel_file_systems_that_keep_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMPI_MCA_io", "^ompio")
    assert writing.automatic(tmp_path, reserved=True) == "posix"
    monkeypatch.setattr(writing, "filesystem_of", lambda _: "lustre")
    parallel = "mpio" if h5py.get_config().mpi else "posix"
    assert writing.automatic(tmp_path, reserved=True) == parallel
    assert writing.automatic(tmp_path, reserved=False) == "posix"


@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, 3 * PAGE + 5])
@pytest.mark.parametrize("skew", [0, 4])
def test_writes_past_the_cache_leave_the_same_file(tmp_path: Path, nbytes: int, skew: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8 * PAGE))
    whole = np.frombuffer(mmap.mmap(-1, 8 * PAGE), dtype=np.uint8)
    data = whole[skew : skew + nbytes]
    data[:] = np.arange(nbytes) % 251 + 1
    descriptor = open_direct(path)
    if descriptor is None:
        pytest.skip("this file system has no writes past the cache")
    done = write_direct(descriptor, PAGE, data)
    os.close(descriptor)
    assert done == (0 if skew else nbytes // PAGE * PAGE)
    found = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    assert np.array_equal(found[PAGE : PAGE + done], data[:done])
    assert not found[:PAGE].any()
    assert not found[PAGE + done :].any()
