"""Which modules become units: by default, by class, and what a rule may not say."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from examples.convnet import ConvNet
from hpczero.errors import PlanError
from hpczero.models import GPT, Block, GPTConfig
from hpczero.plan import Plan
from hpczero.plan.plan import UnitRule
from hpczero.plan.rules import PACK_BYTES, by_class, default_rule, whole_model


def gpt(layers: int = 3) -> GPT:
    return GPT(GPTConfig(vocab_size=11, context=5, layers=layers, hidden=8, heads=2))


def unit_modules(model: nn.Module, rule: UnitRule) -> list[tuple[str, ...]]:
    plan = Plan.build(model, num_shards=2, stage=3, rule=rule)
    return [unit.modules for unit in plan.units]


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


ROOT_AND_BLOCKS = [("",), ("blocks.0",), ("blocks.1",), ("blocks.2",)]


@pytest.mark.parametrize(
    ("model", "rule", "units"),
    [
        (gpt(), default_rule, ROOT_AND_BLOCKS),
        (gpt(), whole_model, [("",)]),
        (ConvNet(), default_rule, ROOT_AND_BLOCKS),
        # Small layers of a Sequential share one; nothing is left for the root.
        (
            nn.Sequential(linear(), nn.ReLU(), linear(), nn.LayerNorm(4)),
            default_rule,
            [("0", "2", "3")],
        ),
        # A block between layers is one of its own.
        (
            nn.Sequential(linear(), nn.Sequential(linear(), linear()), linear(), linear()),
            default_rule,
            [("0",), ("1",), ("2", "3")],
        ),
        # Without containers the root is all, and without parameters nothing.
        (linear(), default_rule, [("",)]),
        (nn.MultiheadAttention(4, 2), default_rule, [("",)]),
        (nn.Sequential(nn.ReLU(), nn.Flatten()), default_rule, []),
    ],
)
def test_units_of_a_model(model: nn.Module, rule: UnitRule, units: list[tuple[str, ...]]) -> None:
    assert unit_modules(model, rule) == units


def test_layers_are_packed_up_to_the_byte_bound() -> None:
    half = PACK_BYTES // 2 // 4
    with torch.device("meta"):
        layers = [nn.Linear(half, 1, bias=False) for _ in range(3)]
        big = nn.Linear(3 * half, 1, bias=False)
    assert default_rule(nn.Sequential(*layers, big)) == [("0", "1"), ("2",), ("3",)]


def test_containers_are_found_at_any_depth_and_their_children_are_units() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = nn.ModuleDict({"a": nn.ModuleList([gpt(1), gpt(1)]), "b": gpt(1)})
            self.norm = nn.LayerNorm(8)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder()
            self.head = nn.Linear(8, 2)

    # a ModuleList is never called, so it cannot be a unit: its children are
    expected = [("encoder.stack.a.0",), ("encoder.stack.a.1",), ("encoder.stack.b",)]
    assert default_rule(Model()) == expected


def test_by_class_takes_the_outermost_modules_of_a_class() -> None:
    assert default_rule(gpt()) == by_class(Block)(gpt())
    nested = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 2))
    assert by_class(nn.Sequential)(nested) == [("0",)]
    assert by_class(nn.Linear)(nested) == [("0.0.0",), ("1",)]
    assert by_class(nn.Linear, nn.Sequential)(nested) == [("0",), ("1",)]


def test_by_class_does_not_take_a_name_that_only_begins_alike_for_nested() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(11)))  # 1 and 10
    assert by_class(nn.Linear)(model) == [(str(index),) for index in range(11)]


# --- rules of a user


def build(*units: tuple[str, ...]) -> Plan:
    return Plan.build(gpt(), num_shards=2, stage=3, rule=lambda model: list(units))


@pytest.mark.parametrize(
    ("units", "said"),
    [
        ([("blocks.0",), ("blocks.7",)], r"'blocks\.7', which is not a submodule"),
        ([("",)], "'', which is not a submodule"),
        ([("blocks.0",), ("blocks.1", "blocks.0")], r"lists module 'blocks\.0' twice"),
        ([("blocks.0.mlp",), ("blocks.0",)], r"nests units: .*'blocks\.0' and 'blocks\.0\.mlp'"),
    ],
)
def test_units_that_cannot_be_are_refused(units: list[tuple[str, ...]], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        build(*units)


def test_unit_of_several_modules_holds_the_parameters_of_all() -> None:
    plan = build(("blocks.0", "blocks.2"), ("wpe",))
    names = {unit.name: {slot.name for slot in unit.layout.slots} for unit in plan.units}
    assert list(names) == ["root", "wpe", "blocks.0"]  # the root first, then registration order
    assert names["wpe"] == {"wpe.weight"}
    blocks = {n for n, _ in gpt().named_parameters() if n.startswith(("blocks.0", "blocks.2"))}
    assert names["blocks.0"] == blocks
