"""Accounts of one transport on this rank.

Owns: what is counted. Must not know: who counts.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class CommStats:
    """Accounts of one transport on this rank, by operation.

    ``sent_nbytes`` counts the bytes that leave the rank, by the algorithm's own arithmetic. ``seconds`` is time in
    calls and waits.
    """

    calls: Counter[str] = field(default_factory=Counter)
    sent_nbytes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def reset(self) -> None:
        """Start counting anew."""
        self.calls.clear()
        self.sent_nbytes.clear()
        self.seconds = 0.0
