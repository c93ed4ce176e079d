"""BackwardPass: how far one backward of a model has come.

Owns: which gradients are still to come, which calls of modules are open, which unit is reduced next. Must not know:
hooks, modules, how a reduction works.

[Note: Order of reductions]
Collectives must be issued in the same order on every rank, whatever autograd does there. A module that one rank did not
use never becomes ready on it. Reductions therefore start in one fixed order, the reverse of unit order, each exactly
once in a backward. A unit that is ready early waits for its turn.

[Note: When a gradient is whole]
Autograd adds a parameter's gradients up in one node, which runs once in a backward, after all uses of the parameter.
The engine knows from the start which of these nodes it will run. A unit's gradient is whole when all of its own have
run, whichever modules used its parameters, and by whatever way the loss reached them.

[Note: When a call is through]
Of the nodes that are ready, the engine runs the one that was made last. When it runs a node that was made before a call
of a module began, it has therefore run all nodes of that call that it is going to run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from hpczero.errors import StepError
from hpczero.zero.units.unit import Unit


class Call:
    """One call of a module under grad. It lives as long as its graph.

    Attributes:
        units: units whose modules ran.
        start: number of the first autograd node that the call could make.
        thread: thread in which it ran. Autograd numbers the nodes of each thread by themselves.
        around: the calls it was made in, outermost first. A loss made of its results alone leads into those too.
    """

    def __init__(self, units: Sequence[Unit], running: Iterable[Call] = ()) -> None:
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
        """Begin; called inside of a backward.

        Args:
            task: autograd's number of it.
            gradients: of every trainable unit.
        """
        self.task = task
        self.differentiable = torch.is_grad_enabled()
        self.opened: list[Call] = []
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

    def passed(self, node_number: int, thread: int) -> list[Call]:
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
    except (
        RuntimeError
    ):  # torch.autograd.grad with respect to this very parameter: nothing is added anywhere
        return False


_MARK = "hpczero: seen"
