"""PartedUpdate: torch's own step of an elementwise optimizer, taken over few long tensors instead of many short ones.

torch's ``step`` is a method wrapped in hooks. In the last hook before it the method itself is called, on the spans of
the units; around that the groups are put back, whatever happens. What torch calls after the hook finds groups without
parameters. A class that is not torch's own may look at anything in its groups, so it steps on the pieces themselves.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from hpczero.errors import StepError
from hpczero.plan.layout import DEFAULT_ALIGN, ShardLayout
from hpczero.zero.units.guard import all_have_gradients, have_gradients
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.optimizers import ELEMENTWISE

# Spans: neighbouring pieces of one optimizer group, and which of them may be stepped on as one tensor.
#
# An optimizer works through hundreds of small tensors, one call or launch each; the elements do not care.
# Between steps every piece has state of its own in ``optimizer.state``, as torch would have made it. Where torch
# has made it for a long tensor, those are parts of it, and nothing else remembers that: the tensors say themselves
# where they lie.
#
# [Note: Apart]
# A program may do anything to ``optimizer.state``. A piece whose state does not lie beside its neighbour's, was given
# other memory, or has anything of the program's own in it, is stepped on by itself, with the very objects that are
# there.
#
# [Note: Counters]
# State without a dimension, ``step`` say, belongs to one piece. Those of a long tensor are elements of one vector.
# Pieces may be one tensor while theirs are equal; that is looked at, since a program may set them.

State = dict[str, Any]


@dataclass(frozen=True)
class StatePart:
    """Where one tensor of a piece's state lies: ``base[begin:end]``; a counter is one element of a vector."""

    base: Tensor
    begin: int
    end: int
    counter: bool

    def goes_on_in(self, other: StatePart) -> bool:
        """Whether ``other`` begins where this one ends."""
        return self.base is other.base and self.end == other.begin and self.counter == other.counter


Parts = dict[str, StatePart]


def parts_of(state: State | None, piece: nn.Parameter) -> Parts | None:
    """Where the state of ``piece`` lies, by name; None where it has to be stepped on apart."""
    found: Parts = {}
    for name, value in (state or {}).items():
        base = value._base if type(value) is Tensor else None
        if base is None or base.stride() != (1,) or value.dtype is not base.dtype:
            return None
        counter = value.dim() == 0
        if not counter and (value.shape != piece.shape or value.stride() != (1,)):
            return None
        begin = value.storage_offset() - base.storage_offset()
        # A program may have given it other memory, which its base knows nothing of.
        if value.data_ptr() != base.data_ptr() + begin * base.element_size():
            return None
        found[name] = StatePart(base, begin, begin + value.numel(), counter)
    return found


def piece_state(states: MutableMapping[Any, Any], piece: nn.Parameter) -> MutableMapping[str, Any]:
    """The state of a piece, past what ``ShardStates`` asks of each key; empty where there is none."""
    held: dict[Any, Any] = states  # type: ignore[assignment]
    found: MutableMapping[str, Any] = dict.get(held, piece, {})
    return found


def values_of(bases: Sequence[Tensor]) -> dict[int, list[Any]]:
    """The elements of vectors, by their ids; one transfer from a device for each kind of them."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for base in {id(base): base for base in bases}.values():
        kinds.setdefault((base.dtype, base.device), []).append(base)
    found: dict[int, list[Any]] = {}
    for alike in kinds.values():
        values = torch.cat(alike).tolist()
        for base in alike:
            found[id(base)], values = values[: base.numel()], values[base.numel() :]
    return found


class PieceSpan:
    """Some neighbours: at least one piece.

    Attributes:
        pieces: what the optimizer's group holds.
        group: index of it.
        ends: (pieces + 1,) elements of the master: where the first begins, and where each ends.
    """

    def __init__(self, pieces: Sequence[nn.Parameter], ends: Sequence[int], *, group: int) -> None:
        self.pieces, self.ends, self.group = list(pieces), list(ends), group
        self._seen: Any = None  # what the state was made of when ``_parts`` was found
        self._parts: list[Parts | None] = []
        self._joined: list[bool] = []  # whether each lies behind the one before
        # Vector and element of each of a piece's.
        self._counters: list[list[tuple[Tensor, int]]] = []
        self._runs: dict[tuple[int, int], PieceRun] = {}

    def forget(self) -> None:
        """Let go of the state's memory."""
        self._seen = None
        self._parts.clear()
        self._counters.clear()
        self._runs.clear()

    def adopt(self, states: dict[Any, Any]) -> None:
        """Lay state that was loaded end to end, as it would lie had it been made here.

        What is not made of plain tensors, one for each element or one number each, stays apart.
        """
        self.forget()
        held = [dict.get(states, piece) or {} for piece in self.pieces]
        kinds = [_kinds(state, piece) for state, piece in zip(held, self.pieces, strict=True)]
        first = 0
        for kind, members in itertools.groupby(kinds):
            last = first + len(list(members))
            for name in kind or ():
                values = [state[name] for state in held[first:last]]
                if values[0].dim():
                    parts = torch.cat(values).split_with_sizes([value.numel() for value in values])
                else:
                    parts = torch.stack(values).unbind()
                for state, part in zip(held[first:last], parts, strict=True):
                    state[name] = part
            first = last

    def look(self, states: Sequence[State | None]) -> Iterable[Tensor]:
        """See where the state of the pieces lies now, (pieces,); vectors of counters."""
        made = [value for state in states if state for value in state.values()]
        # Which objects, and where memory is: no two live ones share both, and ``_parts`` keeps the memory alive.
        places = [value.data_ptr() if isinstance(value, Tensor) else 0 for value in made]
        seen = ([list(state) if state else None for state in states], list(map(id, made)), places)
        if seen != self._seen:
            self._parts = [parts_of(s, p) for s, p in zip(states, self.pieces, strict=True)]
            self._joined = [False, *(_beside(a, b) for a, b in pairwise(self._parts))]
            self._runs.clear()
            self._seen = seen
            self._counters = [
                [(part.base, part.begin) for part in (parts or {}).values() if part.counter]
                for parts in self._parts
            ]
        return self.counters

    @property
    def counters(self) -> Iterator[Tensor]:
        """Vectors of counters, as last seen."""
        return (base for counters in self._counters for base, _ in counters)

    def runs(self, present: Sequence[bool], values: dict[int, list[Any]]) -> Iterator[PieceRun]:
        """Longest runs of pieces that may be one tensor.

        Args:
            present: (pieces,) whether each has a gradient.
            values: of all counters, by their vectors' ids.
        """
        counts = [[values[id(base)][at] for base, at in counters] for counters in self._counters]
        count = len(self.pieces)
        if all(present) and all(self._joined[1:]) and counts.count(counts[0]) == count:
            yield self._run(0, count)
            return
        starts = [
            i
            for i in range(count)
            if not (
                self._joined[i] and present[i - 1] and present[i] and counts[i - 1] == counts[i]
            )
        ]
        for first, last in pairwise([*starts, count]):
            if present[first]:
                yield self._run(first, last)

    def _run(self, first: int, last: int) -> PieceRun:
        run = self._runs.get((first, last))
        if run is None:
            run = self._runs[first, last] = PieceRun(self, first, last, self._parts)
        return run


def _kinds(state: State, piece: nn.Parameter) -> dict[str, Any] | None:
    """Of each tensor what neighbours must have alike to be laid end to end; None where there is something else."""
    found: dict[str, Any] = {}
    for name, value in state.items():
        if type(value) is not Tensor or value.requires_grad or value.layout is not torch.strided:
            return None
        if value.dim() and value.shape != piece.shape:
            return None
        found[name] = (value.dim(), value.dtype, value.device)
    return found


def _beside(one: Parts | None, other: Parts | None) -> bool:
    if one is None or other is None or one.keys() != other.keys():
        return False
    return all(part.goes_on_in(other[name]) for name, part in one.items())


class PieceRun:
    """Neighbours that are one tensor during a step, or one piece apart.

    Attributes:
        group: index of the optimizer's group.
        pieces: of it.
        apart: whether the one piece has to be stepped on by itself.
    """

    def __init__(
        self, span: PieceSpan, first: int, last: int, parts: Sequence[Parts | None]
    ) -> None:
        """Pieces ``first`` to ``last`` (exclusive) of ``span``, of whose pieces ``parts_of`` gave ``parts``."""
        self.group = span.group
        self.pieces = span.pieces[first:last]
        self.apart = parts[first] is None
        self._ends = [end - span.ends[first] for end in span.ends[first : last + 1]]
        self._begin, self._end = span.ends[first], span.ends[last]
        begins, ends = parts[first] or {}, parts[last - 1] or {}
        self._parts = {
            name: StatePart(part.base, part.begin, ends[name].end, part.counter)
            for name, part in begins.items()
        }

    def tensor(self, master: Tensor) -> nn.Parameter:
        """One parameter for all of them, a view of ``master``."""
        return nn.Parameter(self.part_of(master))

    @property
    def begin(self) -> int:
        """Of their elements in the master."""
        return self._begin

    def part_of(self, flat: Tensor) -> Tensor:
        """Theirs of ``flat``, which is cut as the master is."""
        return flat[self._begin : self._end]

    def state(self) -> State:
        """Their state as one; empty where they have none."""
        return {
            name: part.base[part.begin].clone()
            if part.counter
            else part.base[part.begin : part.end]
            for name, part in self._parts.items()
        }

    def give(self, before: State, after: State, states: dict[Any, Any]) -> bool:
        """The optimizer has made ``after`` of ``before``: every piece gets its part, in ``states``.

        Returns:
            Whether ``after`` can be the state before the next step: nothing is new, or lies elsewhere.
        """
        same = after.keys() == self._parts.keys()
        for name, value in after.items():
            part = self._parts.get(name)
            if part is None:
                self._give_new(name, value, states)
                continue
            if part.counter:
                part.base[part.begin : part.end].copy_(value)
                same = same and isinstance(value, Tensor)
            elif value is not before[name]:
                part.base[part.begin : part.end].copy_(value)
                same = False
        for name in self._parts.keys() - after.keys():
            for piece in self.pieces:
                del states[piece][name]
        return same

    def _give_new(self, name: str, value: Any, states: dict[Any, Any]) -> None:
        if isinstance(value, Tensor) and value.dim() == 0:
            values: Any = value.repeat(len(self.pieces))  # a copy that is dense for one piece too
        elif isinstance(value, Tensor):
            # A base of its own: parts_of asks for it.
            whole = value if value._base is None else value.clone()
            values = [whole[begin:end] for begin, end in pairwise(self._ends)]
        else:
            values = [value] * len(self.pieces)
        for i, piece in enumerate(self.pieces):
            held = states[piece] if dict.__contains__(states, piece) else None
            if held is None:
                held = {}
                dict.__setitem__(states, piece, held)
            held[name] = values[i]


class Update(ABC):
    """How the step of one optimizer is taken over its shards; nothing is collective where a subclass does not say so.

    Whoever makes it calls ``follow`` before anything else.

    Attributes:
        together: what fails in the step on one rank must fail on all.
        pending: whether an update is on its way that the model does not have yet; equal on all ranks.
        nbytes: of state that lies elsewhere than in ``optimizer.state``.
    """

    together = False
    pending = False
    nbytes = 0

    def __init__(self, optimizer: Optimizer) -> None:
        """``optimizer`` has been pointed at shards."""
        self._optimizer = optimizer
        self._put_away: list[list[nn.Parameter]] | None = None

    def check(self, *, last: bool) -> None:  # noqa: B027  (nothing by default)
        """Refuse a step that cannot be taken. ``last``: no hook of the program comes between ``take`` and torch's call.

        Raises:
            StepError: the optimizer is not as it was at zeroify.
        """

    @abstractmethod
    def take(self, *, last: bool) -> None:
        """Take the step as far as it is not left to torch's own call, which follows."""

    @abstractmethod
    def adopt(self) -> None:
        """State was loaded, or put into ``optimizer.state``."""

    def forget(self) -> None:  # noqa: B027  (nothing by default)
        """State is about to be replaced."""

    @abstractmethod
    def follow(self, slots: Mapping[Unit, Sequence[int]], groups: range) -> None:
        """``slots`` are the optimizer's from now on; ``groups``: numbers of its groups in the plan."""

    def finish(self) -> None:  # noqa: B027  (nothing by default)
        """Take what a delayed update has made, if one is on its way."""

    def abandon(self) -> None:  # noqa: B027  (nothing by default)
        """What a delayed update has made is of no use any more."""

    @property
    def taken(self) -> bool:
        """Whether torch's own call has nothing left to do; until ``restore``."""
        return self._put_away is not None

    def restore(self) -> None:
        """Put the pieces back into their groups; nothing if they are there."""
        if self._put_away is not None:
            for group, pieces in zip(self._optimizer.param_groups, self._put_away, strict=True):
                group["params"] = pieces
            self._put_away = None

    @contextmanager
    def _taking(self) -> Iterator[None]:
        """Context: the step is taken inside, with anything in the groups; ``taken`` then, or restored if it raises."""
        self._put_away = [group["params"] for group in self._optimizer.param_groups]
        try:
            yield
        except BaseException:
            self.restore()
            raise
        _empty_groups(self._optimizer)

    def _group_of(self) -> dict[int, int]:
        """The group that each piece is in now, by the piece's id."""
        groups = enumerate(self._optimizer.param_groups)
        return {id(piece): number for number, group in groups for piece in group["params"]}


def _empty_groups(optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["params"] = []


# [Note: The same bits wherever a shard begins]
# torch's fused kernels of the host round the last elements of a tensor, which fill no vector, in another way (torch
# 2.13). Which elements these are depends on where a shard begins and ends, and on which neighbours are one tensor,
# which may change with a load. Where steps must not depend on that, a long tensor is cut where parameters begin and
# end, and at the multiples of 64 elements of the unit around these places. All shards begin at such multiples: what
# lies between fills all vectors, and the rest lies in one shard however many there are.


APART = (
    "exact: the optimizer steps on its pieces one by one (a class, a step, a hook or state of the program's own, or "
    "torch.inference_mode), and a fused step rounds by where a piece begins; build it with fused=False"
)


def _cuts(layout: ShardLayout, start: int, numel: int) -> list[int]:
    """Where ``numel`` elements from ``start`` of a unit on are cut, both ends among them."""
    edges = {
        start,
        start + numel,
        *(edge for slot in layout.slots for edge in (slot.offset, slot.stop)),
    }
    around = {
        at
        for edge in edges
        if edge % DEFAULT_ALIGN
        for at in (edge - edge % DEFAULT_ALIGN, edge, edge + -edge % DEFAULT_ALIGN)
    }
    return [0, *sorted(at - start for at in around if start < at < start + numel), numel]


@contextmanager
def in_groups_aligned(
    optimizer: Optimizer,
    tensors: Sequence[tuple[int, nn.Parameter, State]],
    places: Sequence[tuple[ShardLayout, int]],
) -> Iterator[list[State | None]]:
    """``in_groups``, with tensors cut; see [Note: The same bits wherever a shard begins].

    ``places``: the layout of the unit of each, and the element there at which it begins.
    """
    cut: list[tuple[int, nn.Parameter, State]] = []
    counts = []
    for (group, tensor, state), (layout, start) in zip(tensors, places, strict=True):
        ends = _cuts(layout, start, tensor.numel())
        for begin, end in pairwise(ends):
            part = nn.Parameter(tensor.detach()[begin:end])
            part.grad = None if tensor.grad is None else tensor.grad[begin:end]
            held = {
                name: (value[begin:end] if value.dim() else value.clone())
                if isinstance(value, Tensor)
                else value
                for name, value in state.items()
            }
            cut.append((group, part, held))
        counts.append(len(ends) - 1)
    after: list[State | None] = []
    made: list[State | None] = []
    try:
        with in_groups(optimizer, cut) as made:
            yield after
    finally:
        following = iter(made)
        for (_, _, state), count in zip(tensors, counts, strict=True):
            after.append(_together([next(following) for _ in range(count)], state))


def _together(parts: Sequence[State | None], before: State) -> State | None:
    """The state of a tensor, of that of its parts; tensors of ``before`` stay, with the values of now."""
    found: State = {}
    for name, first in (parts[0] or {}).items():
        old = before.get(name)
        if not (isinstance(first, Tensor) and first.dim()):
            found[name] = old.copy_(first) if isinstance(old, Tensor) else first
            continue
        values: list[Tensor] = [(part or {})[name] for part in parts]
        begin, same = 0, name in before
        for value in values:
            same = same and value.data_ptr() == old[begin:].data_ptr()  # type: ignore[index]
            begin += value.numel()
        found[name] = old if same else torch.cat(values)
    return found or None


@contextmanager
def in_groups(
    optimizer: Optimizer, tensors: Sequence[tuple[int, nn.Parameter, State]]
) -> Iterator[list[State | None]]:
    """Context: the groups of ``optimizer`` hold ``tensors`` and nothing else, each with its group and its state.

    The list that it gives has the state of each at the end of the context; None where there is none.
    """
    states: dict[Any, Any] = optimizer.state
    after: list[State | None] = []
    _empty_groups(optimizer)
    for number, tensor, state in tensors:
        if state:  # past what ShardStates asks of each key
            dict.__setitem__(states, tensor, state)
        optimizer.param_groups[number]["params"].append(tensor)
    try:
        yield after
    finally:
        after += [dict.pop(states, tensor, None) for _, tensor, _ in tensors]


# Prepared: what a step was taken over, and whether the next one may be taken over the same.
#
# Training takes the same step again and again. What a program may have changed meanwhile is looked at in a few passes
# over all pieces; only where something is not as it was are they put together anew.

_version = attrgetter("_version")


class Prepared:
    """One call of torch's method over all units that have gradients.

    Attributes:
        units: in unit order.
        runs: of each long tensor its unit, its pieces, itself, and its state.
        apart: pieces that are stepped on by themselves, each with the number of its group.
    """

    def __init__(self, units: Sequence[Unit], pieces: Sequence[nn.Parameter]) -> None:
        """``pieces``: all of ``units`` in the groups of the optimizer."""
        self.units = list(units)
        self.runs: list[tuple[Unit, PieceRun, nn.Parameter, State]] = []
        self.apart: list[tuple[int, nn.Parameter]] = []
        self._pieces = list(pieces)
        # What a step after this one must find again, and what keeps the ids in it alive.
        self._seen: list[Any] = []
        self._kept: list[Tensor] = []
        self._counters: list[Tensor] = []  # vectors of counters, each once
        self._versions: list[int] = []
        self._counts: Tensor | None = None  # on the host: their values

    def add(self, unit: Unit, run: PieceRun) -> None:
        """Put the pieces of ``run`` together."""
        if run.apart:
            self.apart += [(run.group, piece) for piece in run.pieces]
        else:
            self.runs.append((unit, run, run.tensor(unit.optimized.master), run.state()))

    def note(self, states: dict[Any, Any], counters: Sequence[Tensor]) -> bool:
        """The step is over: remember what there is. Returns whether it can serve again.

        Args:
            states: of the optimizer.
            counters: vectors of the pieces' counters.
        """
        if not self._seen:
            if sum(len(run.pieces) for _, run, _, _ in self.runs) != len(self._pieces):
                return False  # some had no gradient, or were apart
            held: list[Any] = [dict.get(states, piece) for piece in self._pieces]
            if not held or any(type(state) is not dict for state in held):
                return False
            made = [*chain.from_iterable(map(dict.values, held))]
            if any(type(value) is not Tensor for value in made):
                return False
            self._kept = [*(unit.optimized.master for unit in self.units), *made]
            self._seen = self._look(self.units, states)
            self._counters = [*{id(vector): vector for vector in counters}.values()]
        # A step that can serve again changes counters and nothing else.
        self._versions = [*map(_version, self._counters)]
        self._counts = self._counts_now()
        return True

    def serves(self, units: Sequence[Unit], states: dict[Any, Any]) -> bool:
        """Whether a step over ``units`` now is the one of before, on state that nobody has touched."""
        if self._look(units, states) != self._seen or not all_have_gradients(self._pieces):
            return False
        if [*map(_version, self._counters)] != self._versions:
            return False
        return self._counts is None or torch.equal(self._counts_now(), self._counts)  # type: ignore[arg-type]

    def _look(self, units: Sequence[Unit], states: dict[Any, Any]) -> list[Any]:
        """Which masters and states there are, under which names, and where: a program may give them other memory."""
        held: list[Any] = [dict.get(states, piece) for piece in self._pieces]
        tensors = [unit.optimized.master for unit in units]
        try:
            tensors += chain.from_iterable(map(dict.values, held))
            places = [*map(Tensor.data_ptr, tensors)]
        except TypeError:  # no state, or a program's own kind of it
            return []
        return [*map(id, units), *map(id, tensors), *places, *chain.from_iterable(held)]

    def _counts_now(self) -> Tensor | None:
        """Versions do not tell of what is written past them, NumPy's or ``.data``; a device's are not waited for."""
        here = [vector for vector in self._counters if vector.device.type == "cpu"]
        kinds = {vector.dtype for vector in here}
        return torch.cat(here) if len(kinds) == 1 else None


def method_behind(optimizer: Optimizer) -> Callable[[Optimizer], Any] | None:
    """The step of ``optimizer`` without hooks; None where pieces cannot be put together for it."""
    kind = type(optimizer)
    method = unhooked(kind.step)
    own = method is not None and written_in(method, "torch.optim")
    return method if kind in ELEMENTWISE and own else None


def unhooked(step: Callable[..., Any]) -> Callable[..., Any] | None:
    """The function that torch has wrapped in hooks to make ``step``; None unless it is wrapped in them once."""
    method: Any = getattr(step, "__wrapped__", None)
    once = getattr(step, "hooked", False) and not getattr(method, "hooked", False)
    return method if once else None


def written_in(method: Callable[..., Any], module: str) -> bool:
    """Whether the code of ``method`` is of ``module`` or a module below it, and all that wraps it is torch's.

    A patch may do anything, and ``functools.wraps`` gives it the names of what it wraps, but not the globals.
    """
    layer: Any = method
    while hasattr(layer, "__wrapped__"):
        if not getattr(layer, "__globals__", {}).get("__name__", "").startswith("torch."):
            return False
        layer = layer.__wrapped__
    name: str = getattr(layer, "__globals__", {}).get("__name__", "")
    return f"{name}.".startswith(f"{module}.")


class PartedUpdate(Update):
    """Of an optimizer whose state is in memory.

    Attributes:
        units: that it steps on.
    """

    def __init__(self, optimizer: Optimizer, *, aligned: bool = False) -> None:
        """``aligned``: see [Note: The same bits wherever a shard begins]."""
        super().__init__(optimizer)
        self._method = method_behind(optimizer)
        self._aligned = aligned

    @override
    def follow(self, slots: Mapping[Unit, Sequence[int]], groups: range) -> None:
        self.units = list(slots)
        self._capturable = [group.get("capturable") for group in self._optimizer.param_groups]
        # Ids of the pieces in each group, for which the spans were made.
        self._members: list[list[int]] = []
        self._spans: dict[Unit, list[PieceSpan]] = {}
        self._prepared: Prepared | None = None  # of the last step, if it may serve again

    @override
    def take(self, *, last: bool) -> None:
        """Take the step over all units that have gradients, where it need not be torch's own call."""
        method = self._method
        if method is None or not self._can_take(last=last):
            return
        with self._taking():
            self._take(method, [unit for unit in self.units if unit.gradients.present])

    @override
    def check(self, *, last: bool) -> None:
        """As of ``Update``: torch's own fused step would round by where a shard begins, where that must not be."""
        fused = any(group.get("fused") for group in self._optimizer.param_groups)
        if self._aligned and fused and (self._method is None or not self._can_take(last=last)):
            raise StepError(APART)

    def _can_take(self, *, last: bool) -> bool:
        groups = self._optimizer.param_groups
        if not last or any(group.get("differentiable") for group in groups):
            return False
        if torch.is_inference_mode_enabled():
            return False  # what is made there has no versions, and no base
        # torch.compile sets this in every group that it steps on by itself.
        if [group.get("capturable") for group in groups] != self._capturable:
            return False
        return self._make_spans()

    def _make_spans(self) -> bool:
        """Spans of the pieces as the groups hold them now; whether there can be any."""
        members = [[id(p) for p in group["params"]] for group in self._optimizer.param_groups]
        if members == self._members:
            return True
        group_of = {piece: index for index, ids in enumerate(members) for piece in ids}
        if len(group_of) < sum(map(len, members)):
            return False  # torch steps twice on what is there twice
        self._members = members
        self._prepared = None
        self._spans = {unit: _spans_of(unit, group_of) for unit in self.units}
        return True

    def _take(self, method: Callable[[Optimizer], Any], units: Sequence[Unit]) -> None:
        """One call of torch's method."""
        optimizer, prepared = self._optimizer, self._prepared
        states: dict[Any, Any] = optimizer.state
        self._prepared = None  # what is cut off serves no more
        if prepared is None or not prepared.serves(units, states):
            prepared = self._prepare(units, states)
        before = [dict(state) for _, _, _, state in prepared.runs]
        for unit, run, long, _ in prepared.runs:
            long.grad = run.part_of(unit.gradients.reduced)
        after: list[State | None] = []
        try:
            tensors = [(run.group, long, state) for _, run, long, state in prepared.runs]
            if self._aligned:
                _check_whole(optimizer, prepared.apart)
                places = [
                    (unit.spec.layout, unit.optimized.start + run.begin)
                    for unit, run, _, _ in prepared.runs
                ]
                context = in_groups_aligned(optimizer, tensors, places)
            else:
                context = in_groups(optimizer, tensors)
            with context as after:
                for number, piece in prepared.apart:
                    optimizer.param_groups[number]["params"].append(piece)
                method(optimizer)
        finally:
            same = True
            for (_, run, long, _), past, made in zip(prepared.runs, before, after, strict=True):
                long.grad = None
                same = made is not None and run.give(past, made, states) and same
        if same and prepared.note(states, self._counters(units)):
            self._prepared = prepared

    def _prepare(self, units: Sequence[Unit], states: dict[Any, Any]) -> Prepared:
        """What is stepped on as one tensor, and the pieces that are not."""
        spans = [(unit, span) for unit in units for span in self._spans[unit]]
        counters: list[Tensor] = []
        for _, span in spans:
            counters += span.look([dict.get(states, piece) for piece in span.pieces])
        values = values_of(counters)
        prepared = Prepared(units, [piece for _, span in spans for piece in span.pieces])
        for unit, span in spans:
            for run in span.runs(have_gradients(span.pieces), values):
                prepared.add(unit, run)
        return prepared

    def _counters(self, units: Sequence[Unit]) -> list[Tensor]:
        """Vectors of the counters of what was seen before the step."""
        return [base for unit in units for span in self._spans[unit] for base in span.counters]

    @override
    def adopt(self) -> None:
        """Lay what was loaded so that pieces can be one tensor again."""
        self._prepared = None
        if self._method is not None and self._make_spans():
            for spans in self._spans.values():
                for span in spans:
                    span.adopt(self._optimizer.state)

    @override
    def forget(self) -> None:
        self._prepared = None
        for spans in self._spans.values():
            for span in spans:
                span.forget()


def _check_whole(optimizer: Optimizer, apart: Sequence[tuple[int, nn.Parameter]]) -> None:
    """Refuse a fused step on pieces that cannot be put together: see [Note: The same bits wherever a shard begins]."""
    if any(optimizer.param_groups[number].get("fused") for number, _ in apart):
        raise StepError(APART)


def _spans_of(unit: Unit, group_of: dict[int, int]) -> list[PieceSpan]:
    """Neighbours in one group and one rank's piece.

    Kernels round the tail of a tensor differently, and a replicated optimizer must give the bits of a sharded one.
    """
    shards = unit.optimized
    found = []
    at: list[tuple[int | None, int, int]] = []  # group, rank's piece, index
    for index, (shard, piece) in enumerate(zip(shards.parameters, shards.pieces, strict=True)):
        at.append((group_of.get(id(shard)), piece, index))
    for (group, _), neighbours in itertools.groupby(at, key=lambda entry: entry[:2]):
        if group is None:
            continue
        indices = [index for _, _, index in neighbours]
        places = [shards.places[index] for index in indices]
        ends = [places[0].start, *(place.stop for place in places)]
        pieces = [shards.parameters[index] for index in indices]
        found.append(PieceSpan(pieces, ends, group=group))
    return found
