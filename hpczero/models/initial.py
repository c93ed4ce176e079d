"""The initial weights of a GPT, whole parameters or any part of one.

Owns: which distribution each parameter has. Must not know: the network, ranks, shards, hpczero.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hpczero.models.deviates import Deviates


class InitialWeights:
    """What the parameters of a GPT begin with; for ``zeroify(initialize=...)``. Nothing here is collective.

    An element depends on (seed, name of the parameter, its place there) alone: not on the order of calls, on who holds
    it, or on the processor. Every number of ranks starts from the same weights, and each rank draws its own part.

    Source: Radford et al., GPT-2 (2019), sec. 2.3, and its code for the 0.02: normal(0, 0.02), residual projections
    scaled by 1/sqrt(number of residual layers), which is 2 per block.
    """

    def __init__(self, *, seed: int, layers: int) -> None:
        """``seed`` of the run, and number of blocks of the model."""
        self._seed, self._layers = seed, layers
        self._latest: tuple[str, Deviates] | None = None

    def __call__(self, name: str, tensor: Tensor) -> None:
        """Fill one whole parameter in place.

        Args:
            name: as in ``named_parameters()``.
            tensor: fp32 on the CPU, contiguous, the whole shape of the parameter.

        Raises:
            ValueError: the tensor is not fp32 on the CPU, or not contiguous.
        """
        if tensor.dtype != torch.float32 or tensor.device.type != "cpu":
            raise ValueError(
                f"parameter {name!r}: got {tensor.dtype} on {tensor.device}, expected torch.float32 on cpu"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"parameter {name!r}: got the strides {tensor.stride()}, expected a contiguous tensor"
            )
        with torch.no_grad():
            self.fill_range(name, tuple(tensor.shape), 0, tensor.view(-1))

    def fill_range(self, name: str, shape: tuple[int, ...], start: int, values: Tensor) -> None:
        """Fill ``values`` with the elements from ``start`` on of one parameter; takes time for these alone.

        Args:
            name: as in ``named_parameters()``.
            shape: of the whole parameter.
            start: first element, counted in the whole parameter.
            values: (n,) fp32 on the CPU.
        """
        if name.endswith("norm.weight"):
            values.fill_(1.0)
        elif name.endswith("bias"):
            values.zero_()
        else:
            residual = name.endswith("projection.weight")
            std = 0.02 / math.sqrt(2 * self._layers) if residual else 0.02
            self._deviates(name).fill(values, start, std)

    def _deviates(self, name: str) -> Deviates:
        """Those of one parameter. A part of it may be asked for in many ranges, one after the other."""
        if self._latest is None or self._latest[0] != name:
            self._latest = name, Deviates(f"{self._seed}/{name}")
        return self._latest[1]
