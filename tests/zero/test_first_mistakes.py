"""What a stranger types first, coming from FSDP or DeepSpeed: it works, or one sentence says what to do."""

from __future__ import annotations

import pytest
import torch

import hpczero
from hpczero.errors import ConfigError, PlanError, StepError
from hpczero.plan import Stage
from tests.helpers.small_models import MLP, mlp_backward, sgd
from tests.helpers.world import World

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2)]


def test_the_stage_may_be_the_third_argument(world: World):
    model = MLP()
    hpczero.zeroify(model, sgd(model), 2, topology=world.topology)
    assert hpczero.sharding(model).plan.stage == Stage.of(2)
    hpczero.release(model)


@pytest.mark.parametrize(("name", "near"), [("stages", "stage"), ("mixed_precision", "precision")])
def test_an_unknown_keyword_is_told_with_the_nearest(world: World, name, near):
    model = MLP()
    with pytest.raises(ConfigError, match=f"unknown keyword '{name}'; did you mean {near}"):
        hpczero.zeroify(model, sgd(model), topology=world.topology, **{name: 3})  # type: ignore[arg-type]


def test_a_missing_optimizer_is_asked_for(world: World):
    with pytest.raises(PlanError, match="got no optimizer; make it before"):
        hpczero.zeroify(MLP(), stage=3, topology=world.topology)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_optimizer_made_after_zeroify_is_told_what_to_do(world: World, stage):
    model = MLP()
    with world.zeroified(model, sgd(model), stage=stage, transport="flat"):
        late = torch.optim.AdamW(model.parameters())
        mlp_backward(model, world.rank)
        said = r"the AdamW that steps .* make the optimizer before"
        with pytest.raises(StepError, match=said) as told:
            late.step()
        assert len(str(told.value)) < 200


def test_values_for_sharded_parameters_are_refused_in_one_sentence(world: World):
    model, values = MLP(), MLP().state_dict()
    hpczero.zeroify(model, sgd(model), stage=3, topology=world.topology, transport="flat")
    with pytest.raises(StepError, match=r"call load_state_dict before .*gathered") as told:
        model.load_state_dict(values)
    assert len(str(told.value)) < 200
    with hpczero.gathered(model, modifier_rank=0):
        model.load_state_dict(values)
    hpczero.release(model, whole=True)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
