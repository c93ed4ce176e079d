"""Ways: by which autograd nodes a backward pass comes into the calls of modules, and leaves them.

[Note: The ways into a call]
With sharded parameters, a call's units must be whole before any of its nodes runs in backward. Hooks on the nodes
behind its results see to that. Results are what the module returns, what it changed or put into its arguments, what it
left on its own attributes, and what a forward hook of the user's was shown inside of it. A module may put its only
result elsewhere, into a list of the program's for example, and so may a forward hook. Its unit then stays whole until
backward is over.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from hpczero.errors import StepError
from hpczero.zero.calls.tensors import tensors_in
from hpczero.zero.units.unit import Unit

# BackwardPass: how far one backward of a model has come.
#
# [Note: Order of reductions]
# Collectives must be issued in the same order on every rank, whatever autograd does there. A module that one rank did
# not use never becomes ready on it. Reductions therefore start in one fixed order, the reverse of unit order, each
# exactly once in a backward. A unit that is ready early waits for its turn.
#
# [Note: When a gradient is whole]
# Autograd adds a parameter's gradients up in one node, which runs once in a backward, after all uses of the parameter.
# The engine knows from the start which of these nodes it will run. A unit's gradient is whole when all of its own have
# run, whichever modules used its parameters, and by whatever way the loss reached them.
#
# [Note: When a call is through]
# Of the nodes that are ready, the engine runs the one that was made last. When it runs a node that was made before a
# call of a module began, it has therefore run all nodes of that call that it is going to run.


class ModuleCall:
    """One call of a module under grad. It lives as long as its graph.

    Attributes:
        units: units whose modules ran.
        start: number of the first autograd node that the call could make.
        thread: thread in which it ran. Autograd numbers the nodes of each thread by themselves.
        around: the calls it was made in, outermost first. A loss made of its results alone leads into those too.
    """

    def __init__(self, units: Sequence[Unit], running: Iterable[ModuleCall] = ()) -> None:
        """Begin a call; ``running`` are the calls under way in any thread."""
        self.units = tuple(units)
        self.start = next_node_number()
        self.thread = get_ident()
        self.around = tuple(call for call in running if call.thread == self.thread)


class Gradients:
    """The autograd nodes that add up the gradients of one unit's parameters, one node for each.

    Attributes:
        hooks: what autograd calls when it has; it holds them weakly.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.hooks: list[Callable[[Tensor], None]] = []
        self._parameters = list(parameters)
        # Held, so that looking one up costs nothing in backward.
        self._nodes: list[Node | None] = [_gradient_node(parameter) for parameter in parameters]

    def to_come(self) -> int:
        """How many of these nodes the running backward runs ([Note: When a gradient is whole])."""
        return sum(node is not None and _will_run(node) for node in self._nodes)

    def renew(self) -> None:
        """Find the nodes anew. A change of parameters may have given them other nodes (``parameter.set_()``)."""
        with torch.inference_mode(False):
            for position, parameter in enumerate(self._parameters):
                if parameter.requires_grad:
                    self._nodes[position] = _gradient_node(parameter)

    def check_known(self, position: int, name: str) -> None:
        """Raise StepError if another node than at ``zeroify`` adds this gradient up."""
        if self._nodes[position] is not _gradient_node(self._parameters[position]):
            raise StepError(
                f"parameter {name!r} adds its gradients up elsewhere than before (parameter.set_()? "
                "register_parametrization after zeroify?), so hpczero cannot know when they are complete; do that "
                "before zeroify, or inside `with hpczero.gathered(model, modifier_rank=0):`"
            )

    def are_in_a_graph(self) -> bool:
        """Whether a living autograd graph leads to one of the parameters. Its node then outlives our reference."""
        found = False
        for position, parameter in enumerate(self._parameters):
            if parameter.requires_grad:  # one that is frozen for a while keeps its node
                self._nodes[position] = None
                _metadata(_gradient_node(parameter))[_MARK] = True
                node = _gradient_node(parameter)
                found = _metadata(node).pop(_MARK, False) or found
                self._nodes[position] = node
        return found


class BackwardPass:
    """Progress of one backward.

    Attributes:
        task: autograd's number of the backward.
        differentiable: whether its own graph is kept (``create_graph=True``).
        opened: calls whose backward is under way.
        next: place in the order of reductions ([Note: Order of reductions]).
        reducing: units whose reduction has not been waited for, where that matters.
        reached: whether it came into the model through results of a call.
        has_gradients: whether it brings gradients of parameters.
    """

    def __init__(self, task: int, gradients: Mapping[Unit, Gradients]) -> None:
        """Begin; called inside of a backward. ``gradients``: of every trainable unit."""
        self.task = task
        self.differentiable = torch.is_grad_enabled()
        self.opened: list[ModuleCall] = []
        self.next = 0
        self.reducing: deque[Unit] = deque()
        self.reached = False
        self._awaited = {unit: nodes.to_come() for unit, nodes in gradients.items()}
        self.has_gradients = any(self._awaited.values())

    def arrived(self, unit: Unit) -> bool:
        """Note that one more gradient of ``unit`` has come; returns whether it was the last."""
        left = self._awaited[unit] = self._awaited[unit] - 1
        return not left

    def is_through(self, unit: Unit) -> bool:
        """Whether this backward needs nothing of ``unit`` any more."""
        return not self._awaited.get(unit) and not any(unit in call.units for call in self.opened)

    def passed(self, node_number: int, thread: int) -> list[ModuleCall]:
        """Close and return the calls whose nodes have all run, as a node of this number, made in this thread, runs.

        Why: [Note: When a call is through]. For a forward in several threads numbers tell nothing.
        """
        if any(call.thread != thread for call in self.opened):
            return []
        through = [call for call in self.opened if call.start > node_number]
        if through:
            self.opened = [call for call in self.opened if call.start <= node_number]
        return through


def next_node_number() -> int:
    """The number that the next autograd node of this thread gets."""
    return int(torch._C._autograd._get_sequence_nr())


def current_task() -> int | None:
    """Autograd's number of the backward that this code runs in; None outside of one."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else task


def _gradient_node(parameter: Tensor) -> Node:
    """The autograd node that adds ``parameter``'s gradients up; a new one if nothing holds it."""
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        function = parameter.view_as(parameter).grad_fn
    assert function is not None, "the parameter needs a gradient"
    node = function.next_functions[0][0]
    assert node is not None, "leaves have a node"
    return node


def _metadata(node: Node) -> dict[Any, Any]:
    return node.metadata  # type: ignore[return-value]  # torch declares the property as a method


def _will_run(node: Node) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # torch.autograd.grad with respect to this very parameter: nothing is added anywhere.
        return False


_MARK = "hpczero: seen"


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
        self, on_entry: Callable[[ModuleCall, int], None], on_exit: Callable[[int, int], None]
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

    def watch_results(self, call: ModuleCall, results: Any) -> bool:
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
        running: Mapping[nn.Module, Sequence[ModuleCall]],
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
        running: Mapping[nn.Module, Sequence[ModuleCall]],
        inner: nn.Module,
        *arguments_and_output: Any,
    ) -> None:
        calls = running.get(module)
        if calls and current_task() is None and torch.is_grad_enabled():
            self.watch_results(calls[-1], arguments_and_output)

    def _enter(self, call: ModuleCall, number: int, gradients: Sequence[Tensor | None]) -> None:
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
