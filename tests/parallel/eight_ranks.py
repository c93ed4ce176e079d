"""On 8 ranks: tensor 2 x pipeline 2 x data 2 beside one process; a job of its own, started by a test.

mpirun -n 8 python tests/parallel/eight_ranks.py
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

import torch
from mpi4py import MPI

from hpczero.options.config import LayoutOptions
from tests.parallel.layouts import (
    MICRO_BATCHES,
    laid_out,
    problems,
    sizes,
    train_alone,
    train_laid_out,
)

CASES = list(itertools.product([0, 1, 2, 3], [False, True], [False, True]))


def main() -> int:
    """Train every case; rank 0 says what is apart. Returns the number of problems on rank 0."""
    torch.set_num_threads(1)
    comm, said = MPI.COMM_WORLD, 0
    number, share = (int(word) for word in sys.argv[1:3]) if len(sys.argv) > 2 else (0, 1)
    for stage, tied, sequence in CASES[number::share]:
        config = sizes(tie_embeddings=tied, positions="rotary" if stage % 2 else "learned")
        layout: dict[str, Any] = {"tensor": 2, "pipeline": 2, "sequence": sequence}
        options = LayoutOptions(**layout)
        with laid_out(comm, options) as topology:
            found = train_laid_out(
                config, topology, options, stage=stage, micro_batches=MICRO_BATCHES
            )
            if topology.is_root:
                expected = train_alone(config, topology.data.size, micro_batches=MICRO_BATCHES)
                losses = max(map(_apart, found.losses, expected.losses))
                norms = max(map(_apart, found.norms, expected.norms))
                what = f"stage {stage}, {'tied' if tied else 'untied'}, sequence {sequence}"
                print(f"{what}: losses off by {losses:.1e}, norms by {norms:.1e}", flush=True)
                for each in problems(found, expected):
                    print(f"{what}: {each}", flush=True)
                    said += 1
    return said


def _apart(a: float, b: float) -> float:
    return abs(a - b) / max(abs(b), 1.0)


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
