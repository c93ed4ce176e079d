"""All constructs, in the order of docs/compatibility.md."""

from __future__ import annotations

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


def at_all_stages(constructs: list[Construct]) -> list[Construct]:
    """Where the stage decides what lies in a gradient."""
    return [replace(each, stages=(0, 1, 2, 3)) for each in constructs]


SECTIONS: dict[str, list[Construct]] = {
    "What blocks are given": [*arguments.CONSTRUCTS, *in_place.CONSTRUCTS],
    "What blocks and models return": outputs.CONSTRUCTS,
    "Ways that no argument or output shows": hidden.CONSTRUCTS,
    "Memory with two names, buffers": aliases.CONSTRUCTS,
    "Zeroing gradients": at_all_stages(zeroing.CONSTRUCTS),
    "Changing, clipping and reading gradients": at_all_stages(gradients.CONSTRUCTS),
    "Training loops": loops.CONSTRUCTS,
    "Recomputation": recomputation.CONSTRUCTS,
    "Autograd by hand": autograd.CONSTRUCTS,
    "Layers": layers.CONSTRUCTS,
    "Weights": weights.CONSTRUCTS,
    "Tensors and indexing": tensors.CONSTRUCTS,
    "Hooks": hooks.CONSTRUCTS,
    "Wrappers, autocast and the compiler": wrappers.CONSTRUCTS,
    "States, copies and changes by hand": states.CONSTRUCTS,
    "Changes after zeroify, optimizers": changes.CONSTRUCTS,
    "Other models beside it": companions.CONSTRUCTS,
    "Half precision": half.CONSTRUCTS,
}
SMALL = [construct for section in SECTIONS.values() for construct in section]
