"""Exposed communication as a device sees it: how long its lane of computation stood still for collectives.

Owns: the spans of one transport, and their sum. Must not know: what the collectives do.

The host's clock cannot tell: the host runs ahead of the device, so while it waits for a collective the device may
still compute. What counts is the time between the last kernel before a collective and the end of the wait for it, on
the lane that computes. Nothing here makes the host wait before somebody asks.
"""

from __future__ import annotations

from collections import deque

from hpczero.accelerator import Accelerator, Span


class Exposed:
    """Not thread-safe: for the thread that computes."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._seconds = 0.0
        self._spans: deque[Span] = deque()

    def begin(self) -> Span | None:
        """A span for ``end``; None on the host, where the host's clock does tell."""
        return None if self._accelerator.is_host else self._accelerator.span()

    def end(self, span: Span | None) -> None:
        """The collective, or the wait for it, is over."""
        if span is None:
            return
        span.end()
        self._spans.append(span)
        while self._spans and self._spans[0].passed():  # nobody may ever ask
            self._seconds += self._spans.popleft().seconds()

    def seconds(self) -> float | None:
        """Of all spans so far; waits until the device is through with them. None on the host."""
        if self._accelerator.is_host:
            return None
        while self._spans:
            self._seconds += self._spans.popleft().seconds()
        return self._seconds
