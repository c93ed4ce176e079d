"""Map-style data sets through torch's DataLoader: the order of one process, an exact resume, whatever reads ahead."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from hpczero.data import Sampler
from hpczero.data.loading import ResumableLoader
from hpczero.errors import ConfigError
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero.job.topology import Topology


@dataclass
class Pictures(Dataset[Any]):
    """Pictures with random crops and noise, by every library that augmentation draws from."""

    length: int

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        picture = torch.arange(64.0).reshape(8, 8) + 100 * index
        top, left = random.randrange(4), int(np.random.randint(4))  # noqa: NPY002
        return index, picture[top : top + 4, left : left + 4] + torch.rand(4, 4)


def rank_of(rank: int, size: int) -> Any:
    return SimpleNamespace(data=SimpleNamespace(rank=rank, size=size))


def loader(rank: int = 0, size: int = 1, length: int = 23, **options: Any) -> ResumableLoader:
    given = {"global_batch": 6, "seed": 3, **options}
    return ResumableLoader(Pictures(length), topology=rank_of(rank, size), **given)


def taken(loaders: list[ResumableLoader], steps: int) -> Iterator[Any]:
    """Batches of ``steps`` global ones in the order of ranks, over the ends of epochs."""
    while steps > 0:
        for parts in zip(*loaders, strict=True):
            yield from parts
            steps -= 1
            if not steps:
                break


def seen(loaders: list[ResumableLoader], steps: int) -> list[tuple[int, list[float]]]:
    """Samples of ``steps`` global batches."""
    found: list[tuple[int, list[float]]] = []
    for indices, pictures in taken(loaders, steps):
        found += zip(indices.tolist(), pictures.flatten(1).tolist(), strict=True)
    return found


def check_resume(
    seen: Callable[[list[ResumableLoader], int], list[Any]],
    whole: list[Any],
    make: Callable[[int, int], ResumableLoader],
    before: int,
    after: int,
    steps: int,
) -> None:
    """``before`` ranks and then, from their state, ``after`` ranks have seen ``whole``, nine batches of one process.

    Args:
        make: the loader of a rank of so many.
        steps: before the change.
    """
    first = [make(rank, before) for rank in range(before)]
    assert seen(first, steps) == whole[: steps * 6]
    states = [each.state_dict() for each in first]
    assert all(state == states[0] for state in states)
    second = [make(rank, after) for rank in range(after)]
    for each in second:
        each.load_state_dict(states[0])
    assert seen(second, 9 - steps) == whole[steps * 6 :]


def test_samples_are_those_of_the_sampler_epoch_after_epoch() -> None:
    found = [index for index, _ in seen([loader()], 7)]
    order = Sampler(23, 3)
    expected = [order.sample(place) for place in [*range(18), *range(23, 41), *range(46, 52)]]
    assert found == expected
    assert len(set(found[:18])) == 18


@pytest.mark.parametrize(
    ("before", "after", "num_workers", "taken"), [(1, 3, 0, 1), (2, 6, 0, 5), (2, 1, 2, 4)]
)
def test_resume_on_other_ranks_with_workers_gives_what_would_have_come(
    before: int, after: int, num_workers: int, taken: int
) -> None:
    """Bit for bit, what augmentation draws too; workers have read ahead of where the state was made."""
    options: dict[str, Any] = {"num_workers": num_workers}
    if num_workers:
        options |= {"prefetch_factor": 3, "persistent_workers": True}
    check_resume(seen, seen([loader()], 9), partial(loader, **options), before, after, steps=taken)


def test_loop_that_is_left_early_is_gone_on_with() -> None:
    one, other = loader(), loader()
    assert seen([one], 2) + seen([one], 3) == seen([other], 5)
    assert (one.taken, one.epoch, len(one)) == (5, 1, 3)


@pytest.mark.parametrize("stop", range(1, 10))
@pytest.mark.parametrize("inside", [True, False])
def test_epochs_end_as_often_in_a_resumed_program(stop: int, inside: bool) -> None:
    """What comes after the last batch of an epoch, such as a schedule's step, is neither left out nor repeated.

    Saved while the program has a batch, or between two loops of one batch each.
    """

    def ends(each: ResumableLoader, steps: int) -> list[int]:
        found: list[int] = []
        while each.epoch < 3:
            for _ in each:
                steps -= 1
                found.append(-1)
                if not steps and inside:
                    states.append(each.state_dict())
                    return found
                if not steps:
                    break
            if not each.taken % len(each):
                found.append(each.epoch)
            if not steps:
                states.append(each.state_dict())
                return found
        return found

    states: list[dict[str, int | str]] = []
    expected = ends(loader(), -1)
    assert expected == [-1, -1, -1, 1, -1, -1, -1, 2, -1, -1, -1, 3]
    found = ends(loader(), stop)
    second = loader()
    second.load_state_dict(states[0])
    assert second.state_dict() == states[0]
    assert found + ends(second, -1) == expected


def test_epoch_whose_last_batch_was_taken_by_itself_is_over() -> None:
    one = loader()
    for epoch in range(3):
        assert one.epoch == epoch
        taken = itertools.islice(one, len(one))
        assert len(list(taken)) == 3
    assert one.taken == 9


def test_program_draws_the_same_numbers_with_and_without_the_loader() -> None:
    def draws() -> tuple[float, float, float]:
        return torch.rand(()).item(), random.random(), float(np.random.rand())  # noqa: NPY002

    torch.manual_seed(1), random.seed(1), np.random.seed(1)  # noqa: NPY002
    expected = draws()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)  # noqa: NPY002
    seen([loader()], 4)
    assert draws() == expected


def test_without_shuffle_the_order_is_that_of_the_data_set() -> None:
    found = seen([loader(shuffle=False, drop_last=False, global_batch=23)], 2)
    assert [index for index, _ in found] == [*range(23), *range(23)]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_weights_make_the_mean_over_ranks_that_over_samples(size: int) -> None:
    """Batches of 5, 5 and 1 of 11 samples; 7 ranks have more ranks than samples in each."""
    data = TensorDataset(torch.arange(11.0))
    given: Any = {"drop_last": False, "draws": False}
    loaders = [
        ResumableLoader(data, topology=rank_of(rank, size), global_batch=5, **given)
        for rank in range(size)
    ]
    order = Sampler(11, 0)
    steps = list(zip(*(each.weighted() for each in loaders), strict=True))
    assert len(steps) == 3
    for step, parts in enumerate(steps):
        mean = sum(weight * batch[0].mean().item() for weight, batch in parts) / size
        samples = order.samples(np.arange(5 * step, min(5 * step + 5, 11)))
        assert mean == pytest.approx(samples.mean(), rel=1e-6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"size": 4}, "4 ranks cannot take equal parts of 3 batches of 6 of 23 samples"),
        ({"drop_last": False, "size": 2}, "2 ranks cannot take equal parts"),
        ({"batch_size": 3}, "got batch_size; it decides itself"),
        ({"sampler": [1], "generator": None}, "got sampler, generator"),
        ({"length": 5}, "no batch is full"),
        ({"length": 0}, "num_samples: got 0"),
        ({"global_batch": 0}, "global_batch: got 0"),
        ({"global_batch": 2.0}, "expected a whole number"),
        ({"seed": -1}, "expected a whole number"),
        ({"seed": None}, "expected a whole number"),
        ({"seed": 2**64}, "expected a whole number"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        iter(loader(**options))


@pytest.mark.parametrize(
    "other",
    [{"length": 24}, {"seed": 4}, {"shuffle": False}, {"global_batch": 3}, {"drop_last": False}],
)
def test_state_of_other_batches_is_refused_by_name(other: dict[str, Any]) -> None:
    state = loader(**other).state_dict()
    name = {"length": "num_samples"}.get(next(iter(other)), next(iter(other)))
    with pytest.raises(ConfigError, match=rf"of other batches \({name} was"):
        loader().load_state_dict(state)


def test_loop_that_another_one_has_overtaken_is_ended() -> None:
    mine = loader()
    old, new = iter(mine), iter(mine)
    next(old), next(new)
    with pytest.raises(RuntimeError, match="not the last one over the loader"):
        next(old)
    mine.load_state_dict(loader().state_dict())
    with pytest.raises(RuntimeError, match="a state was loaded"):
        next(new)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
def test_training_on_uneven_batches_is_that_of_plain_torch(
    comm: MPI.Intracomm, topology: Topology
) -> None:
    import hpczero

    rows = torch.randn(11, 5, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(rows, rows.sum(1, keepdim=True))

    def model() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))
        return made, torch.optim.AdamW(made.parameters(), lr=1e-2)

    plain, plain_optimizer = model()
    alone = ResumableLoader(data, global_batch=5, topology=rank_of(0, 1), drop_last=False)
    for _ in range(2):
        for x, y in alone:
            nn.functional.mse_loss(plain(x), y).backward()
            plain_optimizer.step(), plain_optimizer.zero_grad()
    sharded, optimizer = model()
    sharded = hpczero.zeroify(sharded, optimizer, stage=3, topology=topology)
    mine = ResumableLoader(data, global_batch=5, topology=topology, drop_last=False)
    for _ in range(2):
        for weight, (x, y) in mine.weighted():
            (weight * nn.functional.mse_loss(sharded(x), y)).backward()
            optimizer.step(), optimizer.zero_grad()
    found = hpczero.full_state_dict(sharded)
    wrong = [
        name
        for name, value in (found or {}).items()
        if not torch.allclose(plain.state_dict()[name], value, atol=1e-6)
    ]
    parallel_assert(comm, not wrong and mine.taken == 6, f"{wrong}")
    parallel_assert(comm, (found is not None) == (comm.rank == 0))


def test_data_set_that_raises_stop_iteration_ends_no_epoch_unseen() -> None:
    class Ends(Pictures):
        def __getitem__(self, index: int) -> Any:
            if index == 9:
                raise StopIteration
            return index

    given: Any = {"global_batch": 6, "shuffle": False, "draws": False}
    for num_workers in (0, 1):
        ours = ResumableLoader(Ends(23), topology=rank_of(0, 1), num_workers=num_workers, **given)
        with pytest.raises(RuntimeError, match="batch 1 of 3 raised StopIteration"):
            list(ours)
