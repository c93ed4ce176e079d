"""The convolutional network: shapes, statistics, and that it learns."""

from __future__ import annotations

import torch

from examples.convnet import ConvNet


def test_blocks_double_the_width_and_halve_the_image() -> None:
    model = ConvNet(channels=2, classes=5, width=4, blocks=3)
    shapes = []
    for block in model.blocks:
        block.register_forward_hook(lambda _m, _i, out: shapes.append(tuple(out.shape)))
    logits = model(torch.randn(3, 2, 16, 12, generator=torch.Generator().manual_seed(0)))
    assert shapes == [(3, 4, 16, 12), (3, 8, 8, 6), (3, 16, 4, 3)]
    assert logits.shape == (3, 5)


def test_running_statistics_move_in_training_only() -> None:
    model = ConvNet(width=4, blocks=2)
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)) + 3
    model.eval()(images)
    mean = model.stem_norm.running_mean
    assert isinstance(mean, torch.Tensor)
    assert not mean.any()
    model.train()(images)
    assert mean.all()
