"""Ten steps of an adapter's model in shards, and the same by plain torch in one process.

Must not know: which adapter it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import hpczero
from hpczero.accelerator import HostAccelerator
from hpczero.adapters.base import Adapter
from hpczero.options.config import ParallelOptions, RunConfig, RunOptions, TrainOptions
from hpczero.run.evaluation import Evaluation, passes_of
from hpczero.run.starting.building import build, decay_groups
from hpczero.run.starting.reading import OwnBatches, OwnHeldOut, Rows
from hpczero.run.step import TrainingStep
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from hpczero import Topology

SEED, STEPS, GLOBAL_BATCH, RATE, CLIP = 3, 10, 12, 3e-3, 1.0
HELD_OUT = 7  # no number of ranks divides it


def whole(adapter: Adapter) -> nn.Module:
    """The adapter's model with its first values."""
    torch.manual_seed(SEED)
    model = adapter.build()
    fill = adapter.initializer(model, SEED)
    if fill is not None:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                fill(name, parameter)
    return model


def plain_run(adapter: Adapter, training: Rows, held_out: Rows) -> list[float]:
    """Losses of ``STEPS`` steps, then held-out loss and metric, by plain torch in one process."""
    model = whole(adapter)
    optimizer = torch.optim.AdamW(decay_groups(model, adapter, 0.1), lr=RATE, betas=(0.9, 0.95))
    batches, figures = OwnBatches(training, GLOBAL_BATCH, SEED), []
    for number in range(STEPS):
        loss = adapter.loss(model, *batches.micro_batch(number, 0, 0, 1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        figures.append(loss.item())
    model.eval()
    wanted = min(HELD_OUT, len(held_out))
    numbers = [index * len(held_out) // wanted for index in range(wanted)]
    rows = held_out.take(numbers)
    with torch.no_grad():
        figures.append(adapter.loss(model, *rows).item())
        if adapter.metric_name:
            figures.append(adapter.metric(model, *rows).item())
    return figures


def sharded_run(
    adapter: Adapter, training: Rows, held_out: Rows, topology: Topology, **parallel: Any
) -> list[float]:
    """The same by the parts of the training command, in two micro batches of each rank."""
    config = RunConfig(
        run=RunOptions(seed=SEED),
        train=TrainOptions(learning_rate=RATE, weight_decay=0.1),
        parallel=ParallelOptions(**parallel),
    )
    accelerator = HostAccelerator()
    model, optimizer = build(config, adapter, topology, accelerator)
    rank, size = topology.data.rank, topology.data.size
    batches = OwnBatches(training, GLOBAL_BATCH, SEED)
    passes = passes_of(config.parallel, adapter, model, accumulation=2, accelerator=accelerator)
    step = TrainingStep(
        model,
        optimizer,
        passes=passes,
        samples=lambda number, micro: batches.micro_batch(number, micro, rank, size, 2),
        accelerator=accelerator,
        clip=CLIP,
    )
    figures = [step.take(number).loss for number in range(STEPS)]
    found = Evaluation(
        model,
        OwnHeldOut(held_out, HELD_OUT),
        passes=passes,
        topology=topology,
        accelerator=accelerator,
        micro_batch=2,
        every=0,
        steps=STEPS,
        adapter=adapter,
    ).after(STEPS)
    assert found is not None, "due after the last step"
    hpczero.release(model)
    return [*figures, found.loss, *([] if found.metric is None else [found.metric])]


def text_rows(adapter: Adapter, vocabulary: int) -> Rows:
    """Forty sequences of random tokens, each token's target the next."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (40, adapter.context + 1), generator=draw)
    return Rows((tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), "rows")


def check_losses(
    topology: Topology, adapter: Adapter, training: Rows, held_out: Rows, **parallel: Any
) -> list[float]:
    """Shards have the figures of plain torch, which move; returns them. Collective."""
    found = sharded_run(adapter, training, held_out, topology, **parallel)
    expected = plain_run(adapter, training, held_out)
    apart = [
        abs(one - other) / max(1.0, abs(other)) for one, other in zip(found, expected, strict=True)
    ]
    comm = topology.world.comm
    parallel_assert(comm, max(apart) <= 1e-6, f"{found} and {expected}")
    parallel_assert(comm, abs(found[STEPS - 1] - found[0]) > 1e-4, f"nothing moved: {found}")
    return found
