"""LateUpdate: whole parameters whose new values are still on their way when ``optimizer.step()`` returns.

Owns: who waits for them, and when waiting is not put off. Must not know: masters, how values travel, modules, hooks.

At stages 1 and 2 every unit is gathered after the update. Where that goes on beside the program, nobody needs to wait
before a unit is used: its call in the next forward waits for it alone (issue 20, 2).

[Note: Who waits]
Until then the parameters are of a class that waits for whatever asks for their values, and is gone afterwards. They lie
elsewhere meanwhile: what gets at them without asking (``torch.tensor(weight)``, say) finds NaN, not values of before.

Views that were made before do not ask. Each holds the storage, which counts who holds it: where somebody does beside
the unit itself, the step waits as it used to. An address alone, from ``data_ptr()``, is held by nobody and is not seen.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from hpczero.plan.layout import ShardLayout
from hpczero.zero.units.guard import METADATA, Guard, set_own_data

# The strides are those of where they lie meanwhile.
_TOLD = METADATA - {Tensor.stride, Tensor.is_contiguous}


class LateParameter(nn.Parameter):
    """A parameter whose values are on their way."""

    settle: Callable[
        [], None
    ]  # returns when they are there; the parameter is of its own class then

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer metadata at once, and everything else when the values are there."""
        if func in _TOLD:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        for kind in types:
            if issubclass(kind, LateParameter):
                kind.settle()
        return func(*args, **(kwargs or {}))

    # What torch does in Python, by the class that it finds.

    @override
    def __deepcopy__(self, memo: Any) -> Any:
        type(self).settle()
        return copy.deepcopy(self, memo)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        type(self).settle()
        return self.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        type(self).settle()
        return repr(self)


class LateUpdate:
    """Of one unit; nothing here is collective."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        guards: Sequence[Guard],
        layout: ShardLayout,
        *,
        allowed: bool,
    ) -> None:
        """Not pending.

        Args:
            parameters: in slot order.
            guards: of them.
            layout: where each lies in the whole buffer.
            allowed: whether values may be on their way after a step at all.
        """
        self._parameters, self._guards = list(parameters), list(guards)
        self._slots = layout.slots
        self._allowed = allowed
        self._views: list[Tensor] = []  # of the buffer that was last put off
        self._nothing: Tensor | None = None  # one NaN
        self._wait: Callable[[], None] | None = None
        self._lock = threading.RLock()  # several threads may ask

    @torch.inference_mode(False)  # what parameters become views of lasts
    def put_off(self, flat: Tensor, wait: Callable[[], None]) -> bool:
        """Whether whoever asks for values will ``wait``, so that nobody else has to.

        Args:
            flat: what the parameters are views of, and nothing else of the unit is.
            wait: returns when the values are there; it may raise, and is called again then.
        """
        if not self._allowed or not self._parameters:
            return False
        if not (self._views and _is_alias(self._views[0], flat)):
            self._views = [flat[s.offset : s.stop].view(s.shape) for s in self._slots]
        if _holders(flat) != 1 + len(self._parameters) + len(self._views):
            return False
        self._wait = wait
        nothing = self._nothing
        if nothing is None:
            nothing = torch.full((), math.nan, dtype=flat.dtype, device=flat.device)
            self._nothing = nothing
        with torch._C.DisableTorchFunctionSubclass():
            for guard, parameter in zip(self._guards, self._parameters, strict=True):
                set_own_data(parameter, nothing.expand(parameter.shape))
                guard.put_off(LateParameter, self.settle)
        return True

    @property
    def pending(self) -> bool:
        """Whether values are on their way, which nobody can have changed then."""
        return self._wait is not None

    def settle(self) -> None:
        """Return when the values are there; at once where none are on their way.

        Raises:
            CommError: they did not come, and never will; at every call from then on.
        """
        if not self.pending:
            return
        with self._lock:
            if self._wait is None:
                return
            self._wait()
            self._bring_back()
            self._wait = None

    @torch.inference_mode(False)
    def _bring_back(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for guard, parameter, view in zip(
                self._guards, self._parameters, self._views, strict=True
            ):
                set_own_data(parameter, view)
                guard.open()


_is_alias = torch._C._is_alias_of  # type: ignore[attr-defined]


def _holders(flat: Tensor) -> int:
    """How many tensors lie in the storage of ``flat``, itself among them."""
    storage = flat.untyped_storage()
    held: int = torch._C._storage_Use_Count(storage._cdata)
    return held - 1  # without ``storage``
