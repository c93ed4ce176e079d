"""A small residual convolutional network, for images.

Owns: the network. Must not know: ranks, shards, hpczero. It has what a GPT has not: convolution kernels, and with
batch normalisation buffers (running statistics), which are state but not parameters.

Shape suffixes: B batch, C channels, Y height, X width, K classes.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

Norm = Callable[[int], nn.Module]


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut; the shortcut is projected where the shape changes.

    Source: He et al., Deep Residual Learning, arXiv 1512.03385, sec. 3.3, shortcut option B.
    """

    def __init__(
        self, channels_in: int, channels_out: int, stride: int, norm: Norm = nn.BatchNorm2d
    ) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm_1 = norm(channels_out)
        self.conv_2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm_2 = norm(channels_out)
        changes = stride != 1 or channels_in != channels_out
        self.shortcut = (
            nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
            if changes
            else nn.Identity()
        )

    def forward(self, x_BCYX: Tensor) -> Tensor:
        """Image features in, (B, channels_out, Y / stride, X / stride) out."""
        y_BCYX = F.relu(self.norm_1(self.conv_1(x_BCYX)))
        return F.relu(self.norm_2(self.conv_2(y_BCYX)) + self.shortcut(x_BCYX))


class ConvNet(nn.Module):
    """A stem, residual blocks that double the width and halve the image, global average, linear classifier.

    Args:
        channels: Of the input images.
        classes: Number of labels.
        width: Channels after the stem.
        blocks: Residual blocks; the first keeps the resolution.
        norm: Makes a normalisation from a number of channels. Batch normalisation takes the statistics of a rank's own
            micro batch, so its results depend on the number of ranks; others do not.
    """

    def __init__(
        self,
        *,
        channels: int = 3,
        classes: int = 10,
        width: int = 16,
        blocks: int = 3,
        norm: Norm = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.stem_norm = norm(width)
        widths = [width * 2**index for index in range(blocks)]
        inputs = [width, *widths[:-1]]
        self.blocks = nn.ModuleList(
            ResidualBlock(wide_in, wide_out, 1 if wide_in == wide_out else 2, norm)
            for wide_in, wide_out in zip(inputs, widths, strict=True)
        )
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images_BCYX: Tensor, labels_B: Tensor | None = None) -> Tensor:
        """Logits (B, K), or the mean cross entropy if labels (int64) are given."""
        x_BCYX = F.relu(self.stem_norm(self.stem(images_BCYX)))
        for block in self.blocks:
            x_BCYX = block(x_BCYX)
        logits_BK: Tensor = self.head(x_BCYX.mean(dim=(-2, -1)))
        return logits_BK if labels_B is None else F.cross_entropy(logits_BK, labels_B)
