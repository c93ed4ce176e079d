"""Forwards: how many this rank has begun, of all models over one topology.

Owns: the count, by which ranks that exchange within a forward see that one of them has begun its forward anew. Must not
know: models, hooks, what is exchanged, who compares.
"""

from __future__ import annotations


class Forwards:
    """Forwards of this rank. All groups of a topology share the object.

    Attributes:
        begun: how many; equal on two ranks that have called the same models.
    """

    def __init__(self) -> None:
        """Not collective."""
        self.begun = 0

    def begin(self) -> None:
        """One begins. Not collective."""
        self.begun += 1
