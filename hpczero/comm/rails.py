"""The level between nodes: ranks with the same local rank, each over its own connection."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from mpi4py import MPI
from torch import Tensor

from hpczero.comm.algorithms import (
    CHUNK_BYTES,
    EXCHANGES,
    GATHERS,
    Blocks,
    Exchange,
    Gather,
    Prepare,
)
from hpczero.comm.codes import SentCodes
from hpczero.comm.devices import HostReach, Reach
from hpczero.comm.inside import Parts
from hpczero.errors import ConfigError
from hpczero.kernels.codes import BLOCK
from hpczero.kernels.tree_sum import ShardSum, piece_numel, pieces
from hpczero.memory.buffers import Memory, Scratch
from hpczero.options.values import ALGORITHMS, named_algorithms
from hpczero.plan.footprint import (
    ROUND_BYTES,
    coded_chunk,
    coded_width,
    gather_round,
    rail_chunk,
    rail_turns,
)
from hpczero.plan.layout import Coding

Kind = TypeVar("Kind", Gather, Exchange)
Read = Callable[[Tensor], None]


@dataclass(frozen=True)
class AlgorithmChoice:
    """What serves blocks of one size and above, up to the next choice.

    Attributes:
        algorithm: its name.
        chunk_nbytes: most bytes of a block that travel in one round, for an algorithm that works in rounds.
        from_nbytes: smallest block that it serves.
        at_nbytes: block that it was measured with; 0 if it was not measured.
        seconds: what each candidate took at that size, by ``algorithm`` or ``algorithm/chunk``.
    """

    algorithm: str
    chunk_nbytes: int = ROUND_BYTES
    from_nbytes: int = 0
    at_nbytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        """The algorithm, with the chunk where it is not the usual one."""
        return candidate_name(self.algorithm, self.chunk_nbytes)


@dataclass(frozen=True)
class Selection:
    """Choices by size, smallest first; the first serves blocks from 0 bytes on.

    Attributes:
        gathers: choices for all-gathers, by the bytes of one rank's shard.
        exchanges: choices for reduce-scatters, by the bytes of one node's partial sum for one rank.
        origin: where the choices come from, in words.
    """

    gathers: tuple[AlgorithmChoice, ...]
    exchanges: tuple[AlgorithmChoice, ...]
    origin: str = "not measured"

    def __post_init__(self) -> None:
        for choices in (self.gathers, self.exchanges):
            starts = [choice.from_nbytes for choice in choices]
            if not starts or starts[0] != 0 or starts != sorted(set(starts)):
                raise ValueError(f"choices must rise from size 0, got {starts}")

    @property
    def algorithms(self) -> set[str]:
        """Names of the algorithms."""
        return {choice.algorithm for choice in (*self.gathers, *self.exchanges)}

    def gather_for(self, nbytes: int) -> AlgorithmChoice:
        """Choice for an all-gather of shards of ``nbytes``."""
        return _at(self.gathers, nbytes)

    def exchange_for(self, nbytes: int) -> AlgorithmChoice:
        """Choice for a reduce-scatter with partial sums of ``nbytes``."""
        return _at(self.exchanges, nbytes)

    def in_rounds_of(self, least_nbytes: int) -> Selection:
        """The same algorithms, in rounds of at least ``least_nbytes``."""
        gathers, exchanges = (
            tuple(replace(c, chunk_nbytes=max(c.chunk_nbytes, least_nbytes)) for c in choices)
            for choices in (self.gathers, self.exchanges)
        )
        return replace(self, gathers=gathers, exchanges=exchanges)

    @classmethod
    def parse(cls, text: str) -> Selection:
        """Selection from ``all_gather=ring,reduce_scatter=pairwise``; an operation that is left out keeps its default.

        Raises ConfigError on an operation or an algorithm that does not exist.
        """
        chosen = {"all_gather": DEFAULT.gathers[0], "reduce_scatter": DEFAULT.exchanges[0]}
        for operation, algorithm in named_algorithms(text).items():
            chosen[operation] = AlgorithmChoice(algorithm)
        return cls((chosen["all_gather"],), (chosen["reduce_scatter"],), origin="given")

    def describe(self) -> str:
        """One line: ``all-gather ring, from 1 MiB doubling; ...``."""
        gathers, exchanges = _line(self.gathers), _line(self.exchanges)
        return f"all-gather {gathers}; reduce-scatter {exchanges} ({self.origin})"

    def table(self) -> list[str]:
        """Lines of what was measured, in milliseconds; none if nothing was measured."""
        rows: list[str] = []
        titled = (("all-gather", self.gathers), ("reduce-scatter", self.exchanges))
        for title, choices in titled:
            for choice in choices:
                if choice.seconds:
                    times = ", ".join(
                        f"{name} {1e3 * s:.3g} ms" for name, s in sorted(choice.seconds.items())
                    )
                    size = size_text(choice.at_nbytes)
                    rows.append(f"{title} of {size} blocks: {choice.name} ({times})")
        return rows

    def as_json(self) -> dict[str, Any]:  # Any: JSON
        """The selection as JSON values, which ``from_json`` reads."""
        return {
            "gathers": [asdict(choice) for choice in self.gathers],
            "exchanges": [asdict(choice) for choice in self.exchanges],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any], *, origin: str) -> Selection:
        """The selection that ``as_json`` wrote.

        Raises ValueError if it has another form, or names algorithms that this version does not have.
        """
        try:
            gathers, exchanges = (
                tuple(AlgorithmChoice(**row) for row in value[name])
                for name in ("gathers", "exchanges")
            )
            known = all(c.algorithm in ALGORITHMS["all_gather"] for c in gathers) and all(
                c.algorithm in ALGORITHMS["reduce_scatter"] for c in exchanges
            )
            if not known or any(c.chunk_nbytes < 1 for c in (*gathers, *exchanges)):
                raise ValueError("unknown algorithm or bad chunk")
            return cls(gathers, exchanges, origin=origin)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a selection: {error}") from error


# Between emulated hosts these come closest to the bound of the links (docs/performance.md).
DEFAULT = Selection((AlgorithmChoice("pairwise"),), (AlgorithmChoice("pairwise"),))


def candidate_name(algorithm: str, chunk_nbytes: int) -> str:
    """``pairwise``, or ``pairwise/512 KiB`` for rounds of another length than usual."""
    return algorithm if chunk_nbytes == ROUND_BYTES else f"{algorithm}/{size_text(chunk_nbytes)}"


def boundary(smaller: int, larger: int) -> int:
    """Size from which the choice for ``larger`` holds, where the next smaller measured size is ``smaller``."""
    return math.isqrt(smaller * larger)


def size_text(nbytes: int) -> str:
    """A size in words: ``64 KiB``, ``8 MiB``."""
    if nbytes >= 2**20:
        return f"{nbytes / 2**20:.3g} MiB"
    return f"{nbytes / 2**10:.3g} KiB"


def _at(choices: Sequence[AlgorithmChoice], nbytes: int) -> AlgorithmChoice:
    return next(choice for choice in reversed(choices) if choice.from_nbytes <= nbytes)


def _line(choices: Sequence[AlgorithmChoice]) -> str:
    words = [choices[0].name]
    for before, choice in itertools.pairwise(choices):
        if choice.name != before.name:
            words.append(f"from {size_text(choice.from_nbytes)} {choice.name}")
    return ", ".join(words)


# Elements of fp32 sums that are rounded at a time, where a device sums everything else at once.
NARROWED_NUMEL = 4 * 2**20


class Rails:
    """This rank's rail: ``comm`` has one rank of every node. Other rails of the node do the same meanwhile.

    Attributes:
        comm: borrowed. It carries nothing else while bytes move.
        selection: which algorithm serves which size.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        memory: Memory,
        *,
        local_size: int,
        local_rank: int,
        node_dtype: torch.dtype,
        selection: Selection = DEFAULT,
        chunk_nbytes: int = CHUNK_BYTES,
        reach: Reach | None = None,
    ) -> None:
        """Not collective. ``comm`` must outlive the rails, and carries nothing else while they move bytes.

        Its ranks have place ``local_rank`` of the ``local_size`` ranks of their nodes. Each node's partial sum is
        rounded to ``node_dtype``. ``selection`` is equal on all ranks. A single MPI call moves at most ``chunk_nbytes``
        of one shard.

        Raises:
            ConfigError: an algorithm that does not work on this number of nodes.
        """
        self.comm = comm
        self._local_size, self._local_rank = local_size, local_rank
        self._node_dtype = node_dtype
        self._chunk_nbytes = chunk_nbytes
        self._reach = reach or HostReach()
        self._device = self._reach.accelerator.device
        self._scratch = Scratch(memory, category="exchange", device=self._device)
        # Of codes: sums before and after, rows of a gather, this rank's shard, values of one shard.
        self._of_codes = {
            name: Scratch(memory, category="exchange", device=self._device)
            for name in ("sums", "rows", "shard", "values")
        }
        self._gathers: dict[str, Gather] = {}
        self._exchanges: dict[str, Exchange] = {}
        self.select(selection)

    def select(self, selection: Selection) -> None:
        """Use other algorithms from now on. Equal on all ranks; not collective.

        Raises ConfigError on an algorithm that does not work between these nodes.
        """
        for kind in (*GATHERS, *EXCHANGES):
            if kind.name in selection.algorithms and not kind.fits(self.comm.size):
                raise ConfigError(
                    f"algorithms: {kind.name} does not work between {self.comm.size} nodes, expected one that does; "
                    "leave it to auto"
                ).on_all_ranks()
        self.selection = selection

    def wire(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of partial sums of ``dtype`` on the network."""
        # One rank per node has nothing to add up: its gradient travels as it is, if that is not wider.
        alone = self._local_size == 1 and dtype.itemsize <= self._node_dtype.itemsize
        return dtype if alone else self._node_dtype

    def gather(self, full: Tensor, shard_numel: int) -> None:
        """Bring the shards of other nodes to this node, in place. Collective over all ranks of the group.

        ``full`` has (num_shards * shard_numel,) elements, this rank's shard in its slice. Afterwards each element is on
        a rank of this node.
        """
        nodes = self.comm.size
        first = self._local_rank * nodes * shard_numel
        self._gather(Blocks.of(full, first, shard_numel, shard_numel, nodes))

    def gather_rows(self, read: Read, dtype: torch.dtype, codes: SentCodes) -> Tensor:
        """The rows of the shards that this rank's part has, own one too. Collective over all ranks of the group.

        ``read`` puts this rank's shard into (shard_numel,) of ``dtype``.

        Returns:
            (nodes, codes.words) fp32 in the order of the nodes; until the next call.
        """
        nodes, me, words = self.comm.size, self.comm.rank, codes.words
        numel = codes.coding.layout.shard_numel
        mine, values = (
            self._of_codes["shard"].get(numel, dtype),
            self._of_codes["values"].get(numel, torch.float32),
        )
        read(mine)
        values.copy_(mine)
        rows = self._of_codes["rows"].get(nodes * words, torch.float32)
        own = rows[me * words :][:words]
        codes.encode(values, own, shard=self._local_rank * nodes + me)
        self._gather(Blocks.of(rows, 0, words, words, nodes))
        return rows.view(nodes, words)

    def decode_rows(self, rows: Tensor, part: Tensor, codes: SentCodes) -> None:
        """Set ``part``, (nodes * shard_numel,), to what the ``rows`` say that ``gather_rows`` gave. Not collective.

        Ranks of the node may still compute with ``part``, which has the same values then: it is written once.
        """
        nodes = self.comm.size
        values = self._of_codes["values"].get(codes.coding.layout.shard_numel, torch.float32)
        for node, into in enumerate(part.view(nodes, -1)):
            shard = self._local_rank * nodes + node
            codes.decode(rows[node : node + 1], values.view(1, -1), shard=shard)
            into.copy_(values)

    def _gather(self, blocks: Blocks) -> None:
        nodes = self.comm.size
        choice = self.selection.gather_for(blocks.nbytes)
        gather = self._called(choice.algorithm, GATHERS, self._gathers, self._reach.gather)
        most = CHUNK_BYTES
        if gather.in_rounds:
            most = gather_round(blocks.nbytes, nodes, choice.chunk_nbytes)
        gather(blocks, round_nbytes=most)

    def reduce(
        self,
        parts: Parts,
        into: ShardSum,
        dtype: torch.dtype,
        *,
        spans: bool = True,
    ) -> None:
        """Sum over the ranks of each node and then over nodes. Collective over all ranks of the group.

        Args:
            parts: every local rank's elements. All ranks of a node make as many calls.
            into: this rank's shard.
            dtype: dtype of the parts.
            spans: whether ``parts`` are views, so that what lies between the elements in question costs nothing.
        """
        # Of what this rail owns slice g is for node g.
        nodes, me, wire, shard_numel = (
            self.comm.size,
            self.comm.rank,
            self.wire(dtype),
            into.out.numel(),
        )
        is_host = self._reach.accelerator.is_host
        choice = self.selection.exchange_for(shard_numel * wire.itemsize)
        exchange = self._called(choice.algorithm, EXCHANGES, self._exchanges, self._reach.exchange)
        chunk = rail_chunk(shard_numel, nodes, wire.itemsize, choice.chunk_nbytes)
        chunk = max(min(chunk, self._chunk_nbytes // wire.itemsize), 1)
        turns, first = rail_turns(shard_numel, chunk), self._local_rank * nodes * shard_numel
        # What a rank alone on its node sends is its gradient: no sum, no copy.
        alone = self._local_size == 1 and dtype is wire and exchange.takes_gaps and is_host
        sides = 1 if alone else 2
        buffers = self._scratch.get(turns * sides * nodes * chunk, wire)
        buffers = buffers.view(turns, sides, nodes * chunk)
        left: Callable[[], None] = lambda: None  # noqa: E731  (what the chunk before still needs)

        for turn, start in enumerate(range(0, shard_numel, chunk)):
            count = min(chunk, shard_numel - start)
            *sums, receive = buffers[turn % turns, :, : nodes * count]
            if alone:
                (gradient,) = parts(start, (nodes - 1) * shard_numel + count)
                send = Blocks.of(gradient, 0, count, shard_numel, nodes)
                prepare: Prepare = lambda first, many: None  # noqa: E731
                own = gradient[me * shard_numel :][:count]
            else:
                (summed,) = sums
                send = Blocks.of(summed, 0, count, count, nodes)
                rows = summed.view(nodes, count)
                prepare = partial(self._sum_node, parts, rows, first + start, into, spans=spans)
                own = rows[me]
            came = Blocks.of(receive, 0, count, count, nodes)
            exchange(send, came, prepare=prepare, meanwhile=left)
            sums_of_nodes = list(receive.view(nodes, -1).unbind())
            sums_of_nodes[me] = own  # read from where it was made
            left = partial(self._sum_nodes, sums_of_nodes, into, start)
        exchange.finish()
        left()

    def coded_chunk(self, coding: Coding) -> int:
        """Elements of each shard that one round of ``reduce_coded`` exchanges."""
        nbytes = coding.codec.nbytes(coding.layout.shard_numel)
        chunk = coded_chunk(
            coding, self.comm.size, self.selection.exchange_for(nbytes).chunk_nbytes
        )
        return max(min(chunk, self._chunk_nbytes // BLOCK * BLOCK), BLOCK)

    def reduce_coded(
        self,
        parts: Parts,
        into: ShardSum,
        codes: SentCodes,
        *,
        spans: bool = True,
    ) -> None:
        """``reduce``, where each node's sum travels as ``codes``. Collective over all ranks of the group."""
        nodes, me, coding = self.comm.size, self.comm.rank, codes.coding
        shard_numel = into.out.numel()
        choice = self.selection.exchange_for(coding.codec.nbytes(shard_numel))
        exchange = self._called(choice.algorithm, EXCHANGES, self._exchanges, self._reach.exchange)
        chunk = self.coded_chunk(coding)
        turns, width = rail_turns(shard_numel, chunk), coded_width(coding, chunk)
        rows = self._scratch.get(turns * 2 * nodes * width, torch.float32)
        rows = rows.view(turns, 2, nodes * width)
        values = self._of_codes["sums"].get(2 * nodes * chunk, torch.float32).view(2, nodes * chunk)
        left: Callable[[], None] = lambda: None  # noqa: E731  (what the chunk before still needs)

        for turn, start in enumerate(range(0, shard_numel, chunk)):
            count = min(chunk, shard_numel - start)
            words = coding.words(start, count)
            send, came = (side[: nodes * words].view(nodes, words) for side in rows[turn % turns])
            sums, decoded = (side[: nodes * count].view(nodes, count) for side in values)

            part = partial(self._encode_node, parts, codes, sums, send, start, into, spans=spans)
            exchange(
                Blocks.of(send.view(-1), 0, words, words, nodes),
                Blocks.of(came.view(-1), 0, words, words, nodes),
                prepare=part,
                meanwhile=left,
            )
            came[me].copy_(send[me])  # its own sum is read as the other nodes' are
            left = partial(self._sum_codes, codes, came, decoded, start, into)
        exchange.finish()
        left()

    def _encode_node(
        self,
        parts: Parts,
        codes: SentCodes,
        sums: Tensor,
        send: Tensor,
        start: int,
        into: ShardSum,
        first: int,
        many: int,
        *,
        spans: bool,
    ) -> None:
        """Sum over the ranks of this node what ``many`` nodes will get, and encode it.

        ``sums`` gets the sums and ``send`` the codes, a row for each node, from node ``first`` on. ``start`` is the
        first element of each shard.
        """
        nodes, shard_numel = self.comm.size, codes.coding.layout.shard_numel
        shard = self._local_rank * nodes  # that of the first node
        self._sum_node(parts, sums, shard * shard_numel + start, into, first, many, spans=spans)
        for node in range(first, first + many):
            place = {"shard": shard + node, "start": start, "node": self.comm.rank}
            codes.encode(sums[node], send[node], **place)

    def _sum_codes(
        self,
        codes: SentCodes,
        rows: Tensor,
        sums: Tensor,
        start: int,
        into: ShardSum,
    ) -> None:
        """Bring the sum of what ``rows`` of all nodes say, which ``sums`` holds meanwhile, ``into`` its place."""
        shard = self._local_rank * self.comm.size + self.comm.rank
        codes.decode(rows, sums, shard=shard, start=start)
        self._sum_nodes(list(sums.unbind()), into, start)

    def _sum_node(
        self,
        parts: Parts,
        send: Tensor,
        start: int,
        into: ShardSum,
        first: int,
        many: int,
        *,
        spans: bool,
    ) -> None:
        """Sum over the ranks of this node what neighbouring nodes will get, into rows of ``send``."""
        count, shard_numel = send.shape[1], into.out.numel()
        if not spans and many > 1:
            for node in range(first, first + many):
                self._sum_node(parts, send, start, into, node, 1, spans=True)
            return
        blocks = parts(first * shard_numel + start, (many - 1) * shard_numel + count)
        if count == shard_numel or many == 1:  # no gaps: one row
            rows = send[first] if many == 1 else send[first : first + many].view(-1)
        else:
            rows = send[first : first + many]
            blocks = [block.as_strided((many, count), (shard_numel, 1)) for block in blocks]
        sum_of_node(into.of_node(blocks, self.comm.rank), rows, self.comm, into)

    def _sum_nodes(self, rows: Sequence[Tensor], into: ShardSum, start: int) -> None:
        """Sum one chunk of all nodes' partial sums, in the order of the nodes."""
        groups, dtype = [[node] for node in range(len(rows))], self._node_dtype
        into.take(rows, start, groups=groups, node_dtype=dtype, ranks=self._local_size)

    def describe(self) -> str:
        """Part of a line for a run header."""
        return f"between nodes {self.selection.describe()}"

    @property
    def messages(self) -> tuple[int, int]:
        """Messages that this rank has sent for gathers and for reductions; the library's own do not count."""
        algorithms = (self._gathers.values(), self._exchanges.values())
        gathered, reduced = (sum(each.messages for each in kind) for kind in algorithms)
        return gathered, reduced

    def _called(
        self,
        name: str,
        kinds: Sequence[type[Kind]],
        made: dict[str, Kind],
        make: Callable[..., Kind],
    ) -> Kind:
        """The algorithm ``name`` of ``made``; the first call makes it."""
        if name not in made:
            kind = next(kind for kind in kinds if kind.name == name)
            made[name] = make(kind, self.comm, chunk_nbytes=self._chunk_nbytes)
        return made[name]

    def close(self) -> None:
        """Free datatypes and scratch. Not collective."""
        for algorithm in (*self._gathers.values(), *self._exchanges.values()):
            algorithm.free()
        for scratch in (self._scratch, *self._of_codes.values()):
            scratch.release()


def sum_of_node(blocks: Sequence[Tensor], into: Tensor, comm: MPI.Intracomm, by: ShardSum) -> None:
    """Set ``into`` to the partial sum of one node, rounded once to its dtype, that of the network. Not collective.

    ``blocks`` are what each local rank has, in local order, summed as ``by`` says. Messages of ``comm`` go on then.
    """
    narrow = into.dtype is not torch.float32
    most = min(piece_numel(into.device), NARROWED_NUMEL if narrow else 2**62)
    for piece in pieces(into.shape, most) if into.numel() > most else (...,):
        target, rows = into, blocks
        if piece is not ...:
            target, rows = into[piece], [block[piece] for block in blocks]
        total = torch.empty_like(target, dtype=torch.float32) if narrow else target
        by.sum_of_node(rows, total)
        if narrow:
            target.copy_(total)
        comm.Iprobe()  # messages of earlier steps go on only inside MPI
