"""Methods other than ``forward`` that use a model's parameters: ``encode``, ``get_text_features``, ``generate``.

Owns: ``register_forward``. Must not know: how units are made whole.

Hooks run when a module is called, and not when a method of it is. A registered method counts as a call of its module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any, NoReturn

from torch import nn

from hpczero.errors import ConfigError, PlanError
from hpczero.zero.sharding import Sharding
from hpczero.zero.zeroify import sharding


def register_forward(model: nn.Module, name: str) -> None:
    """Allow calls of ``model.NAME(...)``, which then work as ``model(...)`` does, in training too. Not collective.

    Such a call is collective at stage 3, as a forward is. In half precision, arguments and results of a method of the
    model itself are cast, as those of its forward.

    Args:
        model: zeroified.
        name: name of a method, with a dotted path if it belongs to a submodule: ``"text_model.encode"``.

    Raises:
        ConfigError: there is no such method.
        PlanError: the model was not zeroified.

    Source: issue 15; torch offers the same for FSDP2 (``register_fsdp_forward_method``).
    """
    state = sharding(model)
    path, _, last = name.rpartition(".")
    try:
        module = model.get_submodule(path)
        method = getattr(module, last)
    except AttributeError:
        method = None
    if not callable(method) or last == "forward":
        raise ConfigError(
            f"register_forward: got {name!r}, expected a method of {type(model).__name__} other than forward, or "
            "'submodule.method'"
        )
    if isinstance(method, _Registered):
        return
    state.registered.append((module, last, module.__dict__.get(last)))
    module.__dict__[last] = _Registered(state, _owner(model, path), method, casts=module is model)


class _Registered:
    """A method whose call counts as one of the module with hooks around it."""

    def __init__(
        self, state: Sharding, owner: nn.Module, method: Callable[..., Any], *, casts: bool
    ) -> None:
        """Wrap a method.

        Args:
            state: of the model.
            owner: the module that the method counts for.
            method: the bound method.
            casts: whether arguments and results are cast, as those of the model's own forward.
        """
        update_wrapper(self, method)
        self._state, self._owner, self._method, self._casts = state, owner, method, casts

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method."""
        state = self._state
        assert state.schedule is not None, "zeroify attaches the schedule"
        assert state.casting is not None, "zeroify attaches the casts"
        assert state.surroundings is not None, "zeroify attaches them"
        state.surroundings.look(self._owner)
        with state.schedule.call(self._owner, args, kwargs) as results:
            if not self._casts:
                state.casting.check_inside(f"method {self._method.__name__!r} of a part")
            call = partial(state.casting.call, self._method) if self._casts else self._run
            results.append(call(args, kwargs))
        return results[0]

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._method(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce_ex__(4)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied: a copy of the module would run the original's method.

        Raises:
            PlanError: always.
        """
        raise PlanError(
            f"a module whose method {self._method.__name__!r} was registered by hpczero.register_forward cannot be "
            "copied or pickled; copy it before that, or after hpczero.release(model)"
        )


def _owner(model: nn.Module, path: str) -> nn.Module:
    """The innermost module with hooks that holds the module at ``path``, or is that module."""
    schedule = sharding(model).schedule
    assert schedule is not None, "zeroify attaches the schedule"
    parts = path.split(".") if path else []
    for length in range(len(parts), 0, -1):
        module = model.get_submodule(".".join(parts[:length]))
        if module in schedule.modules:
            return module
    return model
