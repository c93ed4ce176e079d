"""First values have the bits of the whole model for every layout of ranks; each is drawn by its owner, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hpczero
from hpczero.adapters.gpt import GPTAdapter
from hpczero.errors import PlanError, StepError
from hpczero.models import GPT, GPTConfig
from hpczero.models.initial import InitialWeights
from hpczero.options.config import LayoutOptions
from hpczero.run.starting.building import divide
from hpczero.zero.filling import GAP, SAMPLE, SPAN
from tests.helpers.small_models import adamw
from tests.helpers.world import World
from tests.parallel.layouts import laid_out
from tests.zero.away_steps import on

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4)]

SEED = 7
CONFIG = GPTConfig(vocab_size=61, context=12, layers=3, hidden=36, heads=3)
# Parts of a matrix cut by columns lie so far apart that some are drawn one by one.
WIDE = GPTConfig(vocab_size=13, context=4, layers=2, hidden=2 * GAP // 3, heads=2, ffn_multiple=1)


class Counted(InitialWeights):
    """Initial weights that know how many elements were asked for."""

    def __init__(self) -> None:
        super().__init__(seed=SEED, layers=CONFIG.layers)
        self.drawn = 0

    def fill_range(self, name: str, shape: tuple[int, ...], start: int, values: Tensor) -> None:
        self.drawn += len(values)
        super().fill_range(name, shape, start, values)


def on_meta(config: GPTConfig = CONFIG) -> GPT:
    with torch.device("meta"):
        return GPT(config)


def whole(config: GPTConfig = CONFIG, seed: int = SEED) -> dict[str, Tensor]:
    """What one process without hpczero begins with."""
    model = GPT(config)
    model.initialize_all(seed=seed)
    return {name: value.detach() for name, value in model.state_dict().items()}


def check_bits(world: World, model: nn.Module, config: GPTConfig = CONFIG) -> None:
    """Of the masters."""
    found = hpczero.full_state_dict(model)
    world.check((found is None) == (world.rank > 0))
    world.check_state(found, whole(config))


def check_parameters(world: World, model: nn.Module) -> None:
    """What the model computes with, beside what is optimised."""
    expected = whole()
    with hpczero.gathered(model):
        pairs = {n: (p, expected[n].to(p.dtype)) for n, p in model.named_parameters()}
        wrong = [name for name, (found, right) in pairs.items() if not torch.equal(found, right)]
    world.check(not wrong, wrong)


@contextmanager
def begun(world: World, initialize: Any, **options: Any) -> Iterator[nn.Module]:
    """Sharded inside."""
    model = on_meta()
    with world.zeroified(model, adamw(model), initialize=initialize, **options):
        yield model


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("transport", ["auto", "flat"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bits_are_those_of_one_process(world: World, stage, transport, precision):
    initialize = on_meta().initial_weights(seed=SEED)
    options = {"stage": stage, "transport": transport, "precision": precision}
    with begun(world, initialize, **options) as model:
        check_bits(world, model)
        check_parameters(world, model)


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_parameters_in_half_precision_are_drawn_too(world: World, stage):
    model, initialize = on_meta(), Counted()
    with world.zeroified(model, None, stage=stage, initialize=initialize, precision="bf16"):
        check_parameters(world, model)


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("stage", [1, 3])
def test_shards_on_a_tier_are_drawn_too(world: World, folder, stage, tier):
    offload = on(tier, folder, parts=3 if stage == 3 else 2)
    with begun(world, Counted(), stage=stage, offload=offload) as model:
        check_bits(world, model)


def layouts(size: int) -> Iterator[dict[str, Any]]:
    if size > 1:
        yield {"tensor": size}  # of 3 heads and 61 ids: parts are padded
        yield {"pipeline": size} if size < 4 else {"pipeline": 2, "tensor": 2}
        yield {"shard": "1"}
    if size == 4:
        yield from ({"tensor": 2}, {"pipeline": 2}, {"shard": "2"})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_bits_are_those_of_the_whole_model_in_every_layout(world: World, stage, tied):
    config = GPTConfig(vocab_size=61, context=12, layers=4, hidden=36, heads=4, tie_embeddings=tied)
    for degrees in layouts(world.size):
        options = LayoutOptions(**degrees)
        with laid_out(world.comm, options) as topology:
            adapter, model = GPTAdapter(config), on_meta(config)
            initialize = adapter.initializer(model, SEED)
            divide(options, adapter, model, topology)
            how = {"stage": stage, "topology": topology, "initialize": initialize}
            with world.zeroified(model, adamw(model), **how):
                check_bits(world, model, config)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_bits_of_columns_that_lie_far_apart(world: World):
    with laid_out(world.comm, LayoutOptions(tensor=2)) as topology:
        adapter, model = GPTAdapter(WIDE), on_meta(WIDE)
        initialize = adapter.initializer(model, SEED)
        divide(LayoutOptions(tensor=2), adapter, model, topology)
        assert WIDE.hidden // 2 < GAP < SPAN
        with world.zeroified(model, adamw(model), topology=topology, initialize=initialize):
            check_bits(world, model, WIDE)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_draws_its_shard_once_and_samples(world: World, stage):
    initialize = Counted()
    with begun(world, initialize, stage=stage) as model:
        units = hpczero.sharding(model).units
        owned = sum(unit.owned_numel for unit in units)
        parameters = sum(len(unit.parameters) for unit in units)
        most = owned + 3 * SAMPLE * parameters  # begin, end, and the end of the shard again
        world.check(owned <= initialize.drawn <= most, f"{initialize.drawn} of {owned}")


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("degrees", [{}, {"shard": "1"}], ids=["shards", "replicas"])
def test_ranks_without_an_element_and_parameters_without_one(world: World, stage, degrees):
    class Number(InitialWeights):
        """Each element is its place, so that a wrong one shows where it came from."""

        def fill_range(self, name: str, shape: tuple[int, ...], start: int, values: Tensor) -> None:
            values.copy_(torch.arange(start, start + len(values)) + 1000.0 * len(name))

    with laid_out(world.comm, LayoutOptions(**degrees)) as topology:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(3, 1), nn.Linear(5, 0), nn.Linear(13, 17))
        initialize = Number(seed=0, layers=1)
        how = {"stage": stage, "topology": topology, "initialize": initialize}
        with world.zeroified(model, adamw(model), **how):
            for name, value in (hpczero.full_state_dict(model) or {}).items():
                expected = torch.arange(value.numel()) + 1000.0 * len(name)
                assert torch.equal(value, expected.view(value.shape)), name


# --- refused


class Sequence(Counted):
    """Each call goes on where the last one stopped, equally on every rank."""

    def fill_range(self, name: str, shape: tuple[int, ...], start: int, values: Tensor) -> None:
        self.drawn += 1
        values.fill_(self.drawn)


class Failing(Counted):
    def fill_range(self, name: str, shape: tuple[int, ...], start: int, values: Tensor) -> None:
        if name == "blocks.1.mlp.expansion.weight" and start > SAMPLE:
            raise PlanError("no such weight")
        super().fill_range(name, shape, start, values)


OTHER_KIND = r"rank\(s\) \[1\] built another model.* or has another kind of initialize"
OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "another seed": (
        lambda: on_meta().initial_weights(seed=SEED + 1),
        r"gave other values on rank 1 .*'wte.weight' .*keyed by \(seed, name\)",
    ),
    "whole": (lambda: on_meta().initial_weights(seed=SEED).__call__, OTHER_KIND),
    "later": (lambda: hpczero.loaded_later, OTHER_KIND),
    "an error": (Failing, r"on rank\(s\) 1, could not .*no such weight"),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("other", OTHERS)
def test_another_initialize_on_one_rank_is_refused(world: World, other):
    make, said = OTHERS[other]
    initialize = make() if world.rank == 1 else on_meta().initial_weights(seed=SEED)
    world.raises(PlanError, said, begun(world, initialize).__enter__)


def test_a_sequence_instead_of_a_function_is_refused(world: World):
    said = "other values for elements .* when they were asked for again, in another range"
    world.raises(PlanError, said, begun(world, Sequence()).__enter__)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("degrees", [{"tensor": 2}, {"pipeline": 2}, {"shard": "2"}], ids=str)
def test_layouts_with_other_seeds_are_refused(world: World, degrees):
    options = LayoutOptions(**degrees)
    with laid_out(world.comm, options) as topology:
        # Ranks that hold the same part agree with each other; those beside them do not.
        other = topology.tensor.rank + topology.pipeline.rank + topology.replicate.rank
        adapter = GPTAdapter(CONFIG)
        model = on_meta()
        initialize = adapter.initializer(model, SEED + other)
        divide(options, adapter, model, topology)
        optimizer = adamw(model)
        said = "first values|fill_range gave other values|initialize gave"
        how: dict[str, Any] = {"topology": topology, "initialize": initialize}
        world.raises(PlanError, said, lambda: hpczero.zeroify(model, optimizer, **how))


# --- a checkpoint follows


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("stage", "tier"), [(0, None), (1, None), (2, None), (3, None), (3, "host"), (3, "disk")]
)
def test_a_checkpoint_that_is_awaited_brings_values(world: World, folder, stage, tier, precision):
    options: dict[str, Any] = {"stage": stage, "precision": precision}
    if tier:
        options["offload"] = on(tier, folder)
    with begun(world, Counted(), stage=3) as model:
        hpczero.checkpoint.save(folder / "saved", model, step=0)
    with begun(world, hpczero.loaded_later, **options) as model:
        hpczero.checkpoint.load(folder / "saved", model)
        check_bits(world, model)
        tokens = torch.arange(24).reshape(2, 12)
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        world.check(bool(torch.isfinite(loss)), f"loss {loss}")


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("use", ["forward", "gather", "state", "save"])
def test_a_model_that_awaits_a_checkpoint_cannot_be_used(world: World, folder, stage, use):
    with begun(world, hpczero.loaded_later, stage=stage) as model:

        def gather() -> None:
            with hpczero.gathered(model):
                pass

        uses = {
            "forward": lambda: model(torch.zeros(1, 3, dtype=torch.int64)),
            "gather": gather,
            "state": lambda: hpczero.full_state_dict(model),
            "save": lambda: hpczero.checkpoint.save(folder, model, step=0),
        }
        said = "loaded_later, and no checkpoint has been loaded; load a checkpoint"
        if use == "forward":  # which no rank waits in for another
            with pytest.raises(StepError, match=said):
                uses[use]()
        else:
            world.raises(StepError, said, uses[use])
