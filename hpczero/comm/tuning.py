"""Measuring which algorithm is fastest for which size between these nodes.

[Note: Measuring]
Sizes go from small blocks to large ones. Every candidate does the real operation, sums included, on all rails at once.
Its time is that of the slowest rank, and the least of a few runs: noise only adds. A candidate far slower than the best
is not tried at the next size, except the default. A size that would break the budget is not tried at all. It gets the
default, unless another was far better at a size where bandwidth decides; what wins with short blocks wins by latency,
which tells nothing of long ones. All ranks see all times, so all stop and choose alike. A candidate replaces the
default only if it is faster by a margin, so that noise does not choose.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from mpi4py import MPI

from hpczero.comm.algorithms import EXCHANGES, GATHERS, Exchange, Gather
from hpczero.comm.devices import HostReach, Reach
from hpczero.comm.rails import DEFAULT, AlgorithmChoice, Rails, Selection, boundary, candidate_name
from hpczero.job.group import Group
from hpczero.kernels.tree_sum import ShardSum
from hpczero.memory.buffers import Memory
from hpczero.options.environment import Environment
from hpczero.plan.footprint import DEVICE_ROUND_BYTES, ROUND_BYTES

# A sample of the nodes of a job, which measure what goes between all of them.
#
# [Note: Sample]
# Many nodes are measured in samples of at most MOST_NODES, all at once, so every connection is busy as it will be. A
# sample has every k-th node, because neighbours in a job often hang on one switch. Time and memory then stop to grow
# with the number of nodes. By pairs and in the ring a call on more nodes is more messages of the same kind. What was
# measured serves all numbers of nodes of one bucket, if the same algorithms work on them.

MOST_NODES = 16  # of a sample

Trial = Callable[[], None]


def bucket(nodes: int) -> int:
    """The largest number of nodes, of those measured at all, that shares its measurement with ``nodes``."""
    return int(min(1 << (nodes - 1).bit_length(), MOST_NODES))


@dataclass(frozen=True)
class Sample:
    """``local_size`` ranks on each of some of the ``nodes``, which measure together.

    ``comm`` has one rank of each; whoever made the sample frees it. ``reach`` says where the buffers are.
    """

    comm: MPI.Intracomm
    nodes: int
    local_size: int
    reach: Reach

    @classmethod
    def create(cls, group: Group, reach: Reach) -> Sample:
        """The sample of this rank. Collective over the group. See [Note: Sample]."""
        assert group.rail is not None, "nodes of equal size"
        samples = -(-group.num_nodes // MOST_NODES)
        comm = group.rail.Split(group.node_index % samples, group.node_index)
        assert isinstance(comm, MPI.Intracomm), "split from an intracommunicator"
        return cls(comm, group.num_nodes, group.local_size, reach)

    def fits(self, kind: type[Gather] | type[Exchange]) -> bool:
        """Whether an algorithm works on all nodes and in all samples, whose sizes may differ by one."""
        samples = -(-self.nodes // MOST_NODES)
        sizes = (self.nodes, self.nodes // samples, -(-self.nodes // samples))
        return all(map(kind.fits, sizes))

    def rails(self, node_dtype: torch.dtype, selection: Selection) -> Rails:
        """Rails between these nodes, for buffers of one rail alone. Not collective."""
        return Rails(
            self.comm,
            Memory(),
            local_size=self.local_size,
            local_rank=0,
            node_dtype=node_dtype,
            selection=selection,
            reach=self.reach,
        )

    def ones(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """(numel,) where the buffers will be."""
        return torch.ones(numel, dtype=dtype, device=self.reach.accelerator.device)

    def until_done(self, operation: Trial) -> None:
        """Run it, and wait until a device has done its part."""
        operation()
        self.reach.accelerator.finish()

    def candidates(
        self, default: AlgorithmChoice, kinds: Sequence[type[Gather] | type[Exchange]]
    ) -> tuple[AlgorithmChoice, ...]:
        """The default and all others that fit and differ, in rounds as long as this memory wants them."""
        least = 1 if self.reach.accelerator.is_host else DEVICE_ROUND_BYTES
        every = [default]
        for kind in filter(self.fits, kinds):
            for chunk in CHUNKS[kind.name] if kind.in_rounds else (ROUND_BYTES,):
                every.append(AlgorithmChoice(kind.name, chunk))
        longer = (replace(c, chunk_nbytes=max(c.chunk_nbytes, least)) for c in every)
        return tuple(dict.fromkeys(longer))


logger = logging.getLogger("hpczero.comm")

VERSION = 3  # of the measurement: what another version remembered is not used
SIZES = (2**14, 2**17, 2**20, 2**23)  # bytes of a block
LONG = 2**17  # bytes from which on the time of a block is that of the links
CHUNKS = {  # bytes of a round; on slow links short rounds overlap best, on fast ones each round costs a few calls
    "pairwise": (ROUND_BYTES, 4 * ROUND_BYTES, 32 * ROUND_BYTES),
    "library": (32 * ROUND_BYTES,),
}
BUDGET_S = 2.0
RUNS = 4  # at most, and 2 where a run takes long
WORSE = 4.0  # times the best: not tried at larger sizes, unless it is the default
FAR_BETTER = 0.67  # of the default's time: serves longer blocks unmeasured
MARGIN = 0.95  # of the default's time: what replaces it must be below


def tune(
    group: Group, node_dtype: torch.dtype, *, fresh: bool = False, reach: Reach | None = None
) -> Selection:
    """The selection for these nodes: remembered, or measured in about BUDGET_S seconds. Collective over the group.

    ``group`` has several nodes of equal size. Partial sums travel in ``node_dtype``. ``fresh`` measures even if
    something is remembered. ``reach`` says where the buffers will be, and how MPI gets at them; None for the host's
    memory.
    """
    reach = reach or HostReach()
    path = cache_file(group, reach)
    found = None if fresh else _remembered(group, path)
    if found is not None:
        return found
    began = time.perf_counter()
    with group.watchdog.collective("measuring the algorithms between nodes"):
        sample = Sample.create(group, reach)
        gathers = _measure(group, _gather_trials(sample), budget_s=BUDGET_S / 2)
        spent = max(group.gather(time.perf_counter() - began))
        trials = _exchange_trials(sample, node_dtype)
        exchanges = _measure(group, trials, budget_s=BUDGET_S - spent)
        sample.comm.Free()
    took = group.gather(time.perf_counter() - began)[0]
    selection = Selection(gathers, exchanges, origin=f"measured in {took:.1f} s")
    if group.is_root:
        _remember(path, selection)
    return selection


def cache_file(group: Group, reach: Reach | None = None) -> Path:
    """Where the selection for this kind of nodes is kept. Collective over the group; equal on all ranks.

    Nodes are of one kind if their names differ in digits only. A job that lands on other nodes of the same cluster then
    uses what the first one measured, also on some more or fewer of them ([Note: Sample]).
    """
    nodes = group.num_nodes
    fitting = [kind.name for kind in (*GATHERS, *EXCHANGES) if kind.fits(nodes)]
    with group.watchdog.collective("naming the nodes"):
        kinds = group.comm.allgather(re.sub(r"\d+", "#", MPI.Get_processor_name()))
    where = (reach or HostReach()).name
    size = (bucket(nodes), fitting, group.local_size)
    shape = (VERSION, MPI.Get_library_version(), size, where, sorted(set(kinds)))
    name = f"nodes-{zlib.crc32(repr(shape).encode()):08x}.json"
    try:
        folder = Environment.read().cache.expanduser()
    except RuntimeError:  # no home
        folder = Path(os.devnull)  # where nothing can be kept
    return Path(group.broadcast_text(str(folder / name)))


def _remembered(group: Group, path: Path) -> Selection | None:
    """Selection that rank 0 finds in ``path``, on every rank. Collective."""
    found = None
    if group.is_root:
        try:
            found = Selection.from_json(json.loads(path.read_text()), origin="measured before")
            logger.info("algorithms between nodes are those of %s", path)
        except (FileNotFoundError, NotADirectoryError):
            pass  # the first job on such nodes
        except (OSError, ValueError) as error:
            logger.warning("%s is not used, and measured anew: %s", path, error)
    with group.watchdog.collective("reading the remembered algorithms"):
        agreed: Selection | None = group.comm.bcast(found, root=0)
    return agreed


def _remember(path: Path, selection: Selection) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}.new")
        new.write_text(json.dumps(selection.as_json(), indent=1))
        new.replace(path)  # another job may read it now
    except OSError as error:
        logger.info("what was measured between nodes is not remembered: %s", error)


# --- candidates ------------------------------------------------------------------------------------------------------


class Candidates(NamedTuple):
    """What competes for one operation, the default first, and a context in which a candidate runs at a size."""

    choices: tuple[AlgorithmChoice, ...]
    trial: Callable[[AlgorithmChoice, int], AbstractContextManager[Trial]]


def _gather_trials(sample: Sample) -> Candidates:
    @contextmanager
    def trial(choice: AlgorithmChoice, nbytes: int) -> Iterator[Trial]:
        rails = sample.rails(torch.float32, Selection((choice,), DEFAULT.exchanges))
        blocks = sample.ones(sample.comm.size * nbytes, torch.uint8)
        yield partial(sample.until_done, partial(rails.gather, blocks, nbytes))
        rails.close()

    return Candidates(sample.candidates(DEFAULT.gathers[0], GATHERS), trial)


def _exchange_trials(sample: Sample, node_dtype: torch.dtype) -> Candidates:
    @contextmanager
    def trial(choice: AlgorithmChoice, nbytes: int) -> Iterator[Trial]:
        rails = sample.rails(node_dtype, Selection(DEFAULT.gathers, (choice,)))
        numel = nbytes // node_dtype.itemsize
        whole = sample.ones(sample.comm.size * numel, torch.float32)
        out = sample.ones(numel, torch.float32)

        def parts(start: int, count: int) -> list[torch.Tensor]:
            return [whole[start : start + count]] * sample.local_size

        reduce = partial(rails.reduce, parts, ShardSum(out), torch.float32)
        yield partial(sample.until_done, reduce)
        rails.close()

    return Candidates(sample.candidates(DEFAULT.exchanges[0], EXCHANGES), trial)


# --- measurement -----------------------------------------------------------------------------------------------------


def _measure(
    group: Group, candidates: Candidates, *, budget_s: float
) -> tuple[AlgorithmChoice, ...]:
    """The choice at every size that the budget allows. Collective; see [Note: Measuring]."""
    left_s, running, default = budget_s, list(candidates.choices), candidates.choices[0]
    chosen: list[AlgorithmChoice] = []
    before: dict[AlgorithmChoice, float] = {}
    for index, nbytes in enumerate(SIZES):
        here = _that_differ(running, nbytes)
        from_nbytes = boundary(SIZES[index - 1], nbytes) if index else 0
        runs = RUNS
        if before:
            growth, usual = nbytes / SIZES[index - 1], min(before.values())
            expected_s = growth * sum(before.get(choice, usual) for choice in here)
            if expected_s * RUNS > left_s:
                runs = 2
            if expected_s * runs > left_s:
                speaks = SIZES[index - 1] >= LONG and default in before
                if not speaks or min(before.values()) > FAR_BETTER * before[default]:
                    chosen.append(replace(default, from_nbytes=from_nbytes))
                break
        times: dict[AlgorithmChoice, float] = {}
        for choice in here:
            times[choice], spent = _time(group, candidates, choice, nbytes, runs)
            left_s -= spent
        best = min(times, key=lambda choice: times[choice])
        if default in times and times[best] > MARGIN * times[default]:
            best = default
        seconds = {candidate_name(c.algorithm, c.chunk_nbytes): s for c, s in times.items()}
        chosen.append(replace(best, from_nbytes=from_nbytes, at_nbytes=nbytes, seconds=seconds))
        running = [c for c in running if times.get(c, 0.0) <= WORSE * times[best] or c == default]
        before = {choice: seconds for choice, seconds in times.items() if choice in running}
    return tuple(chosen)


def _that_differ(choices: list[AlgorithmChoice], nbytes: int) -> list[AlgorithmChoice]:
    """Choices without those that do the same as an earlier one at this size: a short block is one round."""
    rounds = {
        (choice.algorithm, min(choice.chunk_nbytes, nbytes)): choice for choice in choices[::-1]
    }
    return [choice for choice in choices if choice in rounds.values()]


def _time(
    group: Group, candidates: Candidates, choice: AlgorithmChoice, nbytes: int, runs: int
) -> tuple[float, float]:
    """Seconds of the fastest run on the slowest rank, and of all runs together. Collective; equal on all ranks."""
    began = time.perf_counter()
    best = float("inf")
    with candidates.trial(choice, nbytes) as run:
        for _ in range(runs):
            group.barrier()
            start = time.perf_counter()
            run()
            best = min(best, max(group.gather(time.perf_counter() - start)))
    return best, max(group.gather(time.perf_counter() - began))
