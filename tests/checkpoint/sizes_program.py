"""A training saved at some number of ranks and passed on, from size to size and stage to stage, with its optimizer.

``mpirun -n 8 python -m tests.checkpoint.sizes_program FOLDER 4-1 8-3 5-1 ...``, where 5-1 means 5 ranks at stage 1.
Checkpoint ``FOLDER/5-1`` is what came out of the one before.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mpi4py import MPI

from tests.checkpoint.programs import Program, first_ranks

STEPS = 3


def main(folder: Path, legs: list[str]) -> None:
    """Collective over world."""
    before: str | None = None
    for leg in legs:
        size, stage = map(int, leg.split("-"))
        with first_ranks(MPI.COMM_WORLD, size) as topology:
            if topology is not None:
                program = Program(topology, stage=stage)
                if before is None:
                    program.train(STEPS)
                else:
                    program.load(folder / before)
                program.save(folder / leg)
                program.close()
        before = leg


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
