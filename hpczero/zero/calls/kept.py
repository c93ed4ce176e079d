"""Kept: units that stay whole although their modules have run, and until when.

Owns: the reasons. Must not know: hooks, buffers, when it is time.

    backward  results that no hook sees, a second pass over the graph of a backward: until a backward is through, and
              no graph is left that another backward may need them for
    graph     a graph made of parameters inside ``gathered``: until the step, or ``gathered`` finds it gone; no hook
              sees its backward come, nor whether it was the last one
    call      a block returned a view of memory that ranks share: until no call runs, or, under grad, as ``backward``

An optimizer's step ends those of its units, because it makes other values. A rank may have reasons that others have
not, such as a hook that logs on rank 0 alone. Reasons therefore decide which memory this rank gives back, and never
whether the next use is collective.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence

from hpczero.zero.calls.backward import Call, Gradients, next_node_number
from hpczero.zero.units.unit import Unit

logger = logging.getLogger("hpczero.schedule")


class Kept:
    """A set of units, in the order in which they came, which is the same on all ranks."""

    def __init__(self, gradients: Mapping[Unit, Gradients]) -> None:
        """An empty set. ``gradients`` are those of every trainable unit, where parameters are sharded."""
        self._gradients = gradients
        # With the calls that live as long as the graphs that need them; where a unit trains, its graphs are found.
        self._for_backward: dict[Unit, weakref.WeakSet[Call]] = {}
        self._for_graph: dict[Unit, None] = {}
        self._for_call: dict[Unit, None] = {}
        self._told: set[Unit] = set()

    def __contains__(self, unit: Unit) -> bool:
        return unit in self._for_backward or unit in self._for_graph or unit in self._for_call

    @property
    def units(self) -> list[Unit]:
        """All units of the set."""
        return list(dict.fromkeys([*self._for_graph, *self._for_backward, *self._for_call]))

    def for_backward(self, units: Iterable[Unit], call: Call | None = None) -> None:
        """Keep units until a backward is over, and as long as graphs are left that lead to them: those of ``call``."""
        for unit in units:
            calls = self._for_backward.setdefault(unit, weakref.WeakSet())
            if call is not None:
                calls.add(call)

    def graphs_since(self, number: int) -> list[bool]:
        """Units that graphs newer than node ``number``, or graphs that keep them already, may lead to.

        An older graph that still exists counts too if any was made since, because the two cannot be told apart.
        """
        new = next_node_number() != number
        return [
            (new or unit in self._for_graph) and gradients.are_in_a_graph()
            for unit, gradients in self._gradients.items()
        ]

    def for_graphs(self, found: Iterable[int]) -> None:
        """Keep what all ranks together found by ``graphs_since``, until the step or the next call of this."""
        pairs = zip(self._gradients, found, strict=True)
        self._for_graph = {unit: None for unit, kept in pairs if kept}

    def for_call(self, unit: Unit) -> None:
        """Keep units until ``calls_are_through``."""
        self._for_call[unit] = None

    def tell(self, units: Sequence[Unit]) -> None:
        """Say once that results which no hook sees cost memory."""
        for unit in units:
            if unit not in self._told:
                self._told.add(unit)
                logger.warning(
                    "unit %r stays whole until backward is through, which takes memory: it has results that are "
                    "neither in what it returns nor in its arguments or attributes, or it computed something after "
                    "them that needs a gradient. Return them; compute what is only logged under torch.no_grad()",
                    unit.spec.name,
                )

    def calls_are_through(self) -> list[Unit]:
        """Note that no call runs any more; returns units that need not stay whole."""
        if not self._for_call:
            return []
        ended, self._for_call = self._for_call, {}
        return [unit for unit in ended if unit not in self]

    def backward_is_through(self) -> None:
        """Forget the units of ``for_backward`` that no graph leads to: a backward is over, and others may come.

        Whether it was the one that they were kept for, nobody can tell.
        """
        for unit, calls in list(self._for_backward.items()):
            gradients = self._gradients.get(unit)
            if not (calls or (gradients is not None and gradients.are_in_a_graph())):
                self._for_backward.pop(unit)

    def clear(self, units: Collection[Unit] | None = None) -> list[Unit]:
        """Empty the set, or take ``units`` out of it; returns what was kept of them."""
        ended = [unit for unit in self.units if units is None or unit in units]
        for kind in (self._for_backward, self._for_graph, self._for_call):
            for unit in ended:
                kind.pop(unit, None)
        return ended
