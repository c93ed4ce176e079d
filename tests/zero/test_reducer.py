"""The exact reducer is the sum of its transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from hpczero.zero.units.gradients import Reducer
from tests.helpers.parallel import parallel_assert
from tests.zero.reducer_suite import SHARD, ReducerSuite, gradient

if TYPE_CHECKING:
    from hpczero import Collectives


class TestExact(ReducerSuite):
    @staticmethod
    def make(transport: Collectives) -> Reducer:
        return Reducer(transport)

    @pytest.mark.ranks(2, 3)
    def test_it_is_the_sum_of_the_transport_bit_for_bit(self, comm, transport):
        local = gradient(comm.rank, comm.size, torch.float32)
        found, expected = torch.empty(SHARD), torch.empty(SHARD)
        reducer = Reducer(transport)
        reducer.reduce(local, found, scale=0.3, accumulate=False, name="u").wait()
        transport.reduce_scatter(local, expected, scale=0.3, name="u").wait()
        parallel_assert(comm, torch.equal(found, expected))
