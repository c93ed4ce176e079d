"""Lightning Fabric over MPI beside plain torch in one process."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hpczero
from hpczero.errors import ConfigError, HpcZeroError
from tests.helpers.parallel import told
from tests.helpers.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(1, 2, 3),
    pytest.mark.filterwarnings("ignore", "error:::hpczero"),
]
MICRO, MAX_NORM = 2, 0.05


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5), nn.Tanh(), nn.Linear(5, 3))


def samples() -> TensorDataset:
    """So many that an incomplete batch is filled up, and that each epoch ends with a step, on 1 to 3 ranks."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(23, width, generator=generator) for width in (7, 3)))


def loss_of(net: Any, batch: Any) -> Tensor:
    return nn.functional.mse_loss(net(batch[0]), batch[1])


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=1e-2)


def plain(size: int, epochs: int, *, shuffle: bool = True) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and norms of a loop of plain torch: each of ``size`` readers brings a loss, and the mean counts."""
    net = model()
    optimizer, norms = adamw(net), []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for epoch in range(epochs):
        readers: list[Any] = [
            DistributedSampler(samples(), num_replicas=size, rank=rank, shuffle=shuffle, seed=0)
            for rank in range(size)
        ]
        for reader in readers:
            reader.set_epoch(epoch)
        loaders = [DataLoader(samples(), batch_size=2, sampler=reader) for reader in readers]
        for number, batches in enumerate(zip(*loaders, strict=True)):
            torch.stack([loss_of(net, batch) for batch in batches]).mean().backward()
            if number % MICRO == MICRO - 1:
                norms.append(torch.nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM).item())
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
    return net.state_dict(), norms


def fabric_of(topology: Topology, sharding: dict[str, Any], **options: Any) -> Any:
    """Launched."""
    from lightning_fabric import Fabric

    from hpczero.fabric import HpczeroStrategy

    strategy = HpczeroStrategy(topology, device="cpu", **sharding)
    found = Fabric(accelerator="cpu", devices=1, strategy=strategy, **options)
    found.launch()
    return found


class Program:
    """What a user of Fabric writes."""

    def __init__(self, topology: Topology, *, shuffle: bool = True, **sharding: Any) -> None:
        self.fabric = fabric_of(topology, sharding)
        net = model()
        self.net, self.optimizer = self.fabric.setup(net, adamw(net))
        loader = DataLoader(samples(), batch_size=2, shuffle=shuffle)
        self.loader: Any = self.fabric.setup_dataloaders(loader)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer.optimizer, 1, gamma=0.5)
        self.norms: list[float] = []
        self.state: dict[str, Any] = {
            "model": self.net,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "epoch": 0,
            "said": {"a": (1, [2.5, None])},
        }

    def train(self, epochs: int) -> None:
        for epoch in range(self.state["epoch"], epochs):
            for number, batch in enumerate(self.loader):
                last = number % MICRO == MICRO - 1
                with self.fabric.no_backward_sync(self.net, enabled=not last):
                    self.fabric.backward(loss_of(self.net, batch))
                if last:
                    most = {"max_norm": MAX_NORM}
                    norm = self.fabric.clip_gradients(self.net, self.optimizer, **most)
                    self.norms.append(float(norm))
                    self.optimizer.step()
                    self.optimizer.zero_grad()
            self.scheduler.step()
            self.state["epoch"] = epoch + 1

    def weights(self, comm: MPI.Intracomm) -> dict[str, Tensor]:
        found: dict[str, Tensor] = comm.bcast(hpczero.full_state_dict(self.net.module))
        return found

    def done(self) -> None:
        hpczero.release(self.net.module)


def furthest(mine: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max((mine[name] - other[name]).abs().max().item() for name in other)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("transport", ["auto", "flat"])
def test_fabric_equals_plain_torch(world: World, stage: int, transport: str) -> None:
    """Set up, accumulated, clipped: the same weights and norms."""
    program = Program(world.topology, stage=stage, transport=transport)
    program.train(2)
    expected, norms = plain(world.size, 2)
    far = furthest(program.weights(world.comm), expected)
    world.check(far < 1e-6, f"{far}")
    world.check(len(norms) == len(program.norms) > 3 and max(norms) > MAX_NORM)
    world.check(program.norms == pytest.approx(norms, rel=1e-5))
    program.done()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("how", [{"max_norm": 0.05}, {"clip_val": 0.01}], ids=["norm", "value"])
def test_each_optimizer_clips_its_own_parameters(
    world: World, stage: int, how: dict[str, float]
) -> None:
    def parts(net: Any) -> list[nn.Module]:
        return [net[0], nn.ModuleList([net[2], net[4]])]

    fabric = fabric_of(world.topology, {"stage": stage})
    net, expected = model(), model()
    net, *ours = fabric.setup(net, *map(adamw, parts(net)))
    theirs = [adamw(part) for part in parts(expected)]
    data, norms = samples().tensors, []
    for start in (0, 8):
        batches = [[each[start + rank : start + rank + 3] for each in data] for rank in range(3)]
        fabric.backward(loss_of(net, batches[world.rank]))
        torch.stack([loss_of(expected, each) for each in batches[: world.size]]).mean().backward()
        for optimizer, part in zip(ours, parts(expected), strict=True):
            norm = fabric.clip_gradients(net, optimizer, **how)
            if norm is None:
                torch.nn.utils.clip_grad_value_(part.parameters(), how["clip_val"])
            else:
                whole = torch.nn.utils.clip_grad_norm_(part.parameters(), how["max_norm"])
                norms.append(abs(float(norm / whole) - 1.0))
        for each in (*ours, *theirs):
            each.step()
            each.zero_grad()
    found = world.comm.bcast(hpczero.full_state_dict(net.module))
    far = furthest(found, expected.state_dict())
    world.check(far < 1e-5 and max(norms, default=0.0) < 1e-5, f"{far} {norms}")
    hpczero.release(net.module)


def test_checkpoint_goes_on_at_another_stage_and_by_fewer_ranks(world: World, folder: Path) -> None:
    """Saved after one epoch by all ranks at stage 3; gone on with at stage 1, and read by each rank alone."""
    first = Program(world.topology, stage=3, shuffle=False)  # Fabric's loaders count epochs anew
    first.train(1)
    first.fabric.save(folder / "one", first.state)
    saved = copy.deepcopy(first.weights(world.comm))
    first.train(2)
    expected = first.weights(world.comm)
    second = Program(world.topology, stage=1, shuffle=False)
    rest = second.fabric.load(folder / "one", second.state)
    world.check(rest == {} and second.state["epoch"] == 1, f"{rest} {second.state}")
    world.check(second.state["said"] == first.state["said"], str(second.state["said"]))
    second.train(2)
    far = furthest(second.weights(world.comm), expected)
    world.check(far < 1e-6, f"{far}")
    first.done()
    second.done()
    alone = hpczero.Topology.alone()
    third = Program(alone, stage=2)
    third.fabric.load(folder / "one", third.state)
    found = hpczero.full_state_dict(third.net.module)
    assert found is not None
    world.check(furthest(found, saved) == 0.0)
    third.done()
    alone.free()


@pytest.mark.ranks(2)
def test_generators_and_tensors_among_the_entries_come_back(world: World, folder: Path) -> None:
    program = Program(world.topology, stage=3)
    generator = torch.Generator().manual_seed(3)
    program.state |= {"generator": generator, "seen": torch.tensor([1, 2])}
    program.fabric.save(folder, program.state)
    expected = torch.rand(3, generator=generator)
    program.state["seen"] = None
    program.fabric.load(folder, program.state)
    world.check(torch.equal(torch.rand(3, generator=generator), expected))
    world.check(torch.equal(program.state["seen"], torch.tensor([1, 2])))
    program.done()


@pytest.mark.ranks(2)
def test_steps_that_begin_anew_leave_one_checkpoint(world: World, folder: Path) -> None:
    program = Program(world.topology, stage=1)
    for epoch in range(3):
        for step in (10, 20):
            program.fabric.save(folder / "one", {**program.state, "epoch": epoch, "step": step})
    there = [each.name for each in (folder / "one").iterdir() if each.is_dir()]
    state = {**program.state, "step": 0}
    program.fabric.load(folder / "one", state)
    world.check(len(there) == 1, str(there))
    world.check((state["epoch"], state["step"]) == (2, 20), str(state))
    program.done()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("stage", [0, 3])
def test_load_that_lacks_an_entry_changes_nothing(world: World, folder: Path, stage: int) -> None:
    program = Program(world.topology, stage=stage)
    program.fabric.save(folder / "one", program.state)
    program.train(1)
    before = program.weights(world.comm)
    text = told(KeyError, program.fabric.load, folder / "one", {**program.state, "nope": 1})
    far = furthest(program.weights(world.comm), before)
    world.check("holds no 'nope', but model, optimizer" in text and far == 0.0, text)
    program.done()


@pytest.mark.ranks(2, 3)
def test_exchanges_between_ranks(world: World) -> None:
    program = Program(world.topology, stage=0)
    fabric, rank, size = program.fabric, world.rank, world.size
    world.check((fabric.world_size, fabric.global_rank) == (size, rank))
    found: Any = fabric.all_gather({"a": torch.full((2,), float(rank)), "b": rank})
    expected = torch.arange(size)
    world.check(found["a"].equal(expected.float()[:, None].expand(size, 2)))
    world.check(found["b"].equal(expected), str(found["b"]))
    mean: Any = fabric.all_reduce(torch.tensor(float(rank)), reduce_op="mean")
    total: Any = fabric.all_reduce(torch.tensor([rank]), reduce_op="sum")
    world.check(mean == expected.float().mean() and total.tolist() == [expected.sum()])
    said: Any = fabric.broadcast({"from": rank}, src=1)
    world.check(said == {"from": 1})
    fabric.barrier()
    program.done()


@pytest.mark.ranks(2)
def test_what_cannot_work_is_refused_on_all_ranks(world: World, folder: Path) -> None:
    program = Program(world.topology, stage=3)
    fabric, net = program.fabric, program.net
    calls: dict[str, Any] = {
        "not trained with": lambda: fabric.clip_gradients(net, adamw(model()), clip_val=1.0),
        "sharded together": lambda: fabric.setup_optimizers(adamw(model())),
        "filter": lambda: fabric.save(folder, program.state, filter={"model": lambda k, v: True}),
        "0 model": lambda: fabric.save(folder, {"epoch": 1}),
        "JSON": lambda: fabric.save(folder, {"model": net, "kept": {1, 2}}),
        "['values']['mine']": lambda: fabric.save(folder, {"model": net, "mine": world.rank}),
        "no checkpoint there": lambda: fabric.load(folder / "none", program.state),
        "sync_grads": lambda: fabric.all_gather(torch.ones(1), sync_grads=True),
        "all_gather: rank 1": lambda: fabric.all_gather(torch.ones(1 + world.rank)),
    }
    for said, call in calls.items():
        text = told(HpcZeroError, call)
        world.check(said in text, f"{said}: {text}")
    program.done()


@pytest.mark.ranks(2)
def test_precision_is_zeroifys(world: World) -> None:
    """bf16 with fp32 masters instead of autocast; half masters are refused."""
    fabric = fabric_of(world.topology, {"stage": 2}, precision="bf16-mixed")
    net = model()
    net, optimizer = fabric.setup(net, adamw(net))
    seen = []
    net.module[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    fabric.backward(loss_of(net, samples()[:4]))
    optimizer.step()
    world.check(seen == [torch.bfloat16], str(seen))
    world.check(hpczero.sharding(net.module).plan.precision.param == "bf16")
    hpczero.release(net.module)
    with pytest.raises(ConfigError, match="precision: got '16-true'"):
        fabric_of(world.topology, {}, precision="16-true")
