"""Losses of models that take the number of items of a whole batch and do not use it.

Owns: whether a loss used that number, and its factor where it did not. Must not know: MPI, accelerate.

transformers gives ``num_items_in_batch``, a sum over ranks, to every model whose forward takes ``**kwargs``, and then
multiplies the loss by the number of ranks: right for a sum that was divided by the number, and many times too much for
a mean over this rank's samples, as of BERT, T5 and BART. What the forward did with the number says which one it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

_Trainer: Any = Trainer  # its annotations are not strict
# What hooks and containers ask of any tensor, and what gives the same number once more.
_LOOKS = frozenset(
    [
        *(
            "dim",
            "size",
            "numel",
            "element_size",
            "is_contiguous",
            "is_floating_point",
            "is_complex",
        ),
        *("stride", "storage_offset", "untyped_storage", "__hash__", "__get__"),
    ]
)
_SAME = frozenset(["to", "cpu", "cuda", "detach", "clone"])


class ItemCount(Tensor):
    """A number of items that notes whether anybody computes with it.

    Attributes:
        uses: names of the functions that did.
    """

    uses: list[str]

    @classmethod
    def of(cls, number: Tensor, uses: list[str] | None = None) -> ItemCount:
        """``number``, with the notes of another one that it was made from."""
        made: ItemCount = number.as_subclass(cls)
        made.uses = [] if uses is None else uses
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """As of an ordinary tensor, noted."""
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        name, first = getattr(func, "__name__", str(func)), args[0] if args else None
        if name in _SAME and isinstance(first, cls):
            return cls.of(found, first.uses)
        if name not in _LOOKS:
            for each in (*args, *(kwargs or {}).values()):
                if isinstance(each, cls):
                    each.uses.append(name)
        return found


class LossesOfOne(_Trainer):  # type: ignore[misc]
    """``Trainer`` whose losses have the mean over ranks that one process computes."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """As ``Trainer`` does; a loss that leaves ``num_items_in_batch`` aside is not multiplied. Not collective."""
        multiplied = self.args.average_tokens_across_devices and (
            self.model_accepts_loss_kwargs or self.compute_loss_func
        )
        if not multiplied or not isinstance(num_items_in_batch, Tensor):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        items = ItemCount.of(num_items_in_batch)
        found = super().compute_loss(model, inputs, return_outputs, items)
        if items.uses:
            return found
        size = self.args.world_size
        return (found[0] / size, found[1]) if return_outputs else found / size
