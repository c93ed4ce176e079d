"""Rows of tables: the bits of whole gradients and of plain torch, the bytes of the rows, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import hpczero
from hpczero.errors import ConfigError, StepError
from tests.helpers.small_models import adamw, same, update
from tests.helpers.world import World, on_nodes

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4)]


@pytest.fixture
def world(comm, tmp_path_factory) -> Iterator[World]:
    """Two nodes."""
    with on_nodes(comm, [rank * 2 // comm.size for rank in range(comm.size)]) as world:
        yield world


ROWS, WIDE = 97, 29


class Clicks(nn.Module):
    """Two tables, one of them looked up in bags, with rows of 6 and 8 numbers, and what reads them."""

    def __init__(self, *, sparse: bool = False, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.user = nn.Embedding(ROWS, 6, sparse=sparse)
        self.words = nn.EmbeddingBag(WIDE, 8, mode="sum", sparse=sparse)
        self.top = nn.Sequential(nn.Linear(14, 8), nn.ReLU(), nn.Linear(8, 1))
        self.again = again

    def forward(self, user: Tensor, words: Tensor) -> Tensor:
        run = partial(checkpoint, self.user, use_reentrant=False) if self.again else self.user
        seen = run(user)
        return self.top(torch.cat([seen, self.words(words)], 1)).squeeze(1)


def rule(model: nn.Module) -> list[tuple[str, ...]]:
    """Tables apart, so that both ways have the same units."""
    return [("user",), ("words",), ("top",)]


def clicks(number: int) -> tuple[Tensor, Tensor]:
    """Users, some of them twice, and three words of each."""
    draws = torch.Generator().manual_seed(number)
    return (
        torch.randint(ROWS, (5,), generator=draws).repeat(2),
        torch.randint(WIDE, (10, 3), generator=draws),
    )


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def trained(world: World, model: Any, optimizer: Any, first: int = 0, steps: int = 3) -> list[Any]:
    """Losses of steps of three micro-batches, two of which wait for each other, and the weights after them."""
    found = []
    for number in range(first, first + steps):
        for part in range(3):
            inputs = clicks(1000 * number + 100 * part + world.rank)
            if part == 0:
                with hpczero.no_sync(model):
                    loss = model(*inputs).square().mean()
                    loss.backward()
            else:
                loss = model(*inputs).square().mean()
                loss.backward()
            found.append(loss.detach())
        hpczero.clip_grad_norm_(model, 0.5)
        update(optimizer)
    return [*found, *(hpczero.full_state_dict(model) or {}).values()]


@pytest.mark.parametrize("make", [adamw, momentum])
@pytest.mark.parametrize("param", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_rows_have_the_bits_of_whole_gradients(world: World, stage, param, make):
    for transport in ("flat", "hierarchical", "window"):
        runs = []
        for rows in (False, True):
            model = Clicks()
            optimizer = make(model)
            with world.zeroified(
                model,
                optimizer,
                stage=stage,
                rule=rule,
                precision=param,
                transport=transport,
                sparse_gradients=rows,
            ) as sharding:
                runs.append(trained(world, model, optimizer))
                stats, plan = sharding.collectives.stats, sharding.plan
                stats.reset()
                trained(world, model, optimizer, 3, 1)
                footprint = sharding.collectives.footprint
                traffic = plan.traffic(micro_steps=3, synced=2, footprint=footprint)
                sent = stats.sent_nbytes
                world.check(bool(sent["reduce_rows"]) is rows, sent)
                world.check(sent["reduce_scatter"] == traffic.reduce_scatter_nbytes, sent)
                memory, peak = plan.memory(footprint=footprint), sharding.memory.peak
                for kind in ("parameters", "master", "gradients", "exchange"):
                    expected = getattr(memory, kind)
                    world.check(peak.get(kind, 0) == expected, (kind, peak, memory))
        world.check(same(*runs), transport)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # of torch's Adagrad
@pytest.mark.parametrize("stage", [0, 2, 3])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_modules_train_as_in_plain_torch(world: World, kind, stage):
    model, plain = Clicks(sparse=True), Clicks(sparse=True)
    optimizer, steps = kind(model.parameters(), lr=0.1), kind(plain.parameters(), lr=0.1)
    with world.zeroified(model, optimizer, stage=stage) as sharding:
        world.check(sum(unit.row > 0 for unit in sharding.plan.units) == 2, sharding.plan.units)
        for number in range(3):
            world.backward(
                model, plain, lambda m, r, n=number: m(*clicks(10 * n + r)).square().mean()
            )
            update(optimizer)
            update(steps)
        world.check_weights(model, plain, within=1e-6)


def test_sparse_modules_train_where_whole_gradients_travel(world: World):
    mesh = hpczero.Mesh(replicate=world.size, shard=1)
    topology = hpczero.Topology.create(world.comm, mesh=mesh)
    model, plain = Clicks(sparse=True), Clicks(sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = torch.optim.SGD(plain.parameters(), lr=0.1)
    with world.zeroified(model, optimizer, topology=topology):
        world.backward(model, plain, lambda m, r: m(*clicks(r)).square().mean())
        update(optimizer)
        update(steps)
        world.check_weights(model, plain, within=1e-6)
    other = Clicks()
    world.raises(
        ConfigError,
        "sparse_gradients: got True and replicas",
        hpczero.zeroify,
        other,
        adamw(other),
        topology=topology,
        sparse_gradients=True,
    )
    topology.free()


@pytest.mark.parametrize("again", [False, True])
def test_recomputed_lookups_and_evaluations_fetch_rows(world: World, again):
    model, plain = Clicks(again=again), Clicks()
    optimizer, steps = adamw(model), adamw(plain)
    with world.zeroified(model, optimizer, sparse_gradients=True) as sharding:
        for number in range(2):
            world.backward(
                model, plain, lambda m, r, n=number: m(*clicks(10 * n + r)).square().mean()
            )
            update(optimizer)
            update(steps)
            with torch.no_grad():
                found, expected = model(*clicks(world.rank)), plain(*clicks(world.rank))
            world.check(torch.allclose(found, expected, atol=1e-6), (found, expected))
        world.check(not sharding.units[1].whole.flat.untyped_storage().size(), "still whole")
        with hpczero.gathered(model, modifier_rank=0):
            model.user.weight.data.mul_(2.0)
        with torch.no_grad():
            plain.user.weight.mul_(2.0)
        world.check_weights(model, plain, within=1e-6)
        world.backward(model, plain, lambda m, r: m(*clicks(r)).square().mean())
        update(optimizer)
        update(steps)
        world.check_weights(model, plain, within=1e-6)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_goes_on_on_other_ranks(world: World, stage, tmp_path):
    folder = world.comm.bcast(str(tmp_path))
    model = Clicks()
    optimizer = adamw(model)
    with world.zeroified(model, optimizer, stage=stage, sparse_gradients=True):
        trained(world, model, optimizer)
        hpczero.checkpoint.save(folder, model, step=3)
        expected = hpczero.full_state_dict(model)
        trained(world, model, optimizer, 3, 1)
    alone: Any = world.comm.Split(0 if world.rank == 0 else 1)
    with on_nodes(alone, None) as one:
        for rows in (True, False):
            model = Clicks()
            optimizer = adamw(model)
            with one.zeroified(model, optimizer, stage=3, sparse_gradients=rows):
                hpczero.checkpoint.load(folder, model)
                found = hpczero.full_state_dict(model)
                ok = expected is None or same(found.values(), expected.values())  # type: ignore[union-attr]
        world.check(ok, "other values")
    alone.Free()


class Regularized(Clicks):
    def forward(self, user: Tensor, words: Tensor) -> Tensor:
        return super().forward(user, words) + self.user.weight.square().sum()


class Weighted(Clicks):
    def forward(self, user: Tensor, words: Tensor) -> Tensor:
        weights = torch.ones(words.shape, requires_grad=True)
        return self.words(words, per_sample_weights=weights).sum(1)


class Scaled(nn.Embedding):
    def forward(self, indices: Tensor) -> Tensor:
        return F.embedding(indices, self.weight, max_norm=1.0)


class Limited(Clicks):
    def __init__(self) -> None:
        super().__init__()
        self.user = Scaled(ROWS, 6)


class Nested(Clicks):
    def forward(self, user: Tensor, words: Tensor) -> Tensor:
        parts = torch.nested.nested_tensor([user[:2], user[2:]], layout=torch.jagged)
        return self.user(parts).values().sum(1)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (
            Regularized,
            r"'user\.weight' is sharded, and rows of it alone travel .*'square' needs all",
        ),
        (Weighted, r"'words\.weight': per_sample_weights that need a gradient"),
        (
            Limited,
            r"'user\.weight' is sharded, and rows .*'embedding' needs all .*without max_norm",
        ),
        (Nested, r"'user\.weight': .*nested indices look rows up by themselves"),
    ],
)
def test_what_needs_more_than_rows_is_refused_by_name(world: World, kind: Callable[[], Any], said):
    model = kind()
    with world.zeroified(model, adamw(model), sparse_gradients=True):
        with pytest.raises(StepError, match=said):
            model(*clicks(world.rank))
        model.zero_grad()


def test_an_index_that_no_row_has_is_torchs_error(world: World):
    model = Clicks()
    with world.zeroified(model, adamw(model), sparse_gradients=True):
        with pytest.raises(IndexError):
            model(torch.tensor([ROWS, 0]), torch.zeros(2, 3, dtype=torch.int64))
        model.zero_grad()


class Cube(nn.Embedding):
    """A row is a matrix."""

    def __init__(self) -> None:
        super().__init__(ROWS, 6)
        self.weight = nn.Parameter(
            torch.randn(ROWS, 2, 3, generator=torch.Generator().manual_seed(1))
        )

    def forward(self, indices: Tensor) -> Tensor:
        return self.weight[indices].flatten(1)


class Factors(nn.Embedding):
    """A table that is a product, without a weight."""

    def __init__(self) -> None:
        super().__init__(ROWS, 6)
        del self.weight
        draws = torch.Generator().manual_seed(1)
        self.a = nn.Parameter(torch.randn(ROWS, 2, generator=draws))
        self.b = nn.Parameter(torch.randn(2, 6, generator=draws))

    def forward(self, indices: Tensor) -> Tensor:
        return self.a[indices] @ self.b


def spectral() -> nn.Module:
    torch.manual_seed(5)
    return nn.utils.parametrizations.spectral_norm(nn.Embedding(ROWS, 6))


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("make", [Cube, Factors, spectral])
def test_embeddings_of_another_kind_travel_whole_and_stay_as_they_are(world: World, make, stage):
    found = []
    for rows in (False, True):
        model = Clicks()
        model.user = make()
        before = [buffer.clone() for buffer in model.buffers()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with world.zeroified(
            model, optimizer, stage=stage, rule=lambda _: [], sparse_gradients=rows
        ):
            world.check(same(before, model.buffers()), "other buffers")
            model(*clicks(world.rank)).square().mean().backward()
            update(optimizer)
            found.append([*(hpczero.full_state_dict(model) or {}).values()])
    world.check(len(found[0]) == len(found[1]) and same(*found))


@pytest.mark.parametrize("param", ["fp32", "bf16"])
def test_gradients_of_other_uses_count(world: World, param):
    """Of single elements, and as views that begin anywhere."""
    found = []
    for rows in (False, True):
        model = Clicks()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with world.zeroified(
            model, optimizer, stage=2, rule=rule, precision=param, sparse_gradients=rows
        ):
            places = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 1, 1, 2, 2, 2]]) + world.rank
            loss = model(*clicks(world.rank)).square().mean()
            loss += torch.gather(model.user.weight, 0, places, sparse_grad=True).square().sum()
            loss.backward()
            everything = [p.flatten()[world.rank :] for p in model.parameters()]
            torch.cat([torch.ones(1, dtype=everything[0].dtype), *everything]).norm().backward()
            update(optimizer)
            found.append([*(hpczero.full_state_dict(model) or {}).values()])
    world.check(same(*found))


def test_tables_that_others_use_too_travel_whole(world: World):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.embed(x))

    model, plain = Tied(), Tied()
    plain.load_state_dict(model.state_dict())
    with world.zeroified(model, adamw(model), sparse_gradients=True) as sharding:
        world.check(not any(unit.row for unit in sharding.plan.units))
        world.backward(model, plain, lambda m, r: m(torch.arange(r, r + 3)).square().mean())
        world.check_gradients(model, plain)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_few_of_many_rows_are_few_of_the_bytes(world: World, stage):
    numel = 20_000 * 16
    model = nn.Sequential(nn.Embedding(20_000, 16), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with world.zeroified(model, optimizer, stage=stage, sparse_gradients=True) as sharding:
        stats = sharding.collectives.stats
        stats.reset()
        model(torch.arange(64) + 64 * world.rank).sum().backward()
        update(optimizer)
        rows = {name: sent for name, sent in stats.sent_nbytes.items() if name.endswith("_rows")}
        # 64 rows of 16 numbers and an index, to one owner at most, or all sums to all ranks; and a few counts
        world.check(rows["reduce_rows"] <= 64 * (4 * 16 + 8) + 24 * world.size, rows)
        spread = 64 * world.size * (4 * 16 + 8) * (world.size - 1) + 24 * world.size
        world.check(rows.get("spread_rows", 0) <= (0 if stage else spread), rows)
        world.check(rows.get("ask_rows", 0) <= (0 if stage < 3 else 64 * 8 + 24 * world.size), rows)
        world.check(sum(rows.values()) < 0.06 * 4 * numel, rows)
        footprint = sharding.collectives.footprint
        memory, peak = sharding.plan.memory(footprint=footprint), sharding.memory.peak
        world.check(peak.get("unsharded", 0) <= memory.unsharded, (peak, memory))
        world.check(stage < 3 or peak["unsharded"] >= 4 * numel, peak)
