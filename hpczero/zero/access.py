"""gathered and full_gradients: whole values of a sharded model for the program around it.

Owns: what a program may read and change, and what becomes of its changes. Must not know: shards, masters, hooks, MPI.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from hpczero.errors import ConfigError, StepError, TierError
from hpczero.job.group import told_all
from hpczero.job.messages import hand_out
from hpczero.zero.calls.backward import next_node_number
from hpczero.zero.modifiers import check_copies, root_of
from hpczero.zero.overlaps import overlaps
from hpczero.zero.sharding import Sharding
from hpczero.zero.units.unit import Unit
from hpczero.zero.units.whole import UnitState
from hpczero.zero.whole_model import WholeModel, is_whole
from hpczero.zero.zeroify import sharding


@contextmanager
def gathered(model: nn.Module, *, modifier_rank: int | None = None) -> Iterator[None]:
    """Context: all parameters are whole. Collective over world.

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
    assert schedule is not None, "zeroify attaches the schedule"
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
            for unit in units:
                unit.whole.doubtful = ""
            nested = any(
                unit.whole.holds for unit in units
            )  # the outer block sees what was changed
            _hold(units)
            state.answer_transformers()
    first_node, ended, fine = next_node_number(), False, False
    try:
        yield
        ended = True
        reads = modifier_rank is None and not nested
        changed = reads and any(unit.whole.was_modified() for unit in units)
        mine = np.array(
            [changed, *schedule.residence.kept.graphs_since(first_node)], dtype=np.uint8
        )
        with state.topology.watchdog.operation("the end of gathered"):
            found = state.collectives.agree(mine, name="gathered")
            if modifier_rank is not None:
                _keep_changes(state, modifier_rank)
                schedule.parameters_changed()
            elif found[0]:
                _refuse_changes(state)
            schedule.residence.kept.for_graphs(found[1:])
            if state.precision.loss_scale is not None and schedule.is_in_graph_since(first_node):
                state.advice.about_weights()
        fine = True
    finally:
        # A refusal at the end is known to all ranks; of an exception inside only this rank knows.
        lost = not fine and (ended or doubtful or any(unit.whole.was_modified() for unit in units))
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


def _hold(units: Sequence[Unit]) -> None:
    """Make all whole, and keep them so: a forward inside must not give back what was changed. Collective.

    Raises:
        TierError: on every rank; nothing is whole then. After any exception nothing is held.
    """
    held: list[Unit] = []
    try:
        for unit in units:
            unit.unshard()
        for unit in units:
            unit.whole.wait_for_unshard()
            held.append(unit)
            unit.whole.hold()
    except BaseException as error:
        told = isinstance(
            error, TierError
        )  # else this rank alone may know: nobody waits for anybody
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
    told_all(error, state.topology.data_sequence.comm)
    raise error


def _check_apart(state: Sharding) -> None:
    """Refuse parameters that were given each other's memory. Plain torch would tie them, and shards cannot.

    Raises:
        StepError: the message names two of them.
    """
    moved = {name for unit in state.units for name in unit.whole.moved()}
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
    """
    state = sharding(model)
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
