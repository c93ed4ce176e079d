"""From options to this rank's part of a model.

Owns: the order in which a model is cut into stages, layers and tokens. Must not know: any model
(its adapter says how it falls into parts), shards, the loop.
"""

from __future__ import annotations

from torch import nn

from hpczero.adapters.base import Adapter
from hpczero.job.topology import Topology
from hpczero.options.config import LayoutOptions
from hpczero.parallel.pipeline.stages import cut
from hpczero.parallel.tensor import share_sequence, split


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
    if options.context > 1:
        share_sequence(model, topology)
    return model
