"""What is measured between nodes, and remembered. Fake nodes: which algorithm wins there means nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hpczero
from hpczero.comm import choose, tuning
from hpczero.comm.devices import DirectReach, HostReach, StagedReach
from hpczero.comm.rails import DEFAULT, AlgorithmChoice, Rails
from hpczero.comm.tuning import cache_file, tune
from hpczero.job.watchdog import Watchdog
from hpczero.options.values import ALGORITHMS
from hpczero.plan.footprint import DEVICE_ROUND_BYTES
from tests.helpers.late import LateAccelerator
from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(3, 4)]


@pytest.fixture(autouse=True)
def _cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "BUDGET_S", 0.5)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


@pytest.fixture
def nodes(comm: MPI.Intracomm) -> Iterator[Topology]:
    """Three nodes of one rank, or two of two."""
    topology = hpczero.Topology.create(comm, [0, 0, 1, 1] if comm.size == 4 else [0, 1, 2])
    yield topology
    topology.free()


def test_every_algorithm_that_fits_is_measured_and_all_ranks_choose_alike(
    comm: MPI.Intracomm, nodes: Topology
) -> None:
    selection = tune(nodes.shard, torch.float32)
    parallel_assert(comm, len(set(comm.allgather(repr(selection)))) == 1)
    fits = set(ALGORITHMS["all_gather"]) - ({"doubling"} if nodes.num_nodes == 3 else set())
    first = selection.gathers[0]
    parallel_assert(comm, set(first.seconds) == fits, str(selection))
    parallel_assert(comm, all(seconds > 0 for seconds in first.seconds.values()))
    measured = {name.partition("/")[0] for name in selection.exchanges[0].seconds}
    parallel_assert(comm, measured == set(ALGORITHMS["reduce_scatter"]), str(selection))
    sizes = [choice.at_nbytes for choice in selection.exchanges if choice.seconds]
    parallel_assert(comm, sizes[0] == 2**14 and sizes == sorted(set(sizes)), str(sizes))
    # the best of what was measured, or the default where it is about as good
    second = selection.exchanges[0]
    for choice, default in ((first, DEFAULT.gathers[0]), (second, DEFAULT.exchanges[0])):
        best = min(choice.seconds.values())
        good = choice.seconds[choice.name] == best or choice.algorithm == default.algorithm
        parallel_assert(comm, good, str(choice))


def test_the_next_job_measures_nothing_unless_asked(comm: MPI.Intracomm, nodes: Topology) -> None:
    first = tune(nodes.shard, torch.float32)
    second = tune(nodes.shard, torch.float32)
    parallel_assert(comm, second.origin == "measured before", second.origin)
    same = (second.gathers, second.exchanges) == (first.gathers, first.exchanges)
    parallel_assert(comm, same, f"{first} {second}")
    third = tune(nodes.shard, torch.float32, fresh=True)
    parallel_assert(comm, third.origin.startswith("measured in"), third.origin)


@pytest.mark.parametrize(
    ("seconds_of_a_byte", "advantage", "measured", "longer"),
    [
        (1e-6, 0.5, 2**14, "pairwise"),
        (6e-8, 0.9, 2**17, "pairwise"),
        (6e-8, 0.6, 2**17, "library"),  # at a size whose time is the links', and by far
    ],
)
def test_what_wins_by_its_latency_does_not_serve_blocks_that_were_too_long_to_measure(
    comm: MPI.Intracomm,
    nodes: Topology,
    monkeypatch: pytest.MonkeyPatch,
    seconds_of_a_byte: float,
    advantage: float,
    measured: int,
    longer: str,
) -> None:
    def over_a_slow_link(
        _nodes: object, _candidates: object, choice: AlgorithmChoice, nbytes: int, runs: int
    ) -> tuple[float, float]:
        took = nbytes * seconds_of_a_byte * (advantage if choice.algorithm == "library" else 1.0)
        return took, nbytes * seconds_of_a_byte * runs

    monkeypatch.setattr(tuning, "_time", over_a_slow_link)
    selection = tune(nodes.shard, torch.float32)
    said = str(selection)
    parallel_assert(comm, max(choice.at_nbytes for choice in selection.gathers) == measured, said)
    parallel_assert(comm, selection.gather_for(2**14).algorithm == "library", said)
    parallel_assert(comm, selection.gather_for(2**23).algorithm == longer, said)
    parallel_assert(comm, selection.exchange_for(2**23).algorithm == longer, said)


@pytest.mark.ranks(4)
def test_other_nodes_and_other_memory_are_remembered_apart(
    comm: MPI.Intracomm, nodes: Topology
) -> None:
    other = hpczero.Topology.create(comm, [0, 1, 2, 3])
    reach = StagedReach(LateAccelerator())
    files = [cache_file(nodes.shard), cache_file(other.shard), cache_file(nodes.shard, reach)]
    parallel_assert(comm, len(set(files)) == 3, f"{files}")
    dealt = hpczero.Topology.create(comm, [0, 1, 0, 1])  # two nodes of two, as well
    parallel_assert(comm, cache_file(dealt.shard) == files[0])
    other.free()
    dealt.free()


class Nodes:
    """A group as far as its file goes, of any number of nodes."""

    def __init__(self, comm: MPI.Intracomm, num_nodes: int) -> None:
        self.comm = comm
        self.num_nodes = num_nodes
        self.local_size = 8
        self.watchdog = Watchdog(0, 0.0)

    def broadcast_text(self, text: str) -> str:
        return text


def test_numbers_of_nodes_share_a_measurement_by_buckets_where_the_same_algorithms_work(
    comm: MPI.Intracomm,
) -> None:
    def file(num_nodes: int) -> Path:
        return cache_file(Nodes(comm, num_nodes))  # type: ignore[arg-type]

    many = {file(num_nodes) for num_nodes in (9, 10, 13, 15, 17, 50, 100, 12_499)}
    parallel_assert(comm, len(many) == 1, f"{many}")
    # recursive doubling needs a power of two
    powers = {file(num_nodes) for num_nodes in (16, 64, 4096)}
    parallel_assert(comm, len(powers) == 1 and not powers & many, f"{powers}, {many}")
    few = [file(num_nodes) for num_nodes in (2, 3, 4, 6, 8, 9, 16)]
    parallel_assert(comm, len(set(few)) == len(few), f"{few}")


@pytest.mark.parametrize("most", [2, 3])
def test_many_nodes_are_measured_in_samples_all_at_once(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(tuning, "MOST_NODES", most)
    topology = hpczero.Topology.create(comm, list(range(comm.size)))
    seen: list[tuple[int, int]] = []
    right = tuning.Sample.ones

    def watched(self: tuning.Sample, numel: int, dtype: torch.dtype) -> torch.Tensor:
        seen.append((self.comm.size, numel * dtype.itemsize))
        return right(self, numel, dtype)

    monkeypatch.setattr(tuning.Sample, "ones", watched)
    found = tuning.Sample.create(topology.shard, HostReach())
    together = sorted(found.comm.allgather(comm.rank))
    found.comm.Free()
    selection = tune(topology.shard, torch.float32)
    topology.free()
    samples = -(-comm.size // most)
    expected = list(range(comm.rank % samples, comm.size, samples))
    parallel_assert(comm, together == expected, f"{together}")
    held = max(nbytes for _, nbytes in seen)
    largest = max(choice.at_nbytes for choice in (*selection.gathers, *selection.exchanges))
    parallel_assert(comm, {size for size, _ in seen} == {len(expected)}, f"{seen}")
    parallel_assert(comm, held <= most * largest, f"{held}, {largest}")
    parallel_assert(comm, len(set(comm.allgather(repr(selection)))) == 1)
    doubles = "doubling" in selection.gathers[0].seconds  # it needs powers of two, also in a sample
    parallel_assert(comm, doubles == (comm.size == 4), str(selection))


class Elsewhere(LateAccelerator):
    """Its device has a name of its own, so that whoever asks for memory shows where."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu", 0)
        self.waits = 0

    def finish(self) -> None:
        self.waits += 1
        super().finish()


@pytest.mark.parametrize("kind", [StagedReach, DirectReach])
def test_buffers_on_a_device_are_measured_there(
    comm: MPI.Intracomm, nodes: Topology, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    accelerator = Elsewhere()
    reach, used, devices = kind(accelerator), set(), set()
    ones = torch.ones

    def watch(operation: str) -> None:
        made = getattr(Rails, operation)

        def call(self: Rails, *given: Any) -> None:
            used.add(self._reach)
            made(self, *given)

        monkeypatch.setattr(Rails, operation, call)

    def watched(*given: Any, **options: Any) -> torch.Tensor:
        devices.add(options.get("device"))
        return ones(*given, **options)

    watch("gather")
    watch("reduce")
    monkeypatch.setattr(torch, "ones", watched)
    selection = tune(nodes.shard, torch.float32, reach=reach)
    parallel_assert(comm, used == {reach} and devices == {accelerator.device}, f"{devices}")
    parallel_assert(comm, accelerator.waits > 0)
    chunks = {choice.chunk_nbytes for choice in (*selection.gathers, *selection.exchanges)}
    parallel_assert(comm, min(chunks) >= DEVICE_ROUND_BYTES, str(selection))
    again = tune(nodes.shard, torch.float32, reach=kind(Elsewhere()))
    parallel_assert(comm, again.origin == "measured before", again.origin)


def test_what_cannot_be_read_or_written_costs_a_measurement_and_no_more(
    comm: MPI.Intracomm, nodes: Topology, caplog: pytest.LogCaptureFixture
) -> None:
    path = cache_file(nodes.shard)
    if nodes.is_root:
        path.parent.mkdir(parents=True)
        path.write_text("{")
    with caplog.at_level(logging.WARNING, "hpczero.comm"):
        origin = tune(nodes.shard, torch.float32).origin
    parallel_assert(comm, origin.startswith("measured in"), origin)
    warned = [record for record in caplog.records if "measured anew" in record.getMessage()]
    parallel_assert(comm, len(warned) == int(nodes.is_root))
    if nodes.is_root:
        path.unlink()
        path.parent.rmdir()
        path.parent.write_text("in the way")
    origin = tune(nodes.shard, torch.float32).origin
    parallel_assert(comm, origin.startswith("measured in"), origin)


def test_fake_nodes_are_measured_only_if_asked(comm: MPI.Intracomm, nodes: Topology) -> None:
    for algorithms, word in (("auto", "not measured"), ("measure", "measured in")):
        transport = choose(nodes, algorithms=algorithms)
        said = transport.describe()
        transport.close()
        parallel_assert(comm, word in said, said)
