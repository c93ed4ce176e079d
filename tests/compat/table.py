"""All constructs, in the order of docs/compatibility.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tests.compat import (
    aliases,
    arguments,
    autograd,
    changes,
    companions,
    gradients,
    half,
    hidden,
    hooks,
    in_place,
    layers,
    loops,
    outputs,
    recomputation,
    states,
    tensors,
    weights,
    wrappers,
    zeroing,
)
from tests.compat.construct import Construct


def at_all_stages(constructs: Sequence[Construct]) -> list[Construct]:
    """Where the stage decides when a gradient is complete, or what lies in it."""
    return [replace(each, stages=(0, 1, 2, 3)) for each in constructs]


SECTIONS: dict[str, Sequence[Construct]] = {
    "What blocks are given": at_all_stages([*arguments.habits, *in_place.habits]),
    "What blocks and models return": at_all_stages(outputs.habits),
    "Ways that no argument or output shows": at_all_stages(hidden.habits),
    "Memory with two names, buffers": aliases.habits,
    "Zeroing gradients": at_all_stages(zeroing.habits),
    "Changing, clipping and reading gradients": at_all_stages(gradients.habits),
    "Training loops": loops.habits,
    "Recomputation": recomputation.habits,
    "Autograd by hand": at_all_stages(autograd.habits),
    "Layers": layers.habits,
    "Weights": weights.habits,
    "Tensors and indexing": tensors.habits,
    "Hooks": hooks.habits,
    "Wrappers, autocast and the compiler": wrappers.habits,
    "States, copies and changes by hand": states.habits,
    "Changes after zeroify, optimizers": changes.habits,
    "Other models beside it": companions.habits,
    "Half precision": half.habits,
}
SMALL = [construct for section in SECTIONS.values() for construct in section]
