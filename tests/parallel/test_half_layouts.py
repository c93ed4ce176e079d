"""Layouts in bf16 make the casts that are documented: losses and norms are those of stock torch with the same casts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from torch import Tensor

import hpczero
from hpczero.options.config import LayoutOptions
from tests.helpers.parallel import parallel_assert
from tests.parallel.by_hand import StepByHand, steps_by_hand
from tests.parallel.layouts import (
    Trained,
    clip_of,
    laid_out,
    problems,
    sizes,
    train_alone,
    train_laid_out,
)
from tests.parallel.wholes import off

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]

CONFIG = sizes(tie_embeddings=False, positions="learned")
STEPS, MICRO_BATCHES = 3, 3
LAYOUTS: dict[int, list[dict[str, Any]]] = {
    2: [{"pipeline": 2}, {"tensor": 2}, {"tensor": 2, "sequence": True}],
    4: [
        {"shard": "2"},
        {"pipeline": 2},
        {"pipeline": 4},
        {"tensor": 2},
        {"tensor": 2, "sequence": True},
        {"tensor": 4},
        {"tensor": 4, "sequence": True},
        {"tensor": 2, "pipeline": 2},
        {"tensor": 2, "pipeline": 2, "sequence": True},
    ],
}
# Every cast is the same, so what may differ is the order of fp32 additions. One activation or gradient that is rounded
# to the other side in bf16 shows: 4e-3 of one element.
TOLERANCE = 1e-6
MASTERS = 5e-6  # biases start at zero, so the first update, divided by its own size, is all of them


def wrong_masters(masters: list[dict[str, Tensor]], expected: list[StepByHand]) -> list[str]:
    """What differs from the reference, in words. ``masters``: before each step and after the last."""
    said = []
    for step, right in enumerate(expected):
        for name, master in right.masters.items():
            worst = off(masters[step + 1][name], master)
            if not worst <= MASTERS:
                said.append(f"step {step}: master {name} is off by {worst:.1e}")
    return said


@pytest.mark.worth("layouts in bf16")
@pytest.mark.parametrize("stage", [0, 3])
def test_a_layout_in_bf16_makes_the_casts_of_the_reference(comm: MPI.Intracomm, stage: int) -> None:
    said: list[str] = []
    for layout in LAYOUTS[comm.size]:
        options = LayoutOptions(**layout)
        masters: list[dict[str, Tensor]] = []

        def around(
            model: Any, optimizer: Any, step: int, masters: list[dict[str, Tensor]] = masters
        ) -> None:
            masters.append(hpczero.full_state_dict(model) or {})

        with laid_out(comm, options) as topology:
            how: dict[str, Any] = {"stage": stage, "steps": STEPS, "precision": "bf16"}
            found = train_laid_out(CONFIG, topology, options, around=around, **how)
            if topology.is_root:
                assert found.state is not None, "given to rank 0"
                data, split = topology.data.size, options.tensor
                how = {"sequence": options.sequence, "micro_batches": MICRO_BATCHES}
                expected = steps_by_hand(CONFIG, masters, data, split, **how)
                wrong = wrong_masters([*masters, found.state], expected)
                numbers = Trained([s.loss for s in expected], [s.norm for s in expected])
                wrong += problems(found, numbers, tolerance=TOLERANCE)
                exact = train_alone(CONFIG, data, steps=STEPS, micro_batches=MICRO_BATCHES)
                said += [f"{layout}: {each}" for each in wrong]
                if not max(exact.norms) > clip_of(data):
                    said.append(f"{layout}: nothing is clipped: {exact.norms}")
                apart = [abs(a - b) / b for a, b in zip(found.norms, exact.norms, strict=True)]
                if not 1e-4 < max(apart) < 0.1:
                    said.append(f"{layout}: bf16 is fp32 or something else: {apart}")
    parallel_assert(comm, not said, "\n".join(said[:8]))
