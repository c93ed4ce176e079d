"""load: the public call, and what is refused before a checkpoint is looked for.

Owns: whose optimizers were given, and where loaded values would not stay. Must not know: files, datasets, saves.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from hpczero.checkpoint.background import wait_for_left
from hpczero.checkpoint.places import GIVE, given_path
from hpczero.checkpoint.reading import Loaded, load_newest
from hpczero.errors import ConfigError, StepError
from hpczero.zero.sharding import Sharding
from hpczero.zero.zeroify import sharding as sharding_of

Given = Optimizer | Sequence[Optimizer] | None


def load(directory: str | Path, model: nn.Module, optimizer: Given = None) -> Loaded:
    """Make ``model`` and its optimizer what they were at a save. Collective over the topology's world.

    The number of ranks, the stage, the units and the precision may be others than at the save. Parameters, state and
    options of the optimizer, buffers, extra states of modules, random streams and loss scale are restored. A scheduler
    and a loader are not; restore them from ``extra``.

    Args:
        directory: a checkpoint, or the folder of checkpoints or of a run, of which the newest sound one is loaded.
        model: zeroified, of the same parameters.
        optimizer: the one it was zeroified with, or a tuple or list of them; None takes those too.

    Returns:
        What the checkpoint holds beside the model, ``extra`` among it.

    Raises:
        ConfigError: there is no checkpoint.
        StepError: inside ``gathered``, whose end would write the old values over the loaded ones.
        CorruptCheckpoint: none is sound; the message says what is wrong with the newest.
        CheckpointMismatch: it is of another model or optimizer, or of a later version; the message lists the
            differences.
    """
    state = given_sharding(model, optimizer)
    found = load_newest_at(given_path(directory), state)
    if found is None:
        error = ConfigError(f"{directory}: no checkpoint there; {GIVE}")
        error.agreed = True
        raise error
    return found


def given_sharding(model: nn.Module, optimizer: Given) -> Sharding:
    """The sharding of a model, once its optimizers are those that were given. Not collective.

    Raises:
        ConfigError: they are others.
    """
    state = sharding_of(model)
    if optimizer is None:
        return state
    given = optimizer if isinstance(optimizer, (tuple, list)) else (optimizer,)
    own = list(state.optimizers)
    if len(given) == len(own) and all(map(operator.is_, given, own)):
        return state
    if len(own) < 2:
        raise ConfigError(
            "the optimizer is not the one this model was zeroified with; give that one, or leave it out"
        )
    raise ConfigError(
        f"got {len(given)} optimizer(s), which are not the {len(own)} that this model was zeroified with "
        f"({', '.join(state.optimizers.classes)}, in this order); give those, or leave them out"
    )


def load_newest_at(path: Path, sharding: Sharding, *, own: bool = False) -> Loaded | None:
    """``load_newest``, refused where loaded values would not stay. Collective over world."""
    with sharding.topology.agreed("begin a load"):
        if any(unit.whole.holds for unit in sharding.units):
            raise StepError(
                f"rank {sharding.topology.rank}: a load inside `with hpczero.gathered(model):` would be overwritten at "
                "its end by the values gathered before; load outside of the block"
            )
    sharding.unfreezing.settle()
    wait_for_left()  # it may be what is asked for
    return load_newest(path, sharding, own=own)
