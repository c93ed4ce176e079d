"""Whole weights of a model written for other programs, by all ranks that hold it; no rank holds more than one unit.

unit by unit: shards -> every rank -> what a writer makes of them, each rank of its tensors -> files under a hidden name
-> rename
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from typing_extensions import Self, override

from hpczero.checkpoint.foreign.safe_file import (
    SINGLE,
    WeightsWriter,
    divided,
    spread,
    write_index,
)
from hpczero.errors import CheckpointNotWritten, ConfigError
from hpczero.files.durable import Hidden, is_free
from hpczero.files.regular import WHY, Explained
from hpczero.job.team import Alone, Ranks, Team
from hpczero.zero.full_state import StateByUnit
from hpczero.zero.zeroify import sharding

Pairs = Iterable[tuple[Tensor, Tensor]]  # what stands for each tensor, and its value


def stream(
    model: nn.Module,
    begin: Callable[[dict[str, Any], Team], Any],
    *,
    before_commit: Callable[[], None] = lambda: None,
) -> None:
    """Write a zeroified model. Collective over the topology's world.

    All ranks write, but of a model of which ranks hold parts rank 0 alone.

    Args:
        model: zeroified, between two steps.
        begin: makes the writer, on each rank that writes, of what ``StateByUnit.tensors`` is and of the ranks that
            write: a context manager with ``put``, which takes pairs, and ``commit``. Entering it and ``commit`` are
            collective over these ranks.
        before_commit: called on rank 0 when all is written.

    Raises:
        HpcZeroError: what any of these raises; on every rank.
    """
    topology = sharding(model).topology
    state = StateByUnit(model)
    team: Team = Ranks(topology) if state.on_every_rank else Alone()
    writer: Any = None

    def by_writers(what: str, work: Callable[[Any], object]) -> None:
        if state.on_every_rank:
            work(writer)
            return
        with topology.agreed(what):
            if writer is not None:
                work(writer)

    with ExitStack() as stack:
        with topology.agreed("begin the weights"):
            if state.tensors is not None:
                writer = begin(state.tensors, team)
        by_writers("begin the weights", stack.enter_context)
        with topology.agreed("write the weights"):
            if writer is not None:
                writer.put(with_values(state.tensors or {}))
        for found in state.units():
            with topology.agreed("write the weights"):
                if writer is not None:
                    writer.put(found)
        with topology.agreed("write the weights"):
            if topology.is_root:
                before_commit()
        by_writers("write the weights", lambda writer: writer.commit())


def with_values(tensors: Mapping[str, Any]) -> list[tuple[Tensor, Tensor]]:
    """Each of the tensors that stands for itself, once: a buffer, of which the values are there."""
    found = [t for t in tensors.values() if isinstance(t, Tensor) and not t.is_meta]
    return [(tensor, tensor) for tensor in {id(t): t for t in found}.values()]


class NewFolder(Hidden):
    """A folder that is made under a hidden name; a context manager, which leaves nothing of what was not committed.

    Entering and ``commit`` raise CheckpointNotWritten.
    """

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError: something is there, other than an empty folder. Nothing is written."""
        super().__init__(folder)
        self._folder = folder
        with Explained(ConfigError, f"{folder}: cannot be looked at: {WHY}"):
            if not is_free(folder.absolute()):
                raise ConfigError(f"{folder}: is there already; give another name, or take it away")

    def told(self) -> Explained:
        """Context: an error of the system becomes a CheckpointNotWritten."""
        text = f"{self._folder}: cannot be written ({WHY}); check the path, space and permissions"
        return Explained(CheckpointNotWritten, text)

    @override
    def __enter__(self) -> Self:
        with self.told():
            super().__enter__()
            self.path.mkdir()
        return self

    @override
    def commit(self) -> None:
        with self.told():
            super().commit()


class FolderWriter:
    """A folder of safetensors files, and what lies beside them, as a context manager of ``stream``.

    Nothing stays of a folder that was not committed. A subclass says what becomes of pairs.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Mapping[str, Tensor],
        shard_nbytes: int,
        beside: Callable[[Path], None],
        team: Team | None = None,
    ) -> None:
        """Nothing is written before the block begins.

        Args:
            folder: must not exist, or be empty; else raises ConfigError.
            tensors: shapes and dtypes by key; values do not matter.
            shard_nbytes: most bytes of a file; a larger tensor has a file of its own.
            beside: writes what lies beside the weights into the folder that it is given; called on rank 0.
            team: the ranks that write, which all give the same arguments; None: this process.
        """
        self._hidden = NewFolder(folder)
        self._tensors, self._beside = dict(tensors), beside
        self._team = team or Alone()
        self._sizes = {key: tensor.nbytes for key, tensor in self._tensors.items()}
        self._writers = spread(self._sizes, self._team.size)
        self._parts = divided(self._sizes, shard_nbytes)
        if len(self._parts) == 1:
            self._parts = {SINGLE: list(self._tensors)}
        self._homes: dict[str, WeightsWriter] = {}

    def put(self, pairs: Pairs) -> None:
        """Write what this rank writes of the tensors that become of these; raises CheckpointError. Not collective."""
        raise NotImplementedError

    def is_mine(self, key: str) -> bool:
        """Whether this rank writes a tensor."""
        return self._writers[key] == self._team.rank

    def write(self, key: str, values: Tensor) -> None:
        """Write one tensor, of the shape and dtype that were said; raises CheckpointError. Not collective."""
        self._homes[key].put_tensor(self._tensors[key], values)

    def commit(self) -> None:
        """All tensors are there: the folder takes its name once everything is on the disk. Raises CheckpointError.

        Collective over the ranks that write, as is entering the block.
        """
        for writer in dict.fromkeys(self._homes.values()):
            writer.commit()
        with self._team.agreed("write the folder"), self._hidden.told():
            if self._team.rank == 0:
                self._beside(self._path)
                if len(self._parts) > 1:
                    write_index(self._path, self._parts, self._sizes)
                self._hidden.commit()

    def __enter__(self) -> Self:
        """Begin the files; raises CheckpointError."""
        with ExitStack() as stack:
            with self._team.agreed("make the folder"):
                if self._team.rank == 0:
                    stack.enter_context(self._hidden)
            (name, *_), *_ = self._team.all_gather_lists([str(self._hidden.path)])
            self._path = Path(name)
            for file, part in self._parts.items():
                tensors = {key: self._tensors[key] for key in part}
                writer = WeightsWriter(self._path / file, tensors, {"format": "pt"}, self._team)
                self._homes |= dict.fromkeys(part, stack.enter_context(writer))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
