"""One rank's step by the real engine, recorded: model, zeroify, passes, clip, optimizer.

On a described machine the model lies on the meta device in its true size, and work is counted. Else it lies in memory
of the host, and work is measured here.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hpczero
from hpczero.accelerator import Accelerator, HostAccelerator
from hpczero.adapters.gpt import GPTAdapter
from hpczero.comm import collectives, hierarchical, rails
from hpczero.comm.devices import DirectReach, HostReach
from hpczero.errors import HpcZeroError
from hpczero.job.topology import Topology
from hpczero.memory.buffers import DTYPES
from hpczero.options.config import LayoutOptions
from hpczero.parallel.pipeline.runner import Pipeline
from hpczero.parallel.tensor import own_tokens
from hpczero.parallel.tensor.split import SUMS
from hpczero.plan.footprint import Named, fastest_transport
from hpczero.plan.precision import Precision
from hpczero.plan.spread import Spread
from hpczero.predict.machine import Kernels, Machine, Roofline
from hpczero.run.evaluation import Passes, PipelinePasses, PlainPasses
from hpczero.run.starting.building import divide
from hpczero.run.step import TrainingStep
from scaling.contenders.workload import LEARNING_RATE, SEED
from scaling.simulate.programs import (
    Call,
    Entry,
    Lanes,
    Origin,
    Places,
    Program,
    Receive,
    Send,
    Work,
)
from scaling.simulate.recorder import CountingClock, Cuts, Fused, Operations, Recorder, ThreadClock
from scaling.simulate.standins import (
    Elsewhere,
    RecordedPath,
    RecordedReach,
    RecordedStageMessages,
    group_of,
    topology_of,
    transport_of,
)

MEASURED_STEPS = 3  # of which each piece of work counts with its median


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

    Raises:
        HpcZeroError: steps that should be alike are not.
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
            stack.enter_context(_counted_sums(clock))
            stack.enter_context(Fused(clock))
            stack.enter_context(Operations(clock))
        recorder = Recorder(clock)
        topology = topology_of(recorder, subject.places, rank)
        model, optimizer, step = _made(subject, recorder, topology, device)
        if prepare is not None:
            prepare(model)
        step.take(0)
        cuts = Cuts(recorder, clock, MEASURED_STEPS if machine is None else 1)
        optimizer.register_step_pre_hook(cuts)
        for number in range(cuts.most + 1):
            step.take(1 + number)
        state = hpczero.sharding(model)
        accumulation = spread.accumulation if spread.mesh.pipeline == 1 else 1
        traffic = state.plan.traffic(
            footprint=state.collectives.footprint, micro_steps=accumulation, synced=1
        )
        topology.watchdog.stop()
        found = Recorded(
            _program(rank, _median(cuts.lanes), recorder),
            recorder.origins,
            cuts.flops,
            (traffic.nbytes, traffic.messages),
        )
    del model, optimizer, step, state, topology
    gc.collect()
    return found


def _made(
    subject: Subject, recorder: Recorder, topology: Topology, device: Accelerator
) -> tuple[nn.Module, torch.optim.Optimizer, TrainingStep]:
    """Model, optimizer and step, in the order of training."""
    spread, options = subject.spread, subject.options
    on_host = device.is_host
    torch.manual_seed(SEED)
    config = replace(spread.model, checkpoint_activations=spread.checkpointing)
    adapter = GPTAdapter(config)
    with torch.device("meta"):
        model = adapter.build()
    initialize = adapter.initializer(model, SEED) if on_host else Ones()
    divide(options, adapter, model, topology)
    for sums in model.__dict__.get(SUMS, ()):
        sums._make = lambda group, _: RecordedPath(group, recorder)
    # torch's fused optimizer knows no meta device.
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, fused=on_host or None, foreach=not on_host or None
    )
    inner = HostReach() if on_host else DirectReach(device)
    reach = RecordedReach(device, recorder, inner)
    replicas = None
    if topology.replicate.size > 1:
        degrees = ("replicate",)
        replicas = group_of(
            recorder, subject.places, topology.rank, degrees, topology.watchdog, "replicas"
        )
    transport = transport_of(
        recorder,
        topology,
        replicas,
        reach,
        subject.transport,
        node_dtype=DTYPES[spread.reduce],
        secondary=spread.secondary,
    )
    hpczero.zeroify(
        model,
        optimizer,
        stage=spread.stage,
        topology=topology,
        precision=Precision.of(spread.precision, reduce=spread.reduce),
        transport=transport,
        initialize=initialize,
    )
    step = TrainingStep(
        model,
        optimizer,
        passes=_passes(subject, adapter, model, recorder, device),
        samples=partial(_samples, spread),
        accelerator=device,
        clip=1.0,
    )
    return model, optimizer, step


def _passes(
    subject: Subject, adapter: GPTAdapter, model: nn.Module, recorder: Recorder, device: Accelerator
) -> Passes:
    """As ``run.passes.passes_of``, with stand-ins for the other stages."""
    spread, state = subject.spread, hpczero.sharding(model)
    own = partial(own_tokens, topology=state.topology)
    if spread.mesh.pipeline == 1:
        return PlainPasses(
            model,
            loss=adapter.loss,
            accumulation=spread.accumulation,
            accelerator=device,
            own=own,
        )
    pipeline = Pipeline(model, micro_batches=spread.accumulation, schedule=subject.options.order)
    mesh = spread.mesh
    tokens = spread.model.context // mesh.sequence
    if spread.sequence_parallel:
        tokens //= mesh.tensor
    form = torch.empty(
        (spread.micro_batch, tokens, spread.model.hidden),
        dtype=DTYPES[state.precision.param],
        device=device.device,
    )
    pipeline.messages = RecordedStageMessages(
        recorder, state.topology.pipeline, chunks=spread.interleave, form=form
    )
    return PipelinePasses(pipeline, group=state.topology.pipeline, accelerator=device, own=own)


def _samples(spread: Spread, number: int, micro: int) -> tuple[Any, Any]:  # Any: numpy arrays
    draw = np.random.default_rng((SEED, number, micro))
    shape = (spread.micro_batch, spread.model.context + 1)
    tokens = draw.integers(0, spread.model.vocab_size, shape)
    return tokens[:, :-1].copy(), tokens[:, 1:].copy()


class Ones:
    """First values of a model that has no memory: a RangeInitializer."""

    def __call__(self, name: str, tensor: Tensor) -> None:
        """Fill one parameter."""
        tensor.fill_(1.0)

    def fill_range(self, name: str, shape: tuple[int, ...], start: int, values: Tensor) -> None:
        """Fill a part of one."""
        values.fill_(1.0)


class Absent(HostAccelerator):
    """A device without memory, whose queue is always empty."""

    is_host = False

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("meta")

    def bring(self, tensor: Tensor) -> Tensor:
        """The form of it."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


@contextmanager
def _counted_sums(clock: CountingClock) -> Iterator[None]:
    """Context in which a sum of blocks costs what one kernel does that reads each block once."""

    def counted(blocks: Sequence[Tensor], out: Tensor, **options: Any) -> None:
        read = sum(block.numel() * block.element_size() for block in blocks)
        clock.moved(read + out.numel() * out.element_size())

    changed: list[tuple[Any, str, Any]] = [
        (module, "tree_sum", counted) for module in (collectives, hierarchical, rails)
    ]
    changed.append((rails, "Blocks", Elsewhere))
    before = [(module, name, vars(module)[name]) for module, name, _ in changed]
    try:
        for module, name, value in changed:
            vars(module)[name] = value
        yield
    finally:
        for module, name, value in before:
            vars(module)[name] = value


def _program(rank: int, lanes: Lanes, recorder: Recorder) -> Program:
    """With the communicators that are used."""
    used = set()
    for entries in lanes.values():
        for entry in entries:
            if isinstance(entry, (Call, Send, Receive)):
                used.add(entry.comm)
            if isinstance(entry, Call) and entry.beside:
                used.add(entry.beside)
    comms = {name: ranks for name, ranks in recorder.comms.items() if name in used}
    return Program(rank, lanes, comms)


def _median(lanes: Sequence[Lanes]) -> Lanes:
    """Entries of steps that are alike, with the median of each piece of work."""
    if len(lanes) == 1:
        return lanes[0]
    found: dict[str, list[Entry]] = {}
    for name in lanes[0]:
        steps = [_pairs(each.get(name, ())) for each in lanes]
        bare = [[_with_work(entry, Work()) for _, entry in step] for step in steps]
        if any(other != bare[0] for other in bare) or any(
            each.keys() != lanes[0].keys() for each in lanes
        ):
            raise HpcZeroError(
                "steps of one rank made different calls, expected the same in each; record more warm-up steps"
            )
        found[name] = [each for pairs in zip(*steps, strict=True) for each in _middle(pairs)]
    return found


def _pairs(lane: Sequence[Entry]) -> list[tuple[Work, Entry | None]]:
    """Each entry with the work before it; at the end the work after the last one."""
    found: list[tuple[Work, Entry | None]] = []
    before = Work()
    for entry in lane:
        if isinstance(entry, Work):
            before += entry
        else:
            found.append((before, entry))
            before = Work()
    return [*found, (before, None)]


def _middle(pairs: Sequence[tuple[Work, Entry | None]]) -> Iterator[Entry]:
    """The median work before an entry, and the entry with the median of the work in it."""
    work, (_, entry) = _median_work([before for before, _ in pairs]), pairs[0]
    if work:
        yield work
    if entry is not None:
        inside = [other.work for _, other in pairs if isinstance(other, Call)]
        yield _with_work(entry, _median_work(inside)) if inside else entry


def _median_work(works: Sequence[Work]) -> Work:
    return Work(median(each.device_s for each in works), median(each.host_s for each in works))


def _with_work(entry: Any, work: Work) -> Any:
    return replace(entry, work=work) if isinstance(entry, Call) else entry
