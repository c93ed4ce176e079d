"""A small residual network on made-up images, with batch normalisation, accumulation and an evaluation.

    mpirun -n 2 python examples/convnet.py

The class of an image is the direction of its stripes. What a network with BatchNorm adds to ``own_loop.py``: it has
buffers (running mean and variance) that are state without gradients. In training each rank normalises by its own
micro-batch, and after each step all ranks take over the statistics of rank 0, as with DDP.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hpczero

# A small residual convolutional network, for images.
#
# Shape suffixes: B batch, C channels, Y height, X width, K classes.

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


STEPS, ACCUMULATION, SIZE, CLASSES = 24, 2, 12, 4
GLOBAL_BATCH, TEST_IMAGES = 48, 120  # 1, 2, 3 and 4 ranks divide both


def images(first: int, count: int) -> tuple[Tensor, Tensor]:
    """``count`` images (count, 1, SIZE, SIZE) and their labels; each depends on its number alone."""
    made, labels = [], []
    axis = torch.arange(SIZE, dtype=torch.float32)
    for index in range(first, first + count):
        generator = torch.Generator().manual_seed(index)
        label = index % CLASSES
        angle = math.pi * label / CLASSES
        phase = 2 * math.pi * torch.rand(1, generator=generator)
        waves = axis[:, None] * math.sin(angle) + axis[None, :] * math.cos(angle)
        noise = torch.randn(SIZE, SIZE, generator=generator)
        made.append(torch.sin(1.2 * waves + phase) + noise)
        labels.append(label)
    return torch.stack(made)[:, None], torch.tensor(labels)


@torch.no_grad()
def accuracy(model: torch.nn.Module, topology: hpczero.Topology) -> float:
    """Share of the test images that are named right. Collective: the forward gathers shards on every rank."""
    share = TEST_IMAGES // topology.size
    x, y = images(10**6 + topology.rank * share, share)
    model.eval()
    right = (model(x).argmax(dim=1) == y).sum().item()
    model.train()
    return sum(topology.gather(right)) / (share * topology.size)


def main() -> None:
    """Train for a few steps and say how far it came."""
    topology = hpczero.Topology.of_world()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = ConvNet(channels=1, classes=CLASSES, width=8, blocks=3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    hpczero.zeroify(model, optimizer, stage=3, topology=topology)
    micro_batch = GLOBAL_BATCH // (topology.size * ACCUMULATION)
    if topology.is_root:
        print(hpczero.sharding(model).plan.describe())

    losses = []
    for step in range(STEPS):
        loss_sum = 0.0
        for micro_step in range(ACCUMULATION):
            first = step * GLOBAL_BATCH + (micro_step * topology.size + topology.rank) * micro_batch
            x, y = images(first, micro_batch)
            loss = F.cross_entropy(model(x), y) / ACCUMULATION
            loss.backward()  # the sharded gradients add up; hpczero.no_sync would trade memory for messages
            loss_sum += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(topology.gather(loss_sum)) / topology.size)
        if topology.is_root and step % 4 == 0:
            print(f"step {step:2d}  loss {losses[-1]:.4f}")

    share = accuracy(model, topology)
    if topology.is_root:
        print(
            f"loss fell from {losses[0]:.4f} to {losses[-1]:.4f}; {share:.0%} of new images right"
        )
    hpczero.release(model)
    topology.free()


if __name__ == "__main__":
    main()
