"""gathered and full_gradients: whole values of a sharded model for the program around it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import update_wrapper
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from hpczero.errors import ConfigError, PlanError, StepError, TierError
from hpczero.job.group import told_all
from hpczero.job.mesh import DATA_SEQUENCE, DEGREES, MODEL
from hpczero.job.messages import hand_out
from hpczero.job.topology import Topology
from hpczero.kernels.norm import digest_of_bits
from hpczero.zero.calls.ways import next_node_number
from hpczero.zero.full_state import WholeModel, is_whole
from hpczero.zero.refusals import overlaps
from hpczero.zero.sharding import Sharding
from hpczero.zero.units.unit import Unit
from hpczero.zero.units.whole import UnitState
from hpczero.zero.update.agreement import DeferredNumber
from hpczero.zero.zeroify import sharding


def read_later(model: nn.Module, tensor: Tensor) -> DeferredNumber:
    """The number in ``tensor`` as it is now, to be asked for later. Not collective.

    ``loss.item()`` waits for the device. A step waits for it once anyway, in ``clip_grad_norm_``, or in
    ``optimizer.step()`` where nothing was clipped. A loss that was given here before is read with that.

        loss = model(x, y); loss.backward()
        value = hpczero.read_later(model, loss)
        hpczero.clip_grad_norm_(model, 1.0); optimizer.step(); optimizer.zero_grad()
        print(value())

    It is never late: asked for before the step has read it, it is read at once, with a wait of its own.

    Args:
        model: zeroified.
        tensor: one real element of any dtype; this rank's own. Later changes of it play no part.

    Returns:
        Gives the number as a float when it is called, as ``tensor.item()`` would have given it.

    Raises:
        ConfigError: more or fewer elements than one, or a complex one.
    """
    return sharding(model).step.norms.readings.add(tensor)


@contextmanager
def accumulate(model: nn.Module, part: int, parts: int) -> Iterator[None]:
    """Context for micro batch ``part`` of ``parts``: gradients become the mean over all of them.

    ``for i in range(n): with hpczero.accumulate(model, i, n): loss(model, i).backward()``

    Do not divide the loss by ``parts``. The fp32 sum over micro batches and ranks is multiplied once, by 1 / (parts *
    ranks); a divided loss would round everything in its backward. All parts but the last add to this rank's own whole
    gradients, as in ``no_sync``. The last one reduces, and its backward is collective.

    Args:
        model: zeroified.
        part: 0 to ``parts - 1``, in this order.
        parts: micro batches of the step, the same on every rank. The step checks that.

    Raises:
        ConfigError: the numbers are out of range.
        StepError: the part is not the next one; or gradients were never reduced when the first one begins.
    """
    state = sharding(model)
    if state.exact is not None:
        state.exact.refuse("accumulate adds up gradients of one rank")
    rank = state.topology.rank
    if not 0 <= part < parts:
        raise ConfigError(
            f"accumulate: got part {part} of {parts}, expected one of 0 to {parts - 1}"
        )
    if part and state.next_part != (part, parts):
        raise StepError(
            f"rank {rank}: accumulate got part {part} of {parts}, which does not follow the part before. Run all parts "
            "of a step in order; to begin anew, call optimizer.zero_grad() and start with part 0"
        )
    if not part and any(unit.gradients.waiting for unit in state.units if unit.spec.trainable):
        raise StepError(
            f"rank {rank}: accumulate begins, but gradients of no_sync or of parts that were never completed are "
            "waiting, and its factor is not theirs; call optimizer.zero_grad(), or keep to one way for the whole step"
        )
    state.next_part = None
    with counted(state, parts, reduces=part == parts - 1):
        yield
        state.next_part = (part + 1, parts)


@contextmanager
def counted(state: Sharding, parts: int, *, reduces: bool) -> Iterator[None]:
    """Context for one of ``parts`` backwards whose mean is wanted; ``reduces``: gradients are reduced in it.

    Whoever calls it keeps the order. Not collective; a backward inside that reduces is.
    """
    schedule = state.schedule
    before = schedule.backward.sync, state.micro_batches
    schedule.backward.sync, state.micro_batches = reduces, parts
    try:
        yield
    finally:
        schedule.backward.sync, state.micro_batches = before


# Modifiers: whose changes inside ``gathered`` become everybody's.
#
# One rank has changed a whole model. Where ranks hold parts, that rank's copy of the model lies on several, which are
# ``topology.model_parallel`` of it. Each of these gives its part to the ranks that hold the same part.

EXACT = 2**52 - 1  # what fp64 holds of a digest
NAMED = 3  # parameters of a unit


def root_of(topology: Topology, modifier_rank: int) -> int:
    """Rank in ``topology.data_sequence`` of the one that gives its values to this rank. Not collective."""
    wanted = topology.mesh.coordinates(modifier_rank)
    places = [DEGREES.index(name) for name in DATA_SEQUENCE]
    ranks = topology.mesh.members(topology.rank, *DATA_SEQUENCE)
    coordinates = [topology.mesh.coordinates(rank) for rank in ranks]
    return next(
        index
        for index, found in enumerate(coordinates)
        if all(found[place] == wanted[place] for place in places)
    )


def check_copies(units: Sequence[Unit], topology: Topology, modifier_rank: int) -> None:
    """Refuse changes that only some of the modifier's tensor ranks have made. Collective over world.

    What all of them hold must be equal, and of a unit of parts all must have changed theirs or none: whoever changes a
    parameter on one rank alone means all of it.

    Raises:
        StepError: on every rank; the message names a unit or parameter, and the ranks that must do the same.
    """
    if topology.tensor.size == 1:
        return
    named, mine = [], []
    for unit in units:
        held = ", ".join(repr(slot.name) for slot in unit.spec.layout.slots[:NAMED])
        named.append(
            f"one of {held} and so on" if len(unit.parameters) > NAMED else f"one of {held}"
        )
        mine.append(float(unit.whole.watch.was_modified()))
        for place in unit.spec.kept:
            named.append(f"parameter {unit.spec.layout.slots[place].name!r}")
            value = unit.parameters[place].detach().contiguous().clone()
            mine.append(float(int(digest_of_bits(value.view(-1))) & EXACT))
    found = topology.tensor.share(np.array(mine))
    odd = np.flatnonzero((found != found[0]).any(axis=0)).tolist()
    ranks = topology.mesh.members(modifier_rank, *MODEL)
    with topology.agreed("keep what was changed inside gathered"):
        if odd and topology.rank in ranks:
            raise StepError(
                f"rank {topology.rank}: {named[odd[-1]]} was changed inside gathered(modifier_rank={modifier_rank}) by "
                "some of the ranks that share its layers (mesh: tensor) and not by the others, or otherwise; expected "
                f"the same change on each of ranks {list(ranks)}, which hold this copy of the model: of what a rank "
                "holds whole the same values, of what is split its own part"
            )


@contextmanager
def gathered(model: nn.Module, *, modifier_rank: int | None = None) -> Iterator[None]:
    """Context: all parameters are whole. Collective over world.

    With ``Precision(gather="int8")`` they are what passes compute with. With a ``modifier_rank`` they are the masters'
    values, and a graph of before refuses its backward, as torch does where parameters have changed.

    Args:
        model: zeroified.
        modifier_rank: world rank whose changes of parameters and persistent buffers all ranks, and the optimizer's
            masters, get at the end. None allows no changes. Where ranks hold parts of a model, those of
            ``topology.model_parallel`` of this rank hold its copy, and each of them changes its part.

    Raises:
        ConfigError: there is no such rank.
        StepError: on every rank. Parameters were changed without a ``modifier_rank``, got values of another shape or
            dtype, or share memory. Ranks have other buffers than ``modifier_rank``. Only some of the ranks that share
            layers with it have changed them. Or, without a ``modifier_rank``, the block before did not end well. After
            this error, and if an exception leaves the block after a change, the model refuses to be used until a block
            ends well or a checkpoint is loaded.
    """
    state = sharding(model)
    units, schedule = state.units, state.schedule
    if modifier_rank is not None and state.exact is not None and schedule.backward.turn is not None:
        state.exact.refuse(
            "parameters change between the leaves of a step", "change them between two steps"
        )
    if modifier_rank is not None and modifier_rank not in range(state.topology.size):
        raise ConfigError(
            f"modifier_rank: got {modifier_rank!r}, expected a rank of 0 to {state.topology.size - 1}"
        )
    with state.topology.watchdog.operation("the beginning of gathered"):
        state.step.finish_updates()
        doubtful = any(unit.whole.doubtful for unit in units)
        # By a call that this block stands in, a forward hook's say; the same on all ranks.
        in_use = {u for u in units if u.whole.state in (UnitState.GATHERING, UnitState.WHOLE)}
        with torch.inference_mode(False):  # what parameters become views of lasts
            with state.topology.agreed("make the parameters whole"):
                for unit in units:
                    unit.optimized.check_seen()
                    if modifier_rank is None:
                        unit.whole.check_certain()
                if modifier_rank is not None and in_use and state.precision.gather != "exact":
                    raise StepError(
                        f"rank {state.topology.rank}: gathered(modifier_rank={modifier_rank}) inside a forward, a "
                        f"backward or another gathered, whose parameters are {state.precision.gather} codes of the "
                        "values (precision.gather); expected it outside, where the values themselves can be changed"
                    )
            for unit in units:
                unit.whole.doubtful = ""
            # The outer block sees what was changed.
            nested = any(unit.whole.holds for unit in units)
            _hold(units, exact=modifier_rank is not None)
            state.answer_transformers()
    first_node, ended, fine = next_node_number(), False, False
    try:
        yield
        ended = True
        reads = modifier_rank is None and not nested
        changed = reads and any(unit.whole.watch.was_modified() for unit in units)
        mine = np.array(
            [changed, *schedule.residence.kept.graphs_since(first_node)], dtype=np.uint8
        )
        with state.topology.watchdog.operation("the end of gathered"):
            found = state.collectives.agree(mine, name="gathered")
            if modifier_rank is not None:
                _keep_changes(state, modifier_rank)
                if state.precision.gather != "exact":
                    # A graph of before saw codes of the values, and would go on with the values themselves.
                    for unit in units:
                        unit.note_step(range(len(unit.parameters)))
                schedule.parameters_changed()
            elif found[0]:
                _refuse_changes(state)
            schedule.residence.kept.for_graphs(found[1:])
            if state.precision.loss_scale is not None and schedule.is_in_graph_since(first_node):
                state.advice.about_weights()
        fine = True
    finally:
        # A refusal at the end is known to all ranks; of an exception inside only this rank knows.
        modified = (unit.whole.watch.was_modified() for unit in units)
        lost = not fine and (ended or doubtful or any(modified))
        for unit in units:
            unit.whole.let_go(
                retain=fine and unit in schedule.residence.kept, in_use=unit in in_use
            )
            if lost:
                unit.whole.doubt()
        state.answer_transformers()
        if not fine:  # what is in the parameters now is not what such a graph was made of
            schedule.residence.kept.clear()


def finish_update(model: nn.Module) -> None:
    """Bring a delayed update, which is on its way, to the model now. Collective over world.

    With ``Offload(delayed=True)`` the parameters lack the update of the last ``optimizer.step()`` until the next one.
    Saving, loading, ``gathered``, ``full_state_dict`` and ``release`` call this first; an evaluation should. What
    follows is late again from the next step on. Without a delayed update it does nothing.

    Args:
        model: zeroified, outside of its forward and backward.

    Raises:
        StepError, TierError: on every rank; the update has failed, and a checkpoint has to be loaded.
    """
    sharding(model).step.finish_updates()


def _hold(units: Sequence[Unit], *, exact: bool) -> None:
    """Make all whole, and keep them so: a forward inside must not give back what was changed. Collective.

    ``exact``: the masters' values, which may be changed; else those that passes compute with.

    Raises:
        TierError: on every rank; nothing is whole then. After any exception nothing is held.
    """
    held: list[Unit] = []
    try:
        for unit in units:
            unit.unshard(exact=exact)
        for unit in units:
            unit.whole.wait_for_unshard()
            held.append(unit)
            unit.whole.hold()
    except BaseException as error:
        # Otherwise this rank alone may know of it: nobody waits for anybody.
        told = isinstance(error, TierError)
        for unit in held:
            unit.whole.let_go(in_use=not told)
        for unit in units if told else ():
            unit.reshard()
        raise


def _keep_changes(state: Sharding, modifier_rank: int) -> None:
    """Give all ranks what ``modifier_rank`` holds. Collective over world."""
    with state.topology.agreed("keep what was changed inside gathered"):
        for unit in state.units:
            unit.whole.watch.check_guards()
        _check_apart(state)
    check_copies(state.units, state.topology, modifier_rank)
    root = root_of(state.topology, modifier_rank)
    state.shared_buffers.check_equal(root)
    with state.topology.agreed("keep what was changed inside gathered"):
        for unit in state.units:
            unit.take_over()
    for unit in state.units:
        unit.write_back(root)
    state.shared_buffers.share(root)


def _refuse_changes(state: Sharding) -> NoReturn:
    """Refuse changes without a ``modifier_rank``. Collective over world."""
    with state.topology.agreed("leave gathered"):
        for unit in state.units:
            unit.whole.watch.check_guards()
    error = StepError(
        "parameters were changed inside gathered(model) without a modifier_rank, so ranks may now "
        "differ; use gathered(model, modifier_rank=0) and change them on that rank"
    )
    raise told_all(error, state.topology.data_sequence.comm)


def _check_apart(state: Sharding) -> None:
    """Refuse parameters that were given each other's memory. Plain torch would tie them, and shards cannot.

    Raises:
        StepError: the message names two of them.
    """
    moved = {name for unit in state.units for name in unit.whole.watch.moved()}
    if not moved:
        return
    pairs = (zip(u.spec.layout.slots, u.parameters, strict=True) for u in state.units)
    names, values = zip(
        *((slot.name, value) for slot, value in itertools.chain.from_iterable(pairs)), strict=True
    )
    for one, other in overlaps(values):
        if one != other and not moved.isdisjoint((names[one], names[other])):
            raise StepError(
                f"rank {state.topology.rank}: parameters {names[one]!r} and {names[other]!r} share memory since they "
                "were changed inside gathered, expected memory of each one's own; tie them before zeroify, or give one "
                "a copy: p.data = other.data.clone()"
            )


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole fp32 mean gradients of trainable parameters by name, on every rank. Collective over world.

    It is for inspection. A parameter is left out if no parameter of its unit has a gradient since the last
    ``zero_grad``. Where ranks hold parts of a model, names and gradients are those of the whole one; it then costs
    what all of them cost on every rank.

    Raises:
        PlanError: on every rank, of a part of a model: see ``full_state_dict``.
        StepError: between the leaves of a step, whose sum is not complete.
    """
    state = sharding(model)
    trained = [unit for unit in state.units if unit.spec.trainable]
    if state.exact is not None and any(unit.gradients.waiting for unit in trained):
        raise StepError(
            "full_gradients between the leaves of a step, whose sum is not complete; call it after the loop over "
            "hpczero.Leaves"
        )
    if not is_whole(state):
        return {name: value for found in _gradients(state) for name, value in found.items()}
    gradients = {}
    for unit in state.units:
        if unit.spec.trainable and unit.gradients.present:
            flat = unit.gradients.whole_copy()
            for slot in unit.spec.layout.slots:
                gradients[slot.name] = flat[slot.offset : slot.stop].view(slot.shape)
    return gradients


def _gradients(state: Sharding) -> Iterator[dict[str, Tensor]]:
    """Whole gradients of parts of a model, unit by unit, on every rank. Collective over world, each item."""

    def values_of(unit: Unit) -> Tensor | None:
        present = unit.spec.trainable and unit.gradients.present
        return unit.gradients.whole_copy() if present else None

    whole = WholeModel(state)
    shapes = whole.shapes
    for found in whole.collected(values_of):
        names = json.loads(state.topology.broadcast_text(json.dumps(list(found))))
        for name in names:
            value = found.setdefault(
                name, torch.empty(shapes[name], dtype=torch.float32, device="cpu")
            )
            hand_out(state.topology.world, value.numpy())
        yield found


# Methods other than ``forward`` that use a model's parameters: ``encode``, ``get_text_features``, ``generate``.
#
# Hooks run when a module is called, and not when a method of it is. A registered method counts as a call of its module.


def register_forward(model: nn.Module, name: str) -> None:
    """Allow calls of ``model.NAME(...)``, which then work as ``model(...)`` does, in training too. Not collective.

    Such a call is collective at stage 3, as a forward is. In half precision, arguments and results of a method of the
    model itself are cast, as those of its forward.

    Args:
        model: zeroified.
        name: name of a method, with a dotted path if it belongs to a submodule: ``"text_model.encode"``.

    Raises:
        ConfigError: there is no such method.
        PlanError: the model was not zeroified.

    Source: torch offers the same for FSDP2 (``register_fsdp_forward_method``).
    """
    state = sharding(model)
    path, _, last = name.rpartition(".")
    try:
        module = model.get_submodule(path)
        method = getattr(module, last)
    except AttributeError:
        method = None
    if not callable(method) or last == "forward":
        raise ConfigError(
            f"register_forward: got {name!r}, expected a method of {type(model).__name__} other than forward, or "
            "'submodule.method'"
        )
    if isinstance(method, _Registered):
        return
    state.registered.append((module, last, module.__dict__.get(last)))
    module.__dict__[last] = _Registered(state, _owner(model, path), method, casts=module is model)


class _Registered:
    """A method whose call counts as one of the module with hooks around it."""

    def __init__(
        self, state: Sharding, owner: nn.Module, method: Callable[..., Any], *, casts: bool
    ) -> None:
        """Wrap a method.

        Args:
            state: of the model.
            owner: the module that the method counts for.
            method: the bound method.
            casts: whether arguments and results are cast, as those of the model's own forward.
        """
        update_wrapper(self, method)
        self._state, self._owner, self._method, self._casts = state, owner, method, casts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        state = self._state
        state.surroundings.look(self._owner)
        with state.schedule.call(self._owner, args, kwargs) as results:
            if not self._casts:
                state.casting.check_inside(f"method {self._method.__name__!r} of a part")
                results.append(self._method(*args, **kwargs))
            else:
                results.append(state.casting.call(self._method, args, kwargs))
        return results[0]

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce_ex__(4)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied: a copy of the module would run the original's method.

        Raises:
            PlanError: always.
        """
        raise PlanError(
            f"a module whose method {self._method.__name__!r} was registered by hpczero.register_forward cannot be "
            "copied or pickled; copy it before that, or after hpczero.release(model)"
        )


def _owner(model: nn.Module, path: str) -> nn.Module:
    """The innermost module with hooks that holds the module at ``path``, or is that module."""
    schedule = sharding(model).schedule
    parts = path.split(".") if path else []
    for length in range(len(parts), 0, -1):
        module = model.get_submodule(".".join(parts[:length]))
        if module in schedule.modules:
            return module
    return model
