"""A vision transformer: patches of an image as tokens.

Owns: the network. Must not know: ranks, shards, hpczero.

Source: Dosovitskiy et al., An Image is Worth 16x16 Words, arXiv 2010.11929, sec. 3.1, with the mean over patches
instead of a class token.

Shape suffixes: B batch, C channels, Y height, X width, P patches, H hidden, K classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Encoder(nn.Module):
    """A transformer block that looks at all positions: norm, attention, norm, MLP, with residuals.

    Args:
        hidden: Width; ``heads`` divides it.
        heads: Attention heads.
    """

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.projection = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.expansion = nn.Linear(hidden, 4 * hidden)
        self.contraction = nn.Linear(4 * hidden, hidden)

    def forward(self, x_BPH: Tensor) -> Tensor:
        """(B, P, H) to (B, P, H)."""
        batch, places, hidden = x_BPH.shape
        q, k, v = (
            part.view(batch, places, self.heads, hidden // self.heads).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x_BPH)).chunk(3, dim=-1)
        )
        seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x_BPH.shape)
        x_BPH = x_BPH + self.projection(seen)
        made: Tensor = self.contraction(F.gelu(self.expansion(self.mlp_norm(x_BPH))))
        return x_BPH + made


class ViT(nn.Module):
    """Patches, learned positions, encoder blocks, mean, linear classifier.

    Args:
        size: Height and width of an image; ``patch`` divides it.
        patch: Height and width of a patch.
        channels: Of the input images.
        classes: Number of labels.
        hidden: Width of the blocks.
        heads: Attention heads of a block.
        layers: Number of blocks.

    Raises:
        ValueError: Sizes do not divide.
    """

    def __init__(
        self,
        *,
        size: int,
        patch: int,
        channels: int,
        classes: int,
        hidden: int = 32,
        heads: int = 2,
        layers: int = 2,
    ) -> None:
        super().__init__()
        if size % patch or hidden % heads:
            raise ValueError(
                f"ViT: image of {size} in patches of {patch}, width of {hidden} in {heads} heads: expected no rest"
            )
        self.patches = nn.Conv2d(channels, hidden, patch, stride=patch)
        self.positions = nn.Parameter(torch.empty((size // patch) ** 2, hidden))
        nn.init.normal_(self.positions, std=0.02)
        self.blocks = nn.ModuleList(Encoder(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, images_BCYX: Tensor) -> Tensor:
        """Logits (B, K)."""
        x_BPH = self.patches(images_BCYX).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x_BPH = block(x_BPH)
        logits_BK: Tensor = self.head(self.norm(x_BPH).mean(dim=1))
        return logits_BK
