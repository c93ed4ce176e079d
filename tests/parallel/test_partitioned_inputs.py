"""Inputs of checkpointed blocks of which each tensor rank keeps a part (P_a of ZeRO-R): the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hpczero.options.config import LayoutOptions
from tests.helpers.parallel import parallel_assert
from tests.parallel.layouts import Trained, laid_out, sizes, train_laid_out

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 4)]


@pytest.mark.parametrize("layout", [{"tensor": 2}, {"tensor": 2, "pipeline": 2}], ids=str)
@pytest.mark.parametrize("stage", [1, 3])
def test_tensor_ranks_keep_a_part_each(
    comm: MPI.Intracomm, layout: dict[str, Any], stage: int
) -> None:
    from hpczero.activations import Checkpointing

    options = LayoutOptions(**layout)
    if options.tensor * options.pipeline > comm.size:
        return
    config = sizes(tie_embeddings=False, hidden=48)  # inputs of a page or more are kept in parts
    peaks: list[int] = []
    with laid_out(comm, options) as topology:
        stage_of_rank = topology.pipeline.rank

        def run(group: Any) -> Trained:
            made: list[Checkpointing] = []

            def prepare(adapter: Any, model: Any) -> Callable[[], None]:
                made.append(Checkpointing.create(group=group))
                adapter.call_blocks_by(model, made[0])
                made[0].join(model)
                return made[0].close

            def around(model: Any, optimizer: Any, step: int) -> None:
                if step == 2:
                    peaks.append(made[0].kept_peak_nbytes)

            return train_laid_out(
                config, topology, options, stage=stage, steps=3, prepare=prepare, around=around
            )

        whole, parted = run(None), run(topology.tensor)
    same = whole.losses == parted.losses and whole.norms == parted.norms
    if whole.state is not None and parted.state is not None:
        same &= all(torch.equal(value, parted.state[name]) for name, value in whole.state.items())
    parallel_assert(comm, same, f"{whole.losses} and {parted.losses}")
    # A half of every input alive: blocks of the stage times its forwards alive.
    alive = config.layers // options.pipeline * (options.pipeline - stage_of_rank)
    input_nbytes = 2 * config.context * config.hidden * 4
    parallel_assert(comm, peaks == [0, alive * input_nbytes // 2], f"{peaks}, {alive} alive")
