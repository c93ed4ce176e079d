"""TensorCopies: what tensor ranks hold whole, each for itself, and must do alike: gradients and optimizers' options.

Owns: how they are compared before a step, and what is said where they differ. Must not know: layers, rules, what is
done about an error.

Every tensor rank steps norms, some biases and positions by itself. Their gradients are equal as long as all have the
same samples, targets and loss, and as long as the rule says of every layer where it stands. Where one of that is not
so, no shape need be wrong, and each rank would train a model of its own without a word. One norm for each such
parameter and step finds it. Kernels that add in no fixed order may round differently, so norms may differ a little.

Gradients that rest on a memory tier have to be brought for it. All are at the first step, where a wrong rule shows
before anything is updated. After that one unit is at each step, by turns.

Source: issue 19.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from contextlib import nullcontext

import numpy as np
import numpy.typing as npt
import torch

from hpczero.errors import StepError
from hpczero.job.topology import Topology
from hpczero.zero.units.unit import Unit

# Of all norms together. What rounding does is below a thousandth, in half precision too.
MOST_OFF = 1e-2


class TensorCopies:
    """Of the trainable units of one model."""

    def __init__(self, units: Sequence[Unit], topology: Topology) -> None:
        """Not collective.

        Args:
            units: the trainable ones.
            topology: its tensor ranks are compared.
        """
        self._topology = topology
        self._slots = [(unit, place) for unit in units for place in unit.spec.kept]
        self._away = [u for u in units if u.spec.kept and not u.gradients.rest.resident]
        self._compared = 0  # times; the same number on all ranks

    def error(self, options: Sequence[str]) -> StepError | None:
        """What differs, the same on each of the tensor ranks; None where nothing does. Collective over them.

        Args:
            options: texts that must be equal.
        """
        group = self._topology.tensor
        if group.size == 1:
            return None
        word = zlib.crc32("\n".join(options).encode())
        found = group.share(np.array([self._topology.shard_index, word, *self._norms()]))
        if (found[:, 1] != found[0, 1]).any():
            here = "; ".join(options)
            return StepError(
                f"rank {self._topology.rank}: ranks that share the layers of one model (mesh: tensor) have other "
                f"options of the optimizer, or have changed gradients otherwise; here {here}. Give all of them the "
                "same numbers: a scheduler the same loss, clip_grad_norm_ the same max_norm"
            )
        if (found[:, 0] != found[0, 0]).any():
            return None  # shards of other elements
        return self._unequal(found[:, 2:])

    def _norms(self) -> list[float]:
        """Of what this rank owns of each gradient; one transfer from a device. 0 where it is not this one's turn."""
        near = {u for u, _ in self._slots if u.gradients.rest.resident}
        found, owners = self._norms_in(near)
        for unit in self._turn():
            with unit.gradients.rest.at_hand() if unit.gradients.present else nullcontext():
                norms, places = self._norms_in([unit])
            found += norms
            owners += places
        squares = np.zeros(len(self._slots))
        if found:
            np.add.at(squares, owners, np.square(torch.stack(found).double().cpu().numpy()))
        roots: list[float] = np.sqrt(squares).tolist()
        return roots

    def _norms_in(self, units: Collection[Unit]) -> tuple[list[torch.Tensor], list[int]]:
        """Norms of pieces in memory, and which slot each is of."""
        found, owners = [], []
        for index, (unit, place) in enumerate(self._slots):
            if unit in units and unit.gradients.present:
                parts = unit.gradients.pieces_at(place, owned=True)
                norms = [torch.linalg.vector_norm(part.detach()) for part in parts if part.numel()]
                found += norms
                owners += [index] * len(norms)
        return found, owners

    def _turn(self) -> Sequence[Unit]:
        """Whose gradients are brought this time, of those that rest elsewhere; the same on all ranks."""
        self._compared += 1
        if not self._away or self._compared == 1:
            return self._away
        return [self._away[self._compared % len(self._away)]]

    def _unequal(self, norms: npt.NDArray[np.float64]) -> StepError | None:
        """Judge (tensor ranks, slots). What is not finite is left to those who skip steps."""
        finite = np.isfinite(norms).all(axis=0)
        norms = np.where(finite, norms, 0.0)
        off = np.abs(norms - norms[0])
        if not (off.sum(axis=1) > MOST_OFF * norms.sum(axis=1).max(initial=0.0)).any():
            return None
        rank, slot = np.unravel_index(int(off.argmax()), off.shape)
        unit, place = self._slots[slot]
        return StepError(
            f"rank {self._topology.rank}: the gradient of {unit.spec.layout.slots[place].name!r}, which all ranks hold "
            f"that share the layers of one model, has the norm {norms[rank, slot]:.6g} on tensor rank {rank} and "
            f"{norms[0, slot]:.6g} on tensor rank 0, expected the same. Give all of them the same samples, targets and "
            "loss, and the same seed for whatever is dropped outside of nn.Dropout. If they have, the rule of split is "
            "wrong about a layer: one within cut features is Kept.INSIDE, and what counts heads belongs to Rule.counts"
        )
