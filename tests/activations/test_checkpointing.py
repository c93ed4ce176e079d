"""Checkpointed blocks whose inputs rest elsewhere: the bits of plain torch, whatever a program does with them."""

from __future__ import annotations

import gc
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hpczero.activations import Checkpointing, keep_products
from tests.activations.stacks import (
    BATCH,
    INPUT_NBYTES,
    PAGES,
    PLACES,
    WIDTH,
    Block,
    Stack,
    batch,
    gradients,
    grads,
    on_disk,
    on_host,
    plain,
    same,
    torchs,
)
from tests.helpers.small_models import grad


@pytest.mark.parametrize("place", PLACES)
def test_losses_gradients_and_random_streams_are_those_of_torch(place, tmp_path):
    with place(tmp_path) as checkpointing:
        found = gradients(checkpointing)
        assert checkpointing.traffic.read_nbytes > 0
    assert same(found, gradients(torchs))
    assert same(found, gradients(plain))


@pytest.mark.parametrize("buffers", [2, 3, 9])
@pytest.mark.parametrize("window", [2**14, 2**20])
def test_staging_and_horizon_do_not_matter(tmp_path, buffers, window):
    with on_disk(tmp_path, buffers=buffers, window=window) as checkpointing:
        assert same(gradients(checkpointing), gradients(plain))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_dtypes(tmp_path, dtype):
    found = []
    with on_disk(tmp_path) as checkpointing:
        for call in (checkpointing, torchs):
            model = Stack(call=call).to(dtype)
            torch.manual_seed(3)
            model(batch(rows=3 * BATCH).to(dtype)).backward()
            found.append(grads(model))
        assert checkpointing.traffic.read_nbytes > 0
    assert same(*found)


def test_traffic_is_every_input_but_the_newest_once_each_way(tmp_path):
    with on_disk(tmp_path) as checkpointing:
        gradients(checkpointing, steps=3, layers=6)
        flow = checkpointing.traffic
        assert flow.read_nbytes == flow.written_nbytes == 3 * 5 * INPUT_NBYTES


def test_one_input_is_in_memory_at_a_time_and_room_is_taken_again(tmp_path):
    with on_disk(tmp_path) as checkpointing:
        for _ in range(3):
            gradients(checkpointing, steps=1, layers=6)
            assert checkpointing.kept_nbytes == 0
        assert checkpointing.kept_peak_nbytes == INPUT_NBYTES
        store: Any = checkpointing._rest
        assert store.tier._end == 5 * PAGES * 4096  # of the inputs that were away
        assert store.tier._room.nbytes == store.tier._end
        assert list(tmp_path.iterdir()) == []


def test_dropped_graphs_give_their_room_back(tmp_path):
    with on_disk(tmp_path) as checkpointing:
        model = Stack(call=checkpointing)
        for _ in range(20):
            model(batch())  # nobody calls backward
        gc.collect()
        assert checkpointing.kept_nbytes == 0
        store: Any = checkpointing._rest
        assert store.tier._end <= 2 * 6 * PAGES * 4096
        assert store.tier._room.nbytes == store.tier._end
        assert not store._inputs


def test_inputs_of_changing_sizes_do_not_pile_up(tmp_path):
    with on_disk(tmp_path) as checkpointing:
        model = Stack(call=checkpointing)
        rows = [BATCH + 17 * (step * 7 % 5) for step in range(40)]
        for step, count in enumerate(rows):
            model(batch(step, count)).backward()
        store: Any = checkpointing._rest
        largest = -(-max(rows) * WIDTH * 4 // 4096)
        assert store.tier._end <= 6 * largest * 4096


def test_several_micro_batches_in_any_order(tmp_path):
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        found = []
        with on_disk(tmp_path) as checkpointing:
            for call in (checkpointing, plain):
                model = Stack(call=call)
                torch.manual_seed(5)
                losses = [model(batch(seed)) for seed in range(3)]
                for index in order:
                    losses[index].backward()
                found.append(grads(model))
        assert same(*found)


def test_no_gradients_nothing_kept(tmp_path):
    with on_disk(tmp_path) as checkpointing:
        model = Stack(call=checkpointing)
        with torch.no_grad():
            model(batch())
        with torch.inference_mode():
            model(batch())
        assert checkpointing.kept_peak_nbytes == 0
        assert all(block.calls == 2 for block in model.blocks)


def test_graphs_that_stay_give_the_same_again_and_derivatives_of_derivatives(tmp_path):
    found = []
    with on_disk(tmp_path) as checkpointing:
        for call in (checkpointing, torchs, plain):
            model = Stack(call=call)
            torch.manual_seed(11)
            x = batch().requires_grad_()
            loss = model(x)
            (first,) = torch.autograd.grad(loss, x, retain_graph=True)
            (again,) = torch.autograd.grad(loss, x, create_graph=True)
            penalty = again.square().sum()
            penalty.backward()
            found.append([first, again.detach(), *grads(model), grad(x)])
    assert same(found[0], found[1])
    assert torch.equal(found[0][0], found[0][1])
    for mine, other in zip(found[0], found[2], strict=True):
        torch.testing.assert_close(mine, other)


class Nested(nn.Module):
    """Two blocks in one; both levels are checkpointed."""

    def __init__(self, call: Any, inner: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pairs = nn.ModuleList(nn.ModuleList([Block(), Block()]) for _ in range(3))
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.call, self.inner = call, inner

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for pair in self.pairs:
            x = self.call(partial(self.two, pair), x)
        return x.square().mean()

    def two(self, pair: Any, x: Tensor) -> Tensor:
        for block in pair:
            x = self.inner(block, x)
        return x


@pytest.mark.parametrize("inner", ["this", "torch", "another"])
@pytest.mark.parametrize("outer", ["this", "torch"])
def test_nested_calls(tmp_path, outer, inner):
    found = []
    with on_disk(tmp_path) as one, on_disk(tmp_path) as two:
        calls = {"this": one, "torch": torchs, "another": two}
        for pair in ((calls[outer], calls[inner]), (torchs, torchs), (plain, plain)):
            model = Nested(*pair)
            for seed in range(2):
                torch.manual_seed(seed)
                model(batch(seed)).backward()
            found.append(grads(model))
        if (outer, inner) == ("this", "this"):
            assert one.traffic.written_nbytes == 2 * 2 * INPUT_NBYTES  # those of the outer calls
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_an_exception_in_a_block_leaves_everything_usable(tmp_path):
    def fails(x: Tensor) -> Tensor:
        raise ZeroDivisionError("of the block")

    with on_disk(tmp_path) as checkpointing:
        model = Stack(call=checkpointing)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError, match="of the block"):
                checkpointing(fails, model.stem(batch()))
        gc.collect()
        assert checkpointing.kept_nbytes == 0
        assert same(gradients(checkpointing), gradients(plain))


def test_an_exception_when_a_block_is_computed_again_leaves_everything_usable(tmp_path):
    class Once(Block):
        def forward(self, x: Tensor) -> Tensor:
            if self.calls == 1:
                self.calls += 1
                raise ZeroDivisionError("the second time")
            return super().forward(x)

    with on_disk(tmp_path) as checkpointing:
        model = Stack(call=checkpointing)
        model.blocks[3] = Once()
        loss = model(batch())
        with pytest.raises(ZeroDivisionError, match="the second time"):
            loss.backward()
        del loss
        gc.collect()
        assert checkpointing.kept_nbytes == 0
        assert same(gradients(checkpointing), gradients(plain))


@pytest.mark.parametrize("policy", [None, keep_products, [torch.ops.aten.addmm.default]])
@pytest.mark.parametrize("place", [on_disk, on_host, None])
def test_selective_recomputation_gives_the_same_bits(tmp_path, place, policy):
    make = Checkpointing.create if place is None else partial(place, tmp_path)
    with make(policy=policy) as checkpointing:
        assert same(gradients(checkpointing), gradients(plain))


class Counting(TorchDispatchMode):
    """Products of linear layers that are computed."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.addmm.default
        return func(*args, **(kwargs or {}))


def test_selective_recomputation_computes_no_product_twice():
    counts = []
    for call in (torchs, Checkpointing.create(policy=keep_products)):
        model = Stack(layers=3, call=call)
        loss = model(batch())
        with Counting() as counting:
            loss.backward()
        counts.append(counting.count)
    assert counts == [2 * 3, 0]


def test_backward_on_another_thread(tmp_path):
    with on_disk(tmp_path) as checkpointing:
        model = Stack(call=checkpointing)
        torch.manual_seed(7)
        loss = model(batch(0))
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert same(grads(model), gradients(plain, steps=1)[1:-1])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("compiled", ["model", "blocks"])
def test_compiled_models_run_it_as_it_is(tmp_path, compiled):
    found = []
    with on_disk(tmp_path) as checkpointing:
        for call in (checkpointing, plain):
            model = Stack(layers=3, call=call)
            if call is checkpointing and compiled == "blocks":
                for block in model.blocks:
                    block.compile(backend="eager")
            run = torch.compile(model, backend="eager") if compiled == "model" else model
            torch.manual_seed(4)
            (run if call is checkpointing else model)(batch()).backward()
            found.append(grads(model))
        assert checkpointing.traffic.read_nbytes == 2 * INPUT_NBYTES
    assert same(*found)
