"""Persistent buffers of a model: which there are, and their bytes.

Owns: reading and writing buffers of any strides and dtype; the walk through modules. Must not know: ranks, when buffers
are shared.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


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
