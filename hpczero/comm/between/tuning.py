"""Measuring which algorithm is fastest for which size between these nodes.

Owns: the candidates, the measurement, and the file that keeps it for the next job. Must not know: buffers of units,
stages, what a selection is used for.

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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from mpi4py import MPI

from hpczero.comm.algorithms import EXCHANGES, GATHERS
from hpczero.comm.between.rails import Rails
from hpczero.comm.between.selection import DEFAULT, Choice, Selection, boundary, candidate_name
from hpczero.job.group import Group
from hpczero.memory.buffers import Memory
from hpczero.options.environment import Environment
from hpczero.plan.rounds import ROUND_BYTES

logger = logging.getLogger("hpczero.comm")

VERSION = 2  # of the measurement: what another version remembered is not used
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

Trial = Callable[[], None]


def tune(group: Group, node_dtype: torch.dtype, *, fresh: bool = False) -> Selection:
    """The selection for these nodes: remembered, or measured in about BUDGET_S seconds. Collective over the group.

    Args:
        group: several nodes of equal size.
        node_dtype: dtype of partial sums on the network.
        fresh: whether to measure even if something is remembered.
    """
    path = cache_file(group)
    found = None if fresh else _remembered(group, path)
    if found is not None:
        return found
    began = time.perf_counter()
    with group.watchdog.watch("measuring the algorithms between nodes"):
        gathers = _measure(group, _gather_trials(group), budget_s=BUDGET_S / 2)
        spent = max(group.gather(time.perf_counter() - began))
        trials = _exchange_trials(group, node_dtype)
        exchanges = _measure(group, trials, budget_s=BUDGET_S - spent)
    took = group.gather(time.perf_counter() - began)[0]
    selection = Selection(gathers, exchanges, origin=f"measured in {took:.1f} s")
    if group.is_root:
        _remember(path, selection)
    return selection


def cache_file(group: Group) -> Path:
    """Where the selection for this kind of nodes is kept. Collective over the group; equal on all ranks.

    Nodes are of one kind if their names differ in digits only. A job that lands on other nodes of the same cluster then
    uses what the first one measured.
    """
    with group.watchdog.watch("naming the nodes"):
        kinds = group.comm.allgather(re.sub(r"\d+", "#", MPI.Get_processor_name()))
    shape = (VERSION, MPI.Get_library_version(), group.nodes, sorted(set(kinds)))
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
    with group.watchdog.watch("reading the remembered algorithms"):
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


class Candidates:
    """What competes for one operation.

    Attributes:
        choices: the default first.
        trial: context in which one of them runs at a size.
    """

    def __init__(
        self, choices: tuple[Choice, ...], trial: Callable[[Choice, int], Iterator[Trial]]
    ) -> None:
        self.choices = choices
        self.trial = contextmanager(trial)


def _rails(group: Group, node_dtype: torch.dtype, selection: Selection) -> Rails:
    assert group.rail is not None, "nodes of equal size"
    return Rails(
        group.rail,
        Memory(),
        local_size=group.node.size,
        node_dtype=node_dtype,
        selection=selection,
    )


def _gather_trials(group: Group) -> Candidates:
    default = DEFAULT.gathers[0]
    every = [
        Choice(kind.name, chunk)
        for kind in GATHERS
        if kind.fits(group.num_nodes)
        for chunk in (CHUNKS[kind.name] if kind.in_rounds else (ROUND_BYTES,))
    ]
    choices = (default, *(choice for choice in every if choice != default))

    def trial(choice: Choice, nbytes: int) -> Iterator[Trial]:
        rails = _rails(group, torch.float32, Selection((choice,), DEFAULT.exchanges))
        blocks = torch.ones(group.num_nodes * nbytes, dtype=torch.uint8)
        yield partial(rails.gather, blocks, nbytes, 0)  # a buffer of this rail alone
        rails.close()

    return Candidates(choices, trial)


def _exchange_trials(group: Group, node_dtype: torch.dtype) -> Candidates:
    default = DEFAULT.exchanges[0]
    names = [kind.name for kind in EXCHANGES if kind.fits(group.num_nodes)]
    every = [Choice(name, chunk) for name in names for chunk in CHUNKS[name]]
    choices = (default, *(choice for choice in every if choice != default))

    def trial(choice: Choice, nbytes: int) -> Iterator[Trial]:
        rails = _rails(group, node_dtype, Selection(DEFAULT.gathers, (choice,)))
        numel = nbytes // node_dtype.itemsize
        whole = torch.ones(group.num_nodes * numel)
        out = torch.empty(numel)

        def parts(start: int, count: int) -> list[torch.Tensor]:
            return [whole[start : start + count]] * group.node.size

        yield partial(rails.reduce, parts, out, torch.float32, 1.0, False)
        rails.close()

    return Candidates(choices, trial)


# --- measurement -----------------------------------------------------------------------------------------------------


def _measure(group: Group, candidates: Candidates, *, budget_s: float) -> tuple[Choice, ...]:
    """The choice at every size that the budget allows. Collective; see [Note: Measuring]."""
    left_s, running, default = budget_s, list(candidates.choices), candidates.choices[0]
    chosen: list[Choice] = []
    before: dict[Choice, float] = {}
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
        times: dict[Choice, float] = {}
        for choice in here:
            times[choice], spent = _time(group, candidates, choice, nbytes, runs)
            left_s -= spent
        best = min(times, key=lambda choice: times[choice])
        if default in times and times[best] > MARGIN * times[default]:
            best = default
        chosen.append(
            Choice(
                best.algorithm,
                best.chunk_nbytes,
                from_nbytes=from_nbytes,
                at_nbytes=nbytes,
                seconds={candidate_name(c.algorithm, c.chunk_nbytes): s for c, s in times.items()},
            )
        )
        running = [c for c in running if times.get(c, 0.0) <= WORSE * times[best] or c == default]
        before = {choice: seconds for choice, seconds in times.items() if choice in running}
    return tuple(chosen)


def _that_differ(choices: list[Choice], nbytes: int) -> list[Choice]:
    """Choices without those that do the same as an earlier one at this size.

    A block that is short enough is one round.
    """
    rounds = {
        (choice.algorithm, min(choice.chunk_nbytes, nbytes)): choice for choice in choices[::-1]
    }
    return [choice for choice in choices if choice in rounds.values()]


def _time(
    group: Group, candidates: Candidates, choice: Choice, nbytes: int, runs: int
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
