"""What every adapter of a text must do. A new one adds a subclass and its ``make``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpczero.adapters.base import Adapter
from hpczero.errors import PlanError
from hpczero.run.starting.header import flops_per_unit
from tests.adapters.equal import check_losses, text_rows

if TYPE_CHECKING:
    from hpczero import Topology

VOCABULARY, SEQUENCES = 11, 6


def filled(adapter: Adapter, seed: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """The whole model with its initial weights, and these."""
    model = adapter.build()
    fill = adapter.initializer(model, seed)
    assert fill is not None, "an adapter that reads text fills its model"
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fill(name, parameter)
    return model, {name: p.detach().clone() for name, p in model.named_parameters()}


def samples(context: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets that can be learnt: each token's successor."""
    inputs = torch.arange(SEQUENCES * context).reshape(SEQUENCES, context) * 3 % VOCABULARY
    return inputs, (inputs + 1) % VOCABULARY


class AdapterSuite:
    """Subclass it as ``TestX`` and set ``make`` to what builds the adapter, a small one."""

    make: Any

    @pytest.fixture
    def adapter(self) -> Adapter:
        adapter: Adapter = type(self).make()
        return adapter.with_vocabulary(VOCABULARY)

    def test_it_says_what_is_planned_and_told_of_it(self, adapter: Adapter) -> None:
        assert adapter.reads_text
        assert adapter.unit == "token"
        assert adapter.context >= 2
        model = adapter.build()
        assert any(VOCABULARY in p.shape for p in model.parameters())
        counted = flops_per_unit(adapter, lambda: samples(adapter.context))
        assert counted > sum(p.numel() for p in model.parameters())

    def test_meta_device_makes_the_same_parameters_without_memory(self, adapter: Adapter) -> None:
        with torch.device("meta"):
            model = adapter.build()
        assert {p.device.type for p in model.parameters()} == {"meta"}
        shapes = [(name, p.shape) for name, p in adapter.build().named_parameters()]
        assert [(name, p.shape) for name, p in model.named_parameters()] == shapes

    def test_initial_values_depend_on_seed_name_and_shape_alone(self, adapter: Adapter) -> None:
        _, first = filled(adapter, seed=1)
        torch.manual_seed(12345)
        with torch.device("meta"):
            model = adapter.build()
        fill = adapter.initializer(model, 1)
        assert fill is not None
        for name in reversed(first):
            again = torch.full_like(first[name], torch.nan)
            fill(name, again)
            assert torch.equal(again, first[name]), name
        other = filled(adapter, seed=2)[1]
        assert any(not torch.equal(other[name], first[name]) for name in first)

    def test_loss_is_the_mean_over_a_micro_batch(self, adapter: Adapter) -> None:
        model, _ = filled(adapter, seed=1)
        model.eval()
        inputs, targets = samples(adapter.context)
        whole = adapter.loss(model, inputs, targets)
        halves = [adapter.loss(model, inputs[i::2], targets[i::2]) for i in (0, 1)]
        assert whole.dim() == 0
        torch.testing.assert_close(whole, sum(halves) / torch.tensor(2.0))

    def test_blocks_are_called_as_they_are_told_or_that_is_refused(self, adapter: Adapter) -> None:
        model, _ = filled(adapter, seed=1)
        called: list[nn.Module] = []

        def call(block: nn.Module, *inputs: Tensor) -> Any:
            called.append(block)
            return checkpoint(block, *inputs, use_reentrant=False)

        def gradients() -> list[Tensor]:
            model.zero_grad()
            adapter.loss(model, *samples(adapter.context)).backward()
            return [p.grad for p in model.parameters() if p.grad is not None]

        before = gradients()
        blocks = self.blocks(model)
        if not blocks:
            with pytest.raises(PlanError, match="no blocks"):
                adapter.call_blocks_by(model, call)
            return
        adapter.call_blocks_by(model, call)
        assert all(map(torch.equal, before, gradients()))
        layers = len(blocks)
        assert [*map(id, called)] == [*map(id, blocks)]
        with torch.no_grad():
            adapter.loss(model, *samples(adapter.context))
        assert len(called) == layers

    @staticmethod
    def blocks(model: nn.Module) -> list[nn.Module]:
        """What is called block by block, in order; none where the model has none."""
        return list(getattr(model, "blocks", []))

    @pytest.mark.mpi
    @pytest.mark.ranks(1, 2, 3)
    @pytest.mark.parametrize("transport", ["window", "flat"])
    @pytest.mark.parametrize("stage", [0, 3])
    def test_losses_are_those_of_plain_torch(
        self, topology: Topology, adapter: Adapter, stage: int, transport: str
    ) -> None:
        rows = text_rows(adapter, VOCABULARY)
        check_losses(topology, adapter, rows, rows, stage=stage, transport=transport)

    def test_something_decays(self, adapter: Adapter) -> None:
        model = adapter.build()
        assert any(adapter.decays(name, p) for name, p in model.named_parameters())
