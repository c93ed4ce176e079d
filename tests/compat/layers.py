# mypy: disable-error-code="override, operator, union-attr, attr-defined, index, assignment, arg-type, call-overload"
"""Layers of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from tests.compat.construct import WIDTH, Habits, Net, Place, Residual

habits = Habits()


class Around(nn.Module):
    """A residual block around any layer."""

    def __init__(
        self, layer: Callable[[], nn.Module], call: Callable[[Any, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.layer = layer()
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return x + self.call(self.layer, x)


def plainly(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def around(
    name: str,
    says: str,
    layer: Callable[[], nn.Module],
    call: Callable[[Any, Tensor], Tensor] = plainly,
    **more: Any,
) -> None:
    habits.add(name, says, block=lambda: Around(layer, call), **more)


def as_image(layer: nn.Module, x: Tensor) -> Tensor:
    """(4, 6) as two channels of three."""
    return layer(x.view(4, 2, 3)).flatten(1)


def as_square(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.view(4, 1, 2, 3)).flatten(1)


def as_volume(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.view(4, 1, 1, 2, 3)).flatten(1)


def as_sequence(layer: nn.Module, x: Tensor) -> Tensor:
    """(4, 6) as four sequences of two steps."""
    return layer(x.view(4, 2, 3))[0].flatten(1)[:, :WIDTH]


def up_and_pooled(layer: nn.Module, x: Tensor) -> Tensor:
    return F.adaptive_avg_pool1d(layer(x.view(4, 2, 3)), 3).flatten(1)


def attended(layer: nn.Module, x: Tensor) -> Tensor:
    h = x.view(4, 2, 3)
    return layer(h, h, h, need_weights=False)[0].flatten(1)


def attended_with_weights(layer: nn.Module, x: Tensor) -> Tensor:
    h = x.view(4, 2, 3)
    mask = torch.triu(torch.ones(2, 2, dtype=torch.bool), 1)
    out, weights = layer(h, h, h, attn_mask=mask)
    return out.flatten(1) + weights.mean()


def translated(layer: nn.Module, x: Tensor) -> Tensor:
    h = x.view(4, 3, 2)
    return layer(h, h).flatten(1)


def packed(layer: nn.Module, x: Tensor) -> Tensor:
    sequence = pack_padded_sequence(x.view(4, 3, 2), torch.tensor([3, 2, 2, 1]), batch_first=True)
    out, _ = layer(sequence)
    return pad_packed_sequence(out, batch_first=True, total_length=3)[0].flatten(1)


class PackedBlock(nn.Module):
    """A block from PackedSequence to PackedSequence."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: PackedSequence) -> PackedSequence:
        return self.rnn(x)[0]


class PackedNet(Net):
    def through(self, x: Any) -> Any:
        rows = x[:, None].expand(4, 3, WIDTH)
        given = pack_padded_sequence(rows, torch.tensor([3, 3, 2, 1]), batch_first=True)
        return pad_packed_sequence(super().through(given), batch_first=True)[0].mean(1)


def words(place: Place) -> tuple[Tensor, Tensor]:
    """Tokens (4, 5), some of them padding, and targets (4, 3)."""
    return place.integers(7, 4, 5), place.normal(4, 3)


class Words(Net):
    def __init__(self, block: Callable[[], nn.Module] = Residual) -> None:
        super().__init__(block)
        self.stem = nn.Embedding(7, WIDTH, padding_idx=0)

    def read(self, x: Any) -> Any:
        return x.mean(1) if x.dim() == 3 else x


def of_words(
    name: str, options: dict[str, Any], kind: type[nn.Module] = nn.Embedding, **more: Any
) -> None:
    said = ", ".join(f"{key}={value}" for key, value in options.items())

    def change(model: Any) -> None:
        model.stem = kind(7, WIDTH, **options)

    habits.add(
        name, f"`nn.{kind.__name__}({said})`", model=Words, change=change, batch=words, **more
    )


def batch_first_transformer() -> nn.Module:
    return nn.Transformer(2, 2, 1, 1, 4, dropout=0.0, batch_first=True)


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(3, 1, 5, dropout=0.0, batch_first=True)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False)


around("conv1d", "`nn.Conv1d`", lambda: nn.Conv1d(2, 2, 3, padding=1), as_image)
around(
    "conv2d-grouped",
    "`nn.Conv2d`, grouped and dilated",
    lambda: nn.Conv2d(1, 2, (1, 2), dilation=(1, 2), padding="same", bias=False),
    lambda m, x: m(x.view(4, 1, 2, 3)).mean(1).flatten(1),
)
around("conv3d", "`nn.Conv3d`", lambda: nn.Conv3d(1, 1, 3, padding=1), as_volume)
around(
    "conv-transposed",
    "`nn.ConvTranspose1d`",
    lambda: nn.ConvTranspose1d(2, 2, 3, stride=2),
    up_and_pooled,
)
around(
    "channels-last",
    "weights in `channels_last`",
    lambda: nn.Conv2d(1, 1, 3, padding=1).to(memory_format=torch.channels_last),
    as_square,
)
around(
    "batch-norm",
    "`nn.BatchNorm1d`: each rank's batch, rank 0's statistics",
    lambda: nn.BatchNorm1d(WIDTH),
)
around(
    "batch-norm-untracked",
    "`nn.BatchNorm1d(track_running_stats=False)`",
    lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False),
)
around("group-norm", "`nn.GroupNorm`", lambda: nn.GroupNorm(2, WIDTH))
around(
    "instance-norm",
    "`nn.InstanceNorm1d(affine=True)`",
    lambda: nn.InstanceNorm1d(2, eps=0.1, affine=True),
    as_image,
    tolerance=3e-6,
)
around("rms-norm", "`nn.RMSNorm`", lambda: nn.RMSNorm(WIDTH))
around(
    "lstm",
    "`nn.LSTM`, two layers, both directions",
    lambda: nn.LSTM(3, 2, 2, bidirectional=True, batch_first=True),
    as_sequence,
)
around(
    "lstm-projected",
    "`nn.LSTM(proj_size=...)`",
    lambda: nn.LSTM(3, 4, proj_size=3, batch_first=True),
    as_sequence,
)
around("gru", "`nn.GRU`", lambda: nn.GRU(3, 3, batch_first=True), as_sequence)
around(
    "gru-cell",
    "`nn.GRUCell` in a loop",
    lambda: nn.GRUCell(WIDTH, WIDTH),
    lambda m, x: m(x, m(x)),
)
around(
    "packed-sequence",
    "`PackedSequence` inside a block",
    lambda: nn.GRU(2, 2, batch_first=True),
    packed,
)
habits.add(
    "packed-blocks",
    "blocks from `PackedSequence` to `PackedSequence`",
    block=PackedBlock,
    model=PackedNet,
)
of_words("embedding-padding", {"padding_idx": 0})
of_words("embedding-by-frequency", {"scale_grad_by_freq": True})
of_words("embedding-bag", {"mode": "mean"}, nn.EmbeddingBag)
of_words(
    "embedding-max-norm",
    {"max_norm": 1},
    refused="has max_norm=1, which changes its weight in every forward",
    remark="`max_norm=None`, weights scaled by hand",
)
of_words("embedding-sparse", {"sparse": True})
around(
    "attention",
    "`nn.MultiheadAttention`",
    lambda: nn.MultiheadAttention(3, 1, batch_first=True),
    attended,
)
around(
    "attention-weights",
    "the same with a mask and weights",
    lambda: nn.MultiheadAttention(3, 1, batch_first=True),
    attended_with_weights,
)
around(
    "attention-kv",
    "the same with `kdim`, `vdim`, `add_bias_kv`",
    lambda: nn.MultiheadAttention(3, 1, kdim=3, vdim=3, add_bias_kv=True, batch_first=True),
    attended,
)
around("transformer", "`nn.Transformer`", batch_first_transformer, translated)
around(
    "transformer-encoder",
    "`nn.TransformerEncoder`",
    encoder,
    lambda m, x: m(x.view(4, 2, 3)).flatten(1),
)
around(
    "bilinear",
    "`nn.Bilinear`",
    lambda: nn.Bilinear(WIDTH, WIDTH, WIDTH),
    lambda m, x: torch.tanh(m(x, x)),
)
around("prelu", "`nn.PReLU`", nn.PReLU)
