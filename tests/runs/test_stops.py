"""The files STOP and SAVE: heard once, on all ranks alike, and only if they are files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hpczero.job.signals import Signals
from hpczero.options.environment import Environment
from hpczero.run.stopping import Deadline, Stops, Wish
from tests.helpers.parallel import on_root, parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2)]


def heard(comm: MPI.Intracomm, stops: Stops, wishes: list[Wish]) -> None:
    found = [stops.wish() for _ in wishes]
    parallel_assert(comm, found == wishes, str(found))


@pytest.mark.limit(30)
@pytest.mark.parametrize("wish", [Wish.SAVE, Wish.STOP])
def test_what_is_no_file_asks_for_nothing_and_is_warned_of_once(
    comm: MPI.Intracomm,
    topology: Topology,
    folder: Path,
    wish: Wish,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stops = Stops(folder, topology, Signals(), Deadline(Environment()))
    place = folder / wish.name
    ways: dict[str, tuple[Callable[[], object], Callable[[], None]]] = {
        "a FIFO": (lambda: os.mkfifo(place), place.unlink),
        "a directory": (place.mkdir, place.rmdir),
        "a device": (lambda: place.symlink_to("/dev/null"), place.unlink),
    }
    for kind, (make, remove) in ways.items():
        caplog.clear()
        on_root(comm, make)
        heard(comm, stops, [Wish.NOTHING] * 3)
        told = caplog.text.count(f"{place}: is {kind} and asks for nothing")
        parallel_assert(comm, told == (comm.rank == 0), caplog.text)
        on_root(comm, remove)
        heard(comm, stops, [Wish.NOTHING])
        on_root(comm, place.touch)
        heard(comm, stops, [wish, Wish.NOTHING])


def test_file_that_cannot_be_removed_is_heard_once(
    comm: MPI.Intracomm, topology: Topology, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(1, "Operation not permitted", os.fspath(path))

    stops = Stops(folder, topology, Signals(), Deadline(Environment()))
    on_root(comm, (folder / "SAVE").touch)
    with monkeypatch.context() as patch:  # root may remove anything
        patch.setattr(Path, "unlink", refuse)
        heard(comm, stops, [Wish.SAVE, Wish.NOTHING, Wish.NOTHING])
    on_root(comm, (folder / "SAVE").unlink)
    heard(comm, stops, [Wish.NOTHING])
    on_root(comm, (folder / "SAVE").touch)
    heard(comm, stops, [Wish.SAVE, Wish.NOTHING])
