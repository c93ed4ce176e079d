"""Matching: whether the programs of all ranks fit together, before they are replayed.

Owns: what must be alike, and the message for whoever differs. Must not know: time, links, how programs were recorded.

On a communicator all ranks make the same calls in the same order: operation, name, dtype, bytes. Each message meets a
receive of the same rank, tag, dtype and size, in the same order. What fits pairwise and still stands still as a whole
is found by the replay.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import zip_longest

from hpczero.errors import HpcZeroError
from hpczero.job.group import spans
from scaling.simulate.programs import Call, Program, Receive, Send

Members = tuple[str, tuple[int, ...]]
Way = tuple[str, int, int, int]  # communicator, source, target, tag
Signature = tuple[str, str, str, int]


class OrderError(HpcZeroError):
    """Ranks of a job would not meet: names the first rank that differs, the position, and what each calls."""


def check(programs: Sequence[Program]) -> None:
    """Refuse programs that do not fit together.

    Args:
        programs: of all ranks, in rank order.

    Raises:
        OrderError: the first difference; the program of most ranks is taken to be right.
    """
    _check_calls(programs)
    _check_messages(programs)


def _check_calls(programs: Sequence[Program]) -> None:
    calls = _Calls()
    groups: dict[Members, set[Hashable]] = {}
    for program in programs:
        for name, ranks in program.comms.items():
            if len(ranks) > 1:
                kinds = groups.setdefault((name, ranks), set())
                kinds.add(calls.kind(program, name))
    for (name, ranks), kinds in groups.items():
        if len(kinds) > 1:
            raise _difference(name, ranks, [calls.of(programs[rank], name) for rank in ranks])
    _check_members(programs)


class _Calls:
    """Calls of each rank by communicator; those of lanes that ranks share are collected once."""

    def __init__(self) -> None:
        self._found: dict[int, dict[str, tuple[Call, ...]]] = {}
        self._numbers: dict[tuple[Signature, ...], int] = {}
        self._kinds: dict[tuple[int, str], int] = {}

    def of(self, program: Program, comm: str) -> tuple[Call, ...]:
        key = id(program.lanes)
        if key not in self._found:
            found: dict[str, list[Call]] = defaultdict(list)
            for call in program.calls:
                found[call.comm].append(call)
            self._found[key] = {name: tuple(calls) for name, calls in found.items()}
        return self._found[key].get(comm, ())

    def kind(self, program: Program, comm: str) -> int:
        """A number that is equal for equal sequences."""
        key = id(program.lanes), comm
        if key not in self._kinds:
            sequence = tuple(call.signature for call in self.of(program, comm))
            self._kinds[key] = self._numbers.setdefault(sequence, len(self._numbers))
        return self._kinds[key]


def _difference(name: str, ranks: Sequence[int], calls: Sequence[Sequence[Call]]) -> OrderError:
    """The first position at which not all are alike."""
    for position, there in enumerate(zip_longest(*calls)):
        said = [None if call is None else call.signature for call in there]
        usual, _ = Counter(said).most_common(1)[0]
        odd = [place for place, signature in enumerate(said) if signature != usual]
        if odd:
            mine, others = there[odd[0]], there[said.index(usual)]
            alike = [ranks[place] for place in odd if said[place] == said[odd[0]]]
            return OrderError(
                f"rank {ranks[odd[0]]}: call {position + 1} over {name} (ranks {spans(ranks)}) is "
                f"{mine or 'missing'}, expected {others or 'none'} as on {len(ranks) - len(odd)} of {len(ranks)} "
                f"ranks; differing alike: {spans(alike)}. Make the same calls in the same order on all of them"
            )
    raise AssertionError("sequences of different kinds differ somewhere")


def _check_members(programs: Sequence[Program]) -> None:
    """Every rank of a communicator must know it with the same ranks."""
    for program in programs:
        for name, ranks in program.comms.items():
            for rank in ranks:
                theirs = programs[rank].comms.get(name)
                if theirs != ranks:
                    raise OrderError(
                        f"rank {rank}: communicator {name} has the ranks {theirs and spans(theirs)}, expected "
                        f"{spans(ranks)} as on rank {program.rank}; give all ranks the same mesh and nodes"
                    )


def _check_messages(programs: Sequence[Program]) -> None:
    sent: dict[Way, list[Send]] = defaultdict(list)
    taken: dict[Way, list[Receive]] = defaultdict(list)
    for program in programs:
        for entry, way in _ways(program):
            if isinstance(entry, Send):
                sent[way].append(entry)
            else:
                taken[way].append(entry)
    for way in [*sent, *(way for way in taken if way not in sent)]:
        comm, source, target, _ = way
        for position, (one, other) in enumerate(zip_longest(sent[way], taken[way])):
            mine = one and (one.nbytes, one.dtype)
            theirs = other and (other.nbytes, other.dtype)
            if mine != theirs:
                raise OrderError(
                    f"rank {source}: message {position + 1} over {comm} to rank {target} is {_said(one)}, and rank "
                    f"{target} expects {_said(other)}; send and receive the same in the same order"
                )


def _ways(program: Program) -> Iterator[tuple[Send | Receive, Way]]:
    """Each message with its communicator, source, target and tag."""
    for entry in program.entries():
        if isinstance(entry, (Send, Receive)):
            peer = program.comms[entry.comm][entry.peer]
            ends = (program.rank, peer) if isinstance(entry, Send) else (peer, program.rank)
            yield entry, (entry.comm, ends[0], ends[1], entry.tag)


def _said(message: Send | Receive | None) -> str:
    return (
        "none"
        if message is None
        else f"{message.name} ({message.nbytes:,} bytes of {message.dtype})"
    )
