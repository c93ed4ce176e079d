"""Exposed communication on a device: how long its lane of computation stood still for collectives.

Owns: the spans of one transport, and their sum. Must not know: what the collectives do.

The host's clock cannot measure it. The host runs ahead of the device, so the device may still compute while the host
waits for a collective. What counts is the time between the last kernel before a collective and the end of the wait for
it, on the lane that computes. The host does not wait for any of this until somebody asks for the sum.
"""

from __future__ import annotations

from collections import deque

from hpczero.accelerator import Accelerator, Span


class Exposed:
    """Spans of one transport. Only the thread that computes may use them."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._seconds = 0.0
        self._spans: deque[Span] = deque()

    def begin(self) -> Span | None:
        """Begin a span; None on the host, whose own clock measures it."""
        return None if self._accelerator.is_host else self._accelerator.span()

    def end(self, span: Span | None) -> None:
        """End a span: the collective, or the wait for it, is over."""
        if span is None:
            return
        span.end()
        self._spans.append(span)
        while self._spans and self._spans[0].passed():  # nobody may ever ask
            self._seconds += self._spans.popleft().seconds()

    def seconds(self) -> float | None:
        """Seconds of all spans so far; None on the host. Waits until the device has worked through them."""
        if self._accelerator.is_host:
            return None
        while self._spans:
            self._seconds += self._spans.popleft().seconds()
        return self._seconds
