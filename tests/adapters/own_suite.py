"""What every adapter that brings its own samples must do. A new one adds a subclass and its ``make``.

Shards are compared with plain torch: the adapter's model, AdamW and the whole batch in one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from hpczero.adapters.base import Adapter
from hpczero.run.starting.header import flops_per_unit
from hpczero.run.starting.reading import Rows
from tests.adapters.equal import SEED, check_losses

if TYPE_CHECKING:
    from hpczero import Topology


class OwnAdapterSuite:
    """Subclass it as ``TestX`` and set ``make`` to what builds the adapter, a small one."""

    make: Any

    @pytest.fixture
    def adapter(self) -> Adapter:
        adapter: Adapter = type(self).make()
        return adapter

    def test_seed_gives_the_same_model_and_samples_every_time(self, adapter: Adapter) -> None:
        models = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            models.append(adapter.build().state_dict())
        first, again, other = models
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert any(not torch.equal(first[name], other[name]) for name in first)
        torch.manual_seed(5)
        sets = [[Rows(part, "rows").digest() for part in adapter.samples()] for _ in range(2)]
        assert sets[0] == sets[1]
        assert sets[0][0] != sets[0][1]

    def test_loss_and_metric_are_means_over_samples(self, adapter: Adapter) -> None:
        torch.manual_seed(SEED)
        model = adapter.build().eval()
        rows = Rows(adapter.samples()[0], "rows")
        calls = [adapter.loss, *([adapter.metric] if adapter.metric_name else [])]
        for call in calls:
            with torch.no_grad():
                whole = call(model, *rows.take(range(6)))
                alone = [call(model, *rows.take([index])) for index in range(6)]
            assert whole.dim() == 0
            torch.testing.assert_close(whole, torch.stack(alone).mean(), rtol=1e-5, atol=1e-6)

    def test_flops_are_more_than_two_for_each_weight(self, adapter: Adapter) -> None:
        batch = Rows(adapter.samples()[0], "rows").take(range(4))
        counted = flops_per_unit(adapter, lambda: batch)
        weights = sum(
            p.numel()
            for name, p in adapter.build().named_parameters()
            if p.dim() >= 2 and self.is_product(name)
        )
        assert counted >= 6 * weights / adapter.context

    @staticmethod
    def is_product(name: str) -> bool:
        """Whether a forward multiplies by this weight; tables are looked up in."""
        return not name.startswith("tables.")

    @pytest.mark.mpi
    @pytest.mark.ranks(1, 2, 3)
    @pytest.mark.parametrize("transport", ["window", "flat"])
    @pytest.mark.parametrize("stage", [0, 3])
    def test_losses_are_those_of_plain_torch(
        self, topology: Topology, adapter: Adapter, stage: int, transport: str
    ) -> None:
        training, held_out = (Rows(part, "rows") for part in adapter.samples())
        check_losses(topology, adapter, training, held_out, stage=stage, transport=transport)
