"""What each reduce operation means, against NumPy, and what is refused."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hpczero.bridge.tensors import OPERATIONS, Reduction
from hpczero.errors import CommError
from tests.helpers.bridged import values

ROWS = 3
AS_NUMPY = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
    "BAND": np.bitwise_and,
    "BOR": np.bitwise_or,
    "BXOR": np.bitwise_xor,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("name", AS_NUMPY)
def test_operation_is_that_of_numpy(name: str, dtype: torch.dtype) -> None:
    reduction = Reduction.of(getattr(dist.ReduceOp, name))
    if dtype not in OPERATIONS[name][1]:
        with pytest.raises(CommError, match=f"{name} of {dtype}, expected one of"):
            reduction.check(dtype)
        return
    for rows in (2, ROWS):
        given = [values(row, (70_001,), dtype) for row in range(rows)]
        found = torch.empty(70_001, dtype=dtype)
        reduction.join(given, found)
        expected = functools.reduce(AS_NUMPY[name], (row.numpy() for row in given))
        assert np.array_equal(found.numpy(), expected)


def test_premultiplied_sum_has_each_ranks_own_factor() -> None:
    given = [values(row, (5,)) for row in range(ROWS)]
    op = dist._make_nccl_premul_sum(0.5)  # type: ignore[attr-defined]
    brought = [Reduction.of(op).prepared(row) for row in given]
    found = torch.empty(5)
    Reduction.of(op).join(brought, found)
    assert torch.equal(found, 0.5 * given[0] + 0.5 * given[1] + 0.5 * given[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mean_of_halves_is_rounded_once(dtype: torch.dtype) -> None:
    given = [values(row, (5,), dtype) for row in range(ROWS)]
    found = torch.empty(5, dtype=dtype)
    Reduction.of(dist.ReduceOp.AVG).join(given, found)
    assert torch.equal(found, ((given[0].float() + given[1] + given[2]) / ROWS).to(dtype))
