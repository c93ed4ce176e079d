"""Layers of which each rank has a part: linear ones cut by outputs or by inputs, an embedding cut by its vocabulary.

    column  y_own = x W_own^T + b_own     x enters whole, outputs stay in parts (or are joined)
    row     y = sum of x_own W_own^T + b  inputs come in parts, the sum leaves whole; the bias is added once

Under sequence parallelism x is gathered along time, and y is summed and cut along time: dimension -2.

[Note: Padding]
Where heads or the vocabulary do not divide, the last parts are padded with zeros. Padding must stay zero, or files that
know none would not hold the whole model. Outputs of a column layer that are padding are zero, but what a model makes of
them need not be (a sigmoid of 0 is 1/2). A row layer therefore leaves padded inputs out of its product: they reach no
sum, no weight there has a gradient, and none flows back into the column layer.

Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053, sec. 3.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from typing_extensions import override

from hpczero.comm.sums import Sums
from hpczero.parallel.tensor.functions import compare, enter, gather, leave, scatter, whole
from hpczero.parallel.tensor.loss import Words
from hpczero.plan.placement import Placement

TIME = -2


class PartLayer(nn.Module):
    """A layer whose weight is cut over the ranks.

    Attributes:
        placement: of the weight.
        sums: over the ranks; borrowed.
        sequence: whether activations outside of the layer are those of own tokens.
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
        """``weight``: of shape ``placement.local_shape``, padding included. Not collective."""
        super().__init__()
        self.weight, self.bias = weight, bias
        self.placement, self.sums, self.sequence = placement, sums, sequence

    def leave(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' ``partial``, of own tokens under sequence parallelism. Collective."""
        return scatter(partial, self.sums, TIME) if self.sequence else leave(partial, self.sums)

    @override
    def extra_repr(self) -> str:
        placed = self.placement
        return f"{placed.local_shape} of {placed.shape}, part {placed.part} of {placed.parts}"


class ColumnLinear(PartLayer):
    """A linear layer whose outputs are cut over the ranks: weight (own outputs, inputs), bias (own outputs,) or None.

    Attributes:
        entered: whether inputs have passed ``enter`` or ``gather`` already, once for several layers.
        joined: whether outputs are gathered, padding left out; for one strip.
    """

    entered = joined = False

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


class RowLinear(PartLayer):
    """A linear layer whose inputs are cut over the ranks: weight (outputs, own inputs), bias (outputs,) or None."""

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
        out = self.leave(F.linear(input, weight))
        # Under autocast products are in half precision; so is what a plain layer returns, its bias included.
        return out if self.bias is None else out + self.bias.to(out.dtype)


class VocabularyEmbedding(PartLayer):
    """An embedding of which each rank has some rows, (own ids, features). Rows of other ranks count as zero in the sum.

    Attributes:
        padding_idx: id whose row has no gradient, of the whole vocabulary; or None.
    """

    padding_idx: int | None = None

    @property
    def num_embeddings(self) -> int:
        """Ids of the whole vocabulary."""
        return self.placement.shape[0]

    @property
    def embedding_dim(self) -> int:
        """Features."""
        return self.placement.shape[1]

    @override
    def forward(self, input: Tensor) -> Tensor:
        """(..., features) of ids (...), of own tokens under sequence parallelism. Collective.

        Raises:
            IndexError: an id is not in the vocabulary; on the host alone, as torch.
            CommError: ranks were given other ids; on the host alone, and on every rank.
        """
        first, held, size = words_of(self.placement)
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
        compare("token ids", input, self.sums)
        return self.leave(out)


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
