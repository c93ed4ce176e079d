"""Ways: by which autograd nodes a backward pass comes into the calls of modules, and leaves them.

Owns: the hooks on nodes. Must not know: units' verbs, what is done when a hook fires.

[Note: The ways into a call]
With sharded parameters, a call's units must be whole before any of its nodes runs in backward. Hooks on the nodes
behind its results see to that. Results are what the module returns, what it changed or put into its arguments, what it
left on its own attributes, and what a forward hook of the user's was shown inside of it. A module may put its only
result elsewhere, into a list of the program's for example, and so may a forward hook. Its unit then stays whole until
backward is over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from hpczero.zero.calls.backward import Call, current_task, next_node_number
from hpczero.zero.calls.tensors import tensors_in

# Hooks that ``torch.compile`` runs as they are, and that modes around a model do not see.
#
# A compiler that traced a hook would keep what the hook found during the trace. Units would be whole in the trace
# alone, and ranks would not wait for each other.
#
# ``torch.compiler.disable`` says the same, but loads the compiler, which takes seconds and 100 MB in every process. Its
# two marks are therefore set here. If this torch has other marks, ``disable`` is called.

Hook = TypeVar("Hook", bound=Callable[..., Any])

REASON = "a hook of hpczero's"


def unseen(hook: Hook) -> Hook:
    """A function that does the same, past the modes of ``torch.utils._python_dispatch`` that are in force.

    Selective recomputation (``torch.utils.checkpoint.create_selective_checkpoint_contexts``) is such a mode. It counts
    the operations of a block and expects the same again in backward. Those of a hook are none of the block's: where a
    unit is whole already, there are fewer.
    """

    @functools.wraps(hook)
    def past(*args: Any, **kwargs: Any) -> Any:
        with torch._C._DisableTorchDispatch():
            return hook(*args, **kwargs)

    return untraced(past)  # type: ignore[return-value]


def untraced(hook: Hook) -> Hook:
    """The same function. The compiler neither traces nor compiles it, nor what it calls."""
    try:
        from torch._C._dynamo.eval_frame import (
            _FrameAction,
            _FrameExecStrategy,
            set_code_exec_strategy,
        )
    except ImportError:
        return torch.compiler.disable(hook, reason=REASON)  # type: ignore[no-any-return, no-untyped-call]
    skip = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    set_code_exec_strategy(hook.__code__, skip)
    hook._torchdynamo_disable = True  # type: ignore[attr-defined]
    hook._torchdynamo_disable_msg = REASON  # type: ignore[attr-defined]
    return hook


class Ways:
    """Watches the nodes around calls. Hooks on nodes live as long as their graph, and keep their call alive."""

    def __init__(
        self, on_entry: Callable[[Call, int], None], on_exit: Callable[[int, int], None]
    ) -> None:
        """No hooks yet.

        Args:
            on_entry: called with a call and the number of its node that is about to run.
            on_exit: called with number and thread of a node from before a call that is about to run.
        """
        self._on_entry = on_entry
        self._on_exit = on_exit
        # Modules that a user's forward hooks look at, with the module whose call they are a part of.
        self._hooked: dict[tuple[nn.Module, nn.Module], RemovableHandle] = {}
        self._last_end = 0  # number of the first node after the last call that was watched

    def remove(self) -> None:
        """Remove the hooks on modules."""
        for handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()

    def watch_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have ``on_exit`` called when the node before this call is about to run.

        The call before this one watches its own last node already. The first call has none before it.
        """
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                number = value.grad_fn._sequence_nr()
                if number != self._last_end - 1:
                    value.grad_fn.register_prehook(partial(self._exit, number, get_ident()))
                return

    def watch_results(self, call: Call, results: Any) -> bool:
        """Have ``on_entry`` called when a node of ``call`` behind ``results`` is about to run.

        Returns whether that is enough. It is not enough if there is no such node, or if nodes were made after the last
        of them: those would run before it.

        Raises:
            TooMany: as ``tensors_in``.
        """
        self._last_end = next_node_number()
        last = -1
        for node in _nodes_behind(results):
            number = node._sequence_nr()
            if number >= call.start:
                node.register_prehook(partial(self._enter, call, number))
                last = max(last, number)
        return last == self._last_end - 1

    def watch_hooked(
        self,
        module: nn.Module,
        inner: Sequence[nn.Module],
        running: Mapping[nn.Module, Sequence[Call]],
    ) -> None:
        """Watch the results of modules inside ``module`` that forward hooks of the user's are shown.

        Args:
            module: a call of it is about to begin.
            inner: modules inside of it whose calls are not watched otherwise.
            running: calls under way.
        """
        for each in inner:
            hooks = each._forward_hooks
            if not hooks or (module, each) in self._hooked:
                continue
            if any(not hasattr(hook, "_hpczero_leaves_nothing") for hook in hooks.values()):
                after = _AfterHooked(partial(self._after_hooked, module, running))
                self._hooked[module, each] = each.register_forward_hook(after, with_kwargs=True)

    @untraced
    def _after_hooked(
        self,
        module: nn.Module,
        running: Mapping[nn.Module, Sequence[Call]],
        inner: nn.Module,
        *arguments_and_output: Any,
    ) -> None:
        calls = running.get(module)
        if calls and current_task() is None and torch.is_grad_enabled():
            self.watch_results(calls[-1], arguments_and_output)

    def _enter(self, call: Call, number: int, gradients: Sequence[Tensor | None]) -> None:
        self._on_entry(call, number)

    def _exit(self, number: int, thread: int, gradients: Sequence[Tensor | None]) -> None:
        self._on_exit(number, thread)


class _AfterHooked:
    """Our forward hook on a module that users may copy. In a copy it does nothing and refers to nothing."""

    _torchdynamo_disable = True  # see untraced

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self._function = function

    def __call__(self, *arguments: Any) -> None:
        if self._function is not None:
            self._function(*arguments)

    def __reduce__(self) -> tuple[type[_AfterHooked], tuple[()]]:
        return _AfterHooked, ()


def leaves_nothing(hook: Hook) -> Hook:
    """The same forward hook, one of hpczero's: what it is shown goes into its result and nowhere else.

    What ``watch_hooked`` adds beside other hooks ends the graph of a block that ``torch.compile`` compiles.
    """
    hook._hpczero_leaves_nothing = True  # type: ignore[attr-defined]
    return hook


def _nodes_behind(results: Any) -> Iterator[Node]:
    """The autograd nodes that made the tensors in ``results``.

    A view that is changed in place later gets another node. The one behind its base stays in the graph.
    """
    for tensor in tensors_in(results):
        if tensor.grad_fn is not None:
            yield tensor.grad_fn
            base = tensor._base
            if base is not None and base.grad_fn is not None:
                yield base.grad_fn


def inside(module: nn.Module, users: Container[nn.Module]) -> Iterator[nn.Module]:
    """The modules below ``module`` whose calls count as its own: not those in ``users``, nor what is below those."""
    for child in module.children():
        if child not in users:
            yield child
            yield from inside(child, users)
