"""Every layout of ranks trains what one process trains: losses, norms and parameters, at every stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hpczero.options.config import LayoutOptions
from tests.helpers.cases import EVERYTHING
from tests.helpers.parallel import parallel_assert
from tests.parallel.layouts import (
    MICRO_BATCHES,
    clip_of,
    laid_out,
    problems,
    sizes,
    text,
    train_alone,
    train_laid_out,
)
from tests.parallel.wholes import off

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


@pytest.mark.ranks(2)
def test_a_second_backward_adds_its_gradients_where_ranks_share_tokens(comm: MPI.Intracomm) -> None:
    """Gradients of norms and biases are sums over the tensor ranks, of each reduction by itself."""
    import hpczero
    from hpczero.models.gpt import GPT

    config, found = sizes(), {}

    def around(model: Any, optimizer: Any, step: int) -> None:
        tokens = text(0, 1, 0, config.context)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        found.update(hpczero.full_gradients(model))

    options = LayoutOptions(tensor=2, sequence=True)
    with laid_out(comm, options) as topology:
        train_laid_out(config, topology, options, stage=2, steps=1, micro_batches=1, around=around)
    plain = GPT(config)
    plain.initialize_all(seed=3)
    for micro in range(2):
        tokens = text(0, micro, 0, config.context)
        plain(tokens[:, :-1], tokens[:, 1:]).backward()
    wrong = [
        f"{name} off by {off(found[name], p.grad):.2g}"
        for name, p in plain.named_parameters()
        if p.grad is not None and not off(found[name], p.grad) <= 1e-5
    ]
    parallel_assert(comm, bool(found) and not wrong, "\n".join(wrong[:8]))
