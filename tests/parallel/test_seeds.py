"""What a run's model draws: tensor ranks alike, all others by themselves; also after a load at another layout."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero.accelerator import HostAccelerator
from hpczero.adapters.gpt import GPTAdapter
from hpczero.options.config import ParallelOptions, RunConfig
from hpczero.parallel import close
from hpczero.run.evaluation import passes_of
from hpczero.run.starting.building import build, seed_of
from tests.helpers.parallel import parallel_assert
from tests.parallel.layouts import laid_out, samples_of, sizes, take

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpczero import Topology

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{"tensor": 2}, {"pipeline": 2}, {"context": 2}, {}],
    4: [{"tensor": 2}, {"tensor": 2, "pipeline": 2}, {"pipeline": 2, "context": 2}, {"shard": "2"}],
}


def masks_of_a_step(topology: Topology, parallel: ParallelOptions) -> bytes:
    """What the first block of this rank drops in the first forward of a run, as it is built by the command."""
    adapter = GPTAdapter(sizes(dropout=0.5))
    config = RunConfig(parallel=parallel)
    model, _ = build(config, adapter, topology, HostAccelerator())
    found: list[bytes] = []

    def look(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        found.append((output == 0).numpy().tobytes())

    blocks = model.get_submodule("blocks")
    next(iter(blocks.children())).get_submodule("dropout").register_forward_hook(look)
    passes = passes_of(parallel, adapter, model, accumulation=2, accelerator=HostAccelerator())

    take(passes, 0, samples_of(topology))
    hpczero.release(model)
    close(model)
    return found[0]


def test_tensor_ranks_drop_alike_and_all_others_otherwise(comm: MPI.Intracomm) -> None:
    for layout in LAYOUTS[comm.size]:
        parallel = ParallelOptions(stage=1, **layout)
        with laid_out(comm, parallel) as topology:
            masks = comm.allgather(masks_of_a_step(topology, parallel))
            same = {tuple(r for r, m in enumerate(masks) if m == mask) for mask in masks}
            tensor = topology.mesh.tensor
            groups = {tuple(range(r, r + tensor)) for r in range(0, comm.size, tensor)}
            parallel_assert(comm, same == groups, f"{layout}: equal masks on {sorted(same)}")


def test_one_stage_draws_what_it_drew_without_a_pipeline(comm: MPI.Intracomm) -> None:
    """Seeds of runs that divide nothing are those of every version before."""
    with laid_out(comm, ParallelOptions()) as topology:
        expected = zlib.crc32(f"7 {comm.rank}".encode())
        parallel_assert(comm, seed_of(7, topology) == expected)


def test_a_load_at_another_layout_leaves_tensor_ranks_with_one_stream(
    comm: MPI.Intracomm, folder: Path
) -> None:
    adapter = GPTAdapter(sizes(dropout=0.5))
    for parallel in (ParallelOptions(), ParallelOptions(tensor=2)):
        with laid_out(comm, parallel) as topology:
            model, _ = build(RunConfig(parallel=parallel), adapter, topology, HostAccelerator())
            if parallel.tensor == 1:
                hpczero.checkpoint.save(folder, model, step=1)
            else:
                hpczero.checkpoint.load(folder, model)
                drawn = comm.allgather(torch.rand(1).item())
                pairs = [drawn[r] == drawn[r + 1] for r in range(0, comm.size, 2)]
                parallel_assert(comm, all(pairs), f"{drawn}")
                parallel_assert(comm, len(set(drawn)) == comm.size // 2, f"{drawn}")
            hpczero.release(model)
            close(model)
