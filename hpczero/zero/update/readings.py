"""Readings: numbers that a program wants of a step, read together with those that the step asks for itself.

Owns: which numbers wait to be read, and the one transfer of all of them. Must not know: units, what a number means.

Whoever asks a tensor on a device for a number waits until the device has come that far. A step asks once anyway, for
the norm or for whether gradients are finite. What a program wants to know of the same step, its loss above all, comes
along then (issue 20, 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

import torch
from torch import Tensor

from hpczero.errors import ConfigError


class Reading:
    """A number that is read when it is asked for, or with others before that."""

    def __init__(self, tensor: Tensor, waiting: WeakSet[Reading]) -> None:
        """``tensor``: 0-dimensional, fp64, of its own; ``waiting``: where it stands until it is read."""
        self._tensor: Tensor | None = tensor
        self._waiting = waiting
        self._number = 0.0

    def __call__(self) -> float:
        """The number. It waits for the device where nothing has read it yet."""
        if self._tensor is not None:
            beside = {
                each: there
                for each in self._waiting
                if (there := each.on(self._tensor.device)) is not None
            }
            found = torch.stack([*beside.values()]).tolist()
            for reading, number in zip(beside, found, strict=True):
                reading.take(number)
        return self._number

    def take(self, number: float) -> None:
        """It was read."""
        self._tensor, self._number = None, number
        self._waiting.discard(self)

    def on(self, device: torch.device) -> Tensor | None:
        """What is to be read, if it is there."""
        tensor = self._tensor
        return tensor if tensor is not None and tensor.device == device else None


class Readings:
    """Of one model. Nothing here is collective."""

    def __init__(self) -> None:
        self._waiting: WeakSet[Reading] = WeakSet()  # what nobody has, nobody asks for

    def add(self, tensor: Tensor) -> Reading:
        """One number, as it is now.

        Args:
            tensor: one element of any real dtype on any device.

        Raises:
            ConfigError: it has another number of elements, or is complex.
        """
        if tensor.numel() != 1 or tensor.is_complex():
            raise ConfigError(
                f"a number to read later: got {tuple(tensor.shape)} {tensor.dtype}, expected one real element; take "
                "the mean or the sum before"
            )
        # A copy: what the program does to the tensor afterwards is not meant.
        with torch.inference_mode(False), torch.no_grad():
            own = tensor.detach().reshape(()).to(torch.float64, copy=True)
        reading = Reading(own, self._waiting)
        self._waiting.add(reading)
        return reading

    def read(self, numbers: Sequence[Tensor]) -> list[float]:
        """These numbers, and whatever waits on their device, in one transfer.

        Args:
            numbers: 0-dimensional, of one dtype on one device. Without any there is no transfer.

        Returns:
            Of ``numbers`` alone; the others have theirs.
        """
        if not numbers:
            return []
        wanted = torch.stack(list(numbers))
        beside = {
            reading: tensor
            for reading in self._waiting
            if (tensor := reading.on(wanted.device)) is not None
        }
        if beside:
            wanted = torch.cat([wanted.double(), torch.stack([*beside.values()])])
        found: list[float] = wanted.tolist()
        for reading, number in zip(beside, found[len(numbers) :], strict=True):
            reading.take(number)
        return found[: len(numbers)]
