"""Tables of which only rows travel: the gradient of the rows that a batch touches, and at stage 3 their values.

    forward    the table stays closed; a lookup fetches the rows that it names from their owners, and reads them alone
    backward   a lookup's gradient needs no values; the rows of it that are not zero are kept
    reduction  rows go to their owners, who sum them; the mean is a whole gradient with zeros, which any optimizer takes

[Note: A closed table]
Between lookups nobody may read a table, of which this rank has no values but its own. ``ShardedParameter`` refuses
everything, and hands lookups on to the table. So code that uses the weight otherwise gets an error, not other values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from hpczero.comm.collectives import Collectives
from hpczero.comm.rows import RowExchange
from hpczero.errors import StepError
from hpczero.memory.buffers import DTYPES
from hpczero.plan import Plan, UnitSpec
from hpczero.zero.units.guard import LOOKUPS
from hpczero.zero.units.whole import WholeParameters


class RowGradient:
    """One rank's own gradient of a table: rows that are not zero, from autograd to the reduction.

    Sums over micro-batches have the bits of sums of whole gradients.

    Attributes:
        filled: whether a gradient has come in; one flag, as of a unit with one slot.
    """

    def __init__(self, spec: UnitSpec, dtype: torch.dtype, exchange: RowExchange) -> None:
        """Not collective. ``dtype``: of the parameter."""
        self._spec, self._dtype, self._exchange = spec, dtype, exchange
        self._rows, self._values = self._nothing()
        self.filled = [False]

    def add(self, position: int, gradient: Tensor, accumulating: bool) -> None:
        """Add ``gradient``, dense or sparse, of the table's shape; arguments as of ``LocalGradient.add``."""
        gradient = gradient.detach()
        if gradient.layout is torch.sparse_coo:
            gradient = gradient.coalesce()
            if (
                gradient.sparse_dim() > 1
            ):  # single elements, as torch.gather(sparse_grad=True) gives
                gradient = gradient.to_dense()
        if gradient.layout is torch.sparse_coo:
            rows, values = gradient.indices()[0], gradient.values()
        else:
            rows = _touched(gradient)
            values = gradient[rows]
        if accumulating and values.dtype is not torch.float32:
            values = values.float()
        if self.filled[position]:
            if accumulating:
                self._values = self._values.float()
            rows, values = _sum(self._rows, self._values, rows, values)
        self._rows, self._values = rows, values
        self.filled[position] = True

    def reduce(self, mean: Tensor, *, scale: float, accumulate: bool) -> None:
        """Set ``mean (+)= scale *`` the sum of every rank's rows; arguments as of ``RowExchange``. Collective."""
        values = self._values.to(self._dtype).float().cpu()  # rounded as whole gradients are
        self._exchange.reduce(
            self._spec, self._rows.cpu(), values, mean, scale=scale, accumulate=accumulate
        )

    def clear(self) -> None:
        """Forget everything."""
        self.filled = [False]
        self._rows, self._values = self._nothing()

    def _nothing(self) -> tuple[Tensor, Tensor]:
        rows = torch.empty(0, dtype=torch.int64, device="cpu")
        return rows, torch.empty(0, self._spec.row, dtype=self._dtype, device="cpu")


def _touched(gradient: Tensor) -> Tensor:
    """Rows that have a bit set; -0.0 counts, as a sum may keep it."""
    rows = gradient.contiguous().view(len(gradient), -1)
    # Views as wider numbers need a width and a begin that they divide.
    wide = math.gcd(rows.shape[1] * rows.element_size(), rows.data_ptr(), 8)
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16}[wide]
    return rows.view(kind).ne(0).any(1).nonzero()[:, 0]


def _sum(rows: Tensor, values: Tensor, more: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and values of the sum of two gradients."""
    union = torch.unique(torch.cat([rows, more]))
    total, other = (
        torch.zeros(len(union), part.shape[1], dtype=part.dtype, device=part.device).index_copy_(
            0, torch.searchsorted(union, of), part
        )
        for of, part in ((rows, values), (more, added))
    )
    return union, total.add_(other)


class TableParameters(WholeParameters):
    """A table at stage 3, of which lookups fetch rows; whole only inside ``gathered`` and the like.

    See [Note: A closed table].
    """

    by_rows = True

    def __init__(
        self,
        spec: UnitSpec,
        parameters: Sequence[nn.Parameter],
        plan: Plan,
        comm: Collectives,
        *,
        given_back: bool = False,
    ) -> None:
        """As of ``WholeParameters``; ``spec`` has rows. ``serve`` follows."""
        super().__init__(spec, parameters, plan, comm, given_back=given_back)
        (guard,) = self.watch.guards
        guard.allow_lookups(self._look_up)
        self._dtype = DTYPES[plan.precision.param]

    def serve(self, exchange: RowExchange, shard: Tensor) -> None:
        """Lookups go by ``exchange``; ``shard``: this rank's part of the table, (shard_numel,), always up to date."""
        self._exchange, self._shard = exchange, shard

    @override
    def reshard(self, *, retain: bool = False) -> None:
        super().reshard()  # graphs of lookups need no values, and others keep the memory that was lent to them

    def check_call(self, args: tuple[Any, ...]) -> None:
        """Refuse a call of the table's module that the table would not be asked about.

        Raises:
            StepError: nested indices, which look rows up by themselves.
        """
        if any(isinstance(each, Tensor) and each.is_nested for each in args):
            raise StepError(
                f"parameter {self.spec.layout.slots[0].name!r}: rows of it alone travel, and nested indices look rows "
                "up by themselves; pass indices.values(), or build the module with sparse=False and leave "
                "sparse_gradients out"
            )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _look_up(self, lookup: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``lookup`` finds in the table, as with all of its rows. Collective."""
        self.check_certain()
        of_table, of_indices = LOOKUPS[lookup]
        name = self.spec.layout.slots[0].name
        if len(args) <= max(of_table, of_indices) or args[of_table] is not self.parameters[0]:
            raise StepError(
                f"parameter {name!r}: {lookup.__name__} got its arguments by names, and rows of the parameter alone "
                "travel; call torch.nn.functional.embedding(indices, weight)"
            )
        weights = kwargs.get("per_sample_weights")
        if weights is not None and weights.requires_grad:
            raise StepError(
                f"parameter {name!r}: per_sample_weights that need a gradient need the whole table in backward, and "
                "its rows alone travel; build the module with sparse=False and leave sparse_gradients out"
            )
        rows = torch.unique(args[of_indices].detach().cpu().long())
        last = self.spec.layout.slots[0].shape[0]
        rows = rows[(rows >= 0) & (rows < last)]  # torch refuses the others below
        values = self._exchange.fetch(self.spec, rows, self._shard)
        self._buffer.take()
        try:
            with torch.no_grad():
                table = self.flat.detach()[: last * self.spec.row].view(last, -1)
                table[rows.to(table.device)] = values.to(table.device, self._dtype)
            with torch._C.DisableTorchFunctionSubclass():
                return lookup(*args, **kwargs)
        finally:
            self._buffer.release()
