"""Arguments: which arguments of a block's call rest elsewhere until backward, and the call as a function of them.

Owns: the choice, which ranks that keep inputs together must make alike. Must not know: where inputs rest, autograd.

[Note: What moves]
Tensors of floating-point numbers among the positional arguments, from a page on. Everything else stays as torch keeps
it: parameters and other leaves, which the program holds in any case; keyword arguments and containers, which torch
looks at again when it computes again; integers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hpczero.activations.rests import Rest, changed, version_of
from hpczero.errors import PlanError
from hpczero.plan.offload import LEAST_NBYTES


def agreed_moving(
    rest: Rest, block: object, args: Sequence[Any], device: torch.device, place: str
) -> list[int]:
    """As ``moving``, the same on all ranks that keep inputs together; collective over them."""
    places: list[int] = []
    refusal = None
    try:
        places = moving(block, args, device, place)
    except PlanError as error:
        refusal = error
    parts = [f"argument {at}: {list(args[at].shape)} {args[at].dtype}" for at in places]
    rest.begin(str(refusal or "; ".join(parts) or "nothing"))
    if refusal is not None:
        raise refusal
    return places


def moving(block: object, args: Sequence[Any], device: torch.device, place: str) -> list[int]:
    """Positions of the arguments that move; see [Note: What moves].

    Args:
        block: that is called.
        args: all positional ones.
        device: where blocks compute.
        place: where inputs rest, for messages.

    Raises:
        PlanError: none can move, so nothing would be saved.
    """
    numbers = [at for at, value in enumerate(args) if _is_plain(value)]
    if not numbers:
        raise PlanError(
            f"activations: none of the {len(args)} positional arguments of a checkpointed "
            f"{type(block).__name__} is a tensor of floating-point numbers, so none can rest {place}, "
            "and nothing is saved; pass activations as arguments of their own, not in containers or by keyword, or "
            "call this block by torch's checkpoint"
        )
    here = [at for at in numbers if args[at].device == device]
    if not here:
        raise PlanError(
            f"activations: inputs of a checkpointed {type(block).__name__} are on {args[numbers[0]].device}, "
            f"expected {device}; make the Checkpointing with device= of the model"
        )
    return [
        at
        for at in here
        if args[at].nbytes >= LEAST_NBYTES and not (args[at].is_leaf and args[at].requires_grad)
    ]


class Call:
    """A call of a block as a function of the tensors that move; called in forward, and again in backward."""

    def __init__(
        self,
        block: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        places: Sequence[int],
        order: Sequence[int],
        inside: threading.local,
    ) -> None:
        """Holds none of what moves.

        Args:
            block: to be called.
            args: all of them.
            kwargs: all of them.
            places: positions among ``args`` of what moves.
            order: ids of what moves, each once, as it is passed to the call.
            inside: counts the calls under way on this thread.
        """
        self._block, self._kwargs, self._inside = block, kwargs, inside
        self._moving = {at: order.index(id(args[at])) for at in places}
        self._args = [None if at in self._moving else value for at, value in enumerate(args)]
        # torch looks whether tensors among the arguments have changed; these do not go through its hands.
        self._versions = [
            (value, version_of(value)) for value in self._args if isinstance(value, Tensor)
        ]
        self._called = False

    def __call__(self, *tensors: Tensor) -> Any:
        """The block's output, with ``tensors`` where they belong, in the order that was given."""
        if self._called:
            for tensor, version in self._versions:
                if (error := changed(tensor, version)) is not None:
                    raise error
        self._called = True
        args = list(self._args)
        for at, index in self._moving.items():
            args[at] = tensors[index]
        del tensors
        self._inside.depth = int(getattr(self._inside, "depth", 0)) + 1
        try:
            return self._block(*args, **self._kwargs)
        finally:
            self._inside.depth -= 1


def _is_plain(value: object) -> bool:
    """Whether it is a tensor whose bytes say all there is to it."""
    if type(value) is not Tensor or not value.is_floating_point():
        return False
    return value.layout is torch.strided and not value.is_neg() and value.device.type != "meta"
