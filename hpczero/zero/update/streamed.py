"""StreamedUpdate: torch's own step of an elementwise optimizer over shards that rest on a tier, window by window.

One ``optimizer.step()`` of the program is one call of torch's method for every window of every unit. Schedulers and
hooks see one step.

    read ahead   [values | gradient | state]     the next windows
    step         long tensors are views of the staging block, as ``parts`` makes them of memory
    write        [values | state | mirror]       the window before; in half precision a copy of values in it

[Note: The same bits]
A run of pieces is one long tensor in memory. Windows cut it at whole vectors, so torch's kernels round every element as
they would there; see plan.windows. Where some pieces of a run have no gradient, the run begins elsewhere; with
``fused=True`` the last bits of a few elements may then differ from those of an update in memory.
"""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from hpczero.accelerator import Mark
from hpczero.errors import StepError, TierError
from hpczero.tier import Fetch, InPlaceTier, Staged
from hpczero.tier.host import InPlace, Opening
from hpczero.zero.units.away import AwayGradient, AwayRest
from hpczero.zero.units.away_shard import GRADIENT, MIRROR, VALUES, AwayShard, UnitStore, floats
from hpczero.zero.units.guard import have_gradients
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.optimizer_state import AwayState, adopt, is_elementwise, state_of
from hpczero.zero.update.parts import (
    PartedUpdate,
    State,
    Update,
    in_groups,
    in_groups_aligned,
    method_behind,
)


@dataclass(frozen=True)
class WindowPieces:
    """Neighbours that are one long tensor.

    Attributes:
        group: index of the optimizer's group.
        begin, end: elements of the shard.
        states: of each.
        counters: what is one number in the state of each of them, equal for all.
        elementwise: what is there for every element.
    """

    group: int
    begin: int
    end: int
    states: tuple[AwayState, ...]
    counters: dict[str, Any]
    elementwise: tuple[str, ...]


@dataclass(frozen=True)
class UpdateWindow:
    """One window of a unit that has to be stepped on.

    Attributes:
        unit, elements: whose, and which of its shard.
        runs: the pieces in it.
        fetch: its reading.
        factors: of its gradient.
        known: parts with content before the step.
    """

    unit: Unit
    elements: range
    runs: list[WindowPieces]
    fetch: Fetch
    factors: tuple[float, ...]
    known: frozenset[str]


@dataclass(frozen=True)
class Stepped:
    """What a step has made of a window.

    Attributes:
        made: numbers in the state of each run.
        kept: parts that have content now and are to be kept.
        changed: whether its gradient is not what it was.
    """

    made: list[tuple[WindowPieces, dict[str, Any]]]
    kept: list[str]
    changed: bool


class StreamedUpdate(Update):
    """Of torch's own optimizer, of whose units some rest on a tier; the others are stepped on where they are.

    Source of the split: DeepSpeed's Twin-Flow, 2023.
    """

    def __init__(self, optimizer: Optimizer, store: UnitStore, *, aligned: bool = False) -> None:
        """Not collective. ``aligned``: as of ``PartedUpdate``."""
        super().__init__(optimizer)
        self._store, self._aligned = store, aligned
        self._here = PartedUpdate(optimizer, aligned=aligned)
        method = method_behind(optimizer)
        assert method is not None, "checked by zeroify"
        self._method: Callable[[Optimizer], Any] = method
        self._capturable = [group.get("capturable") for group in optimizer.param_groups]
        self._begun: list[Fetch] = []  # blocks of staging that this step has

    @override
    def take(self, *, last: bool) -> None:
        """Take the step; ``check`` has passed. Reads have begun when the units that are not on the tier are stepped on.

        Raises:
            StepError: the optimizer's groups hold a piece twice, or it makes state that it did not make at zeroify.
            TierError: bytes could not be moved; values and state are then of two steps, and a checkpoint has to be
                loaded.
        """
        made: list[tuple[WindowPieces, dict[str, Any]]] = []
        try:
            windows = self._begin()
            self._take_here(last=last)
            with self._taking():
                for window in windows:
                    staged = window.fetch.wait()
                    made += self._step(window, staged)
                    self._begun.remove(window.fetch)
                # What cannot be written is told now, where all ranks hear of it.
                self._store.tier.drain()
                # At the end: a piece of two windows begins both with what it had before.
                for run, after in made:
                    give_counters(run, after)
        except BaseException:
            self.give_up()
            raise

    def _begin(self) -> Iterator[UpdateWindow]:
        """The windows of the step; the first ones are on their way."""
        self._adopt()  # a program may have put some there
        group_of = self._group_of()
        self._store.make_room(self._store.blocks)
        windows = self._windows(group_of)
        first = list(itertools.islice(windows, 1))
        return itertools.chain(first, windows)

    def _take_here(self, *, last: bool) -> None:
        """Step on the units that are not on the tier."""
        if not self._here.units:
            return
        try:
            self._here.take(last=last)
            if not self._here.taken:
                raise StepError(
                    "optimizer.step() with a part of its state on a memory tier (offload): the step cannot be taken "
                    "over long tensors, expected every piece once in optimizer.param_groups"
                )
        finally:
            self._here.restore()

    def give_up(self) -> None:
        """The step is cut off: its blocks go back, and nothing is written."""
        for fetch in self._begun:
            with suppress(TierError):  # its block went back when it failed
                self._store.tier.evict(fetch.wait(), ())
        self._begun.clear()

    @override
    def follow(self, slots: Mapping[Unit, Sequence[int]], groups: range) -> None:
        self._units = [unit for unit in slots if unit.away is not None]
        here = {unit: own for unit, own in slots.items() if unit.away is None}
        self._here.follow(here, groups)

    @override
    def adopt(self) -> None:
        self._here.adopt()
        self._adopt()

    def _adopt(self) -> None:
        """What was put into ``optimizer.state`` for every element goes to the tier."""
        for unit in self._units:
            adopt(unit, self._optimizer.state)

    @override
    def forget(self) -> None:
        self._here.forget()
        for unit in self._units:
            shard = unit.away
            assert shard is not None, "it rests on the tier"
            shard.drop(part for part in shard.parts if part not in (VALUES, GRADIENT))

    @override
    def check(self, *, last: bool) -> None:
        groups = self._optimizer.param_groups
        what = ""
        if not last:
            what = "a hook before the step was registered past optimizer.register_step_pre_hook"
        elif method_behind(self._optimizer) is not self._method:
            what = "its step was replaced"
        elif any(group.get("differentiable") for group in groups):
            what = "a group has differentiable=True"
        elif any(g.get("capturable") != c for g, c in zip(groups, self._capturable, strict=False)):
            what = "torch.compile, or a change of capturable, took the step over"
        elif torch.is_inference_mode_enabled():
            what = "torch.inference_mode is on"
        if what:
            raise StepError(
                f"optimizer.step() with its state on a memory tier (offload): {what}, expected torch's own step, which "
                "is taken in windows; leave the optimizer on the device for this"
            )

    def _windows(self, group_of: dict[int, int]) -> Iterator[UpdateWindow]:
        """Those that have to be stepped on, in the order of units; reads of the next ones are on their way."""
        on_its_way: deque[UpdateWindow] = deque()
        for unit, index, runs in self._wanted(group_of):
            on_its_way.append(self._window(unit, index, runs))
            if len(on_its_way) > max(self._store.blocks - 2, 1):
                yield on_its_way.popleft()
        yield from on_its_way

    def _window(self, unit: Unit, index: int, runs: list[WindowPieces]) -> UpdateWindow:
        """Its reading starts."""
        shard, rest = unit.away, unit.gradients.rest
        assert shard is not None, "it rests on the tier"
        elements = shard.windows[index]
        factors = tuple(rest.factors(elements)) if isinstance(rest, AwayGradient) else ()
        fetch = self._start(shard, index)
        known = frozenset(shard.places[index].known)
        return UpdateWindow(unit, elements, runs, fetch, factors, known)

    def _wanted(self, group_of: dict[int, int]) -> Iterator[tuple[Unit, int, list[WindowPieces]]]:
        for unit in self._units:
            shard = unit.away
            if shard is None or not unit.gradients.present:
                continue
            runs = self._runs(unit, group_of)
            for index, window in enumerate(shard.windows):
                inside = [run for run in runs if run.begin < window.stop and window.start < run.end]
                if inside:
                    yield unit, index, inside

    def _start(self, shard: AwayShard, index: int) -> Fetch:
        wanted, fresh = shard.of_step(index)
        self._begun.append(self._store.fetch(shard.places[index], wanted, fresh=fresh))
        return self._begun[-1]

    def _runs(self, unit: Unit, group_of: dict[int, int]) -> list[WindowPieces]:
        """Longest runs of neighbours with gradients, of one group, and with equal numbers in their state."""
        shards = unit.optimized
        found: list[WindowPieces] = []
        entries = []
        present = have_gradients(shards.parameters)
        for piece, place, there in zip(shards.parameters, shards.places, present, strict=True):
            state = state_of(self._optimizer.state, piece)
            entries.append(((group_of.get(id(piece)), there, _numbers(state)), place, state))
        for (group, there, _), neighbours in itertools.groupby(entries, key=itemgetter(0)):
            if group is None or not there:
                continue
            members = list(neighbours)
            first = members[0][2]
            found.append(
                WindowPieces(
                    group,
                    members[0][1].start,
                    members[-1][1].stop,
                    tuple(state for _, _, state in members),
                    {name: self._number(value) for name, value in first.numbers.items()},
                    tuple(first.elementwise),
                )
            )
        return found

    def _step(
        self, window: UpdateWindow, staged: Staged
    ) -> list[tuple[WindowPieces, dict[str, Any]]]:
        """One call of torch's method; the window goes back to the tier. Returns the state of each run."""
        unit, elements = window.unit, window.elements
        stepped = self._compute(window, staged, self._optimizer)
        made = []
        if isinstance(unit.rest, AwayRest):
            made = self._bring_up(unit.rest, elements, staged)
        if stepped.changed and isinstance(unit.gradients.rest, AwayGradient):
            unit.gradients.rest.changed(elements)  # torch's own step of some works in place
        self._store.tier.evict(staged, [*stepped.kept, *made])
        return stepped.made

    def _compute(self, window: UpdateWindow, staged: Staged, optimizer: Optimizer) -> Stepped:
        """One call of torch's method with the options of ``optimizer``, whose own state is not used."""
        unit, known, elements = window.unit, set(window.known), window.elements
        values, gradient = _operands(window, staged)
        parts: list[slice] = []
        tensors: list[tuple[int, nn.Parameter, State]] = []
        for run in window.runs:
            part = slice(
                max(run.begin, elements.start) - elements.start,
                min(run.end, elements.stop) - elements.start,
            )
            long = nn.Parameter(values[part])
            # With a count of changes that is not that of everything in the block.
            long.grad = gradient[part].data if GRADIENT in staged else gradient[part]
            state = {name: self._number(value) for name, value in run.counters.items()}
            state.update({name: floats(staged, name)[part] for name in run.elementwise})
            parts.append(part)
            tensors.append((run.group, long, state))
        first = unit.optimized.start + elements.start
        places = [(unit.spec.layout, first + part.start) for part in parts]
        context = (
            in_groups_aligned(optimizer, tensors, places)
            if self._aligned
            else in_groups(optimizer, tensors)
        )
        with context as made:
            self._call(optimizer)
        changed = GRADIENT in staged and any(
            long.grad is not None and long.grad._version for _, long, _ in tensors
        )
        changed = changed or (staged.in_place and bool(window.factors))
        states = [state or {} for state in made]
        for after, part in zip(states, parts, strict=True):
            for name in [name for name, value in after.items() if is_elementwise(value)]:
                _keep(name, after.pop(name), part, staged, fresh=name not in known)
                known.add(name)
                after.setdefault(_ELEMENTWISE, []).append(name)
        kept = [part for part in staged if part in known and (part != GRADIENT or changed)]
        return Stepped(list(zip(window.runs, states, strict=True)), kept, changed)

    def _call(self, optimizer: Optimizer) -> None:
        """Torch's method, over what the groups hold now."""
        self._method(optimizer)

    def _number(self, value: Any) -> Any:
        """A counter of pieces, for a long tensor."""
        return value.clone() if isinstance(value, Tensor) else value

    def _bring_up(self, rest: AwayRest, elements: range, staged: Staged) -> list[str]:
        """The values of a window are new: so must be copies of them. Returns those that go to the tier."""
        return rest.stepped(elements, staged)


def _operands(window: UpdateWindow, staged: Staged) -> tuple[Tensor, Tensor]:
    """Values and gradient of a window, wherever they are."""
    begin, end = window.elements.start, window.elements.stop
    unit = window.unit
    values = floats(staged, VALUES) if VALUES in staged else unit.optimized.master[begin:end]
    if GRADIENT not in staged:
        return values, unit.gradients.reduced[begin:end].to(values.device)
    gradient = floats(staged, GRADIENT)
    for factor in window.factors:
        gradient.mul_(factor)
    return values, gradient


_ELEMENTWISE = "\0elementwise"  # no optimizer's name


def give_counters(run: WindowPieces, after: dict[str, Any]) -> None:
    """What is one number in the state of a long tensor is that of each of its pieces."""
    names = after.pop(_ELEMENTWISE, [])
    for state in run.states:
        state.elementwise.update(dict.fromkeys(names))
        for name, value in after.items():
            state[name] = value.clone() if isinstance(value, Tensor) else value


def _keep(name: str, value: Tensor, part: slice, staged: Staged, *, fresh: bool) -> None:
    """State that torch has made for a long tensor, in its place in staging."""
    if name not in staged:
        raise StepError(
            f"the optimizer has made state {name!r}, which it did not make at zeroify, so the tier has no room for "
            "it; set the options that ask for it before zeroify (SGD's momentum, Adam's amsgrad), or leave the "
            "optimizer on the device"
        )
    into = floats(staged, name)
    if fresh:
        into.zero_()  # also of pieces that have none yet
    if value.data_ptr() != into[part].data_ptr():
        into[part].copy_(value)


# HostUpdate: the step is taken by the host where state rests in its memory, for a model on a device.
#
#     backward   gradients come down behind it, one reduction after the other (units/away.py)
#     step       [values | gradient | state] where they rest; no state moves
#     after      values go up in the dtype of the parameters, beside the steps on the next windows
#
# Source: Ren et al., ZeRO-Offload, ATC21, sec. 4 and 5.

# Classes of torch's with a fused kernel for the host: one pass over memory, several times faster than the others.
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


class HostUpdate(StreamedUpdate):
    """Of an optimizer whose pieces rest in memory that the host works on."""

    def __init__(self, optimizer: Optimizer, store: UnitStore, *, aligned: bool = False) -> None:
        """``store`` has an ``InPlaceTier`` and an ascent; ``aligned``: as of ``PartedUpdate``."""
        super().__init__(optimizer, store, aligned=aligned)
        assert isinstance(store.tier, InPlaceTier), "opened by zeroify"
        self._tier = store.tier

    @override
    def _begin(self) -> Iterator[UpdateWindow]:
        for unit in self._units:
            if isinstance(unit.rest, AwayRest) and unit.rest.near is not None:
                unit.rest.near.settle()  # it is sent from memory that changes now
        return super()._begin()

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
        if rest.near is None:
            return super()._bring_up(rest, elements, staged)
        rest.near.send(elements, ready(rest, staged))
        return []


def ready(rest: AwayRest, staged: Staged) -> Tensor:
    """(elements,) values of a window in the dtype of the parameters, where they rest, to be sent from there."""
    return rest.shard.renew_mirror(staged) if MIRROR in staged else floats(staged, VALUES)


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
        tasks: all windows, those first whose gradients will come first.
        numbers: each state that they are of, and what was in it.
        work: on the thread.
    """

    tasks: Sequence[Task]
    numbers: Sequence[tuple[Any, dict[str, Any]]]
    work: Future[None]


class DelayedUpdate(HostUpdate):
    """The host's step of one batch, taken on a thread while the model computes the next batch."""

    def __init__(self, optimizer: Optimizer, store: UnitStore, *, aligned: bool = False) -> None:
        """As of ``HostUpdate``."""
        super().__init__(optimizer, store, aligned=aligned)
        self._pending: Pending | None = None
        self._thread = ThreadPoolExecutor(1, "hpczero-delayed-update")

    @property
    def pending(self) -> bool:  # type: ignore[override]
        """Whether an update was started and not finished; equal on all ranks."""
        return self._pending is not None

    @override
    def take(self, *, last: bool) -> None:
        """Start this update; the one before is finished."""
        assert self._pending is None, "finished, by all ranks, before any of them starts"
        try:
            with self._taking():
                self._start_update()
        except BaseException:
            self.give_up()
            raise

    @override
    def finish(self) -> None:
        """Wait for the update that was started, if any; its result is the optimizer's, and is sent to the model.

        Raises:
            StepError: the program has changed ``optimizer.state`` meanwhile, or torch's step has raised.
            TierError: a gradient did not come to where it rests.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        error = pending.work.exception()  # waits for it
        try:
            if error is not None:
                raise _told(error)
            self._check_state(pending)
            for task in pending.tasks:
                self._take_over(task)
        finally:
            self.give_up()
        for task in pending.tasks:
            for run, after in task.stepped.made if task.stepped is not None else ():
                give_counters(run, after)

    @override
    def abandon(self) -> None:
        """Wait for the thread, and forget what it has made; values and state are then of two steps."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.work.exception()
        self.give_up()

    def _start_update(self) -> None:
        self._adopt()  # a program may have put some there
        group_of = self._group_of()
        self._store.make_room(self._store.blocks)
        tasks = []
        for unit, index, runs in reversed(list(self._wanted(group_of))):
            window = self._window(unit, index, runs)
            near = unit.rest.near if isinstance(unit.rest, AwayRest) else None
            tasks.append(Task(window, None if near is None else near.sent))
            if isinstance(unit.gradients.rest, AwayGradient):
                # The thread multiplies it, and may do more.
                unit.gradients.rest.changed(window.elements)
        states = [state for task in tasks for run in task.window.runs for state in run.states]
        numbers = [(state, _numbers(state)) for state in states]
        work = self._thread.submit(self._run, tasks, twin_of(self._optimizer))
        self._pending = Pending(tasks, numbers, work)

    def _run(self, tasks: Sequence[Task], twin: Optimizer) -> None:
        """On the thread; what goes wrong is told in ``finish``. See [Note: What the thread touches]."""
        try:
            assert self._store.ascent is not None, "the host steps"
            self._store.ascent.accelerator.enter_thread()
            with torch.no_grad():
                for task in tasks:
                    self._do(task, twin)
        finally:
            for task in tasks:
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
            task.source = ready(rest, staged)
        staged.end()

    def _take_over(self, task: Task) -> None:
        """What the thread has made of a window is the tier's, and on its way up."""
        assert task.staged is not None, "the thread has ended well"
        assert task.stepped is not None, "the thread has ended well"
        self._store.tier.evict(task.staged, task.stepped.kept)
        self._begun.remove(task.window.fetch)
        rest = task.window.unit.rest
        if task.source is not None and isinstance(rest, AwayRest):
            assert rest.near is not None, "it has a source"
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
    kind = TierError if isinstance(error, TierError) else StepError
    name = "" if isinstance(error, kind) else f"{type(error).__name__}: "
    told = kind(f"the delayed update of the step before: {name}{error}")
    told.__cause__ = error
    return told
