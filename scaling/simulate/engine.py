"""One rank's step by the real engine, recorded: model, zeroify, passes, clip, optimizer.

On a described machine the model lies on the meta device in its true size, and work is counted. Else it lies in memory
of the host, and work is measured here.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import hpczero
from hpczero.accelerator import Accelerator, HostAccelerator
from hpczero.adapters.gpt import GPTAdapter
from hpczero.comm import collectives, rails
from hpczero.comm.devices import DirectReach, HostReach
from hpczero.job.topology import Topology
from hpczero.kernels import tree_sum as sums
from hpczero.memory.buffers import DTYPES
from hpczero.options.config import LayoutOptions
from hpczero.parallel.tensor.split import SUMS
from hpczero.plan.footprint import Named, fastest_transport
from hpczero.plan.precision import Precision
from hpczero.plan.spread import Spread
from hpczero.predict.machine import Kernels, Machine, Roofline
from hpczero.run.evaluation import PipelinePasses
from scaling.contenders.base import adamw
from scaling.contenders.training import GPTTraining, random_samples
from scaling.contenders.workload import SEED
from scaling.hostcost.step import Absent, Elsewhere
from scaling.simulate import standins
from scaling.simulate.programs import Call, Lanes, Origin, Places, Program, Receive, Send, Work
from scaling.simulate.recorder import CountingClock, Cuts, Fused, Operations, Recorder, ThreadClock

MEASURED_STEPS = 3  # the one with the median work counts


@dataclass(frozen=True)
class Subject:
    """What is recorded."""

    spread: Spread  # the model and its ranks
    options: LayoutOptions  # the layout, as the spread has it
    machine: Machine | None = None  # whose devices compute; None: this processor, in small
    kernels: Kernels | None = None  # of one rank of the machine; None takes a roofline of it

    @property
    def places(self) -> Places:
        """Where the ranks are."""
        return Places(self.spread.mesh, self.spread.ranks_per_node)

    def transport(self, local: int, nodes: int) -> Named:
        """Which transport serves so many ranks of a node on so many nodes."""
        return fastest_transport(local, nodes, on_host=self.machine is None)


@dataclass(frozen=True)
class Recorded:
    """One rank's step.

    Attributes:
        program: what it did.
        origins: of its communicators.
        flops: of products and attention; 0 where work was measured.
        planned: what the plan says that this rank sends: (bytes, messages between nodes) of its shards.
    """

    program: Program
    origins: Mapping[str, Origin]
    flops: float
    planned: tuple[int, int]


def record(
    subject: Subject, rank: int, *, prepare: Callable[[nn.Module], None] | None = None
) -> Recorded:
    """The step of world rank ``rank``. Not collective: all others are stand-ins.

    Args:
        subject: what is trained, and how.
        rank: of the world.
        prepare: changes the model once it is zeroified, for tests of what goes wrong.
    """
    spread, machine = subject.spread, subject.machine
    with ExitStack() as stack:
        if machine is None:
            clock: ThreadClock | CountingClock = ThreadClock()
            device: Accelerator = HostAccelerator()
        else:
            item = Precision.of(spread.precision).param_itemsize
            kernels = subject.kernels or Roofline(machine, spread.precision, item)
            clock, device = CountingClock(kernels, machine.memory_rate), Absent()
            for module in (collectives, sums):
                stack.enter_context(patch.object(module, "tree_sum", partial(_count_sum, clock)))
            stack.enter_context(patch.object(rails, "Blocks", Elsewhere))
            stack.enter_context(Fused(clock))
            stack.enter_context(Operations(clock))
        recorder = Recorder(clock)
        topology = standins.topology_of(recorder, subject.places, rank)
        training = _training(subject, recorder, topology, device)
        if prepare is not None:
            prepare(training.model)
        training.take()
        cuts = Cuts(recorder, clock, MEASURED_STEPS if machine is None else 1)
        training.optimizer.register_step_pre_hook(cuts)
        training.steps(cuts.most + 1)
        state = hpczero.sharding(training.model)
        accumulation = spread.accumulation if spread.mesh.pipeline == 1 else 1
        traffic = state.plan.traffic(
            footprint=state.collectives.footprint, micro_steps=accumulation, synced=1
        )
        topology.watchdog.stop()
        found = Recorded(
            _program(rank, sorted(cuts.lanes, key=_seconds)[len(cuts.lanes) // 2], recorder),
            recorder.origins,
            cuts.flops,
            (traffic.nbytes, traffic.messages),
        )
    del training, state, topology
    gc.collect()
    return found


def _training(
    subject: Subject, recorder: Recorder, topology: Topology, device: Accelerator
) -> GPTTraining:
    """Model, optimizer and steps as in training, with stand-ins for all other ranks."""
    spread, mesh, on_host = subject.spread, subject.spread.mesh, device.is_host
    torch.manual_seed(SEED)
    inner = HostReach() if on_host else DirectReach(device)
    replicas = None
    if topology.replicate.size > 1:
        degrees = ("replicate",)
        replicas = standins.group_of(
            recorder, subject.places, topology.rank, degrees, topology.watchdog, "replicas"
        )
    transport = standins.transport_of(
        recorder,
        topology,
        replicas,
        standins.RecordedReach(device, recorder, inner),
        subject.transport,
        node_dtype=DTYPES[spread.reduce],
        secondary=spread.secondary,
    )
    # torch's fused optimizer knows no meta device.
    apart: dict[str, Any] = {"initialize": Ones(), "optimizer": partial(adamw, fused=False)}
    training = GPTTraining(
        GPTAdapter(replace(spread.model, checkpoint_activations=spread.checkpointing)),
        topology,
        lambda *step: random_samples((SEED, *step), spread.micro_batch, spread.model),
        subject.options,
        accumulation=spread.accumulation,
        device=device,
        stage=spread.stage,
        precision=Precision.of(spread.precision, reduce=spread.reduce),
        transport=transport,
        secondary=False,  # which the transport has
        **({} if on_host else apart),
    )
    for each in training.model.__dict__.get(SUMS, ()):
        each._make = lambda group, _: standins.RecordedPath(group, recorder)
    if isinstance(training.passes, PipelinePasses):
        tokens = spread.model.context // mesh.sequence
        if spread.sequence_parallel:
            tokens //= mesh.tensor
        shape = (spread.micro_batch, tokens, spread.model.hidden)
        dtype = DTYPES[hpczero.sharding(training.model).precision.param]
        training.passes._pipeline.messages = standins.RecordedStageMessages(
            recorder,
            topology.pipeline,
            chunks=spread.interleave,
            form=torch.empty(shape, dtype=dtype, device=device.device),
        )
    return training


class Ones:
    """First values of a model that has no memory: a RangeInitializer."""

    def __call__(self, name: str, tensor: Tensor) -> None:
        """Fill one parameter."""
        tensor.fill_(1.0)

    def fill_range(self, name: str, shape: tuple[int, ...], start: int, values: Tensor) -> None:
        """Fill a part of one."""
        values.fill_(1.0)


def _count_sum(
    clock: CountingClock, blocks: Sequence[Tensor], out: Tensor, **options: object
) -> None:
    """A sum of blocks costs what one kernel does that reads each block once."""
    clock.moved(sum(block.nbytes for block in blocks) + out.nbytes)


def _program(rank: int, lanes: Lanes, recorder: Recorder) -> Program:
    """With the communicators that are used."""
    used = set[str]()
    for entry in itertools.chain(*lanes.values()):
        if isinstance(entry, Call):
            used |= {entry.comm, entry.beside}
        elif isinstance(entry, (Send, Receive)):
            used.add(entry.comm)
    return Program(rank, lanes, {name: r for name, r in recorder.comms.items() if name in used})


def _seconds(lanes: Lanes) -> float:
    """Work of one step."""
    works = (
        each.work if isinstance(each, Call) else each for each in itertools.chain(*lanes.values())
    )
    return sum(work.seconds for work in works if isinstance(work, Work))
