"""Rows: of a table, only the rows that a batch touches travel between the ranks that share the table.

    fetch    each rank asks the owners for rows              | owners answer with values
    reduce   each rank sends the rows of its own gradient    | owners sum, and send the sums on where all keep them

A row that a rank does not send counts as zeros. Sums have the order of every other reduction (`kernels.tree_sum`) over
the rows that any rank has sent, so they have the bits of the sum of whole gradients.

Source: row-wise exchange of sparse gradients as in Horovod (arXiv 1802.05799) and SparCML (arXiv 1802.08021).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate as running_sums

import torch
from torch import Tensor

from hpczero.comm.collectives import Collectives, trade
from hpczero.kernels.tree_sum import tree_sum
from hpczero.plan.layout import FP32_BYTES, UnitSpec

CHUNK_BYTES = 16 * 2**20  # of the rows that are summed at a time, zeros included


class RowExchange:
    """Rows of all tables of one model. Every rank makes the same calls; rows are int64, ascending, each once."""

    def __init__(self, collectives: Collectives) -> None:
        """Collective over ``collectives.group``: rows have a communicator, as units may be on their way meanwhile."""
        self._collectives = collectives
        self._group = collectives.group
        self._comm = collectives.group.ordered.Dup()

    def close(self) -> None:
        """Free the communicator. Collective."""
        self._comm.Free()

    def fetch(self, table: UnitSpec, rows: Tensor, shard: Tensor) -> Tensor:
        """Values of ``rows``, (len(rows), row) fp32 on the host. Collective, blocking.

        Args:
            table: whose rows.
            rows: that this rank needs, on the host.
            shard: (shard_numel,) what this rank owns of the table.
        """
        asked = self._trade("ask_rows", table, ([_words(part)] for part in _cut(table, rows)))
        mine, first = shard.detach().view(-1, table.row), self._first(table)
        answers = (
            [mine[(_numbers(part) - first).to(mine.device)].float().flatten().cpu()]
            for (part,) in asked
        )
        found = self._trade("fetch_rows", table, answers)
        return torch.cat([values for (values,) in found]).view(-1, table.row)

    def reduce(
        self,
        table: UnitSpec,
        rows: Tensor,
        values: Tensor,
        mean: Tensor,
        *,
        scale: float,
        accumulate: bool,
    ) -> None:
        """Set ``mean (+)= scale *`` the sum of every rank's ``values``. Collective, blocking.

        Args:
            table: whose gradient.
            rows: of this rank's gradient that are not zero, on the host.
            values: (len(rows), row) fp32, theirs, on the host.
            mean: fp32, (shard_numel,) this rank's part, or (padded_numel,) where every rank keeps all of it.
            scale: multiplies the sum.
            accumulate: add to ``mean`` instead of replacing it.
        """
        owned = _cut(table, rows)
        ends = list(running_sums(map(len, owned)))[:-1]
        pairs = zip(owned, values.tensor_split(ends), strict=True)
        found = self._trade(
            "reduce_rows", table, ([_words(row), value.flatten()] for row, value in pairs)
        )
        parts = [(_numbers(row), value.view(-1, table.row)) for row, value in found]
        union = torch.unique(torch.cat([row for row, _ in parts]))
        if accumulate:
            mean.add_(0.0)  # as whole gradients do: of -0.0 they make 0.0
        else:
            mean.zero_()
        is_whole = len(mean) == table.layout.padded_numel
        first = 0 if is_whole else self._first(table)
        of_rows = mean.view(-1, table.row)
        sums = torch.empty(len(union), table.row, device=mean.device, dtype=torch.float32)
        for start, stop in _chunks(len(union), table.row * len(parts)):
            some, out = union[start:stop], sums[start:stop]
            places = (some - first).to(mean.device)
            if accumulate:
                out.copy_(of_rows[places])
            tree_sum(
                [_spread_out(some, *part, mean.device) for part in parts],
                out.view(-1),
                groups=self._group.reduction_groups,
                scale=scale,
                accumulate=accumulate,
                node_dtype=self._collectives.node_dtype,
            )
            of_rows[places] = out
        if is_whole:
            everywhere = [_words(union), sums.flatten().cpu()]
            sent = self._trade("spread_rows", table, (everywhere for _ in parts))
            for peer, (row, value) in enumerate(sent):
                if peer != self._group.index:
                    of_rows[_numbers(row).to(mean.device)] = value.view(-1, table.row).to(
                        mean.device
                    )

    def _first(self, table: UnitSpec) -> int:
        """The first row that this rank owns."""
        return self._group.index * (table.layout.shard_numel // table.row)

    def _trade(
        self, operation: str, table: UnitSpec, outgoing: Iterator[list[Tensor]]
    ) -> list[list[Tensor]]:
        return trade(
            self._collectives, [*outgoing], name=table.name, operation=operation, comm=self._comm
        )


def _cut(table: UnitSpec, rows: Tensor) -> Sequence[Tensor]:
    """``rows`` by owner."""
    layout = table.layout
    firsts = torch.arange(1, layout.num_shards, device="cpu") * (layout.shard_numel // table.row)
    return rows.tensor_split(torch.searchsorted(rows, firsts).tolist())


def _chunks(rows: int, width: int) -> Iterator[tuple[int, int]]:
    """Begin and end of runs of rows, of ``width`` elements each while they are summed."""
    most = max(CHUNK_BYTES // (FP32_BYTES * width), 1)
    return ((start, min(start + most, rows)) for start in range(0, rows, most))


def _spread_out(some: Tensor, rows: Tensor, values: Tensor, device: torch.device) -> Tensor:
    """What a rank has sent of the rows ``some``, end to end: zeros where it has none."""
    first, stop = torch.searchsorted(rows, torch.stack([some[0], some[-1] + 1])).tolist()
    block = torch.zeros(len(some), values.shape[1], dtype=torch.float32, device="cpu")
    block[torch.searchsorted(some, rows[first:stop])] = values[first:stop]
    return block.view(-1).to(device)


def _words(rows: Tensor) -> Tensor:
    """The numbers of rows as they travel, fp32 words of their bits."""
    return rows.contiguous().view(torch.float32)


def _numbers(words: Tensor) -> Tensor:
    """The inverse of ``_words``."""
    return words.clone().view(torch.int64)
