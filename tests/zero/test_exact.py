"""Steps that are summed leaf by leaf have the bits of one rank on any number of ranks; all else is refused by name."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import hpczero
from hpczero.errors import ConfigError, StepError
from hpczero.kernels.norm import exact_square_words, largest_magnitude, numbers_of
from hpczero.optim import Muon
from hpczero.plan.sizing import accumulated_nbytes
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import MLP, mlp_input

WIDTH, WORDS, SAMPLES = 13, 29, 2  # odd: slots and shards begin anywhere


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))
        return found


class Words(nn.Module):
    """A parameter that some leaves alone use, dropout, and blocks that may be computed again or left out."""

    def __init__(self, *, again: bool, skips: bool) -> None:
        super().__init__()
        self._skips = skips
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.seldom = nn.Parameter(torch.ones(WIDTH))
        self._again = again

    def forward(self, words: Tensor, leaf: int) -> Tensor:
        x = self.embed(words)
        for place, block in enumerate(self.blocks):
            if self._skips and place == leaf % 4:
                continue
            x = checkpoint(block, x, use_reentrant=False) if self._again else block(x)
        if leaf % 3 == 1:
            x = x * self.seldom
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), words.flatten())


def decayed(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


@dataclass(frozen=True)
class Training:
    """One way to train; ``nodes``: of each rank, by the number of ranks."""

    leaves: int
    stage: int = 3
    optimizer: Callable[[nn.Module], Optimizer] = lambda m: AdamW(decayed(m), lr=0.01, fused=True)
    again: bool = False
    skips: bool = False
    offload: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    nodes: Callable[[int], list[int]] | None = None

    def digest(self, comm: MPI.Intracomm, folder: Path) -> str:
        """Of losses, norms and weights after 4 steps."""
        ranks = comm.size
        nodes = None if self.nodes is None else self.nodes(ranks)
        topology = hpczero.Topology.create(comm, nodes)
        torch.manual_seed(7)
        model = Words(again=self.again, skips=self.skips)
        optimizer, options = self.optimizer(model), dict(self.options)
        if self.offload:
            options["offload"] = hpczero.Offload("disk", folder=str(folder), parameters="disk")
        hpczero.zeroify(model, optimizer, self.stage, topology=topology, exact="require", **options)
        found: list[Any] = []
        for step in range(4):
            leaves = hpczero.Leaves(model, self.leaves, step=step, seed=1)
            for leaf in leaves:
                drawn = torch.Generator().manual_seed(100 * step + leaf)
                words = torch.randint(0, WORDS, (SAMPLES, 9), generator=drawn)
                loss = model(words, leaf)
                loss.backward()
                leaves.note(loss)
            found.append(hpczero.clip_grad_norm_(model, 0.5))
            optimizer.step()
            optimizer.zero_grad()
            found.append(leaves.mean_loss())
        digest = hashlib.sha256(repr(found).encode())
        for name, value in (hpczero.full_state_dict(model) or {}).items():
            digest.update(name.encode() + value.float().numpy().tobytes())
        hpczero.release(model)
        topology.free()
        return digest.hexdigest()


def in_pairs(ranks: int) -> list[int]:
    """Nodes of two ranks, by turns; of an odd number the last has one."""
    nodes = max(ranks // 2, 1)
    return [rank % nodes for rank in range(ranks)]


TRAININGS = {
    "8 leaves, dropout, fused": Training(8),
    "12 leaves, recomputed, stage 0": Training(12, stage=0, again=True),
    "5 leaves, some ranks idle": Training(5, stage=1, options={"transport": "flat"}),
    "foreach": Training(6, 2, lambda m: AdamW(decayed(m), lr=0.01, foreach=True)),
    "SGD in bf16": Training(
        8, 1, lambda m: SGD(decayed(m), lr=0.1, momentum=0.9), options={"precision": "bf16"}
    ),
    "Muon": Training(4, 2, lambda m: Muon.of(m, lr=0.01)),
    "fp16 on nodes": Training(8, 3, options={"precision": "fp16"}, nodes=in_pairs),
    "one rank a node": Training(7, 2, nodes=lambda ranks: list(range(ranks))),
    "offloaded": Training(6, offload=True),
    "another block left out in each leaf": Training(9, stage=1, skips=True),
}


@pytest.mark.mpi
@pytest.mark.parametrize("name", TRAININGS)
def test_any_number_of_ranks_has_the_bits_of_one(
    comm: MPI.Intracomm, name: str, tmp_path: Path
) -> None:
    found = TRAININGS[name].digest(comm, tmp_path)
    alone = TRAININGS[name].digest(MPI.COMM_SELF, tmp_path)
    same = comm.rank > 0 or found == alone  # rank 0 has the weights
    parallel_assert(comm, same, "losses, norms or weights differ from those of one rank")


@pytest.mark.mpi
@pytest.mark.parametrize("stage", [0, 3])
def test_steps_are_those_of_plain_torch_over_the_mean_of_the_leaves(
    topology: hpczero.Topology, stage: int
) -> None:
    def made() -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(7)
        model = MLP()
        return model, AdamW(model.parameters(), lr=0.01, fused=True)

    count = 2 * topology.size + 1
    plain, plain_optimizer = made()
    model, optimizer = made()
    hpczero.zeroify(model, optimizer, stage, topology=topology, exact="require")
    for step in range(5):  # the counters of the optimizer count
        leaves = hpczero.Leaves(model, count, step=step)
        for leaf in leaves:
            loss = loss_of(model, 10 * step + leaf)
            loss.backward()
            leaves.note(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses = [loss_of(plain, 10 * step + leaf) for leaf in range(count)]
        mean = torch.stack(losses).mean()
        mean.backward()
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        assert leaves.mean_loss() == pytest.approx(mean.item(), rel=1e-5)
    hpczero.release(model)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture
def exact(topology: hpczero.Topology) -> Iterator[tuple[nn.Module, Optimizer]]:
    model = MLP()
    optimizer = AdamW(model.parameters())
    hpczero.zeroify(model, optimizer, topology=topology, exact="require")
    yield model, optimizer
    hpczero.release(model)


def loss_of(model: nn.Module, leaf: int) -> Tensor:
    found: Tensor = model(mlp_input(leaf)).square().mean()
    return found


@pytest.mark.mpi
def test_a_backward_outside_of_leaves_is_refused(exact: tuple[nn.Module, Optimizer]) -> None:
    model, optimizer = exact
    with pytest.raises(StepError, match="inside `for leaf"):
        loss_of(model, 0).backward()
    optimizer.zero_grad()
    with pytest.raises(StepError, match="accumulate"), hpczero.accumulate(model, 0, 2):
        pass
    with pytest.raises(StepError, match="no_sync"), hpczero.no_sync(model):
        pass


@pytest.mark.mpi
def test_a_step_or_another_sum_between_leaves_is_refused(
    topology: hpczero.Topology, exact: tuple[nn.Module, Optimizer]
) -> None:
    model, optimizer = exact
    leaves = hpczero.Leaves(model, 2 * topology.size, step=0).__iter__()
    loss_of(model, next(leaves)).backward()
    with pytest.raises(StepError, match="never reduced"):
        optimizer.step()
    with pytest.raises(StepError, match="a sum over leaves begins"):
        next(iter(hpczero.Leaves(model, topology.size, step=0)))
    leaves.close()
    optimizer.zero_grad()
    for leaf in hpczero.Leaves(model, topology.size, step=0):
        loss_of(model, leaf).backward()
    optimizer.step()


@pytest.mark.mpi
def test_a_fused_step_of_the_programs_own_is_refused(topology: hpczero.Topology) -> None:
    class Own(AdamW):
        pass

    model = MLP()
    optimizer = Own(model.parameters(), fused=True)
    hpczero.zeroify(model, optimizer, topology=topology, exact="require")
    for leaf in hpczero.Leaves(model, topology.size, step=0):
        loss_of(model, leaf).backward()
    with pytest.raises(StepError, match="build it with fused=False"):
        optimizer.step()
    hpczero.release(model)


@pytest.mark.mpi
def test_a_step_of_the_programs_own_is_refused_unless_it_says_how_it_rounds(
    topology: hpczero.Topology,
) -> None:
    class Own(SGD):
        hpczero_elementwise = True

        def step(self, closure: Any = None) -> Any:
            """Nothing."""

    def zeroified(optimizer: type[SGD]) -> nn.Module:
        model = MLP()
        own = optimizer(model.parameters(), lr=0.1)
        return hpczero.zeroify(model, own, topology=topology, exact="require")

    with pytest.raises(StepError, match=r"Own is a class of the program's own.*hpczero_exact"):
        zeroified(Own)
    hpczero.release(zeroified(type("Said", (Own,), {"hpczero_exact": True})))


class Late(nn.Module):
    """Two parameters of odd sizes, of which each misses one of the first two steps."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        self.first = nn.Parameter(torch.randn(100, generator=draw))
        self.second = nn.Parameter(torch.randn(127, generator=draw))

    def forward(self, x: Tensor, step: int) -> Tensor:
        parts = [self.first * x[:, :100]] * (step != 1) + [self.second * x[:, :127]] * (step != 0)
        return sum((part.sum(1) for part in parts), torch.zeros(()))


@pytest.mark.mpi
def test_a_load_that_lays_states_together_changes_no_bit(
    comm: MPI.Intracomm, topology: hpczero.Topology, folder: Path
) -> None:
    """Fused steps round by where tensors end; counters are equal from step 2 on, states lie apart until a load."""

    def made() -> tuple[nn.Module, Optimizer]:
        model = Late()
        optimizer = AdamW(model.parameters(), lr=0.03, fused=True)
        return hpczero.zeroify(model, optimizer, topology=topology, exact="require"), optimizer

    def train(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
        for step in steps:
            for leaf in hpczero.Leaves(model, 3 * topology.size, step=step):
                x = torch.randn(4, 127, generator=torch.Generator().manual_seed(10 * step + leaf))
                (model(x, step) - 1).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = []
    for loads in (False, True):
        model, optimizer = made()
        train(model, optimizer, range(4))
        if loads:
            hpczero.checkpoint.save(folder, model, optimizer, step=4)
            hpczero.release(model)
            model, optimizer = made()
            hpczero.checkpoint.load(folder, model, optimizer)
        train(model, optimizer, range(4, 40))
        found.append(hpczero.full_state_dict(model) or {})
        hpczero.release(model)
    same = all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    parallel_assert(comm, same)


@pytest.mark.mpi
def test_a_buffer_that_forward_changes_is_refused(topology: hpczero.Topology) -> None:
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    optimizer = AdamW(model.parameters())
    hpczero.zeroify(model, optimizer, topology=topology, exact="require")
    leaves = hpczero.Leaves(model, topology.size, step=0).__iter__()
    next(leaves)
    model(torch.randn(3, 4)).sum().backward()
    with pytest.raises(StepError, match=r"forward has changed buffer '.*_u'"):
        next(leaves)
    hpczero.release(model)


@pytest.mark.mpi(min_size=2)
def test_ranks_with_another_seed_or_count_are_told_before_the_update(
    topology: hpczero.Topology, exact: tuple[nn.Module, Optimizer]
) -> None:
    model, optimizer = exact
    for leaf in hpczero.Leaves(model, topology.size, step=0, seed=topology.rank):
        loss_of(model, leaf).backward()
    with pytest.raises(StepError, match="seed"):
        optimizer.step()


@pytest.mark.mpi
def test_losses_are_noted_inside_the_loop_and_leaves_taken_once(
    topology: hpczero.Topology, exact: tuple[nn.Module, Optimizer]
) -> None:
    model, optimizer = exact
    leaves = hpczero.Leaves(model, topology.size, step=0)
    for leaf in leaves:
        loss_of(model, leaf).backward()
    with pytest.raises(StepError, match="outside of the loop"):
        leaves.note(torch.ones(()))
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(StepError, match="taken already"):
        next(leaves.__iter__())


@pytest.mark.mpi
def test_fewer_leaves_than_ranks_are_refused(
    topology: hpczero.Topology, exact: tuple[nn.Module, Optimizer]
) -> None:
    with pytest.raises(ConfigError, match="at least one leaf for each rank"):
        hpczero.Leaves(exact[0], topology.size - 1, step=0)


@pytest.mark.mpi
def test_what_cannot_be_exact_is_refused_or_told(
    topology: hpczero.Topology, caplog: pytest.LogCaptureFixture
) -> None:
    def zeroified(exact: Any) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        optimizer = AdamW(model.parameters())
        return hpczero.zeroify(model, optimizer, topology=topology, exact=exact)

    with pytest.raises(ConfigError, match=r"'1' keeps running statistics.*GroupNorm"):
        zeroified("require")
    model = zeroified("prefer")
    parallel_assert(
        topology.world.comm, not topology.is_root or "running statistics" in caplog.text
    )
    model(torch.randn(3, 4)).sum().backward()  # an ordinary one
    hpczero.release(model)
    with pytest.raises(ConfigError, match="require, prefer or off"):
        zeroified("yes")


# --- the norm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 2.0**100, 2.0**-149])
def test_the_exact_norm_has_one_value_for_all_orders_and_cuts(scale: float) -> None:
    drawn = torch.Generator().manual_seed(3)
    exponents = torch.randint(-12, 12, (100_000,), generator=drawn)
    values = (torch.randn(100_000, generator=drawn) * torch.exp2(exponents)).double() * scale
    flat = values.float()
    top = largest_magnitude([flat])
    found = set()
    for seed in range(4):
        drawn.manual_seed(seed)
        mixed = flat[torch.randperm(len(flat), generator=drawn)]
        cuts = torch.randint(0, len(flat), (5,), generator=drawn).sort().values
        words = [
            word
            for part in torch.tensor_split(mixed, cuts)
            for word in numbers_of(exact_square_words([part], top))
        ]
        found.add(math.fsum(words))
    wanted = math.fsum(value * value for value in flat.double().tolist())
    assert len(found) == 1
    assert abs(found.pop() - wanted) <= len(flat) * 2.0**-73 * top * top + math.ulp(wanted)


def test_the_exact_norm_of_nothing_has_no_words() -> None:
    assert exact_square_words([torch.empty(0)], 1.0) == []


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.mpi
@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (2, "bf16"), (3, "fp32")])
def test_the_plan_has_every_byte_of_gradients_and_of_sums_of_leaves(
    topology: hpczero.Topology, stage: int, precision: str
) -> None:
    torch.manual_seed(7)
    model, count = MLP(), 4 * topology.size + 1
    optimizer = AdamW(model.parameters())
    hpczero.zeroify(
        model, optimizer, stage, topology=topology, precision=precision, exact="require"
    )
    state = hpczero.sharding(model)
    for leaf in hpczero.Leaves(model, count, step=0):
        loss_of(model, leaf).backward()
    footprint = replace(state.collectives.footprint, leaves=count)
    planned = state.plan.memory(footprint=footprint)
    carried = accumulated_nbytes(state.plan, count, footprint=footprint)
    kept = state.memory.peak["gradients"], state.memory.peak["carried"]
    assert kept == (planned.gradients, carried)
    assert state.memory.current["carried"] == 0
    hpczero.release(model)
