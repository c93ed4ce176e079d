"""What is about to be trained, as the plan counts it.

Owns: the way from options and ranks to a ``Run``, of the whole model or of this rank's part. Must not know: what a
machine has, how bytes are counted (``plan.peak``).
"""

from __future__ import annotations

import dataclasses

from hpczero.comm.uneven import carriers_of
from hpczero.job.topology import Topology
from hpczero.models import GPTConfig, parameter_shapes
from hpczero.options.config import LayoutOptions, RunConfig
from hpczero.options.environment import Environment
from hpczero.plan.batch import Batch
from hpczero.plan.footprint import fastest_transport
from hpczero.plan.peak import Network, PartRun, Run
from hpczero.plan.plan import Stage
from hpczero.plan.spread import Spread
from hpczero.run.starting.offloading import activations_of, offload_of


def run_of(
    config: RunConfig,
    model: GPTConfig,
    batch: Batch,
    topology: Topology,
    *,
    is_host: bool,
) -> Run:
    """What is about to be trained, as the plan counts it. Not collective.

    Raises:
        ConfigError: HPCZERO_TRANSPORT is not a transport.
        PlanError: what is offloaded does not fit the stage; inputs of blocks elsewhere would save nothing.
    """
    offload, kept = offload_of(config.offload), activations_of(config)
    offload.check(Stage.of(config.parallel.stage))
    kept.check(on_host=is_host)
    transport = config.parallel.transport
    if transport == "auto":
        transport = Environment.read().transport
    if transport == "auto":
        transport = fastest_transport(
            topology.shard.local_size,
            topology.shard.num_nodes,
            on_host=is_host,
            rectangular=topology.shard.is_rectangular,
        )
    run = Run(
        network=Network(model, tuple(parameter_shapes(model))),
        ranks=topology.size,
        local_size=topology.local_size,
        transport=transport,
        stage=config.parallel.stage,
        precision=config.parallel.precision,
        reduce=config.parallel.reduce,
        sequence=model.context,
        micro_batch=batch.micro_batch,
        accumulation=batch.accumulation,
        checkpointing=model.checkpoint_activations or kept.checkpointing != "none",
        copies=config.checkpoint.background,
        laid_out=config.parallel.nodes is not None or Environment.read().fake_nodes is not None,
        offload=offload,
        kept=kept,
        carriers=carriers_of(topology.shard),
        on_device=not is_host,
    )
    kept.check_saves(inputs=model.layers, input_nbytes=run.input_nbytes)
    return run if topology.mesh.shard == topology.size else _part_of(run, config.parallel, topology)


def _part_of(run: Run, layout: LayoutOptions, topology: Topology) -> PartRun:
    """The run as this rank sees it, which has a part of the model, or one of several copies of everything."""
    model, mesh = run.network.model, topology.mesh
    assert isinstance(model, GPTConfig), "made by run_of"
    spread = Spread(
        model,
        mesh,
        topology.local_size,
        sequence_parallel=layout.sequence,
        secondary=layout.secondary and run.stage == 3,
        schedule=layout.order,
        interleave=layout.interleave,
    )
    stages = [mesh.coordinates(rank)[0] for rank in topology.world.nodes[topology.node_index]]
    fields = {each.name: getattr(run, each.name) for each in dataclasses.fields(run)}
    place = topology.pipeline.rank
    return PartRun(**fields, layout=layout, spread=spread, place=place, near=tuple(stages))
