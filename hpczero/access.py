"""gathered and full_gradients: whole values of a sharded model for the program around it.

Owns: what a program may read and change, and what becomes of its changes. Must not know: shards, masters, hooks, MPI.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from hpczero.backward import next_node_number
from hpczero.errors import ConfigError, StepError
from hpczero.zero import sharding


@contextmanager
def gathered(model: nn.Module, *, modifier_rank: int | None = None) -> Iterator[None]:
    """All parameters are whole inside. Collective over world.

    Args:
        model: zeroified.
        modifier_rank: this world rank's changes are given to all ranks and to the optimizer's masters at the end.

    Raises:
        ConfigError: there is no such rank.
        StepError: on every rank, if parameters were changed and no ``modifier_rank`` was named, or were given values
            of another shape or dtype.
    """
    state = sharding(model)
    units, schedule = state.units, state.schedule
    assert schedule is not None, "zeroify attaches the schedule"
    if modifier_rank is not None and modifier_rank not in range(state.topology.size):
        raise ConfigError(
            f"modifier_rank: got {modifier_rank!r}, expected a rank of 0 to {state.topology.size - 1}"
        )
    with torch.inference_mode(False):  # what parameters become views of lasts
        with state.topology.agreed("make the parameters whole"):
            for unit in units:
                unit.check_values()
        for unit in units:
            unit.unshard()
        for unit in units:
            unit.wait_for_unshard()
            unit.whole.hold()  # a forward inside must not give back what was changed
    first_node, fine = next_node_number(), False
    try:
        yield
        changed = modifier_rank is None and any(unit.whole.was_modified() for unit in units)
        mine = np.array([changed, *schedule.kept.graphs_since(first_node)], dtype=np.uint8)
        found = state.collectives.agree(mine, name="gathered")
        if modifier_rank is not None:
            with state.topology.agreed("keep what was changed inside gathered"):
                for unit in units:
                    unit.take_over()
            for unit in units:
                unit.write_back(modifier_rank)
        elif found[0]:
            error = StepError(
                "parameters were changed inside gathered(model) without a modifier_rank, so ranks may now "
                "differ; use gathered(model, modifier_rank=0) and change them on that rank"
            )
            error.agreed = True
            raise error
        schedule.kept.for_graphs(found[1:])
        if state.precision.loss_scale is not None and schedule.is_in_graph_since(first_node):
            state.advice.about_weights()
        fine = True
    finally:
        for unit in units:
            unit.whole.let_go(retain=fine and unit in schedule.kept)
        if not fine:  # what is in the parameters now is not what such a graph was made of
            schedule.kept.clear()


def full_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole fp32 mean gradients of trainable parameters by name, on every rank. Collective over world.

    For inspection; parameters without a gradient since the last ``zero_grad`` are left out where the whole unit has
    none.
    """
    gradients = {}
    for unit in sharding(model).units:
        if unit.has_gradient:
            flat = unit.gather_gradients()
            for slot in unit.spec.layout.slots:
                gradients[slot.name] = flat[slot.offset : slot.stop].view(slot.shape)
    return gradients
