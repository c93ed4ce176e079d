"""Order: every rank makes the same calls, so that no rank takes one unit's values for another's.

Owns: which call has followed which on all ranks, the comparison of ranks, and the message that names the rank that
differs. Must not know: what the calls do.

[Note: Calls that are known]
MPI pairs collectives by their order alone. A rank that calls another unit's gather gets the other unit's values where
sizes are equal. Where they differ, an MPI library may write past the buffer (Open MPI 4.1.4 reads a large message whole
before it compares lengths). So ranks compare a call before they make it, unless it is known: after the same two calls
it came the last time, on all ranks. What is not compared follows from what has been, so no two ranks make different
calls.

A rank that departs from what is known is the one that compares, and waits for the others. They come along and all go
on; or they depart elsewhere and all ranks raise; or they are in another call and the watchdog ends the job. Nobody has
got a wrong value. Where another call comes than the last time, as after a forward that a backward or an evaluation
follows, ranks compare AGAIN times more there, so that a rank that departs alone is named at once. A training loop
compares in its first steps only (docs/decisions/0035-known-calls.md).
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from hpczero.errors import CommError
from hpczero.job.group import Group, told_all
from hpczero.job.messages import is_same_number

RECORD_NBYTES = 192
AGAIN = 16  # comparisons where another call has come than the last time


class Order:
    """Of the calls of one transport. See [Note: Calls that are known].

    Attributes:
        comparisons: made so far.
    """

    def __init__(self, ranks: Group, *, strict: bool) -> None:
        """Not collective.

        Args:
            ranks: that make the same calls; borrowed.
            strict: whether ranks compare every call (``HPCZERO_STRICT=1``). A rank that stays on the known way while
                others leave it is then named at once, and by the watchdog otherwise.
        """
        self._ranks = ranks
        self._strict = strict
        self._before, self._last = "", ""
        # By the two calls before: the call that came the last time, and the comparisons that are left to make there.
        self._followed: dict[tuple[str, str], tuple[str, int]] = {}
        self.comparisons = 0

    def check(self, record: str, fingerprint: int, step: int) -> None:
        """Return when it is certain that all ranks make the call ``record`` now. Collective where it is not known.

        Args:
            record: of the call.
            fingerprint: of the calls so far, this one included.
            step: for messages.

        Raises:
            CommError: on every rank; one of them is about to make another call. The message names each rank that
                differs from the majority, and both calls.
        """
        place = self._before, self._last
        known, due = self._followed.get(place, ("", 0))
        if self._strict or due or known != record:
            self._compare(record, fingerprint, step)
            again = AGAIN if known else 0
            self._followed[place] = record, (max(due - 1, 0) if known == record else again)
        self._before, self._last = self._last, record

    def _compare(self, record: str, fingerprint: int, step: int) -> None:
        self.comparisons += 1
        ranks = self._ranks
        last = f" after {self._last!r}" if self._last else ""
        with ranks.watchdog.collective(f"the comparison of ranks before {record!r}{last}"):
            if is_same_number(ranks, fingerprint):
                return
            error = CommError(self._differing(f"{record}, step {step}"))
            told_all(error, ranks.comm)
            raise error

    def _differing(self, record: str) -> str:
        """What the error says. Collective: every rank has found that they differ."""
        mine = np.zeros(RECORD_NBYTES, dtype=np.uint8)
        encoded = record.encode()[:RECORD_NBYTES]
        mine[: len(encoded)] = np.frombuffer(encoded, dtype=np.uint8)
        found = np.empty((self._ranks.size, RECORD_NBYTES), dtype=np.uint8)
        self._ranks.comm.Allgather(mine, found)
        calls = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in found]
        usual, votes = Counter(calls).most_common(1)[0]
        odd = [f"rank {rank}: {call}" for rank, call in enumerate(calls) if call != usual]
        more = f" and {len(odd) - 8} more" if len(odd) > 8 else ""
        there = f"{votes} of {len(calls)} rank(s) start {usual}; {'; '.join(odd[:8])}{more}"
        if not odd:
            there = f"all start {usual}, and have made other calls before, as after an exception that left a forward"
        return (
            f"ranks disagree about their next collective: {there}. Every rank must run the same modules in the same "
            "order; look for a branch on rank or data before this call. To leave a block out on some ranks, run it on "
            "all and choose afterwards: x = torch.where(keep, block(x), x)"
        )
