"""SharedBuffers: the persistent buffers of a model (running statistics), which are rank 0's after every step."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hpczero.comm.collectives import Collectives
from hpczero.errors import StepError
from hpczero.job.group import unlike
from hpczero.job.mesh import DATA_SEQUENCE
from hpczero.job.topology import Topology


def modules_of(model: nn.Module) -> list[nn.Module]:
    """As ``model.modules()``, in its order, at a tenth of its cost."""
    found: list[nn.Module] = []
    seen: set[int] = set()
    stack = [model]
    while stack:
        module = stack.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append(module)
        inner = module._modules
        if inner:
            stack.extend(m for m in reversed(inner.values()) if m is not None)
    return found


def signature(modules: Iterable[nn.Module]) -> list[tuple[Any, ...]]:
    """Of a model's modules: an equal one later means that no persistent buffer came, went or was reshaped."""
    return [
        (id(module), name, buffer.shape, buffer.dtype)
        for module in modules
        if module._buffers
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    ]


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that state_dict would save, each once, under its first name."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            found[f"{path}.{name}" if path else name] = buffer
    return found


def bytes_of(buffer: Tensor) -> Tensor:
    """(nbytes,) uint8, of whatever strides; a view where it can be one."""
    plain = buffer.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8)


def set_bytes(buffer: Tensor, new: Tensor) -> None:
    """Give ``buffer`` what ``bytes_of`` gave."""
    with torch.inference_mode(buffer.is_inference()), torch.no_grad():
        values = new.clone().view(buffer.dtype).view(buffer.shape)
        steps = zip(buffer.shape, buffer.stride(), strict=True)
        if not any(length > 1 and not step for length, step in steps):
            buffer.copy_(values)
        else:  # expanded: torch cannot write to it
            buffer.data = values
            if not buffer.is_inference():
                torch.autograd.graph.increment_version(buffer)


def version_of(buffer: Tensor) -> int:
    """Another one after each change in place; torch counts none of what ``torch.inference_mode`` made."""
    return -1 if buffer.is_inference() else buffer._version


class SharedBuffers:
    """Persistent buffers of one model."""

    def __init__(self, model: nn.Module, topology: Topology, collectives: Collectives) -> None:
        """Note the buffers that the model has now; all ranks must keep the same ones. Not collective."""
        self._model = model
        self._topology = topology
        self._collectives = collectives
        self._first = self._describe()
        self._signature = signature(modules_of(model))
        self._any = bool(self._signature)  # on all ranks alike
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    @property
    def now(self) -> list[Tensor]:
        """The buffers as they are now. A forward may replace them (``self.mean = ...``)."""
        return list(persistent_buffers(self._model).values())

    def _describe(self) -> list[str]:
        named = persistent_buffers(self._model).items()
        return [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in named]

    def replaced(self, modules: Iterable[nn.Module]) -> list[str]:
        """Buffers that came, went, or changed shape or dtype since ``zeroify``. Ranks must agree on them.

        Args:
            modules: modules that the model has now.
        """
        found = signature(modules)
        self._any = bool(found)
        if found == self._signature:
            return []
        now, first = self._describe(), self._first
        if now == first:
            return []
        gone = [f"no {text}" for text in first if text not in now]
        return [text for text in now if text not in first] + gone

    def check_equal(self, root: int) -> None:
        """Refuse to share buffers if ranks have others than rank ``root`` of ``data_sequence``. Collective over world.

        Raises:
            StepError: on every rank; the message names buffers.
        """
        here = self._describe()
        self._any = bool(here)
        differs = unlike(self._topology.data_sequence, here, root)
        first = self._topology.mesh.members(self._topology.rank, *DATA_SEQUENCE)[root]
        with self._topology.agreed("share the buffers"):
            if differs:
                raise StepError(
                    f"rank {self._topology.rank}: the model has {differs[0]}, where rank {first} has {differs[1]}; "
                    "change shapes and dtypes of buffers, add and remove them on every rank alike"
                )

    def share(self, root: int = 0) -> None:
        """Give every rank the values of ``root``, as DDP does. Collective over world.

        Ranks have compared which buffers exist before: ``replaced`` at a step, ``check_equal`` otherwise.
        """
        if not self._any:
            return
        buffers = self.now
        with torch.no_grad():
            parts = [bytes_of(buffer) for buffer in buffers]
            packed = torch.cat(parts)
            self._collectives.broadcast(packed, root=root, name="buffers").wait()
            pieces = torch.split(packed, [part.numel() for part in parts])
            pairs = zip(parts, pieces, strict=True)
            differ = torch.stack([(mine != new).any() for mine, new in pairs]).tolist()
            for buffer, new, differs in zip(buffers, pieces, differ, strict=True):
                # One that nobody changed is left alone: a graph from before the step may need it. One that was changed
                # is written on every rank, also where it is right, so that such a graph raises on all ranks or on none.
                if differs or not self._is_known(buffer):
                    set_bytes(buffer, new)
        self._known = {id(b): (weakref.ref(b), version_of(b)) for b in buffers}

    def _is_known(self, buffer: Tensor) -> bool:
        """Whether a buffer was among those that were shared last, and has not changed since."""
        known = self._known.get(id(buffer))
        return known is not None and known[0]() is buffer and known[1] == version_of(buffer)
