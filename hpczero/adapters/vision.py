"""Images: a residual network and a vision transformer that name the direction of stripes.

Owns: the images, drawn with a seed, and the choice of network. Must not know: ranks.

    python -m hpczero.train --model.factory hpczero.adapters.vision:resnet
    python -m hpczero.train --model.factory hpczero.adapters.vision:vit
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from hpczero.adapters.base import Adapter
from hpczero.models.config import check_sizes

if TYPE_CHECKING:
    from torch import Tensor, nn

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
            from hpczero.models.vit import ViT

            return ViT(
                size=self.size,
                patch=4,
                channels=1,
                classes=CLASSES,
                hidden=self.width,
                layers=self.layers,
            )
        from torch.nn import GroupNorm

        from hpczero.models.convnet import ConvNet

        norm = partial(GroupNorm, NORM_GROUPS)
        return ConvNet(channels=1, classes=CLASSES, width=self.width, blocks=self.layers, norm=norm)

    def samples(self) -> tuple[Any, Any]:
        """Images, fp32 (1, size, size), and labels, int64."""
        import torch

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
        from torch.nn import functional

        images, labels = batch
        return functional.cross_entropy(model(images), labels)

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
