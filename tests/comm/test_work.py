"""Waits for another thread that an exception cuts off: a later wait waits for the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch

import hpczero
from hpczero.accelerator import HostAccelerator
from hpczero.comm.background import Background
from hpczero.comm.calls import Work
from hpczero.comm.hierarchical import LentBuffer
from hpczero.job.watchdog import Watchdog
from hpczero.memory.buffers import Memory
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, mlp_input, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI


class TimeUp(Exception):
    """What a signal handler of a program raises."""


def test_a_wait_for_another_thread_that_was_cut_off_is_begun_anew() -> None:
    go, waits, done = threading.Event(), [], []
    background = Background(Watchdog(0, 0.0), HostAccelerator())

    def operation() -> None:
        go.wait(10)
        done.append(True)

    rest = background.start("a gather", operation)

    def cut_off_once() -> None:
        waits.append(True)
        if len(waits) == 1:
            raise TimeUp
        go.set()
        rest()

    work = Work("layer.3", cut_off_once)
    with pytest.raises(TimeUp):
        work.wait()
    work.wait()
    assert done
    work.wait()
    assert len(waits) == 2, "what is complete is not waited for"
    background.close()


def test_a_lent_gradient_is_not_given_back_while_it_is_read() -> None:
    buffer = LentBuffer(8, torch.float32, memory=Memory(), category="gradients", keep=False)
    waits = []

    def reader() -> None:
        waits.append(True)
        if len(waits) == 1:
            raise TimeUp

    buffer.take()
    buffer.lend(reader)
    buffer.release()
    with pytest.raises(TimeUp):
        buffer.get_back()
    assert buffer.tensor.untyped_storage().nbytes(), "it is read still"
    buffer.get_back()
    assert not buffer.tensor.untyped_storage().nbytes()


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_program_that_catches_what_its_signal_handler_raised_goes_on_with_the_new_values(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    topology = hpczero.Topology.create(comm, list(range(comm.size)))
    models = [MLP(), MLP()]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    options = {"stage": stage, "topology": topology, "precision": "bf16"}
    held = threading.Event()
    start = Background.start

    def begun(
        background: Background, what: str, operation: Callable[[], None]
    ) -> Callable[[], None]:
        def late() -> None:
            held.wait(10)
            operation()

        wait = start(background, what, late)

        def waited() -> None:
            # Once for each unit: a forward that was left gathers all of them anew.
            if "all_gather" in what and armed and what not in cut_off:
                cut_off.add(what)
                raise TimeUp
            held.set()
            wait()

        return waited

    armed: list[bool] = []
    cut_off: set[str] = set()
    monkeypatch.setattr(Background, "start", begun)
    with (
        zeroified(models[0], optimizers[0], transport="hierarchical", **options),
        zeroified(models[1], optimizers[1], transport="flat", **options),
    ):
        held.set()
        for model, optimizer in zip(models, optimizers, strict=True):
            model(mlp_input(comm.rank)).square().mean().backward()
            held.clear()
            optimizer.step()
            optimizer.zero_grad()
        armed.append(True)
        caught = 0
        for _ in range(20):
            held.clear()
            try:
                with torch.no_grad():
                    found = models[0](mlp_input(comm.rank))
                break
            except TimeUp:
                caught += 1
        with torch.no_grad():
            expected = models[1](mlp_input(comm.rank))
        parallel_assert(comm, caught, "nothing was cut off")
        parallel_assert(comm, torch.equal(found, expected), f"{found} {expected}")
        armed.clear()
        held.set()
    topology.free()
