"""What torch's reduce operations mean: rows of all ranks, in rank order, become one.

Owns: operations, dtypes, the order and precision of sums. Must not know: how rows travel.

Half precision is added and multiplied in fp32 and rounded once. All ranks take rows in the same order, so all have the
same bits. MPI adds nothing here: it has no bf16, and its order depends on the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpczero.errors import CommError

WIDENED = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, torch.float64, *WIDENED)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
NUMBERS = (*FLOATS, *INTEGERS, torch.bool)
# Elements that are reduced at a time, so that the partial result stays in the cache.
PIECE_NUMEL = 2**16

# Each with what joins two rows, and the dtypes that it is defined for.
OPERATIONS: dict[str, tuple[Callable[..., Tensor], tuple[torch.dtype, ...]]] = {
    "SUM": (torch.add, (*NUMBERS, *COMPLEX)),
    "AVG": (torch.add, (*FLOATS, *COMPLEX)),
    "PREMUL_SUM": (torch.add, (*FLOATS, *COMPLEX)),
    "PRODUCT": (torch.mul, NUMBERS),
    "MIN": (torch.minimum, NUMBERS),
    "MAX": (torch.maximum, NUMBERS),
    "BAND": (torch.bitwise_and, (*INTEGERS, torch.bool)),
    "BOR": (torch.bitwise_or, (*INTEGERS, torch.bool)),
    "BXOR": (torch.bitwise_xor, (*INTEGERS, torch.bool)),
}


@dataclass(frozen=True)
class Reduction:
    """One of torch's reduce operations.

    Attributes:
        name: as in ``torch.distributed.ReduceOp``. For bool, SUM and MAX are "or", PRODUCT and MIN are "and".
        factor: of PREMUL_SUM, by which this rank's values are multiplied before; else None.
    """

    name: str
    factor: float | Tensor | None = None

    @classmethod
    def of(cls, op: Any) -> Reduction:
        """From ``ReduceOp``, or from its enumeration.

        Raises:
            CommError: it is none of ``OPERATIONS``.
        """
        name = str(getattr(op, "op", op)).rpartition(".")[2]
        if name not in OPERATIONS:
            raise CommError(f"reduce operation {name}, expected one of {', '.join(OPERATIONS)}")
        # torch 2.11 and older have no op.factor, but keep it for pickle.
        return cls(name, op.__getstate__()[1] if name == "PREMUL_SUM" else None)

    def check(self, dtype: torch.dtype) -> None:
        """Refuse a dtype that the operation is not defined for.

        Raises:
            CommError: with the dtypes that it is defined for.
        """
        known = OPERATIONS[self.name][1]
        if dtype not in known:
            names = ", ".join(str(one).removeprefix("torch.") for one in known)
            raise CommError(
                f"reduce operation {self.name} of {dtype}, expected one of {names}; cast it before"
            )

    def prepared(self, tensor: Tensor) -> Tensor:
        """What this rank brings for its ``tensor``: the tensor itself, or a new one."""
        return tensor if self.factor is None else tensor * self.factor

    def join(self, rows: Sequence[Tensor], out: Tensor) -> None:
        """Reduce ``rows`` into ``out``.

        Args:
            rows: of all ranks in rank order, flat, of one dtype and length; they are read only.
            out: of their dtype and length; it may be one of them.
        """
        two_at_once = self.name != "AVG" and len(rows) == 2
        step = max(out.numel(), 1) if two_at_once else PIECE_NUMEL
        for start in range(0, out.numel(), step):
            self._join([row[start : start + step] for row in rows], out[start : start + step])

    def _join(self, rows: Sequence[Tensor], out: Tensor) -> None:
        joined = OPERATIONS[self.name][0]
        if self.name != "AVG" and len(rows) == 2:  # torch adds and multiplies halves in fp32
            joined(rows[0], rows[1], out=out)
            return
        total = rows[0].to(torch.float32) if out.dtype in WIDENED else rows[0].clone()
        for row in rows[1:]:
            joined(total, row.to(total.dtype), out=total)
        if self.name == "AVG":
            total.div_(len(rows))
        out.copy_(total)
