"""Tensors of a program as flat ones, and back; and torch's reduce operations on flat ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpczero.errors import CommError

DEVICES = ("cpu", "cuda")  # what lies on the latter goes through the host


def check(what: str, tensors: Sequence[Tensor]) -> None:
    """Wait for what the program's stream still writes to the tensors; refuse those that the bridge cannot send.

    Raises:
        CommError: one is neither on the host nor on a CUDA device, or sparse.
    """
    for tensor in tensors:
        if tensor.device.type not in DEVICES:
            raise CommError(
                f"{what}: got a tensor on {tensor.device}, expected one on {' or '.join(DEVICES)}"
            )
        if tensor.layout != torch.strided:
            raise CommError(
                f"{what}: got a tensor of layout {tensor.layout}, expected a dense one; call .to_dense() before"
            )
    # The line's thread has another stream.
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        torch.cuda.current_stream(device).synchronize()


def check_apart(what: str, tensors: Sequence[Tensor]) -> None:
    """Raise CommError for tensors to be filled whose elements share memory, as those of ``expand`` do."""
    for tensor in tensors:
        if not tensor.is_contiguous() and torch._debug_has_internal_overlap(tensor) == 1:
            raise CommError(
                f"{what}: got a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}, of which several "
                "elements lie in one place and cannot be filled; call .contiguous() before"
            )


def check_equal(
    what: str, tensors: Sequence[Tensor], like: Tensor, *, count: int, only: int | None = None
) -> None:
    """Refuse a list of tensors that is not one for each of ``count`` ranks, of the dtype and length of ``like``.

    With ``only`` the length of that rank's tensor alone is compared.

    Raises:
        CommError: the message says what differs.
    """
    if len(tensors) != count:
        raise CommError(f"{what}: got {len(tensors)} tensors, expected {count}, one for each rank")
    for rank, tensor in enumerate(tensors):
        is_equal = tensor.numel() == like.numel() or only not in (None, rank)
        if tensor.dtype != like.dtype or not is_equal:
            raise CommError(
                f"{what}: got {tensor.numel()} x {tensor.dtype}, expected {like.numel()} x {like.dtype}: all ranks "
                "must bring tensors of one dtype and size"
            )


def check_whole(what: str, whole: Tensor, part: Tensor, size: int) -> None:
    """Raise CommError unless ``whole`` is of the dtype of ``part`` and has ``size`` times as many elements."""
    if whole.dtype != part.dtype or whole.numel() != size * part.numel():
        raise CommError(
            f"{what}: got {whole.numel()} x {whole.dtype} for all ranks and {part.numel()} x {part.dtype} for each, "
            f"expected one dtype and {size} times as many elements"
        )


def cut(what: str, tensor: Tensor, splits: Sequence[int] | None, size: int) -> list[int]:
    """Elements of each rank's part of a tensor that is cut along its first dimension.

    ``splits`` are the rows of each rank; where there are none, all have equally many. Raises CommError unless they fit.
    """
    rows = tensor.shape[0] if tensor.dim() else 0
    given = list(splits) if splits else [rows // size] * size
    if len(given) != size or sum(given) != rows or min(given) < 0:
        raise CommError(
            f"{what} of shape {tuple(tensor.shape)} is cut into {given} rows, expected {size} numbers with sum {rows}"
        )
    each = tensor[0].numel() if rows else 0
    return [each * number for number in given]


def flat(tensor: Tensor) -> Tensor:
    """The elements in order, flat, on the host: a view where the memory holds them so, else a copy.

    A copy has no negative and no conjugate bit, by which the bytes in memory are other numbers than the elements.
    """
    return tensor.detach().resolve_conj().resolve_neg().contiguous().cpu().view(-1)


def apart(source: Tensor, targets: Sequence[Tensor], *, same: Tensor | None = None) -> Tensor:
    """``source``, or a copy where a call that fills ``targets`` would fill some of it before all of it is read.

    All are flat.

    ``same``: one of the targets, which may lie exactly where ``source`` does.
    """
    for target in targets:
        exact = target is same and target.data_ptr() == source.data_ptr()
        if not exact and _share_memory(source, target):
            return source.clone()
    return source


def all_apart(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
    """As ``apart``, of each of ``sources``."""
    begin = min((each.data_ptr() for each in targets if each.numel()), default=0)
    end = max((_end(each) for each in targets if each.numel()), default=0)
    return [
        apart(each, targets) if each.data_ptr() < end and begin < _end(each) else each
        for each in sources
    ]


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() < _end(other) and other.data_ptr() < _end(one)


def _end(tensor: Tensor) -> int:
    return tensor.data_ptr() + tensor.numel() * tensor.element_size()


def fill(tensor: Tensor, values: Tensor) -> None:
    """Bring ``values``, which ``flat(tensor)`` gave and a call has filled, into the tensor, if they are a copy."""
    tensor = tensor.detach()
    as_it_is = tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj()
    if not as_it_is or tensor.device.type != "cpu":
        tensor.copy_(values.view(tensor.shape))


# What torch's reduce operations mean: rows of all ranks, in rank order, become one.
#
# Half precision is added and multiplied in fp32 and rounded once. All ranks take rows in the same order, so all have
# the same bits. MPI adds nothing here: it has no bf16, and its order depends on the algorithm.

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
        """From ``ReduceOp``, or from its enumeration. Raises CommError for others than ``OPERATIONS``."""
        name = str(getattr(op, "op", op)).rpartition(".")[2]
        if name not in OPERATIONS:
            raise CommError(f"reduce operation {name}, expected one of {', '.join(OPERATIONS)}")
        # torch 2.11 and older have no op.factor, but keep it for pickle.
        return cls(name, op.__getstate__()[1] if name == "PREMUL_SUM" else None)

    def check(self, dtype: torch.dtype) -> None:
        """Raise CommError for a dtype that the operation is not defined for."""
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
        """Reduce ``rows`` into ``out``, which may be one of them.

        ``rows``: of all ranks in rank order, flat, of the dtype and length of ``out``; they are read only.
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
