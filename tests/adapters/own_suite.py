"""What every adapter that brings its own samples must do. A new one adds a subclass and its ``make``.

The training that shards are held against is plain torch: the adapter's model, AdamW and the whole batch in one process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import hpczero
from hpczero.accelerator import HostAccelerator
from hpczero.adapters.base import Adapter
from hpczero.options.config import ParallelOptions, RunConfig, RunOptions, TrainOptions
from hpczero.run.evaluation import Evaluation
from hpczero.run.passes import PlainPasses
from hpczero.run.starting.building import build, decay_groups
from hpczero.run.starting.flops import flops_per_unit
from hpczero.run.starting.own_samples import OwnBatches, OwnHeldOut, Rows
from hpczero.run.step import TrainingStep
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

SEED, STEPS, GLOBAL_BATCH, RATE, CLIP = 3, 10, 12, 3e-3, 1.0
HELD_OUT = 7  # no number of ranks divides it


def plain_run(adapter: Adapter) -> tuple[list[float], list[float]]:
    """Losses of ``STEPS`` steps, then held-out loss and metric, by plain torch in one process."""
    torch.manual_seed(SEED)
    model = adapter.build()
    optimizer = torch.optim.AdamW(decay_groups(model, adapter, 0.1), lr=RATE, betas=(0.9, 0.95))
    training, held_out = (Rows(part, "rows") for part in adapter.samples())
    batches, losses = OwnBatches(training, GLOBAL_BATCH, SEED), []
    for number in range(STEPS):
        loss = adapter.loss(model, *batches.micro_batch(number, 0, 0, 1))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    numbers = [index * len(held_out) // HELD_OUT for index in range(HELD_OUT)]
    rows = held_out.take(numbers)
    with torch.no_grad():
        figures = [adapter.loss(model, *rows).item()]
        if adapter.metric_name:
            figures.append(adapter.metric(model, *rows).item())
    return losses, figures


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
        self,
        comm: MPI.Intracomm,
        topology: Topology,
        adapter: Adapter,
        stage: Any,
        transport: Any,
    ) -> None:
        config = RunConfig(
            run=RunOptions(seed=SEED),
            train=TrainOptions(learning_rate=RATE, weight_decay=0.1),
            parallel=ParallelOptions(stage=stage, transport=transport),
        )
        accelerator = HostAccelerator()
        model, optimizer = build(config, adapter, topology, accelerator)
        training, held_out = (Rows(part, "rows") for part in adapter.samples())
        batches, rank, size = OwnBatches(training, GLOBAL_BATCH, SEED), comm.rank, comm.size
        passes = PlainPasses(model, loss=adapter.loss, accumulation=2, accelerator=accelerator)
        step = TrainingStep(
            model,
            optimizer,
            passes=passes,
            samples=lambda number, micro: batches.micro_batch(number, micro, rank, size, 2),
            accelerator=accelerator,
            clip=CLIP,
        )
        losses = [step.take(number).loss for number in range(STEPS)]
        found = Evaluation(
            model,
            OwnHeldOut(held_out, HELD_OUT),
            passes=passes,
            topology=topology,
            accelerator=accelerator,
            micro_batch=2,
            every=0,
            steps=STEPS,
            metric=adapter.metric if adapter.metric_name else None,
        ).after(STEPS)
        assert found is not None, "due after the last step"
        figures = [found.loss] if found.metric is None else [found.loss, found.metric]
        expected = plain_run(adapter)
        worst = max(
            abs(ours - theirs) / max(1.0, abs(theirs))
            for ours, theirs in zip([*losses, *figures], [*expected[0], *expected[1]], strict=True)
        )
        parallel_assert(comm, worst <= 1e-6, f"{worst:.1e}: {losses} {figures} and {expected}")
        parallel_assert(comm, abs(losses[-1] - losses[0]) > 1e-4, f"nothing moved: {losses}")
        hpczero.release(model)
