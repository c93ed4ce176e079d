"""No class of the engine has more methods and attributes than a reader keeps in mind; those that have say why."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
METHODS, ATTRIBUTES = 20, 12
ROOMS = ("bridge", "zero", "comm", "tier", "activations", "parallel")
# Each with its methods and attributes, so that none grows unseen.
LARGER = {
    # The parts of one sharded model stand side by side here, and in no other place; a step and gradients ask it.
    "Sharding": (28, 28),
    # From autograd to the optimizer: what is local, what is reduced, and, of exact steps, what leaves leave behind.
    "UnitGradients": (22, 14),
    # Whether a backward reduces, and which leaves it is of, are set from outside; the rest is one pass.
    "BackwardSchedule": (13, 13),
    # One step as a loop sees it: which leaves, their random numbers and losses, and what is compared of them.
    "Leaves": (14, 13),
    # One state machine over one buffer: who may use it, and who may write to it, decide together when it is given back.
    "WholeParameters": (25, 20),
    # The contract of a transport, public: ten verbs to write, the others say what every transport has in common.
    "Collectives": (26, 9),
    # Two levels behind that contract, each of which it asks; what differs between nodes is seams that subclasses fill.
    "Hierarchical": (23, 10),
}


def classes() -> list[ast.ClassDef]:
    """All of ``ROOMS``."""
    assert all((ROOT / "hpczero" / room).is_dir() for room in ROOMS)
    files = [file for room in ROOMS for file in (ROOT / "hpczero" / room).rglob("*.py")]
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def size(node: ast.ClassDef) -> tuple[int, int]:
    """Methods, properties among them, and attributes that they set on ``self``."""
    methods = sum(isinstance(member, ast.FunctionDef) for member in node.body)
    attributes = {
        place.attr
        for place in ast.walk(node)
        if isinstance(place, ast.Attribute)
        and isinstance(place.ctx, ast.Store)
        and isinstance(place.value, ast.Name)
        and place.value.id == "self"
    }
    return methods, len(attributes)


def test_no_class_is_larger_than_it_says() -> None:
    found = {node.name: size(node) for node in classes()}
    large = {name: of for name, of in found.items() if of[0] > METHODS or of[1] > ATTRIBUTES}
    assert large == LARGER
