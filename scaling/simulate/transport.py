"""The real transports over stand-ins: what they would move, recorded.

Owns: stand-ins for the peers of a node and for the queue that runs beside the model, and the choice of a transport.
Must not know: the engine, what a step is, time.

The order of everything is the transports' own. What a queue would do later is done at once, and recorded as a lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from typing_extensions import override

from hpczero.comm import Collectives, Flat, Hierarchical, Hybrid, Work
from hpczero.comm.background import Background
from hpczero.comm.devices import Reach
from hpczero.comm.inside import NodeLevel, Parts
from hpczero.job.group import Group
from hpczero.job.topology import Topology
from hpczero.memory.buffers import Buffer, Memory, Use
from hpczero.plan.footprint import Named
from scaling.simulate.messages import name_of
from scaling.simulate.recorder import Recorder
from scaling.simulate.standin import StandIn

SHARDS, REPLICAS = "shards", "replicas"  # lanes


# --- inside a node


class StandInBuffer(Buffer):
    """Whole parameters that a node would share."""

    shared = True

    def __init__(self, *args: Any, lasts: bool, **others: Any) -> None:
        super().__init__(*args, **{**others, "keep": True})
        self.lasts = lasts  # of this one object
        with torch.no_grad():
            self.tensor.zero_()  # parts of peers stay so


class Peers(NodeLevel):
    """Ranks of a node that share memory, of which this one is alone."""

    most_nbytes = 2**62

    def __init__(
        self,
        node: StandIn,
        memory: Memory,
        recorder: Recorder,
        *,
        device: torch.device,
        lasts: bool,
    ) -> None:
        super().__init__(node, memory, device=device)
        self.shares_wholes = device.type == "cpu"
        self._recorder, self._lasts, self._node = recorder, lasts, node

    @override
    def allocate(
        self, numel: int, dtype: torch.dtype, *, category: str, use: Use, keep: bool
    ) -> Buffer:
        if use is not Use.GATHER or not self.shares_wholes:
            # Gradients that peers read stay where they are while a sum is put off.
            keep = keep or (use is Use.REDUCE and self.shares_wholes)
            return super().allocate(numel, dtype, category=category, use=use, keep=keep)
        return StandInBuffer(numel, dtype, memory=self.memory, category=category, lasts=self._lasts)

    @override
    def shares(self, full: Tensor, use: Use) -> bool:
        return use is Use.REDUCE or self.shares_wholes

    @override
    def spread(self, full: Tensor) -> Callable[[], None] | None:
        pulled = 0 if self.shares_wholes else full.numel() // self.comm.size * full.element_size()
        self._meet(full, pulled)
        return None

    @override
    def reading(self, full: Tensor) -> AbstractContextManager[Parts]:
        return self._reading(full)

    @contextmanager
    def _reading(self, full: Tensor) -> Iterator[Parts]:
        part = full.numel() // self.comm.size
        self._meet(full, 0)
        if not self.shares_wholes:
            self._recorder.reads = self._node.name_of, part * full.element_size()
        yield lambda start, count: [full.narrow(0, start, count)] * self.comm.size
        if self._recorder.reads[1]:  # no other call has gone on meanwhile
            self._recorder.reads = "", 0
            self._meet(full, part * full.element_size())

    def _meet(self, full: Tensor, sent: int) -> None:
        self._recorder.call(
            self._node.name_of, full.numel() * full.element_size(), operation="meet", sent=sent
        )

    @override
    def close(self) -> None:
        """Nothing to free."""


# --- beside the model


class Lane(Background):
    """A queue whose operations are done at once, and recorded as done by a lane of their own."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    @override
    def start(self, what: str, operation: Callable[[], None]) -> Callable[[], None]:
        with self._recorder.started(self._name) as starting, torch.no_grad():
            operation()
        return starting.wait

    @override
    def drain(self) -> None:
        """Nothing is under way."""

    @override
    def close(self) -> None:
        """No thread was started."""


class Labelled(Collectives):
    """Says of each call what it is for."""

    recorder: Recorder

    @override
    def all_gather(self, full: Tensor, *, name: str, again: bool = False) -> Work:
        with self.recorder.labelled("all_gather", name, name_of(full)):
            return super().all_gather(full, name=name, again=again)

    @override
    def reduce_scatter(
        self, full: Tensor, out: Tensor, *, scale: float, accumulate: bool = False, name: str
    ) -> Work:
        with self.recorder.labelled("reduce_scatter", name, name_of(full)):
            return super().reduce_scatter(full, out, scale=scale, accumulate=accumulate, name=name)

    @override
    def total(self, value: float, *, name: str) -> float:
        with self.recorder.labelled("total", name, "digits"):
            return super().total(value, name=name)

    @override
    def agree(self, flags: npt.NDArray[np.uint8], *, name: str) -> npt.NDArray[np.uint8]:
        with self.recorder.labelled("agree", name, "bits"):
            return super().agree(flags, name=name)

    @override
    def share(
        self, values: npt.NDArray[np.float64], *, name: str, replicas: bool = False
    ) -> npt.NDArray[np.float64]:
        with self.recorder.labelled("share", name, "float64"):
            return super().share(values, name=name, replicas=replicas)


class RecordedFlat(Labelled, Flat):
    """Flat over stand-ins."""

    def __init__(self, recorder: Recorder, *args: Any, **others: Any) -> None:
        self.recorder = recorder
        super().__init__(*args, **others)


class RecordedHierarchical(Labelled, Hierarchical):
    """Hierarchical over stand-ins."""

    def __init__(self, recorder: Recorder, *args: Any, **others: Any) -> None:
        self.recorder = recorder
        super().__init__(*args, **others)
        if self._background is not None:
            self._background = Lane(recorder, SHARDS)

    @override
    def _level(
        self, inside: str, group: Group, messages: NodeLevel, *, shares_wholes: bool
    ) -> NodeLevel:
        if group.node.size == 1 or inside == "messages":
            return messages
        assert isinstance(group.node, StandIn), "of this study"
        node = self._own[1] if self._own else group.node
        assert isinstance(node, StandIn), "a duplicate of it"
        return Peers(
            node, self.memory, self.recorder, device=self.device, lasts=group.num_nodes == 1
        )


class RecordedHybrid(Labelled, Hybrid):
    """Hybrid over stand-ins."""

    def __init__(self, recorder: Recorder, *args: Any, **others: Any) -> None:
        self.recorder = recorder
        super().__init__(*args, **others)
        if self._background is not None:
            self._background = Lane(recorder, REPLICAS)


def transport_of(
    recorder: Recorder,
    topology: Topology,
    replicas: Group | None,
    reach: Reach,
    name: Callable[[int, int], Named],
    *,
    node_dtype: torch.dtype,
    secondary: bool = False,
) -> Collectives:
    """The transport that ``comm.choose`` would make.

    Args:
        recorder: of this rank.
        topology: of stand-ins.
        replicas: a group of its own with the ranks of ``topology.replicate``; None where it is one rank.
        reach: a RecordedReach.
        name: which transport serves so many ranks of a node on so many nodes.
        node_dtype: of partial sums.
        secondary: whether nodes keep what they have gathered.
    """

    def one(ranks: Topology | Group, *, second: bool, overlap: bool, memory: Memory | None) -> Any:
        group = ranks.shard if isinstance(ranks, Topology) else ranks
        chosen = name(group.local_size, group.num_nodes)
        common = {"node_dtype": node_dtype, "reach": reach, "memory": memory}
        if chosen == "flat":
            return RecordedFlat(recorder, ranks, **common)
        wanted = group.num_nodes > 1 or not reach.accelerator.is_host
        inside = chosen if chosen in ("window", "ipc") else "messages"
        return RecordedHierarchical(
            recorder,
            ranks,
            inside=inside,
            overlap=overlap and wanted,
            secondary=second,
            **common,
        )

    if replicas is None:
        return one(topology, second=secondary, overlap=True, memory=None)
    inside = one(topology.shard, second=secondary, overlap=True, memory=None)
    outside = one(replicas, second=False, overlap=False, memory=inside.memory)
    wanted = replicas.num_nodes > 1 or not reach.accelerator.is_host
    return RecordedHybrid(recorder, topology, inside, outside, overlap=wanted)
