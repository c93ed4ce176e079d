"""The delayed update: the recurrence of an update that is one step late, to the last bit, and nothing in between.

The reference is plain torch over the same batches: gradients of every rank's batch are averaged as the ranks average
them, and each gradient is stepped on one batch later than it was made.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero import Offload
from hpczero.errors import PlanError, StepError, TierError
from hpczero.zero.update.delayed import DelayedUpdate
from tests.helpers import late
from tests.helpers.late import LateAccelerator
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, adamw, mlp_input, raises_on_all, zeroified

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3)]

SIZES = (
    7,
    128,
    64,
    64,
)  # whole vectors, however they are cut: fused kernels round what fills none in another way
OFFLOAD = Offload("host", "host", window=2**14, buffers=4, step="host", delayed=True)

Maker = Callable[[Any], torch.optim.Optimizer]
MAKERS: dict[str, Maker] = {
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD foreach nesterov": lambda p: torch.optim.SGD(
        p, lr=1e-2, momentum=0.9, nesterov=True, foreach=True
    ),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}


def backward(model: nn.Module, rank: int, step: int, *, scale: float = 1.0) -> None:
    """Of a batch of its own for every step and rank."""
    x = mlp_input(rank + 7 * step)
    (model(x).square().mean() * scale).backward()


class Late:
    """Plain torch on one process that steps with the gradients of the step before, and with that step's options."""

    def __init__(self, make: Maker) -> None:
        self.model = MLP(SIZES)
        self.optimizer = make(self.model.parameters())
        self._late: tuple[dict[str, Tensor], float] | None = None

    def step(self, gradients: dict[str, Tensor] | None, lr: float = 0.0) -> None:
        """Gradients of this step, and its learning rate; None: it is skipped."""
        self.finish()
        if gradients is not None:
            self._late = gradients, lr

    def finish(self) -> None:
        """Take the step that is late."""
        if self._late is not None:
            gradients, self.optimizer.param_groups[0]["lr"] = self._late
            for name, parameter in self.model.named_parameters():
                parameter.grad = gradients[name]
            self.optimizer.step()
            self._late = None

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


def gradients_of(
    topology: Topology,
    weights: dict[str, Tensor],
    step: int,
    clip: float | None = None,
    parts: int = 1,
    precision: str = "fp32",
) -> dict[str, Tensor]:
    """Mean over ranks at ``weights``, reduced by a model that is sharded and does not step."""
    model = MLP(SIZES)
    model.load_state_dict(weights)
    options: dict[str, Any] = {"stage": 2, "topology": topology, "transport": "flat"}
    with zeroified(model, adamw(model), precision=precision, **options):
        for part in range(parts):
            with hpczero.accumulate(model, part, parts):
                backward(model, topology.rank, step + 100 * part)
        if clip is not None:
            hpczero.clip_grad_norm_(model, clip)
        return hpczero.full_gradients(model)


def weights_now(model: nn.Module) -> dict[str, Tensor]:
    """What the model computes with; an update on its way stays there."""
    held = {}
    for unit in hpczero.sharding(model).units:
        unit.unshard()
        unit.whole.wait_for_unshard()
        for parameter, slot in zip(unit.parameters, unit.spec.layout.slots, strict=True):
            with torch._C.DisableTorchFunctionSubclass():
                held[slot.name] = parameter.detach().clone().float()
        unit.reshard()
    return held


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_step_shows_the_update_of_the_one_before(
    comm: MPI.Intracomm,
    topology: Topology,
    stage: int,
    make: Maker,
    clip: float | None,
    parts: int,
    precision: str,
) -> None:
    """Weights after every step, with a scheduler, against plain torch; the last update comes with ``finish_update``."""
    expected = Late(make)
    model = MLP(SIZES)
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    options: dict[str, Any] = {"stage": stage, "topology": topology, "device": LateAccelerator()}
    options.update(precision=precision, transport="flat")

    def right() -> bool:
        wanted = expected.weights
        if precision == "bf16":
            wanted = {name: value.bfloat16().float() for name, value in wanted.items()}
        return same(wanted, weights_now(model))

    with zeroified(model, optimizer, offload=OFFLOAD, **options):
        for step in range(5):
            gradients = gradients_of(topology, expected.weights, step, clip, parts, precision)
            for part in range(parts):
                with hpczero.accumulate(model, part, parts):
                    backward(model, comm.rank, step + 100 * part)
            if clip is not None:
                hpczero.clip_grad_norm_(model, clip)
            optimizer.step()
            optimizer.zero_grad()
            expected.step(gradients, optimizer.param_groups[0]["lr"])
            scheduler.step()
            parallel_assert(comm, right(), f"other weights, step {step}")
        hpczero.finish_update(model)
        expected.finish()
        parallel_assert(comm, right(), "other weights at the end")
        hpczero.finish_update(model)  # there is nothing more
        parallel_assert(comm, right(), "an update was taken twice")


def options_of(topology: Topology, **more: Any) -> dict[str, Any]:
    options = {"stage": 3, "topology": topology, "device": LateAccelerator(), "transport": "flat"}
    return {"offload": OFFLOAD, **options, **more}


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()


def expect_steps(expected: Late, topology: Topology, steps: range) -> None:
    for step in steps:
        expected.step(gradients_of(topology, expected.weights, step), 1e-2)


READS: dict[str, Callable[[nn.Module], dict[str, Tensor] | None]] = {
    "full_state_dict": hpczero.full_state_dict,
    "gathered": lambda model: whole(model),
    "release": lambda model: released(model),
}


def whole(model: nn.Module) -> dict[str, Tensor]:
    with hpczero.gathered(model):
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


def released(model: nn.Module) -> dict[str, Tensor]:
    hpczero.release(model, whole=True)
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    hpczero.zeroify(model, None, topology=hpczero.Topology.of_world())  # to be released once more
    return found


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_whoever_reads_the_weights_reads_all_updates(
    comm: MPI.Intracomm,
    topology: Topology,
    read: Callable[[nn.Module], dict[str, Tensor] | None],
) -> None:
    make = MAKERS["AdamW fused"]
    expected, model = Late(make), MLP(SIZES)
    optimizer = make(model.parameters())
    with zeroified(model, optimizer, **options_of(topology)):
        take_steps(model, optimizer, comm.rank, range(3))
        expect_steps(expected, topology, range(3))
        parallel_assert(comm, same(expected.weights, weights_now(model)), "not late")
        expected.finish()
        found = read(model)
        parallel_assert(
            comm, found is None or same(expected.weights, found), "an update is missing"
        )


def test_a_program_may_change_values_between_steps(comm: MPI.Intracomm, topology: Topology) -> None:
    make = MAKERS["AdamW fused"]
    expected, model = Late(make), MLP(SIZES)
    optimizer = make(model.parameters())
    with zeroified(model, optimizer, **options_of(topology)):
        for first in (0, 2, 4):
            take_steps(model, optimizer, comm.rank, range(first, first + 2))
            expect_steps(expected, topology, range(first, first + 2))
            expected.finish()
            with hpczero.gathered(model, modifier_rank=0):
                for parameter in model.parameters():
                    parameter.data.mul_(0.9)
            with torch.no_grad():
                for parameter in expected.model.parameters():
                    parameter.mul_(0.9)
        parallel_assert(comm, same(expected.weights, weights_now(model)), "other weights")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("background", [False, True])
def test_a_save_has_all_updates_and_whoever_loads_it_goes_on_alike(
    comm: MPI.Intracomm, topology: Topology, folder: Path, precision: str, background: bool
) -> None:
    """The run that has saved and the one that loads are both without an update on its way."""
    ends = []
    model = MLP(SIZES)
    optimizer = adamw(model, fused=True)
    with zeroified(model, optimizer, **options_of(topology, precision=precision)):
        take_steps(model, optimizer, comm.rank, range(3))
        with hpczero.checkpoint.Checkpoints(folder, model, background=background) as checkpoints:
            checkpoints.save(3)
            take_steps(model, optimizer, comm.rank, range(3, 6))
        ends.append(hpczero.full_state_dict(model))
    model = MLP(SIZES, seed=8)
    optimizer = adamw(model, fused=True)
    with zeroified(model, optimizer, **options_of(topology, precision=precision)):
        take_steps(model, optimizer, comm.rank, range(2))  # one is on its way when it is loaded
        hpczero.checkpoint.load(folder, model)
        take_steps(model, optimizer, comm.rank, range(3, 6))
        ends.append(hpczero.full_state_dict(model))
    if ends[0] is not None and ends[1] is not None:
        assert same(ends[0], ends[1])
    if precision == "fp32":
        expected = Late(MAKERS["AdamW fused"])
        expect_steps(expected, topology, range(3))
        expected.finish()
        model = MLP(SIZES)
        with zeroified(model, adamw(model), stage=1, topology=topology):
            hpczero.checkpoint.load(folder, model)
            found = hpczero.full_state_dict(model)
        parallel_assert(comm, found is None or same(expected.weights, found), "not in the file")


def test_a_step_that_is_skipped_still_shows_the_one_before(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    make = MAKERS["AdamW fused"]
    expected, model = Late(make), MLP(SIZES)
    optimizer = make(model.parameters())
    precision = hpczero.Precision(nonfinite="skip")
    with zeroified(model, optimizer, **options_of(topology, precision=precision)) as sharding:
        for step in range(6):
            bad = step in (2, 3)
            gradients = gradients_of(topology, expected.weights, step)
            backward(model, comm.rank, step, scale=float("inf") if bad else 1.0)
            optimizer.step()
            optimizer.zero_grad()
            expected.step(None if bad else gradients, 1e-2)
            right = same(expected.weights, weights_now(model))
            parallel_assert(comm, right, f"other weights after step {step}")
        assert sharding.skipped_steps == 2


def test_gradients_that_nobody_drops_are_added_to(comm: MPI.Intracomm, topology: Topology) -> None:
    """While the thread still reads them."""
    make = MAKERS["AdamW fused"]
    expected, model = Late(make), MLP(SIZES)
    optimizer = make(model.parameters())
    total: dict[str, Tensor] | None = None
    with zeroified(model, optimizer, **options_of(topology)):
        for step in range(5):
            new = gradients_of(topology, expected.weights, step)
            total = new if total is None else {name: total[name] + new[name] for name in new}
            backward(model, comm.rank, step)
            parallel_assert(comm, same(total, hpczero.full_gradients(model)), "another sum")
            optimizer.step()
            expected.step(total, 1e-2)
            parallel_assert(comm, same(expected.weights, weights_now(model)), f"step {step}")


def test_the_next_batch_is_computed_while_the_host_steps(
    comm: MPI.Intracomm, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread may not even begin before the next forward has ended: nobody waits for it until then."""
    make = MAKERS["AdamW fused"]
    expected, model = Late(make), MLP(SIZES)
    optimizer = make(model.parameters())
    go = threading.Event()
    do = DelayedUpdate._do

    def held_back(self: Any, task: Any, twin: Any) -> None:
        assert go.wait(60), "the program waits for the thread"
        do(self, task, twin)

    monkeypatch.setattr(DelayedUpdate, "_do", held_back)
    monkeypatch.setattr(late, "LATE_S", 3e-3)
    with zeroified(model, optimizer, **options_of(topology)):
        for step in range(4):
            x = mlp_input(comm.rank + 7 * step)
            loss = model(x).square().mean()
            go.set()
            loss.backward()
            optimizer.step()
            go.clear()
            optimizer.zero_grad()
        go.set()
        expect_steps(expected, topology, range(4))
        hpczero.finish_update(model)
        expected.finish()
        parallel_assert(comm, same(expected.weights, weights_now(model)), "other weights")


def test_the_late_twin_sees_a_wait_that_is_missing(
    comm: MPI.Intracomm, topology: Topology, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32 values are sent from where the thread steps on them: it must wait until they are on their way."""
    monkeypatch.setattr(late, "LATE_S", 20e-3)
    do = DelayedUpdate._do

    def hasty(self: Any, task: Any, twin: Any) -> None:
        task.sent = None
        do(self, task, twin)

    differ = []
    for wrong in (False, True):
        if wrong:
            monkeypatch.setattr(DelayedUpdate, "_do", hasty)
        make = MAKERS["AdamW fused"]
        expected, model = Late(make), MLP(SIZES)
        optimizer = make(model.parameters())
        with zeroified(model, optimizer, **options_of(topology)):
            take_steps(model, optimizer, comm.rank, range(3))
            expect_steps(expected, topology, range(3))
            differ.append(not same(expected.weights, weights_now(model)))
    parallel_assert(comm, differ == [False, True], str(differ))


@pytest.mark.parametrize("kind", [TierError, ValueError])
def test_what_fails_on_the_thread_is_one_error_of_the_next_step(
    comm: MPI.Intracomm,
    topology: Topology,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[Exception],
) -> None:
    model = MLP(SIZES)
    optimizer = adamw(model, fused=True)
    with zeroified(model, optimizer, **options_of(topology)) as sharding:
        take_steps(model, optimizer, comm.rank, range(2))
        saved = hpczero.checkpoint.Checkpoints(folder, model)
        saved.save(2)
        take_steps(model, optimizer, comm.rank, range(2, 5))
        expected = hpczero.full_state_dict(model)
        saved.load()
        update: Any = sharding.step.steppers[0].parted
        do = update._do
        done: list[int] = []

        def failing(task: Any, twin: Any) -> None:
            done.append(1)
            if len(done) == 2:
                raise kind("no more")
            do(task, twin)

        with monkeypatch.context() as patch:
            if comm.rank == comm.size - 1:
                patch.setattr(update, "_do", failing)
            take_steps(model, optimizer, comm.rank, range(2, 3))
            backward(model, comm.rank, 3)
            wanted: Any = TierError if kind is TierError else StepError
            raises_on_all(comm, wanted, "delayed update.*no more", optimizer.step)
        raises_on_all(comm, StepError, "load a checkpoint", lambda: hpczero.full_state_dict(model))
        optimizer.zero_grad()
        saved.load()
        take_steps(model, optimizer, comm.rank, range(2, 5))
        found = hpczero.full_state_dict(model)
        same_end = found is None or expected is None or same(expected, found)
        parallel_assert(comm, same_end, "another end after the checkpoint")


def clear_each(optimizer: torch.optim.Optimizer) -> None:
    for state in dict.values(optimizer.state):
        state.clear()


def count_on(optimizer: torch.optim.Optimizer) -> None:
    for state in dict.values(optimizer.state):
        state["step"] = state["step"] + 1


CHANGES: dict[str, Callable[[torch.optim.Optimizer], None]] = {
    "clear": lambda optimizer: optimizer.state.clear(),
    "clear each": clear_each,
    "count": count_on,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_state_that_changes_under_an_update_is_refused_and_may_change_after_it(
    comm: MPI.Intracomm,
    topology: Topology,
    folder: Path,
    change: Callable[[torch.optim.Optimizer], None],
) -> None:
    model = MLP(SIZES)
    optimizer = adamw(model, fused=True)
    with zeroified(model, optimizer, **options_of(topology)):
        take_steps(model, optimizer, comm.rank, range(2))
        saved = hpczero.checkpoint.Checkpoints(folder, model)
        saved.save(2)
        change(optimizer)
        take_steps(model, optimizer, comm.rank, range(2, 4))
        change(optimizer)
        backward(model, comm.rank, 4)
        raises_on_all(comm, StepError, "finish_update", optimizer.step)
        optimizer.zero_grad()
        saved.load()
        take_steps(model, optimizer, comm.rank, range(2, 4))


def test_whole_parameters_inside_a_call_are_refused_while_an_update_is_on_its_way(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    model = MLP(SIZES)
    optimizer = adamw(model, fused=True)
    with zeroified(model, optimizer, **options_of(topology)):
        take_steps(model, optimizer, comm.rank, range(2))

        def look(*_: Any) -> None:
            with hpczero.gathered(model):
                pytest.fail("it is not whole")

        handle = model.layers[1].register_forward_hook(look)
        raises_on_all(comm, StepError, "finish_update", lambda: model(mlp_input(comm.rank)))
        handle.remove()
        take_steps(model, optimizer, comm.rank, range(2, 4))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"step": "device"}, "delayed with step device"),
        ({"gradients": "device"}, "delayed with gradients on device"),
        ({"parameters": "host"}, "delayed with parameters on host"),
        ({"fraction": 0.5}, "delayed with fraction 0.5"),
        (
            {"optimizer": "disk", "gradients": "disk", "step": "device", "folder": "x"},
            "step device",
        ),
    ],
)
def test_a_delay_that_cannot_be_right_is_refused(
    comm: MPI.Intracomm, topology: Topology, changes: dict[str, Any], text: str
) -> None:
    offload = dataclasses.replace(OFFLOAD, **changes)
    model = MLP()

    def start() -> nn.Module:
        return hpczero.zeroify(model, adamw(model), topology=topology, offload=offload)

    raises_on_all(comm, PlanError, text, start)


def test_several_optimizers_are_refused(comm: MPI.Intracomm, topology: Topology) -> None:
    model = MLP()
    first, *others = model.parameters()
    both = (torch.optim.AdamW([first]), torch.optim.AdamW(others))

    def start() -> nn.Module:
        return hpczero.zeroify(model, both, topology=topology, offload=OFFLOAD)

    raises_on_all(comm, PlanError, "2 optimizers, expected one", start)
