"""The plan: every parameter in one unit, stages as data, bytes by formulas written out by hand."""

from __future__ import annotations

import dataclasses
import pickle
from math import prod

import pytest
import torch
from torch import nn

from hpczero.errors import ConfigError, PlanError
from hpczero.models import GPT, GPTConfig
from hpczero.plan import MemoryPlan, Plan, Stage, TrafficPlan
from hpczero.plan.footprint import EXCHANGE_BYTES
from hpczero.plan.plan import UnitRule
from hpczero.plan.precision import DType, LossScale, Precision
from hpczero.plan.rules import default_rule, whole_model

SHARDS = 3


def gpt(*, tied: bool = True) -> GPT:
    sizes = GPTConfig(vocab_size=61, context=11, layers=2, hidden=18, heads=2, tie_embeddings=tied)
    return GPT(sizes)


def build(
    model: nn.Module,
    stage: int = 3,
    precision: str | Precision = "fp32",
    rule: UnitRule = default_rule,
    num_shards: int = SHARDS,
) -> Plan:
    return Plan.build(model, num_shards=num_shards, stage=stage, precision=precision, rule=rule)


# --- stages


def test_stages_are_three_booleans() -> None:
    expected = {0: (0, 0, 0), 1: (1, 0, 0), 2: (1, 1, 0), 3: (1, 1, 1)}
    for number, booleans in expected.items():
        stage = Stage.of(number)
        assert dataclasses.astuple(stage) == tuple(map(bool, booleans))
        assert int(stage) == number
        assert Stage.of(stage) is stage
    assert [Stage.of(n).keeps_local_gradients for n in range(4)] == [False, True, False, False]


@pytest.mark.parametrize("stage", [7, -1, True, False, "3", None, 1.5])
def test_unknown_stage_is_refused(stage: object) -> None:
    with pytest.raises(ConfigError, match=r"stage: got .*, expected 0"):
        Stage.of(stage)  # type: ignore[arg-type]


# --- units


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_in_one_unit_with_its_shape(tied: bool) -> None:
    model = gpt(tied=tied)
    plan = build(model)
    slots = [slot for unit in plan.units for slot in unit.layout.slots]
    found = sorted((slot.name, slot.shape) for slot in slots)
    assert found == sorted((name, tuple(p.shape)) for name, p in model.named_parameters())
    assert plan.numel == sum(p.numel() for p in model.parameters())
    assert all(unit.layout.num_shards == SHARDS for unit in plan.units)


def test_units_keep_registration_order_with_the_root_first() -> None:
    plan = build(gpt())
    assert [unit.name for unit in plan.units] == ["root", "blocks.0", "blocks.1"]
    assert [unit.is_root for unit in plan.units] == [True, False, False]
    order = [name for name, _ in gpt().named_parameters() if name.startswith("blocks.1")]
    assert [slot.name for slot in plan.units[2].layout.slots] == order


def test_weight_tied_between_two_units_goes_to_the_root() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)))
    model[1][0].weight = model[0][0].weight  # type: ignore[index]
    units = {unit.name: [s.name for s in unit.layout.slots] for unit in build(model).units}
    assert units == {"root": ["0.0.weight"], "0": ["0.0.bias"], "1": ["1.0.bias"]}


def test_weight_tied_within_a_unit_stays_in_it() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model[0][1].weight = model[0][0].weight  # type: ignore[index]
    (unit,) = build(model).units
    assert [slot.name for slot in unit.layout.slots] == ["0.0.weight", "0.0.bias", "0.1.bias"]


def test_frozen_parameters_form_a_unit_of_their_own_beside_the_trainable_ones() -> None:
    model = gpt()
    model.blocks[0].mlp.requires_grad_(False)
    model.get_submodule("wpe").requires_grad_(False)
    plan = build(model)
    found = {unit.name: (unit.modules, unit.trainable) for unit in plan.units}
    assert found == {
        "root": (("",), True),
        "root (frozen)": (("",), False),
        "blocks.0": (("blocks.0",), True),
        "blocks.0 (frozen)": (("blocks.0",), False),
        "blocks.1": (("blocks.1",), True),
    }
    frozen = [s.name for unit in plan.units if not unit.trainable for s in unit.layout.slots]
    expected = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert sorted(frozen) == sorted(expected)
    assert [unit.name for unit in plan.trainable_units] == ["root", "blocks.0", "blocks.1"]


def test_optimizer_groups_follow_the_parameters() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    plan = Plan.build(model, num_shards=2, stage=1, rule=whole_model, groups={"weight": 4})
    assert [(u.name, u.groups) for u in plan.units] == [("root", (4,)), ("root (frozen)", (-1,))]


def test_mixed_dtypes_in_a_unit_are_refused_with_an_example_of_each() -> None:
    model = gpt()
    model.blocks[1].mlp.to(torch.bfloat16)
    said = r"unit 'blocks\.1' holds torch\.float32 \(blocks\.1\.attention_norm\.weight\), torch\.bfloat16 \(blocks"
    with pytest.raises(PlanError, match=said):
        build(model, precision="bf16")


@pytest.mark.parametrize(
    ("dtype", "precision", "passes"),
    [
        (torch.float32, "bf16", True),
        (torch.bfloat16, "bf16", True),
        (torch.bfloat16, "fp32", False),
        (torch.float16, "bf16", False),
        (torch.float64, "fp32", False),
    ],
)
def test_only_fp32_or_the_dtype_of_the_precision_can_be_sharded(
    dtype: torch.dtype, precision: str, passes: bool
) -> None:
    model = nn.Linear(3, 3).to(dtype)
    if passes:
        assert build(model, precision=precision).numel == 12
    else:
        with pytest.raises(PlanError, match=f"holds {dtype}, expected torch.float32"):
            build(model, precision=precision)


@pytest.mark.parametrize("precision", ["fp64", "", "BF16"])
def test_unknown_precision_is_refused(precision: str) -> None:
    with pytest.raises(ConfigError, match="precision: got"):
        build(nn.Linear(2, 2), precision=precision)


def test_loss_scale_beside_fp32_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave loss_scale out"):
        Precision(loss_scale=LossScale())


def test_plans_of_equal_models_are_equal_and_of_others_are_not() -> None:
    assert build(gpt()) == build(gpt())
    assert build(gpt()) != build(gpt(tied=False))
    assert build(gpt()) != build(gpt(), stage=2)
    assert pickle.loads(pickle.dumps(build(gpt()))) == build(gpt())


def test_model_on_the_meta_device_has_the_same_plan() -> None:
    with torch.device("meta"):
        model = gpt()
    assert build(model) == build(gpt())


# --- bytes held


def units_numel(model: nn.Module) -> list[int]:
    """Padded elements of root, block 0 and block 1, each shard a multiple of 64; from the model alone."""
    groups: dict[str, int] = {"root": 0}
    for name, parameter in model.named_parameters():
        owner = name[:8] if name.startswith("blocks.") else "root"
        groups[owner] = groups.get(owner, 0) + parameter.numel()
    return [-(-numel // (SHARDS * 64)) * SHARDS * 64 for numel in groups.values()]


# Per padded element: parameters, master, gradients, optimizer (Adam); sharded terms have the second number over N.
HELD = {
    ("fp32", 0): ((4, 0), (0, 0), (4, 0), (8, 0)),
    ("fp32", 1): ((4, 0), (0, 0), (4, 4), (0, 8)),
    ("fp32", 2): ((4, 0), (0, 0), (0, 4), (0, 8)),
    ("fp32", 3): ((0, 4), (0, 0), (0, 4), (0, 8)),
    ("bf16", 0): ((2, 0), (4, 0), (4, 0), (8, 0)),
    ("bf16", 1): ((2, 0), (0, 4), (2, 4), (0, 8)),
    ("bf16", 2): ((2, 0), (0, 4), (0, 4), (0, 8)),
    ("bf16", 3): ((0, 0), (0, 4), (0, 4), (0, 8)),
}
# In flight per element of the root and of one block: whole parameters at stage 3, local gradients unless kept.
IN_FLIGHT = {0: 1, 1: 0, 2: 1, 3: 2}


@pytest.mark.parametrize(("precision", "stage"), HELD)
def test_memory_is_the_table_of_the_architecture_page(precision: DType, stage: int) -> None:
    root, block, other = units_numel(gpt())
    assert block == other
    total = root + block + other
    parameters, master, gradients, optimizer = held = [
        whole * total + cut * total // SHARDS for whole, cut in HELD[precision, stage]
    ]
    if stage == 0:  # whole parameters have no padding
        optimizer = held[3] = 8 * sum(parameter.numel() for parameter in gpt().parameters())
    itemsize = {"fp32": 4, "bf16": 2}[precision]
    expected = MemoryPlan(
        parameters=parameters,
        master=master,
        gradients=gradients,
        optimizer=optimizer,
        unsharded=IN_FLIGHT[stage] * itemsize * (root + block),
        exchange=itemsize * max(root, block),
    )
    found = build(gpt(), stage, precision).memory()
    assert found == expected
    assert found.states == sum(held)
    assert found.total == found.states + found.unsharded + found.exchange


def test_frozen_parameters_have_no_master_gradient_or_optimizer_state() -> None:
    model = gpt().requires_grad_(False)
    total = sum(units_numel(model))
    for stage, held in ((0, total), (1, total), (2, total), (3, total // SHARDS)):
        memory = build(model, stage, "bf16").memory()
        assert (memory.parameters, memory.states) == (2 * held, 2 * held)
        assert memory.exchange == 0


def test_exchange_is_bounded_however_large_the_model() -> None:
    with torch.device("meta"):
        model = nn.Linear(2**15, 2**15)
    memory = build(model, num_shards=8).memory()
    assert 0.99 * EXCHANGE_BYTES < memory.exchange <= EXCHANGE_BYTES


# --- bytes moved; what really moves is counted in tests/zero/test_traffic.py


def test_traffic_of_one_rank_is_nothing() -> None:
    traffic = build(gpt(), num_shards=1).traffic()
    assert (traffic.numel, traffic.nbytes, traffic.padding) == (0, 0, 0)


@pytest.mark.parametrize(("stage", "times"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_traffic_is_two_or_three_times_the_padded_model(stage: int, times: int) -> None:
    total = sum(units_numel(gpt()))
    padding = total - sum(prod(p.shape) for p in gpt().parameters())
    traffic = build(gpt(), stage).traffic()
    assert traffic.numel == times * total * (SHARDS - 1) // SHARDS
    assert traffic.padding == pytest.approx(times * padding * (SHARDS - 1) / SHARDS, abs=3)


def test_traffic_adds_up() -> None:
    one = TrafficPlan(1, 2, 3, 4, 5, 6, 7)
    assert one + one == TrafficPlan(2, 4, 6, 8, 10, 12, 14)
    assert (one.numel, one.nbytes) == (7, 11)


def test_description_names_stage_precision_units_and_bytes() -> None:
    text = build(gpt(), 2, "bf16").describe()
    plan = build(gpt(), 2, "bf16")
    assert "stage 2, bf16 parameters" in text
    assert f"{plan.numel:,} parameters (+{plan.padding_numel:,} padding) in 3 units" in text
    assert "3 all-gathers and 3 reduce-scatters" in text
