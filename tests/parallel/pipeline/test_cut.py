"""A cut model has its stage's modules under whole-model names, says what of it it is, and refuses the rest by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from hpczero import Mesh, Topology
from hpczero.errors import PlanError
from hpczero.parallel import Stages, cut, gpt_stages
from hpczero.plan.placement import part_of
from hpczero.plan.rules import default_rule
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all, sgd, zeroified
from tests.helpers.world import World
from tests.parallel.pipeline.models import gpt

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mpi4py import MPI

pytestmark = pytest.mark.mpi


@pytest.fixture
def stages_of_ranks(comm: MPI.Intracomm) -> Iterator[Topology]:
    """Every rank is a stage."""
    topology = Topology.create(comm, mesh=Mesh(pipeline=comm.size))
    yield topology
    topology.free()


class Sandwich(nn.Module):
    """Four blocks between two layers; what is asked for is built in as well."""

    def __init__(self, add: Callable[[Sandwich], object] = lambda model: None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.down = nn.Linear(3, 7)
        self.layers = nn.ModuleDict({name: nn.Linear(7, 7) for name in ("a", "b", "c", "d")})
        self.up = nn.Linear(7, 3)
        self.act = nn.Tanh()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0.0, 0.3, generator=generator)
        add(self)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = self.down(x)
        for layer in self.layers.values():
            x = self.act(layer(x))
        out: Tensor = self.up(x)
        return out if y is None else (out - y).square().mean()


def leave(model: Any, x: Tensor, *targets: Tensor) -> Tensor:
    out: Tensor = model.up(x)
    return (out - targets[0]).square().mean() if targets else out


def enter(model: Any, x: Tensor) -> Any:
    return model.down(x)


def call(model: Any, block: Any, x: Tensor) -> Any:
    return model.act(block(x))


SANDWICH = Stages("layers", ("down",), ("up",), enter=enter, call=call, leave=leave)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("tied", [True, False])
def test_a_stage_has_its_modules_under_their_names_in_the_whole_model(
    comm: MPI.Intracomm, stages_of_ranks: Topology, tied: bool
) -> None:
    whole = gpt(tie_embeddings=tied)
    shapes = {n: tuple(p.shape) for n, p in whole.named_parameters(remove_duplicate=False)}
    model = gpt(tie_embeddings=tied)
    assert cut(model, stages_of_ranks, gpt_stages(model)) is model
    names = dict(model.named_parameters())
    parallel_assert(comm, all(shapes[n] == p.shape for n, p in names.items()))
    blocks = {2: [3, 2], 3: [2, 2, 1]}[comm.size]
    start = sum(blocks[: comm.rank])
    expected = {f"blocks.{start + i}." for i in range(blocks[comm.rank])}
    expected |= {"wte.", "wpe."} if comm.rank == 0 else set()
    expected |= {"final_norm.", "lm_head."} if comm.rank == comm.size - 1 else set()
    mine = {name for name in shapes if name.startswith(tuple(expected))}
    mine -= {"lm_head.weight"} if tied and comm.rank == 0 else set()
    parallel_assert(comm, names.keys() == mine, f"{names.keys()} {mine}")
    part = part_of(model)
    assert part is not None
    parallel_assert(comm, part.names == tuple(n for n, _ in whole.named_parameters()))
    parallel_assert(comm, dict(part.aliases) == ({"lm_head.weight": "wte.weight"} if tied else {}))
    parallel_assert(comm, (part.first, part.last) == (comm.rank == 0, comm.rank == comm.size - 1))
    found = {n: (p.name, p.shape, p.tied, p.counted) for n, p in part.placements.items()}
    local = {0: "wte.weight", comm.size - 1: "lm_head.weight"}.get(comm.rank) if tied else None
    tie = {local: ("wte.weight", (61, 18), True, comm.rank == 0)} if local else {}
    parallel_assert(comm, found == tie, f"{found}")
    units = default_rule(model)
    own = [(local.rpartition(".")[0],)] if local else []
    parallel_assert(comm, units == [*own, *((p[:-1],) for p in sorted(expected) if "blocks" in p)])


@pytest.mark.ranks(2)
def test_chunks_take_turns_and_uneven_numbers_are_taken_as_given(
    comm: MPI.Intracomm, stages_of_ranks: Topology
) -> None:
    model = cut(Sandwich(), stages_of_ranks, SANDWICH, interleave=2)
    names = [n for n, _ in model.get_submodule("layers").named_children()]
    parallel_assert(comm, names == (["a", "c"] if comm.rank == 0 else ["b", "d"]), f"{names}")
    model = cut(Sandwich(), stages_of_ranks, SANDWICH, balance=[1, 3])
    names = [n for n, _ in model.get_submodule("layers").named_children()]
    parallel_assert(comm, names == (["a"] if comm.rank == 0 else ["b", "c", "d"]), f"{names}")


@pytest.mark.ranks(2)
def test_forwards_of_the_stages_follow_each_other_to_that_of_the_model(
    comm: MPI.Intracomm, stages_of_ranks: Topology
) -> None:
    """Each rank has other values at first; those of rank 0 count, buffers too."""

    def add(model: Sandwich) -> None:
        model.up.register_buffer("scale", torch.full((3,), 1.0 + comm.rank))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.0 + comm.rank)

    model = cut(Sandwich(add), stages_of_ranks, SANDWICH)
    x, y = torch.arange(6.0).view(2, 3), torch.ones(2, 3)
    if comm.rank == 0:
        comm.send(model(x, chunk=0).detach(), 1)
        return
    loss = model(comm.recv(source=0), targets=(y,), chunk=0)
    assert torch.equal(loss, Sandwich()(x, y))
    assert torch.equal(model.get_buffer("up.scale"), torch.ones(3))


def share(one: str, other: str) -> Callable[[nn.Module], None]:
    def add(model: nn.Module) -> None:
        model.get_submodule(other).weight = model.get_submodule(one).weight

    return add


def hooked(model: nn.Module) -> None:
    model.get_submodule("up").register_forward_hook(lambda *_: None)


def shared_buffer(model: nn.Module) -> None:
    buffer = torch.zeros(2)
    for name in ("down", "up"):
        model.get_submodule(name).register_buffer("seen", buffer)


def replaced(model: nn.Module) -> None:
    model.__dict__["forward"] = lambda x: x


def nothing(model: nn.Module) -> None:
    """As it is."""


def one_block(model: Any) -> None:
    del model.layers["a"], model.layers["b"], model.layers["c"]


def extra_parameter(model: nn.Module) -> None:
    model.register_parameter("extra", nn.Parameter(torch.zeros(2)))


def extra_buffer(model: nn.Module) -> None:
    model.register_buffer("count", torch.zeros(2))


WRONG: list[tuple[Callable[[Any], None], dict[str, Any], dict[str, Any], str]] = [
    # what is done to the model, other words of its stages, options of the cut, what is said
    (one_block, {}, {}, r"1 block\(s\) for 2 stage\(s\) of 1 chunk\(s\), expected at least 2"),
    (nothing, {}, {"interleave": 3}, "expected at least 6"),
    (nothing, {"blocks": "up"}, {}, "blocks='up' is Linear"),
    (nothing, {"blocks": "h"}, {}, "'h' is nothing"),
    (nothing, {"before": ("down", "norm")}, {}, "before names 'norm', which is no module"),
    (nothing, {"after": ("up", "layers.d")}, {}, "'layers.d', and the blocks are in 'layers'"),
    (nothing, {"after": ("up", "down")}, {}, "'down' and 'down'"),
    (extra_parameter, {}, {}, "parameter 'extra' is neither in the blocks nor before nor after"),
    (extra_buffer, {}, {}, "persistent buffer 'count' is neither"),
    (shared_buffer, {}, {}, "'down.seen' is shared by the stages .0, 1."),
    (hooked, {}, {}, r"module 'up' \(Linear\) has a hook"),
    (replaced, {}, {}, "model.forward was replaced"),
    (nothing, {}, {"balance": [1, 2]}, "balance=.1, 2., expected 2 numbers"),
    (nothing, {}, {"balance": [4, 0]}, "expected 2 numbers of at least 1"),
    (nothing, {}, {"interleave": 0}, "interleave 0"),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("add", "changes", "options", "said"), WRONG)
def test_what_cannot_be_cut_is_refused_and_left_as_it_was(
    comm: MPI.Intracomm,
    stages_of_ranks: Topology,
    add: Callable[[Any], None],
    changes: dict[str, Any],
    options: dict[str, Any],
    said: str,
) -> None:
    model, stages = Sandwich(add), replace(SANDWICH, **changes)
    before = list(model.state_dict())
    raises_on_all(comm, PlanError, said, lambda: cut(model, stages_of_ranks, stages, **options))
    parallel_assert(comm, list(model.state_dict()) == before and part_of(model) is None)


@pytest.mark.ranks(3)
def test_only_the_first_and_the_last_stage_can_share_a_parameter(
    comm: MPI.Intracomm, stages_of_ranks: Topology
) -> None:
    # a and b are on the first stage, c on the second
    model: nn.Module = Sandwich(share("layers.a", "layers.c"))
    said = r"'layers.a.weight' is shared by the stages .0, 1., as .*'layers.c.weight'"
    raises_on_all(comm, PlanError, said, lambda: cut(model, stages_of_ranks, SANDWICH))
    model = cut(Sandwich(share("layers.a", "layers.b")), stages_of_ranks, SANDWICH)
    part = part_of(model)
    assert part is not None
    parallel_assert(comm, dict(part.aliases) == {"layers.b.weight": "layers.a.weight"})
    parallel_assert(comm, not part.placements)


@pytest.mark.ranks(2)
def test_a_model_is_cut_once_and_before_it_is_sharded(
    comm: MPI.Intracomm, stages_of_ranks: Topology
) -> None:
    model = cut(Sandwich(), stages_of_ranks, SANDWICH)
    again = "is a part of one already"
    raises_on_all(comm, PlanError, again, lambda: cut(model, stages_of_ranks, SANDWICH))
    whole, alone, said = Sandwich(), Topology.alone(), "was zeroified"
    with zeroified(whole, sgd(whole), topology=alone):
        raises_on_all(comm, PlanError, said, lambda: cut(whole, stages_of_ranks, SANDWICH))
    alone.free()


@pytest.mark.ranks(2)
def test_ranks_with_other_models_are_told(comm: MPI.Intracomm, stages_of_ranks: Topology) -> None:
    def add(model: Sandwich) -> None:
        model.up = nn.Linear(7, 3 + comm.rank)

    said = r"rank\(s\) .1. have another model"
    raises_on_all(comm, PlanError, said, lambda: cut(Sandwich(add), stages_of_ranks, SANDWICH))


@pytest.mark.ranks(2)
def test_a_tied_weight_beside_others_is_refused(
    comm: MPI.Intracomm, stages_of_ranks: Topology
) -> None:
    """Its unit would be cut into other shards on the two stages."""

    def add(model: Sandwich) -> None:
        model.up = nn.Linear(7, 7)
        model.down = nn.Linear(7, 7)
        model.up.weight = model.down.weight

    model = cut(Sandwich(add), stages_of_ranks, SANDWICH)
    said = r"weight' lies on two stages of a pipeline, and its module Linear has other parameters too \(bias"
    World(comm, stages_of_ranks).refuses(PlanError, said, model, sgd(model))
