"""From options to this rank's part of a model.

Owns: the order in which a model is cut into stages, layers and tokens, and what calls it then. Must not know: any model
(its adapter says how it falls into parts), shards, the loop.
"""

from __future__ import annotations

from torch import nn

from hpczero.accelerator import Accelerator
from hpczero.adapters.base import Adapter
from hpczero.job.topology import Topology
from hpczero.options.parallel import LayoutOptions
from hpczero.parallel.pipeline.runner import Pipeline
from hpczero.parallel.pipeline.stages import cut
from hpczero.parallel.tensor import split
from hpczero.run.passes import Passes, PipelinePasses, PlainPasses


def divide(
    options: LayoutOptions, adapter: Adapter, model: nn.Module, topology: Topology
) -> nn.Module:
    """Keep this rank's part of ``model``, in place, before its optimizer is made. Collective over the topology's world.

    Args:
        options: degrees, which are those of the topology's mesh.
        adapter: of the model.
        model: whole, on the meta device.
        topology: the ranks.

    Returns:
        ``model`` itself.

    Raises:
        PlanError: the model cannot be divided so; the same on every rank.
    """
    if options.pipeline > 1:
        cut(model, topology, adapter.stages(model), interleave=options.interleave)
    if options.tensor > 1:
        split(model, topology, adapter.tensor_rule(), sequence=options.sequence)
    return model


def passes_of(
    options: LayoutOptions,
    adapter: Adapter,
    model: nn.Module,
    *,
    accumulation: int,
    accelerator: Accelerator,
) -> Passes:
    """What makes the gradients of a step. Not collective.

    Args:
        options: schedule of the pipeline.
        adapter: of the model.
        model: zeroified.
        accumulation: micro steps in a step, which are the micro batches of a pipeline.
        accelerator: device of the model.

    Raises:
        ConfigError: numbers that the schedule cannot run.
    """
    if options.pipeline == 1:
        return PlainPasses(
            model, loss=adapter.loss, accumulation=accumulation, accelerator=accelerator
        )
    pipeline = Pipeline(model, micro_batches=accumulation, schedule=options.order)
    return PipelinePasses(pipeline, accelerator=accelerator)
