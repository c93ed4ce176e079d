"""On 8 ranks: tensor 2 x pipeline 2 x data 2 beside one process; a job of its own, started by a test.

mpirun -n 8 python tests/parallel/eight_ranks.py
"""

from __future__ import annotations

import sys

import torch
from mpi4py import MPI

from hpczero.options.config import LayoutOptions
from tests.parallel.layouts import laid_out, problems, sizes, train_alone, train_laid_out

# Each stage of ZeRO once: tied and not, with sequence parallelism and without.
CASES = [(0, False, False), (1, False, True), (2, True, False), (3, True, True)]


def main() -> int:
    """Train every case; rank 0 says what is apart. Returns the number of problems on rank 0."""
    torch.set_num_threads(1)
    said = 0
    for stage, tied, sequence in CASES:
        config = sizes(tie_embeddings=tied, positions="rotary" if stage % 2 else "learned")
        options = LayoutOptions(tensor=2, pipeline=2, sequence=sequence)
        with laid_out(MPI.COMM_WORLD, options) as topology:
            found = train_laid_out(config, topology, options, stage=stage)
            if topology.is_root:
                wrong = problems(found, train_alone(config, topology.data.size))
                said += len(wrong)
                print(f"stage {stage}: {wrong}", flush=True)
    return said


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
