"""Every layout of ranks trains what one process trains: losses, norms and parameters, at every stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hpczero.options.parallel import LayoutOptions
from tests.helpers.cases import EVERYTHING
from tests.helpers.parallel import parallel_assert
from tests.parallel.layouts import (
    MICRO_BATCHES,
    clip_of,
    laid_out,
    problems,
    sizes,
    train_alone,
    train_laid_out,
)

if TYPE_CHECKING:
    from mpi4py import MPI


pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3, 4)]

LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{"pipeline": 2}, {"context": 2}, {"tensor": 2}, {"tensor": 2, "sequence": True}],
    3: [{"pipeline": 3}, {"tensor": 3}, {"tensor": 3, "sequence": True}],
    4: [
        {"tensor": 2},
        {"tensor": 2, "sequence": True},
        {"tensor": 4},
        {"tensor": 4, "sequence": True},
        {"tensor": 2, "pipeline": 2},
        {"tensor": 2, "pipeline": 2, "sequence": True},
        {"tensor": 2, "shard": "1"},
        {"context": 4},
        {"context": 2},
        {"context": 2, "tensor": 2},
        {"context": 2, "pipeline": 2},
        {"pipeline": 2, "interleave": 2},
        {"pipeline": 2},
        {"pipeline": 4},
        {"pipeline": 2, "schedule": "gpipe"},
        {"pipeline": 2, "shard": "1"},
        {"shard": "2"},
    ],
}


@pytest.mark.worth("every layout trains as one process does")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_layout_trains_what_one_process_trains(
    comm: MPI.Intracomm, stage: int, tied: bool
) -> None:
    config = sizes(tie_embeddings=tied, positions="rotary" if stage % 2 else "learned")
    said: list[str] = []
    for number, layout in enumerate(LAYOUTS[comm.size]):
        if not EVERYTHING and (number + 2 * stage + tied) % 3:
            continue  # every layout at some stages, tied and not
        options = LayoutOptions(**layout)
        with laid_out(comm, options) as topology:
            micro = 4 if options.interleave > 1 else MICRO_BATCHES
            found = train_laid_out(config, topology, options, stage=stage, micro_batches=micro)
            if topology.is_root:
                expected = train_alone(config, topology.data.size, micro_batches=micro)
                if not min(expected.norms) < clip_of(topology.data.size) < max(expected.norms):
                    said.append(f"clip some steps, not all: {expected.norms}")
                said += [f"{layout}: {each}" for each in problems(found, expected)]
    parallel_assert(comm, not said, "\n".join(said[:8]))
