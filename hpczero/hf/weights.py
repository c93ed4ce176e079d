"""FolderWeights: any range of any parameter of a model, from the files of its folder.

``zeroify`` asks each rank for the elements of its own shard (``hpczero.zero.filling.KnownValues``), so nobody holds the
model.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hpczero.checkpoint.foreign.weight_files import cast
from hpczero.errors import CheckpointMismatch, PlanError
from hpczero.hf.converting import Assembly, Box, boxes
from hpczero.hf.files import Matched, WeightFolder

# Origins: which parameter of a loaded model each parameter is, after a program has changed the model.
#
# [Note: Copies]
# A copy has other parameters, of which torch keeps nothing. A copied module keeps what is in its dictionary. So each
# module has there the names that its parameters had, and whether it is a copy.

KEY = "_hpczero_origin"
_WAYS = (
    "change the model by transformers in one process (from_pretrained, the change, save_pretrained) and load that "
    "folder, or pass initialize=f(name, tensor) that fills such parameters itself and calls weights(name, tensor) for "
    "the others"
)
_PRODUCTS = (
    "it is of finetune.lora: pass zeroify(..., initialize=hpczero.finetune.first_values(weights))"
)


@dataclass(frozen=True)
class _ModuleOrigin:
    """On one module: what its own parameters were. See [Note: Copies].

    ``load`` is equal for all modules of one load, and for no other. ``names`` has the names at the load by those now.
    """

    load: object
    names: Mapping[str, str]
    is_copy: bool = False

    def __deepcopy__(self, memo: Any) -> _ModuleOrigin:
        return replace(self, is_copy=True)


class Origins:
    """Names of the parameters of one model as they were when it was loaded. Nothing here is collective."""

    def __init__(self, model: nn.Module) -> None:
        """``model``: as it was loaded; its modules are marked."""
        self._load = object()
        self._shapes: dict[str, tuple[int, ...]] = {}
        # Not weakly: torch gives no parameter of the meta device memory that a weak reference knows of.
        self._objects = list(model.parameters())
        self._names: dict[int, str] = {}
        self._moved: dict[str, str] = {}
        self._renamed = False
        for name, parameter in model.named_parameters():
            self._shapes[name], self._names[id(parameter)] = tuple(parameter.shape), name
        for module in model.modules():
            names = {key: self._names[id(own)] for key, own in _own(module)}
            if names:
                module.__dict__[KEY] = _ModuleOrigin(self._load, names)

    def bind(self, parameters: Mapping[str, nn.Parameter], model: nn.Module) -> None:
        """Find the origin of every parameter of a model that is about to get values.

        Raises PlanError: one has none, or two.
        """
        known = {n: self._names[id(p)] for n, p in parameters.items() if id(p) in self._names}
        marked = self._marked(model, copies=bool(known))
        empty = any(each.is_meta for each in parameters.values())
        self._moved = dict(known)
        for name, parameter in parameters.items():
            if name in known:
                continue
            found = marked.get(id(parameter), set())
            # Of a model that was built anew nothing is known, and all names are.
            strange = not found and bool(known or marked)
            if strange or len(found) > 1 or (empty and not parameter.is_meta):
                raise PlanError(
                    f"parameter {name!r} {tuple(parameter.shape)} was put into the model after hpczero.hf.load, which "
                    f"has no values of it; {_PRODUCTS if '.lora.' in name else _WAYS}"
                )
            if found:
                (self._moved[name],) = found
        self._renamed = any(now != then for now, then in self._moved.items())
        for name, parameter in parameters.items():
            self.origin(name, tuple(parameter.shape))

    def _marked(self, model: nn.Module, *, copies: bool) -> dict[int, set[str]]:
        """By the ids of parameters, the names that marked modules have for them; with ``copies`` those alone."""
        found: dict[int, set[str]] = {}
        for module in model.modules():
            mark = module.__dict__.get(KEY)
            if not isinstance(mark, _ModuleOrigin) or mark.load is not self._load:
                continue
            for key, parameter in _own(module):
                if key in mark.names and (mark.is_copy or not copies):
                    found.setdefault(id(parameter), set()).add(mark.names[key])
        return found

    def origin(self, name: str, shape: tuple[int, ...] | None = None) -> str:
        """The name at the load. Raises PlanError: there was no such parameter, or it had another shape.

        ``shape``: whole, now; None is not compared.
        """
        before = self._moved.get(name)
        if before is None and self._renamed:
            raise PlanError(
                f"parameter {name!r} is held in parts, in a model whose modules have other names than when "
                f"hpczero.hf.load gave it; {_WAYS}"
            )
        before = before or name
        known = self._shapes.get(before)
        if known is None:
            raise PlanError(
                f"parameter {name!r} was not in the model that hpczero.hf.load gave; {_WAYS}"
            )
        if shape is not None and known != tuple(shape):
            raise PlanError(
                f"parameter {name!r} is {tuple(shape)}, and was {known} when hpczero.hf.load gave the model; {_WAYS}"
            )
        return before


def _own(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for key, parameter in module._parameters.items():
        if parameter is not None:
            yield key, parameter


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
        """Not collective. ``draw`` gives a whole parameter that no file has; None where there are all."""
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

    def _read_box(self, key: str, box: Box = ()) -> Tensor:
        found = self._folder.box(key, [slice(own.start, own.stop) for own in box])
        return cast(found, torch.float32, self._folder.label(key))

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
                self._held = (key, converted[0].convert(self._model, self._read_box))
        return self._held[1][name if converted is None else converted[1]]
