"""WholeUpdate: the step of an optimizer that needs whole parameters, taken for each of them by one rank.

    round by round   parts -> owners      gradient, values and state of each part
                     owners               the optimizer's own step, over whole parameters
                     owners -> parts      values and state

A rule of directions sends less: see ``Directions``. Between steps values and state are in shards, as those of any
optimizer are. So stages, checkpoints and the plan are none the wiser. In a step 1/N of the parameters is whole on a
rank, and of that one round's.

Source: torchtitan #3502 places owners so, too; deepspeed #8090 tells what becomes of a matrix of which each rank
orthogonalises its part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from math import prod
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from hpczero.comm.collectives import Collectives, trade
from hpczero.errors import StepError
from hpczero.zero.units.guard import own_gradient
from hpczero.zero.units.unit import Unit
from hpczero.zero.update.optimizers import needs_whole
from hpczero.zero.update.parts import Update, in_groups, piece_state, unhooked, written_in
from hpczero.zero.update.whole_states import ParameterUpdate, States, WholeParameter

# Directions: updates of whole parameters of which only one tensor goes to the owner and one comes back.
#
#     part    momentum of its elements -> what is wanted -> owner
#     owner   wanted of all parts -> direction, of the whole
#     part    direction of its elements -> values; momentum is kept
#
# Momentum stays in shards, and the owner never sees values. What is sent has the dtype in which the rule computes
# directions. Every operation but the direction is element by element, so the bits are those of a step on the whole.

_muon: Any = getattr(torch.optim, "_muon", None)  # from torch 2.9
ATTRIBUTE = "hpczero_directions"
PARTS = ("muon", "_single_tensor_muon", "_zeropower_via_newtonschulz", "_adjust_lr")  # of torch's
Group = Mapping[str, Any]


class Directions(Protocol):
    """An update in three parts, of which one needs whole parameters.

    Attributes:
        state: the name of the one state, as large as the parameter and zero at first.
    """

    state: str

    def dtype(self, group: Group, /) -> torch.dtype:
        """Of what is wanted and of directions."""

    def advance(self, state: Tensor, gradient: Tensor, group: Group, /) -> None:
        """Change the state of some elements by their gradient."""

    def wanted(self, state: Tensor, gradient: Tensor, group: Group, /) -> Tensor:
        """What a direction is made of, of some elements."""

    def direction(self, wanted: Tensor, group: Group, /) -> Tensor:
        """In the shape of the parameter, which ``wanted`` has; it may be used up."""

    def apply(
        self, values: Tensor, direction: Tensor, shape: Sequence[int], group: Group, /
    ) -> None:
        """Change the values of some elements of a parameter of this shape."""


class TorchsMuon:
    """torch.optim.Muon, by torch's own functions."""

    state = "momentum_buffer"

    def dtype(self, group: Group, /) -> torch.dtype:
        """See ``Directions``; the iteration begins with this rounding."""
        return torch.bfloat16

    def advance(self, state: Tensor, gradient: Tensor, group: Group, /) -> None:
        """See ``Directions``."""
        state.lerp_(gradient, 1 - group["momentum"])

    def wanted(self, state: Tensor, gradient: Tensor, group: Group, /) -> Tensor:
        """See ``Directions``."""
        return gradient.lerp(state, group["momentum"]) if group["nesterov"] else state

    def direction(self, wanted: Tensor, group: Group, /) -> Tensor:
        """See ``Directions``."""
        found: Tensor = _muon._zeropower_via_newtonschulz(
            wanted, group["ns_coefficients"], group["ns_steps"], group["eps"]
        )
        return found

    def apply(
        self, values: Tensor, direction: Tensor, shape: Sequence[int], group: Group, /
    ) -> None:
        """See ``Directions``."""
        given = group["lr"]
        given = given.squeeze() if isinstance(given, Tensor) else given  # of one element
        lr = _muon._adjust_lr(cast("float", given), group["adjust_lr_fn"], torch.Size(shape))
        values.mul_(1 - given * group["weight_decay"])
        values.add_(direction, alpha=-lr)


def directions_of(optimizer: Optimizer) -> Directions | None:
    """The rule of an optimizer; None where its own step has to be called."""
    kind = type(optimizer)
    method = unhooked(kind.step)
    if method is None:
        return None
    if _muon is not None and kind is _muon.Muon:
        parts = [method, *(getattr(_muon, name, None) for name in PARTS)]
        own = all(part is not None and written_in(part, _muon.__name__) for part in parts)
        return TorchsMuon() if own else None
    own = written_in(method, kind.__module__)
    found: Directions | None = vars(kind).get(ATTRIBUTE)  # of that very class, not of its base
    return found if own else None


class DirectionJob(ParameterUpdate):
    """The update of one parameter by a rule of directions."""

    by_optimizer = False

    def __init__(
        self, optimizer: Optimizer, rule: Directions, *place: Any, replicated: bool
    ) -> None:
        """By the ``rule`` of ``optimizer``; ``place`` as of ``ParameterUpdate``."""
        super().__init__(*place, replicated=replicated)
        self._optimizer, self._rule = optimizer, rule

    @property
    def _options(self) -> Group:
        found: Group = self._optimizer.param_groups[self.group]
        return found

    @override
    def _said(self, shard: nn.Parameter, part: range, states: States) -> Tensor:
        gradient = own_gradient(shard)
        if gradient is None:
            return torch.zeros(1, device=shard.device, dtype=torch.float32)
        state = piece_state(states, shard).get(self._rule.state)
        new = torch.zeros_like(gradient) if state is None else state.detach().reshape(-1).clone()
        if new.shape != gradient.shape:
            raise StepError(
                f"optimizer.state[...][{self._rule.state!r}] of a part of {self.name!r} has {new.numel():,} elements, "
                f"expected the {gradient.numel():,} of the part"
            )
        group = self._options
        self._rule.advance(new, gradient, group)
        wanted = self._rule.wanted(new, gradient, group).to(self._rule.dtype(group))
        return torch.cat([gradient.new_ones(1), _words(wanted)])

    @override
    def assemble(
        self, said: Sequence[tuple[range, Tensor]], states: States
    ) -> WholeParameter | None:
        """The direction from what all parts said; None where there is no gradient."""
        if not self._present(said):
            return None
        group = self._options
        dtype = self._rule.dtype(group)
        wanted = torch.empty(self.numel, dtype=dtype, device=self.parts[0][0].device)
        for part, each in said:
            assert len(each) == 1 + _count(len(part), dtype), "options are agreed on before a step"
            wanted[part.start : part.stop].copy_(each[1:].view(dtype)[: len(part)])
        direction = self._rule.direction(wanted.view(self.shape), group)
        return WholeParameter(nn.Parameter(direction.to(dtype), requires_grad=False))

    @override
    def _answer(self, whole: WholeParameter) -> tuple[Tensor, Callable[[range], Tensor]]:
        flat = whole.parameter.detach().reshape(-1)
        mark = torch.ones(1, dtype=torch.float32, device="cpu")
        return mark, lambda part: _words(flat[part.start : part.stop]).cpu()

    @override
    def take(self, answer: Sequence[Tensor], states: States) -> None:
        """Move values along the direction, and keep the new state."""
        mark, new = answer
        if not len(mark):
            return
        group, rule = self._options, self._rule
        dtype = rule.dtype(group)
        lengths = [_count(len(part), dtype) for _, part in self.parts]
        for (shard, part), each in zip(self.parts, new.split_with_sizes(lengths), strict=True):
            gradient = own_gradient(shard)
            assert gradient is not None, "it was said"
            kept = states.setdefault(shard, {})
            if rule.state not in kept:
                kept[rule.state] = torch.zeros_like(gradient)
            with torch.no_grad():
                rule.advance(kept[rule.state], gradient, group)
                direction = each.view(dtype)[: len(part)].to(shard.device)
                rule.apply(shard, direction, self.shape, group)


def _count(numel: int, dtype: torch.dtype) -> int:
    """Numbers of fp32 with as many bytes, rounded up."""
    return -(-numel * dtype.itemsize // 4)


def _words(values: Tensor) -> Tensor:
    """The bytes of (n,) ``values`` as numbers of fp32, padded."""
    if values.dtype == torch.float32:
        return values
    room = _count(len(values), values.dtype) * 4 // values.dtype.itemsize
    padded = values.new_zeros(room)
    padded[: len(values)].copy_(values)
    return padded.view(torch.float32)


# Owners: which rank takes the update of which whole parameter, and in how many rounds.
#
# Longest job first, each to the rank with least work among those that hold a part of the parameter: what a rank holds
# itself need not travel, and it knows what belongs to it.

# Elements of whole parameters that one owner has at a time, unless one parameter alone has more.
ROUND_NUMEL = 2**24


def work_of(shape: tuple[int, ...]) -> int:
    """How long the update of one parameter takes, up to a factor: products of its smaller Gram matrix.

    A stack of matrices, (..., rows, columns), takes as long as all of them; a vector as long as it is.
    """
    if len(shape) < 2:
        return prod(shape)
    rows, columns = shape[-2:]
    return prod(shape[:-2]) * min(rows, columns) ** 2 * max(rows, columns)


def owners_of(shapes: Sequence[tuple[int, ...]], holders: Sequence[Sequence[int]]) -> list[int]:
    """The owner of each parameter; ``holders``: of each the ranks that hold a part of it, at least one."""
    work = list(map(work_of, shapes))
    load: dict[int, int] = {}
    owners = [0] * len(shapes)
    for job in sorted(range(len(shapes)), key=lambda job: (-work[job], job)):
        rank = min(holders[job], key=lambda rank: (load.get(rank, 0), rank))
        load[rank] = load.get(rank, 0) + work[job]
        owners[job] = rank
    return owners


def rounds_of(
    shapes: Sequence[tuple[int, ...]], owners: Sequence[int], limit: int = ROUND_NUMEL
) -> list[list[int]]:
    """Which parameters are updated together, so that no owner has more than ``limit`` elements whole at a time.

    Longest first. A parameter with more elements has a round of its owner alone.
    """
    rounds: list[list[int]] = []
    # Of each owner its round, and the elements that it has there.
    at: dict[int, tuple[int, int]] = {}
    for job in sorted(range(len(shapes)), key=lambda job: (-work_of(shapes[job]), job)):
        number, held = at.get(owners[job], (0, 0))
        if held and held + prod(shapes[job]) > limit:
            number, held = number + 1, 0
        at[owners[job]] = number, held + prod(shapes[job])
        while len(rounds) <= number:
            rounds.append([])
        rounds[number].append(job)
    return rounds


Jobs = Sequence[tuple[ParameterUpdate, int]]
"""Each with its owner."""
Found = TypeVar("Found")


class WholeUpdate(Update):
    """Of one optimizer. ``take`` is collective over the ranks that share shards; nothing else is."""

    together = True

    def __init__(self, optimizer: Optimizer, comm: Collectives, *, replicated: bool) -> None:
        """Not collective. ``replicated``: every rank holds all shards."""
        super().__init__(optimizer)
        self._comm, self._replicated = comm, replicated
        step: Any = type(optimizer).step
        self._method: Callable[[Optimizer], Any] = getattr(step, "__wrapped__", step)
        self._failure: Exception | None = None

    @override
    def follow(self, slots: Mapping[Unit, Sequence[int]], groups: range) -> None:
        optimizer, replicated = self._optimizer, self._replicated
        groups_now = optimizer.param_groups
        rule = directions_of(optimizer)
        kind = ParameterUpdate if rule is None else partial(DirectionJob, optimizer, rule)
        jobs = [
            kind(unit, position, unit.spec.groups[position] - groups.start, replicated=replicated)
            for unit, positions in slots.items()
            for position in positions
            if unit.spec.layout.slots[position].numel
            and needs_whole(optimizer, groups_now[unit.spec.groups[position] - groups.start])
        ]
        shapes = [job.shape for job in jobs]
        self._jobs = jobs
        owners = owners_of(shapes, [job.holders for job in jobs])
        self._rounds = [
            [(jobs[number], owners[number]) for number in numbers]
            for numbers in rounds_of(shapes, owners)
        ]

    @override
    def check(self, *, last: bool) -> None:
        if not last:
            raise StepError(
                f"{type(self._optimizer).__name__} steps on whole parameters, and a hook was put before its step past "
                "optimizer.register_step_pre_hook, which would find pieces; register it by that method"
            )
        if torch.is_inference_mode_enabled():
            raise StepError("optimizer.step() inside torch.inference_mode(); step outside of it")
        place = self._group_of()
        for job in self._jobs:
            for shard, _ in job.parts:
                if place.get(id(shard)) != job.group:
                    raise StepError(
                        f"a part of {job.name!r} was in group {job.group} of {type(self._optimizer).__name__} at "
                        f"zeroify, and is in {place.get(id(shard), 'none')} now; change options of groups instead, or "
                        "set their learning rate to 0"
                    )

    @override
    def take(self, *, last: bool) -> None:
        """Take the step over all parameters that have gradients.

        Collective over the ranks that share shards. What fails on one is raised there, once all messages have passed.

        Raises:
            StepError: parts of a parameter do not belong together, or the optimizer has changed options of its groups.
        """
        self._failure = None
        with self._taking():
            for group in self._optimizer.param_groups:
                if needs_whole(self._optimizer, group):
                    group["params"] = []
            if any(group["params"] for group in self._optimizer.param_groups):
                self._tried(self._call)
            for number, jobs in enumerate(self._rounds):
                present = [(job, owner) for job, owner in jobs if job.unit.gradients.present]
                self._take_round(f"round {number}", present)
            if self._failure is not None:
                raise self._failure

    @override
    def adopt(self) -> None:
        """What was padded in a file is so no more."""
        for job in self._jobs:
            job.adopt(self._optimizer.state)

    def _take_round(self, name: str, jobs: Jobs) -> None:
        """Take the step over ``jobs``.

        After a failure a rank goes on with the messages, empty ones, so that no other waits for it. Who gets none of
        what it needs does nothing.
        """
        said = self._tried(lambda: self._said(jobs))
        said = trade(self._comm, said or self._nothing(), name=f"parts for {name}")
        updated = self._tried(lambda: self._updated(jobs, said))
        updated = trade(self._comm, updated or self._nothing(), name=f"parts of {name}")
        self._tried(lambda: self._put(jobs, updated))

    def _tried(self, work: Callable[[], Found]) -> Found | None:
        """What ``work`` gives, unless something has failed; a failure is kept for the end of the step."""
        if self._failure is None:
            try:
                return work()
            except Exception as error:
                self._failure = error
        return None

    def _nothing(self) -> list[list[Tensor]]:
        return [[] for _ in range(self._comm.group.size)]

    def _said(self, jobs: Jobs) -> list[list[Tensor]]:
        """By rank, what goes to owners."""
        outgoing = self._nothing()
        for job, owner in jobs:
            if owner != self._comm.group.index and not self._replicated:
                outgoing[owner] += (each.cpu() for each in job.said(self._optimizer.state))
        return outgoing

    def _updated(self, jobs: Jobs, said: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        """Step on this rank's own; by rank, what goes back."""
        me, outgoing = self._comm.group.index, self._nothing()
        arrived = [iter(each) for each in said]
        wholes: list[tuple[ParameterUpdate, WholeParameter | None]] = []
        for job, owner in jobs:
            if owner == me:
                wholes.append((job, self._assembled(job, arrived)))
        self._step_on(
            [(job, whole) for job, whole in wholes if whole is not None and job.by_optimizer]
        )
        for job, whole in wholes:
            for rank, answer in job.answers(whole).items():
                outgoing[rank] += answer
        return outgoing

    def _assembled(
        self, job: ParameterUpdate, arrived: Sequence[Iterator[Tensor]]
    ) -> WholeParameter | None:
        """A parameter of this rank's, from its own parts and what arrived of the others; None: no update."""
        states = self._optimizer.state
        elements = [part for _, part in job.parts]
        said = job.said(states)
        for rank in () if self._replicated else job.holders:
            if rank != self._comm.group.index:
                found = next(arrived[rank], None)
                if found is None:
                    return None  # that rank has failed, and says so
                elements += job.parts_of(rank)
                said.append(found)
        return job.assemble(list(zip(elements, said, strict=True)), states)

    def _put(self, jobs: Jobs, updated: Sequence[list[Tensor]]) -> None:
        """Put what owners have sent into this rank's parts."""
        arrived = [iter(each) for each in updated]
        for job, owner in jobs:
            if job.parts:
                answer = [*islice(arrived[owner], 2)]
                if answer:  # else its owner has failed
                    job.take(answer, self._optimizer.state)

    def _step_on(self, wholes: Sequence[tuple[ParameterUpdate, WholeParameter]]) -> None:
        tensors = [(job.group, whole.parameter, whole.state) for job, whole in wholes]
        with in_groups(self._optimizer, tensors) as after:
            if wholes:
                self._call()
        for (_, whole), state in zip(wholes, after, strict=True):
            whole.state = state or {}

    def _call(self) -> None:
        """The optimizer's own step over what its groups hold.

        Raises:
            StepError: it has changed numbers in its groups, which it would do once for each round, on each rank.
        """
        optimizer = self._optimizer
        before = [_options(group) for group in optimizer.param_groups]
        with _without_hooks(optimizer):
            self._method(optimizer)
        for number, (group, past) in enumerate(zip(optimizer.param_groups, before, strict=True)):
            changed = [name for name, value in _options(group).items() if past.get(name) != value]
            if changed:
                raise StepError(
                    f"{type(optimizer).__name__}.step has changed {changed[0]!r} of group {number}, and it is called "
                    "once for each round of whole parameters, on each rank; keep such numbers in "
                    "optimizer.state[parameter], or change them between steps"
                )


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers and texts of a group."""
    return {key: value for key, value in group.items() if isinstance(value, int | float | str)}


@contextmanager
def _without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Context: ``super().step()`` in the optimizer's own step calls no hooks a second time."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    kept = {name: optimizer.__dict__[name] for name in names}
    optimizer.__dict__.update({name: OrderedDict() for name in names})
    try:
        yield
    finally:
        optimizer.__dict__.update(kept)
