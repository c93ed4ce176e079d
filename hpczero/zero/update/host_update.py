"""HostUpdate: torch's own step, taken by the host where state rests in its memory, for a model on a device.

Owns: what stands in ``param_groups`` for that, and the way of new values up. Must not know: the agreement of ranks,
clipping, streams of a device.

    backward   gradients come down behind it, one reduction after the other (units/away.py)
    step       [values | gradient | state] where they rest; no state moves
    after      values go up in the dtype of the parameters, beside the steps on the next windows

Source: Ren et al., ZeRO-Offload, ATC21, sec. 4 and 5.
"""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from hpczero.accelerator import Mark
from hpczero.errors import StepError, TierError
from hpczero.tier import Fetch, InPlaceTier, Staged
from hpczero.tier.host import InPlace, Opening
from hpczero.zero.units.away import AwayGradient, AwayRest, mirrored
from hpczero.zero.units.away_shard import MIRROR, VALUES, AwayShard, SentNear, UnitStore, floats
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.streamed import Stepped, StreamedUpdate, UpdateWindow, give_counters

# Classes of torch's with a fused kernel for the host: one pass over memory, several times faster than the others.
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


class HostUpdate(StreamedUpdate):
    """Of one optimizer, whose pieces rest in memory that the host works on; nothing here is collective."""

    def __init__(self, units: Sequence[Unit], optimizer: Optimizer, store: UnitStore) -> None:
        """As of ``StreamedUpdate``; ``store`` has an ``InPlaceTier`` and an ascent."""
        super().__init__(units, optimizer, store)
        assert isinstance(store.tier, InPlaceTier), "opened by zeroify"
        self._tier = store.tier

    @override
    def begin(self) -> None:
        for unit in self._units:
            if isinstance(unit.rest, AwayRest) and unit.rest.near is not None:
                unit.rest.near.settle()  # it is sent from memory that changes now
        super().begin()

    @override
    def _start(self, shard: AwayShard, index: int) -> Fetch:
        wanted, fresh = shard.of_step(index)
        self._begun.append(self._tier.open(shard.places[index], wanted, fresh=fresh))
        return self._begun[-1]

    @override
    def _call(self, optimizer: Optimizer) -> None:
        with fused_where_nothing_was_chosen(optimizer):
            super()._call(optimizer)

    @override
    def _number(self, value: Any) -> Any:
        return value.to("cpu", copy=True) if isinstance(value, Tensor) else value

    @override
    def _bring_up(self, rest: AwayRest, elements: range, staged: Staged) -> list[str]:
        if not isinstance(rest.near, SentNear):
            return super()._bring_up(rest, elements, staged)
        rest.near.send(elements, ready(staged, rest.near.tensor.dtype))
        return []


def ready(staged: Staged, dtype: torch.dtype) -> Tensor:
    """(elements,) values of a window in ``dtype``, where they rest, so that they can be sent from there."""
    return mirrored(staged, dtype) if MIRROR in staged else floats(staged, VALUES)


@contextmanager
def fused_where_nothing_was_chosen(optimizer: Optimizer) -> Iterator[None]:
    """Context: groups that leave the implementation to torch have the fused one, where the host has one.

    Torch itself chooses another one on each kind of device; on a host it would choose the slowest.
    """
    chosen = _groups_without_choice(optimizer)
    for group in chosen:
        group["fused"] = True
    try:
        yield
    finally:
        for group in chosen:
            group["fused"] = None


def leaves_choice(optimizer: Optimizer) -> bool:
    """Whether a group leaves the implementation to torch, and the host has a fused one."""
    return bool(_groups_without_choice(optimizer))


def _groups_without_choice(optimizer: Optimizer) -> list[dict[str, Any]]:
    if not isinstance(optimizer, FUSED):
        return []
    groups = optimizer.param_groups
    return [g for g in groups if g.get("fused", False) is None and g.get("foreach") is None]


# DelayedUpdate: the host's step of one batch is taken on a thread while the model computes the next batch.
#
#     step k        the result of the update before is put into the model; this update begins, with today's options
#     batch k+1     is computed with parameters that lack the update of batch k: it is one step late
#     finish        waits, then as at a step; without it the last update would stay on its way
#
# The recurrence is w[k] = w[k-1] + update(gradient at w[k-2]). It is not that of plain torch.
#
# [Note: What the thread touches]
# The records that were opened for it, where copies of other gradients wait until it is through; and a twin of the
# optimizer with options and state of its own. Everything else, the tier's lists and ``optimizer.state`` among it, is
# touched by the program's thread alone: before the thread starts and after it has ended.
#
# Source: Ren et al., ZeRO-Offload, ATC21, sec. 5.2.


@dataclass
class Task:
    """One window, and what the thread has made of it.

    Attributes:
        window: of a unit.
        sent: behind what is still being sent from where its values rest.
        staged: where it rests, once it was waited for.
        stepped: what came of it.
        source: its values, to be sent.
    """

    window: UpdateWindow
    sent: Mark | None
    staged: InPlace | None = None
    stepped: Stepped | None = None
    source: Tensor | None = None


@dataclass
class Pending:
    """An update that was started.

    Attributes:
        twin: the optimizer as it was then.
        tasks: all windows, those first whose gradients will come first.
        thread: None where there is nothing to do.
        error: what went wrong on it.
    """

    twin: Optimizer
    tasks: Sequence[Task]
    thread: threading.Thread | None = None
    error: BaseException | None = None
    numbers: list[tuple[Any, dict[str, Any]]] = field(default_factory=list)


class DelayedUpdate(HostUpdate):
    """Of one optimizer; nothing here is collective."""

    _pending: Pending | None = None

    @property
    def pending(self) -> bool:  # type: ignore[override]
        """Whether an update was started and not finished; equal on all ranks."""
        return self._pending is not None

    @override
    def take(self, *, last: bool) -> None:
        """Start this update; the one before is finished. The groups are empty then until ``restore``.

        Raises:
            StepError, TierError: it cannot be started.
        """
        assert self._pending is None, "finished, by all ranks, before any of them starts"
        self._put_groups_away()
        try:
            self._start_update()
        except BaseException:
            self.give_up()
            self.restore()
            raise
        self._empty_groups()

    def finish(self) -> None:
        """Wait for the update that was started, if any; its result is the optimizer's, and is sent to the model.

        Raises:
            StepError: the program has changed ``optimizer.state`` meanwhile, or torch's step has raised.
            TierError: a gradient did not come to where it rests.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.thread is not None:
            pending.thread.join()
        try:
            if pending.error is not None:
                raise _told(pending.error)
            self._check_state(pending)
            for task in pending.tasks:
                self._take_over(task)
        finally:
            self.give_up()
        for task in pending.tasks:
            for run, after in task.stepped.made if task.stepped is not None else ():
                give_counters(run, after)

    def abandon(self) -> None:
        """Wait for the thread, and forget what it has made; values and state are then of two steps."""
        pending, self._pending = self._pending, None
        if pending is not None and pending.thread is not None:
            pending.thread.join()
        self.give_up()

    def _start_update(self) -> None:
        self.adopt()  # a program may have put some there
        groups = self._optimizer.param_groups
        group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
        self._store.make_room(self._store.blocks)
        tasks = []
        for unit, index, runs in reversed(list(self._wanted(group_of))):
            window = self._window(unit, index, runs)
            near = unit.rest.near if isinstance(unit.rest, AwayRest) else None
            tasks.append(Task(window, near.sent if isinstance(near, SentNear) else None))
            if isinstance(unit.gradients.rest, AwayGradient):
                unit.gradients.rest.changed(
                    window.elements
                )  # the thread multiplies it, and may do more
        pending = Pending(twin_of(self._optimizer), tasks)
        for task in tasks:
            for run in task.window.runs:
                pending.numbers += [(state, _numbers(state)) for state in run.states]
        if tasks:
            pending.thread = threading.Thread(
                target=self._run, args=(pending,), name="hpczero-delayed-update"
            )
        self._pending = pending
        if pending.thread is not None:
            pending.thread.start()

    def _run(self, pending: Pending) -> None:
        """On the thread; what goes wrong is told in ``finish``. See [Note: What the thread touches]."""
        try:
            assert self._store.ascent is not None, "the host steps"
            self._store.ascent.accelerator.enter_thread()
            with torch.no_grad():
                for task in pending.tasks:
                    self._do(task, pending.twin)
        except BaseException as error:  # told where the result is waited for
            pending.error = error
        finally:
            for task in pending.tasks:
                assert isinstance(task.window.fetch, Opening), "of a tier in place"
                task.window.fetch.end()

    def _do(self, task: Task, twin: Optimizer) -> None:
        window = task.window
        staged = window.fetch.wait()
        assert isinstance(staged, InPlace), "of a tier in place"
        if task.sent is not None:
            task.sent.wait()
        task.staged, task.stepped = staged, self._compute(window, staged, twin)
        rest = window.unit.rest
        if isinstance(rest, AwayRest) and rest.near is not None:
            task.source = ready(staged, rest.near.tensor.dtype)
        staged.end()

    def _take_over(self, task: Task) -> None:
        """What the thread has made of a window is the tier's, and on its way up."""
        assert task.staged is not None, "the thread has ended well"
        assert task.stepped is not None, "the thread has ended well"
        self._store.tier.evict(task.staged, task.stepped.kept)
        self._begun.remove(task.window.fetch)
        rest = task.window.unit.rest
        if task.source is not None and isinstance(rest, AwayRest):
            assert isinstance(rest.near, SentNear), "the host steps"
            rest.near.send(task.window.elements, task.source)

    def _check_state(self, pending: Pending) -> None:
        """Refuse to give numbers to state that is not what the update was started with.

        Raises:
            StepError: says what to call before.
        """
        held = {id(state) for state in dict.values(self._optimizer.state)}
        for state, numbers in pending.numbers:
            if id(state) not in held or _numbers(state) != numbers:
                raise StepError(
                    "optimizer.state was changed while a delayed update of it was on its way (offload, delayed), "
                    "expected no change between optimizer.step() and the next one; call hpczero.finish_update(model) "
                    "before a change"
                )


def twin_of(optimizer: Optimizer) -> Optimizer:
    """An optimizer with the options of today, which later changes do not reach; without pieces and state."""
    twin: Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.param_groups = [
        {
            name: value.clone() if isinstance(value, Tensor) else copy.copy(value)
            for name, value in group.items()
            if name not in ("params", "param_names")
        }
        | {"params": []}
        for group in optimizer.param_groups
    ]
    twin.state = defaultdict(dict)
    return twin


def _numbers(state: Any) -> dict[str, Any]:
    """What is in memory of the state of a piece, and the names of the rest."""
    found = {
        name: value.item() if isinstance(value, Tensor) else value
        for name, value in state.numbers.items()
    }
    return {**found, "": tuple(state.elementwise)}


def _told(error: BaseException) -> StepError | TierError:
    """As whoever finishes the update is told of it."""
    said = f"the delayed update of the step before: {error}"
    kind = TierError if isinstance(error, TierError) else StepError
    if not isinstance(error, (TierError, StepError)):
        said = f"the delayed update of the step before: {type(error).__name__}: {error}"
    told = kind(said)
    told.__cause__ = error
    return told
