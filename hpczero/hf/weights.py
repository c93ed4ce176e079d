"""FolderWeights: any range of any parameter of a model, from the files of its folder.

Owns: reading no more than is asked for, and the cast to fp32. Must not know: MPI, units, stages. ``zeroify`` asks each
rank for the elements of its own shard (``hpczero.zero.filling.KnownValues``), so nobody holds the model.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hpczero.checkpoint.foreign.weight_files import cast
from hpczero.errors import CheckpointMismatch
from hpczero.hf.assembly import Assembly, Box, boxes, runs
from hpczero.hf.converting import Group
from hpczero.hf.files import WeightFolder
from hpczero.hf.matching import Matched
from hpczero.hf.origins import Origins

PIECE_NUMEL = 2**20  # put together at a time


class FolderWeights:
    """The weights of one model, as ``zeroify(initialize=...)`` takes them.

    Attributes:
        missing: parameters that no file has; they are drawn.
        unexpected: tensors that the model has no place for.
        mismatched: parameters of which the files have another shape; they are drawn.
    """

    def __init__(
        self,
        folder: WeightFolder,
        matched: Matched,
        model: Any,
        draw: Callable[[str], Tensor] | None,
    ) -> None:
        """Not collective.

        Args:
            folder: the files.
            matched: what they are of the model.
            model: of transformers.
            draw: gives a whole parameter that no file has; None where there are all.
        """
        self.missing, self.unexpected = tuple(matched.missing), tuple(matched.unexpected)
        self.mismatched = tuple(matched.mismatched)
        self._folder, self._matched, self._model, self._draw = folder, matched, model, draw
        self._held: tuple[object, dict[str, Tensor]] = (None, {})  # the whole ones of last time
        self._known = Origins(model)
        self._files = zlib.crc32("\n".join(folder.fingerprint()).encode())

    @property
    def nbytes_read(self) -> int:
        """Bytes of values that this rank has read so far."""
        return self._folder.nbytes_read

    def bind(self, parameters: Mapping[str, nn.Parameter], model: nn.Module) -> None:
        """Follow parameters of the model to where they are now: under other names, in another order. Not collective.

        Args:
            parameters: of the model that is about to get values, by name.
            model: that has them, or some of them; a copy of the one that was loaded, too.

        Raises:
            PlanError: one of them was not there when the model was loaded, or had another shape.
        """
        self._known.bind(parameters, model)

    def __call__(self, name: str, tensor: Tensor) -> None:
        """Fill one whole parameter in place, fp32 on the CPU. Not collective; errors are those of ``fill_range``."""
        flat = torch.empty(tensor.numel(), dtype=torch.float32, device="cpu")
        self.fill_range(name, tuple(tensor.shape), 0, flat)
        with torch.no_grad():
            tensor.copy_(flat.view(tensor.shape))

    def fill_range(self, name: str, shape: tuple[int, ...], start: int, values: Tensor) -> None:
        """Fill ``values`` with the elements of one parameter from ``start`` on. Not collective.

        Args:
            name: of the parameter in the model.
            shape: of it.
            start: the first element, flat.
            values: (n,) fp32 on the CPU.

        Raises:
            CheckpointError: the file cannot be read.
            CheckpointMismatch: it has values that fp32 cannot hold, or two for one tied parameter.
            PlanError: the model that was loaded has no such parameter, or one of another shape.
        """
        name = self._known.origin(name, shape)
        if keys := self._matched.plain.get(name):
            self._held = (None, {})
            self._read(keys[0], start, values)
            for other in keys[1:]:
                self._compare(keys[0], other, start, values)
            return
        group, result = self._matched.converted.get(name, (None, ""))
        if group is not None and group.assemblies:
            self._held = (None, {})
            self._assemble(group.assemblies[result], start, values)
            return
        whole = self._whole(name)
        if tuple(whole.shape) != tuple(shape):
            raise CheckpointMismatch(f"{name!r} is {tuple(whole.shape)}, expected {tuple(shape)}")
        values.copy_(whole.reshape(-1)[start : start + len(values)])

    def fingerprint(self, name: str) -> int:
        """32 bits of the files and of where the parameter is in them. Not collective."""
        name = self._known.origin(name)
        plain = self._matched.plain.get(name, [])
        group = self._matched.converted.get(name)
        keys = [*plain, *(key for key, _ in (group[0].sources if group else []))]
        return zlib.crc32(repr((name, keys)).encode(), self._files)

    def _read(self, key: str, start: int, values: Tensor) -> None:
        done = 0
        for piece in self._folder.pieces(key, start, start + len(values)):
            values[done : done + len(piece)].copy_(
                cast(piece, torch.float32, self._folder.label(key))
            )
            done += len(piece)

    def _assemble(self, assembly: Assembly, start: int, values: Tensor) -> None:
        """Read a range of a parameter that is put together from several tensors, a piece at a time."""
        done = 0
        while done < len(values):
            stop = min(done + PIECE_NUMEL, len(values))
            for box in boxes(assembly.shape, start + done, start + stop):
                part = assembly.read(box, self._read_box)
                values[done : done + part.numel()].view(part.shape).copy_(part)
                done += part.numel()

    def _read_box(self, key: str, box: Box) -> Tensor:
        found = torch.empty([len(own) for own in box], dtype=torch.float32, device="cpu")
        flat, done = found.view(-1), 0
        for run in runs(self._folder.entries[key].shape, box):
            self._read(key, run.start, flat[done : done + len(run)])
            done += len(run)
        return found

    def _compare(self, key: str, other: str, start: int, values: Tensor) -> None:
        """Refuse a tied parameter with two values: transformers would not tie it."""
        again = torch.empty(len(values), dtype=torch.float32, device="cpu")
        self._read(other, start, again)
        same = (again == values) | (again.isnan() & values.isnan())
        if not bool(same.all()):
            raise CheckpointMismatch(
                f"{self._folder.path}: {key!r} and {other!r} are tied by config.json and differ in the files; set "
                "tie_word_embeddings to false in config.json to keep both, or take one out of the files"
            )

    def _whole(self, name: str) -> Tensor:
        """A whole parameter that cannot be read by ranges. The last ones are kept: more ranges of them follow."""
        converted = self._matched.converted.get(name)
        key: object = name if converted is None else id(converted[0])
        if self._held[0] != key:
            self._held = (None, {})
            if converted is None:
                assert self._draw is not None, "checked when the weights were compared"
                self._held = (key, {name: self._draw(name)})
            else:
                self._held = (key, self._converted(converted[0]))
        return self._held[1][name if converted is None else converted[1]]

    def _converted(self, group: Group) -> dict[str, Tensor]:
        def value_of(key: str) -> Tensor:
            return cast(self._folder.whole(key), torch.float32, self._folder.label(key))

        return group.convert(self._model, value_of)
