"""StreamedUpdate: torch's own step of an elementwise optimizer over shards that rest on a tier, window by window.

Owns: which windows pass through memory, and what stands in ``param_groups`` meanwhile. Must not know: the medium, the
agreement of ranks, clipping, what follows an update.

One ``optimizer.step()`` of the program is one call of torch's method for every window of every unit. Schedulers and
hooks see one step (issue 18).

    read ahead   [values | gradient | state]     the next windows
    step         long tensors are views of the staging block, as ``parts`` makes them of memory
    write        [values | state | mirror]       the window before; in half precision a copy of values in it

[Note: The same bits]
A run of pieces is one long tensor in memory. Windows cut it at whole vectors, so torch's kernels round every element as
they would there; see plan.windows. Where some pieces of a run have no gradient, the run begins elsewhere; with
``fused=True`` the last bits of a few elements may then differ from those of an update in memory.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from hpczero.errors import StepError, TierError
from hpczero.tier import Fetch, Staged
from hpczero.zero.units.away import AwayGradient, AwayRest
from hpczero.zero.units.away_shard import GRADIENT, VALUES, AwayShard, UnitStore, floats
from hpczero.zero.units.guard import have_gradients
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.optimizer_state import AwayState, adopt, is_elementwise, state_of
from hpczero.zero.update.parts import PartedUpdate, Update, method_behind


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
    """Of one optimizer, all of whose pieces rest on a tier; nothing here is collective."""

    def __init__(self, units: Sequence[Unit], optimizer: Optimizer, store: UnitStore) -> None:
        """``optimizer`` is torch's own and has been pointed at the shards of ``units``, the trainable ones."""
        super().__init__(optimizer)
        self._units, self._store = list(units), store
        method = method_behind(optimizer)
        assert method is not None, "checked by zeroify"
        self._method: Callable[[Optimizer], Any] = method
        self._capturable = [group.get("capturable") for group in optimizer.param_groups]
        self._begun: list[Fetch] = []  # blocks of staging that this step has
        self._coming: Iterator[UpdateWindow] | None = None  # of a step that has begun

    def take(self, *, last: bool) -> None:
        """Take the step of the optimizer; the groups are empty then until ``restore``. ``check`` has passed.

        Raises:
            StepError: the optimizer makes state that it did not make at zeroify.
            TierError: bytes could not be moved; values and state are then of two steps, and a checkpoint has to be
                loaded.
        """
        self.begin()
        self._put_groups_away()
        made: list[tuple[WindowPieces, dict[str, Any]]] = []
        try:
            assert self._coming is not None, "it has begun"
            for window in self._coming:
                staged = window.fetch.wait()
                made += self._step(window, staged)
                self._begun.remove(window.fetch)
            self._store.tier.drain()  # what cannot be written is told now, where all ranks hear of it
        except BaseException:
            self.give_up()
            self.restore()
            raise
        self._coming = None
        for run, after in made:  # a piece of two windows begins both with what it had before
            give_counters(run, after)
        self._empty_groups()

    def begin(self) -> None:
        """The first windows of the step that follows are on their way from here on; ``check`` has passed.

        Raises:
            StepError: a program has put state there that the tier has no room for.
            TierError: there is no staging.
        """
        if self._coming is not None:
            return
        self.adopt()  # a program may have put some there
        groups = self._optimizer.param_groups
        group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
        self._store.make_room(self._store.blocks)
        try:
            windows = self._windows(group_of)
            first = list(itertools.islice(windows, 1))
            self._coming = itertools.chain(first, windows)
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """The step is cut off: its blocks go back, and nothing is written."""
        self._coming = None
        for fetch in self._begun:
            with suppress(TierError):  # its block went back when it failed
                self._store.tier.evict(fetch.wait(), ())
        self._begun.clear()

    @override
    def follow(self, slots: Mapping[Unit, Sequence[int]], groups: range) -> Update:
        here = [unit for unit in slots if unit.away is None]
        return TwinUpdate(PartedUpdate(here, self._optimizer), self) if here else self

    def adopt(self) -> None:
        """State was put into ``optimizer.state``: what is there for every element goes to the tier."""
        for unit in self._units:
            if unit.away is not None:
                adopt(unit, self._optimizer.state)

    def forget(self) -> None:
        """State is about to be replaced."""
        for unit in self._units:
            if unit.away is not None:
                unit.away.drop(part for part in unit.away.parts if part not in (VALUES, GRADIENT))

    def check(self, *, last: bool) -> None:
        """Refuse a step that cannot be taken in windows.

        Args:
            last: no hook of the program comes between ``take`` and torch's own call.

        Raises:
            StepError: the optimizer is not as it was at zeroify.
        """
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
        todo = self._wanted(group_of)
        on_its_way: deque[UpdateWindow] = deque()
        for unit, index, runs in todo:
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
            group = group_of.get(id(piece))
            state = state_of(self._optimizer.state, piece)
            counters = {
                name: value.item() if isinstance(value, Tensor) else value
                for name, value in state.numbers.items()
            }
            key = (group, there, counters, list(state.elementwise))
            entries.append((key, place, state))
        for key, neighbours in itertools.groupby(entries, key=lambda entry: entry[0]):
            group, there, _, elementwise = key
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
                    tuple(elementwise),
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
        known = set(window.known)
        values, gradient = self._operands(window, staged)
        states: dict[Any, Any] = optimizer.state
        groups = optimizer.param_groups
        for group in groups:
            group["params"] = []
        elements = window.elements
        taken: list[tuple[WindowPieces, nn.Parameter, slice]] = []
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
            if state:
                dict.__setitem__(states, long, state)
            groups[run.group]["params"].append(long)
            taken.append((run, long, part))
        try:
            self._call(optimizer)
        finally:
            made = [(run, dict.pop(states, long, {}), part) for run, long, part in taken]
        changed = GRADIENT in staged and any(
            long.grad is not None and long.grad._version for _, long, _ in taken
        )
        changed = changed or (staged.in_place and bool(window.factors))
        for _, after, part in made:
            for name in [name for name, value in after.items() if is_elementwise(value)]:
                _keep(name, after.pop(name), part, staged, fresh=name not in known)
                known.add(name)
                after.setdefault(_ELEMENTWISE, []).append(name)
        kept = [part for part in staged if part in known and (part != GRADIENT or changed)]
        return Stepped([(run, after) for run, after, _ in made], kept, changed)

    def _call(self, optimizer: Optimizer) -> None:
        """Torch's method, over what the groups hold now."""
        self._method(optimizer)

    def _number(self, value: Any) -> Any:
        """A counter of pieces, for a long tensor."""
        return value.clone() if isinstance(value, Tensor) else value

    def _bring_up(self, rest: AwayRest, elements: range, staged: Staged) -> list[str]:
        """The values of a window are new: so must be copies of them. Returns those that go to the tier."""
        return rest.stepped(elements, staged)

    @staticmethod
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


# TwinUpdate: one step over two kinds of units: some rest on a tier, the others stay where they are computed with.
#
# Source: DeepSpeed's Twin-Flow, 2023.


class TwinUpdate(Update):
    """Of one optimizer; nothing here is collective. The parts are as of ``StreamedUpdate`` and ``PartedUpdate``."""

    def __init__(self, here: PartedUpdate, away: StreamedUpdate) -> None:
        """``here`` and ``away``: of the same optimizer, over different units."""
        super().__init__(here._optimizer)
        self._here, self._away = here, away

    @override
    def follow(self, slots: Mapping[Unit, Sequence[int]], groups: range) -> Update:
        self._here.follow({unit: own for unit, own in slots.items() if unit.away is None}, groups)
        return self

    # --- the part that rests on a tier may be delayed

    @property
    def pending(self) -> bool:  # type: ignore[override]
        """As of what rests on the tier."""
        return self._away.pending

    @override
    def finish(self) -> None:
        self._away.finish()

    @override
    def abandon(self) -> None:
        self._away.abandon()

    @property
    @override
    def taken(self) -> bool:
        return self._away.taken

    @override
    def check(self, *, last: bool) -> None:
        self._away.check(last=last)

    @override
    def take(self, *, last: bool) -> None:
        """Take both steps: reads from the tier have begun when the units that are here are stepped on.

        Raises:
            StepError: the optimizer's groups hold a piece twice, or it makes state that it did not make at zeroify.
            TierError: as of what rests on the tier.
        """
        self._away.begin()
        try:
            self._here.take(last=last)
            if not self._here.taken:
                raise StepError(
                    "optimizer.step() with a part of its state on a memory tier (offload): the step cannot be taken "
                    "over long tensors, expected every piece once in optimizer.param_groups"
                )
        except BaseException:
            self._away.give_up()
            raise
        finally:
            self._here.restore()
        self._away.take(last=last)

    @override
    def restore(self) -> None:
        self._here.restore()
        self._away.restore()

    @override
    def adopt(self) -> None:
        self._here.adopt()
        self._away.adopt()

    @override
    def forget(self) -> None:
        self._here.forget()
        self._away.forget()
