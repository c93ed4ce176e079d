"""Images: a residual network and a vision transformer that name the direction of stripes.

Owns: the images, drawn with a seed, and the choice of network. Must not know: ranks.

    python -m hpczero.train --model.factory examples.vision:resnet
    python -m hpczero.train --model.factory examples.vision:vit
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpczero.adapters.base import Adapter
from hpczero.models.config import check_sizes

# A vision transformer: patches of an image as tokens.
#
# Source: Dosovitskiy et al., An Image is Worth 16x16 Words, arXiv 2010.11929, sec. 3.1, with the mean over patches
# instead of a class token.
#
# Shape suffixes: B batch, C channels, Y height, X width, P patches, H hidden, K classes.


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


CLASSES = 8
NORM_GROUPS = 4


@dataclass(frozen=True)
class Stripes(Adapter):
    """Images of stripes in one of 8 directions, of any phase, under noise.

    Args:
        network: "resnet" or "vit".
        size: height and width of an image.
        width: channels after the stem, or width of the blocks.
        layers: blocks.
        rows: images to train on; a quarter as many are held out.
        noise: standard deviation of the noise, where stripes are of amplitude 1.

    Raises:
        ValueError: a size is below 1.
    """

    network: Literal["resnet", "vit"]
    size: int = 16
    width: int = 16
    layers: int = 2
    rows: int = 2048
    noise: float = 0.7

    metric_name = "accuracy"

    def __post_init__(self) -> None:
        check_sizes("Stripes", size=self.size, width=self.width, layers=self.layers, rows=self.rows)

    def build(self) -> nn.Module:
        """The network. Groups of channels are normalised, not the batch, whose statistics would depend on the ranks."""
        if self.network == "vit":
            return ViT(
                size=self.size,
                patch=4,
                channels=1,
                classes=CLASSES,
                hidden=self.width,
                layers=self.layers,
            )
        from examples.convnet import ConvNet

        norm = partial(nn.GroupNorm, NORM_GROUPS)
        return ConvNet(channels=1, classes=CLASSES, width=self.width, blocks=self.layers, norm=norm)

    def samples(self) -> tuple[Any, Any]:
        """Images, fp32 (1, size, size), and labels, int64."""
        generator = torch.Generator().manual_seed(16)
        total = self.rows + max(1, self.rows // 4)
        labels = torch.randint(CLASSES, (total,), generator=generator)
        phase = 2 * math.pi * torch.rand(total, 1, 1, generator=generator)
        waves = 2 + torch.rand(total, 1, 1, generator=generator)
        along = torch.linspace(-0.5, 0.5, self.size)
        angle = (math.pi / CLASSES * labels).view(-1, 1, 1)
        distance = along.view(1, -1, 1) * torch.sin(angle) + along.view(1, 1, -1) * torch.cos(angle)
        images = torch.sin(2 * math.pi * waves * distance + phase)
        images += self.noise * torch.randn(images.shape, generator=generator)
        images = images.unsqueeze(1)
        rows = self.rows
        return (images[:rows], labels[:rows]), (images[rows:], labels[rows:])

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean cross entropy in nats."""
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    def metric(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Share of images that are named right."""
        images, labels = batch
        right: Tensor = (model(images).argmax(dim=1) == labels).float().mean()
        return right


def resnet(
    size: int = 16, width: int = 16, layers: int = 2, rows: int = 2048, noise: float = 0.7
) -> Stripes:
    """A residual network; for the arguments see ``Stripes``."""
    return Stripes("resnet", size, width, layers, rows, noise)


def vit(
    size: int = 16, width: int = 32, layers: int = 2, rows: int = 2048, noise: float = 0.7
) -> Stripes:
    """A vision transformer; for the arguments see ``Stripes``."""
    return Stripes("vit", size, width, layers, rows, noise)
