"""Layers of which each rank has a part: linear ones cut by outputs or by inputs, an embedding cut by its vocabulary.

Owns: their products, and that padding stays zero. Must not know: how a model is cut (``split``), MPI, shards.

    column  y_own = x W_own^T + b_own     x enters whole, outputs stay in parts (or are joined)
    row     y = sum of x_own W_own^T + b  inputs come in parts, the sum leaves whole; the bias is added once

Under sequence parallelism x is gathered along time, and y is summed and cut along time: dimension -2.

[Note: Padding]
Where heads or the vocabulary do not divide, the last parts are padded with zeros. Padding must stay zero, or files that
know none would not hold the whole model. Outputs of a column layer that are padding are zero, but what a model makes of
them need not be (a sigmoid of 0 is 1/2). A row layer therefore leaves padded inputs out of its product: they reach no
sum, no weight there has a gradient, and none flows back into the column layer.

Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053, sec. 3; issue 19.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from hpczero.comm.sums import Sums
from hpczero.parallel.tensor.functions import enter, gather, leave, scatter, whole
from hpczero.parallel.tensor.loss import Words
from hpczero.plan.placement import Placement

TIME = -2


class ColumnLinear(nn.Module):
    """A linear layer whose outputs are cut over the ranks.

    Attributes:
        placement: of the weight.
        sums: over the ranks.
        sequence: whether inputs are own tokens, to be gathered along time.
        entered: whether inputs have passed ``enter`` or ``gather`` already, once for several layers.
        joined: whether outputs are gathered, padding left out.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        placement: Placement,
        sums: Sums,
        *,
        sequence: bool = False,
        entered: bool = False,
        joined: bool = False,
    ) -> None:
        """Not collective.

        Args:
            weight: (own outputs, inputs), padding included.
            bias: (own outputs,) or None.
            placement: of the weight, cut along dimension 0.
            sums: borrowed.
            sequence: as the attribute.
            entered: as the attribute.
            joined: as the attribute; for one strip.
        """
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.placement, self.sums = placement, sums
        self.sequence, self.entered, self.joined = sequence, entered, joined

    @property
    def in_features(self) -> int:
        """Inputs."""
        return self.placement.shape[1]

    @property
    def out_features(self) -> int:
        """Outputs of this rank, padding included; of the whole layer where they are joined."""
        return self.placement.shape[0] if self.joined else self.placement.local_shape[0]

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Own outputs, (..., own outputs); with ``joined`` all, (..., outputs). Collective in one direction or both."""
        if not self.entered:
            input = gather(input, self.sums, TIME) if self.sequence else enter(input, self.sums)
        out = F.linear(input, self.weight, self.bias)
        return joined(out, self.sums, self.placement) if self.joined else out

    @override
    def extra_repr(self) -> str:
        return _described(self.placement)


class RowLinear(nn.Module):
    """A linear layer whose inputs are cut over the ranks; its bias is whole on all of them.

    Attributes:
        placement: of the weight.
        sums: over the ranks.
        sequence: whether the sum is cut along time.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        placement: Placement,
        sums: Sums,
        *,
        sequence: bool = False,
    ) -> None:
        """Not collective.

        Args:
            weight: (outputs, own inputs), padding included.
            bias: (outputs,) or None.
            placement: of the weight, cut along dimension 1.
            sums: borrowed.
            sequence: as the attribute.
        """
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.placement, self.sums, self.sequence = placement, sums, sequence

    @property
    def in_features(self) -> int:
        """Inputs of this rank, padding included."""
        return self.placement.local_shape[1]

    @property
    def out_features(self) -> int:
        """Outputs."""
        return self.placement.shape[0]

    @override
    def forward(self, input: Tensor) -> Tensor:
        """All outputs, (..., outputs), of own tokens under sequence parallelism. Collective."""
        weight: Tensor = self.weight
        if self.placement.is_padded:  # see [Note: Padding]
            input, weight = (_without_padding(x, self.placement) for x in (input, weight))
        out = F.linear(input, weight)
        out = scatter(out, self.sums, TIME) if self.sequence else leave(out, self.sums)
        return out if self.bias is None else out + self.bias

    @override
    def extra_repr(self) -> str:
        return _described(self.placement)


class VocabularyEmbedding(nn.Module):
    """An embedding of which each rank has some rows. Rows of other ranks count as zero in the sum.

    Attributes:
        placement: of the weight.
        sums: over the ranks.
        sequence: whether the sum is cut along time.
        padding_idx: id whose row has no gradient, of the whole vocabulary; or None.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        placement: Placement,
        sums: Sums,
        *,
        sequence: bool = False,
        padding_idx: int | None = None,
    ) -> None:
        """Not collective.

        Args:
            weight: (own ids, features), padding included.
            placement: of the weight, cut along dimension 0 in one strip.
            sums: borrowed.
            sequence: as the attribute.
            padding_idx: as the attribute.
        """
        super().__init__()
        self.weight = weight
        self.placement, self.sums, self.sequence = placement, sums, sequence
        self.padding_idx = padding_idx
        self.words = words_of(placement)

    @property
    def num_embeddings(self) -> int:
        """Ids of the whole vocabulary."""
        return self.words.size

    @property
    def embedding_dim(self) -> int:
        """Features."""
        return self.placement.shape[1]

    @override
    def forward(self, input: Tensor) -> Tensor:
        """(..., features) of ids (...), of own tokens under sequence parallelism. Collective.

        Raises:
            IndexError: an id is not in the vocabulary; on the host alone, as torch.
        """
        first, held, size = self.words
        wrong = (input < 0) | (input >= size)
        if input.device.type == "cpu":
            if wrong.any():
                raise IndexError(f"index out of range: got id {int(input[wrong][0])} of {size}")
        elif input.device.type != "meta":
            torch._assert_async(~wrong.any(), "a token id is out of range")
        other = (input < first) | (input >= first + held)
        padding = self.padding_idx
        if padding is not None:
            padding = padding - first if first <= padding < first + held else None
        local = torch.where(other, 0, input - first)
        # Ids of other ranks look up row 0, and the mask takes its gradient away again.
        out = F.embedding(local, self.weight)
        if padding is not None:
            stopped = (local == padding) & ~other
            out = torch.where(stopped[..., None], out.detach(), out)
        out = out.masked_fill(other[..., None], 0.0)
        return scatter(out, self.sums, TIME) if self.sequence else leave(out, self.sums)

    @override
    def extra_repr(self) -> str:
        return _described(self.placement)


def words_of(placement: Placement) -> Words:
    """The part of the vocabulary that a rank has, by the placement of the weight of an embedding or a head."""
    owned = placement.owned
    return Words(owned.start, len(owned), placement.shape[0])


def joined(out: Tensor, sums: Sums, placement: Placement) -> Tensor:
    """Outputs of a column layer, all of them on every rank, without padding: (..., outputs). Collective."""
    return whole(out, sums, -1)[..., : placement.shape[0]]


def _without_padding(x: Tensor, placement: Placement) -> Tensor:
    """The last dimension of ``x``, which has ``strips`` x ``room`` elements, without those that are padding."""
    owned = len(placement.owned)
    if placement.strips == 1:
        return x[..., :owned]
    strips = x.reshape(*x.shape[:-1], placement.strips, placement.room)
    return strips[..., :owned].flatten(-2)


def _described(placement: Placement) -> str:
    return (
        f"{placement.local_shape} of {placement.shape}, part {placement.part} of {placement.parts}"
    )
