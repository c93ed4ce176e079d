"""First values have the bits of the whole model for every layout of ranks; each is drawn by its owner, once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

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
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import adamw, raises_on_all
from tests.parallel.layouts import laid_out

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(1, 2, 3, 4)]

Tier = Literal["host", "disk"]
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


def check_bits(comm: MPI.Intracomm, model: nn.Module, config: GPTConfig = CONFIG) -> None:
    found = hpczero.full_state_dict(model)
    wrong = []
    if comm.rank == 0:
        assert found is not None
        expected = whole(config)
        wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
        wrong += [name for name in found if name not in expected]
    parallel_assert(comm, not wrong, f"other bits: {wrong}")


def place_of(tier: Tier, folder: Path) -> str | None:
    return str(folder) if tier == "disk" else None


def begun(topology: Topology, initialize: Any, **options: Any) -> nn.Module:
    model = on_meta()
    hpczero.zeroify(model, adamw(model), topology=topology, initialize=initialize, **options)
    return model


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("transport", ["auto", "flat"])
def test_bits_are_those_of_one_process(
    comm: MPI.Intracomm, topology: Topology, stage: int, transport: str
) -> None:
    initialize = on_meta().initial_weights(seed=SEED)
    model = begun(topology, initialize, stage=stage, transport=transport)
    check_bits(comm, model)
    with hpczero.gathered(model):  # what the model computes with, beside what is optimised
        seen = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = whole()
    equal = all(torch.equal(value, expected[name]) for name, value in seen.items())
    parallel_assert(comm, equal, "the parameters")
    hpczero.release(model)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_bf16_parameters_are_the_rounded_masters(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = begun(topology, Counted(), stage=stage, precision="bf16")
    check_bits(comm, model)
    expected = whole()
    with hpczero.gathered(model):
        wrong = [
            n for n, p in model.named_parameters() if not torch.equal(p, expected[n].bfloat16())
        ]
    parallel_assert(comm, not wrong, str(wrong))
    hpczero.release(model)


@pytest.mark.parametrize("stage", [0, 3])
def test_frozen_parameters_in_half_precision_are_drawn_too(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    model = on_meta()
    hpczero.zeroify(
        model, None, stage=stage, topology=topology, initialize=Counted(), precision="bf16"
    )
    expected = whole()
    with hpczero.gathered(model):
        wrong = [
            n for n, p in model.named_parameters() if not torch.equal(p, expected[n].bfloat16())
        ]
    parallel_assert(comm, not wrong, str(wrong))
    hpczero.release(model)


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("stage", [1, 3])
def test_shards_on_a_tier_are_drawn_too(
    comm: MPI.Intracomm, topology: Topology, folder: Path, stage: int, tier: Tier
) -> None:
    parameters: Literal["device", "host", "disk"] = tier if stage == 3 else "device"
    offload = hpczero.Offload(tier, tier, parameters, folder=place_of(tier, folder))
    model = begun(topology, Counted(), stage=stage, offload=offload)
    check_bits(comm, model)
    hpczero.release(model)


def layouts(size: int) -> Iterator[dict[str, Any]]:
    if size > 1:
        yield {"tensor": size}  # of 3 heads and 61 ids: parts are padded
        yield {"pipeline": size} if size < 4 else {"pipeline": 2, "tensor": 2}
        yield {"shard": "1"}
    if size == 4:
        yield from ({"tensor": 2}, {"pipeline": 2}, {"shard": "2"})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_bits_are_those_of_the_whole_model_in_every_layout(
    comm: MPI.Intracomm, stage: int, tied: bool
) -> None:
    config = GPTConfig(vocab_size=61, context=12, layers=4, hidden=36, heads=4, tie_embeddings=tied)
    for degrees in layouts(comm.size):
        options = LayoutOptions(**degrees)
        with laid_out(comm, options) as topology:
            adapter, model = GPTAdapter(config), on_meta(config)
            initialize = adapter.initializer(model, SEED)
            divide(options, adapter, model, topology)
            hpczero.zeroify(
                model, adamw(model), stage=stage, topology=topology, initialize=initialize
            )
            check_bits(comm, model, config)
            hpczero.release(model)


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_bits_of_columns_that_lie_far_apart(comm: MPI.Intracomm) -> None:
    with laid_out(comm, LayoutOptions(tensor=2)) as topology:
        adapter, model = GPTAdapter(WIDE), on_meta(WIDE)
        initialize = adapter.initializer(model, SEED)
        divide(LayoutOptions(tensor=2), adapter, model, topology)
        assert WIDE.hidden // 2 < GAP < SPAN
        hpczero.zeroify(model, adamw(model), stage=3, topology=topology, initialize=initialize)
        check_bits(comm, model, WIDE)
        hpczero.release(model)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_rank_draws_its_shard_once_and_samples(
    comm: MPI.Intracomm, topology: Topology, stage: int
) -> None:
    initialize = Counted()
    model = begun(topology, initialize, stage=stage)
    units = hpczero.sharding(model).units
    owned = sum(unit.owned_numel for unit in units)
    parameters = sum(len(unit.parameters) for unit in units)
    most = owned + 3 * SAMPLE * parameters  # begin, end, and the end of the shard again
    parallel_assert(comm, owned <= initialize.drawn <= most, f"{initialize.drawn} of {owned}")
    hpczero.release(model)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("degrees", [{}, {"shard": "1"}], ids=["shards", "replicas"])
def test_ranks_without_an_element_and_parameters_without_one(
    comm: MPI.Intracomm, stage: int, degrees: dict[str, Any]
) -> None:
    class Number(InitialWeights):
        """Each element is its place, so that a wrong one shows where it came from."""

        def fill_range(self, name: str, shape: tuple[int, ...], start: int, values: Tensor) -> None:
            values.copy_(torch.arange(start, start + len(values)) + 1000.0 * len(name))

    with laid_out(comm, LayoutOptions(**degrees)) as topology:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(3, 1), nn.Linear(5, 0), nn.Linear(13, 17))
        initialize = Number(seed=0, layers=1)
        hpczero.zeroify(model, adamw(model), stage=stage, topology=topology, initialize=initialize)
        found = hpczero.full_state_dict(model)
        wrong = []
        for name, value in (found or {}).items():
            expected = torch.arange(value.numel()) + 1000.0 * len(name)
            wrong += [name] * (not torch.equal(value, expected.view(value.shape)))
        parallel_assert(comm, not wrong, str(wrong))
        hpczero.release(model)


# --- refused


@pytest.mark.ranks(2, 3)
def test_ranks_with_other_seeds_are_refused(comm: MPI.Intracomm, topology: Topology) -> None:
    initialize = on_meta().initial_weights(seed=SEED + (comm.rank == 1))
    said = r"gave other values on rank 1 .*'wte.weight' .*keyed by \(seed, name\)"
    raises_on_all(comm, PlanError, said, lambda: begun(topology, initialize))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("degrees", [{"tensor": 2}, {"pipeline": 2}, {"shard": "2"}], ids=str)
def test_layouts_with_other_seeds_are_refused(comm: MPI.Intracomm, degrees: dict[str, Any]) -> None:
    options = LayoutOptions(**degrees)
    with laid_out(comm, options) as topology:
        # Ranks that hold the same part agree with each other; those beside them do not.
        other = topology.tensor.rank + topology.pipeline.rank + topology.replicate.rank
        adapter = GPTAdapter(CONFIG)
        model = on_meta()
        initialize = adapter.initializer(model, SEED + other)
        divide(options, adapter, model, topology)
        optimizer = adamw(model)
        raises_on_all(
            comm,
            PlanError,
            "first values|fill_range gave other values|initialize gave",
            lambda: hpczero.zeroify(model, optimizer, topology=topology, initialize=initialize),
        )


def test_a_sequence_instead_of_a_function_is_refused(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    class Sequence(InitialWeights):
        """Each call goes on where the last one stopped, equally on every rank."""

        def __init__(self) -> None:
            super().__init__(seed=SEED, layers=2)
            self.generator = torch.Generator().manual_seed(1)

        def fill_range(self, name: str, shape: tuple[int, ...], start: int, values: Tensor) -> None:
            values.normal_(generator=self.generator)

    said = "other values for elements .* when they were asked for again, in another range"
    raises_on_all(comm, PlanError, said, lambda: begun(topology, Sequence()))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("other", ["whole", "later"])
def test_another_kind_of_initialize_on_one_rank_is_refused(
    comm: MPI.Intracomm, topology: Topology, other: str
) -> None:
    others = {"whole": on_meta().initial_weights(seed=SEED).__call__, "later": hpczero.loaded_later}
    initialize = others[other] if comm.rank == 1 else Counted()
    said = r"rank\(s\) \[1\] built another model.* or has another kind of initialize"
    raises_on_all(comm, PlanError, said, lambda: begun(topology, initialize))


@pytest.mark.ranks(2, 3)
def test_an_error_on_one_rank_is_everybodys(comm: MPI.Intracomm, topology: Topology) -> None:
    class Failing(InitialWeights):
        def fill_range(self, name: str, shape: tuple[int, ...], start: int, values: Tensor) -> None:
            if comm.rank == 1 and name == "blocks.1.mlp.expansion.weight" and start > SAMPLE:
                raise PlanError("no such weight")
            super().fill_range(name, shape, start, values)

    said = r"on rank\(s\) 1, could not .*no such weight"
    initialize = Failing(seed=SEED, layers=2)
    raises_on_all(comm, PlanError, said, lambda: begun(topology, initialize))


# --- a checkpoint follows


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_that_awaits_a_checkpoint_has_its_values_after_the_load(
    comm: MPI.Intracomm, topology: Topology, folder: Path, stage: int, precision: str
) -> None:
    model = begun(topology, Counted(), stage=3)
    hpczero.checkpoint.save(folder, model, step=0)
    hpczero.release(model)
    model = begun(topology, hpczero.loaded_later, stage=stage, precision=precision)
    hpczero.checkpoint.load(folder, model)
    check_bits(comm, model)
    tokens = torch.arange(24).reshape(2, 12)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    parallel_assert(comm, bool(torch.isfinite(loss)), f"loss {loss}")
    hpczero.release(model)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_checkpoint_is_awaited_on_a_tier_too(
    comm: MPI.Intracomm, topology: Topology, folder: Path, tier: Tier
) -> None:
    offload = hpczero.Offload(tier, tier, tier, folder=place_of(tier, folder))
    model = begun(topology, Counted(), stage=3)
    hpczero.checkpoint.save(folder / "saved", model, step=0)
    hpczero.release(model)
    model = begun(topology, hpczero.loaded_later, stage=3, offload=offload)
    hpczero.checkpoint.load(folder / "saved", model)
    check_bits(comm, model)
    hpczero.release(model)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("use", ["forward", "gather", "state", "save"])
def test_a_model_that_awaits_a_checkpoint_cannot_be_used(
    comm: MPI.Intracomm, topology: Topology, folder: Path, stage: int, use: str
) -> None:
    model = begun(topology, hpczero.loaded_later, stage=stage)

    def gather() -> None:
        with hpczero.gathered(model):
            pass

    uses = {
        "forward": lambda: model(torch.zeros(1, 3, dtype=torch.int64)),
        "gather": gather,
        "state": lambda: hpczero.full_state_dict(model),
        "save": lambda: hpczero.checkpoint.save(folder, model, step=0),
    }
    said = "initialize=hpczero.loaded_later, and no checkpoint has been loaded; load a checkpoint"
    if use == "forward":  # which no rank waits in for another
        with pytest.raises(StepError, match=said):
            uses[use]()
    else:
        raises_on_all(comm, StepError, said, uses[use])
    hpczero.release(model)
