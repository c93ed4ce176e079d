"""ResumableLoader: torch's own ``DataLoader`` over a rank's part of each global batch, with an exact resume.

Owns: what of a run's batches the program has been given. Must not know: what a sample is, models, checkpoints.

[Note: What has been taken]
Workers read ahead: they have asked for batches that the program has not seen. What counts is what the program was
given, so the loader counts, and not the sampler that workers read from. The count is of global batches. It means the
same on any number of ranks and workers. What a program does at the end of an epoch comes after its last batch. A state
made while the program has that batch says so, and the first loop after a load is then over at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hpczero.data.loading.fingerprint import fingerprint_of
from hpczero.data.loading.global_batches import GlobalBatches
from hpczero.data.loading.keyed import Keyed, Plain
from hpczero.errors import ConfigError

if TYPE_CHECKING:
    from hpczero.job.topology import Topology

# Which samples, in which order, is decided here.
OURS = ("batch_size", "sampler", "batch_sampler", "generator", "in_order")
BATCHES = "batches"
IN_LAST = "in_last_batch"  # there, and True, while the program has the last batch of an epoch


class ResumableLoader:
    """The batches of one rank, epoch after epoch.

    ``for batch in loader`` gives what is left of the current epoch, so the first loop after ``load_state_dict`` goes on
    where the checkpoint was made. A loop that is left early is gone on with by the next one.

    Nothing here is collective: each rank has its own workers.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        global_batch: int,
        topology: Topology,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        draws: bool = True,
        **options: Any,  # Any: of torch
    ) -> None:
        """Not collective.

        Args:
            dataset: with ``__getitem__`` and ``__len__``, equal on all ranks.
            global_batch: samples of a batch over all ranks.
            topology: its ``data`` ranks share each batch.
            seed: of the order, and of what samples draw.
            shuffle: whether each epoch has an order of its own.
            drop_last: whether samples that fill no global batch are left out of the epoch.
            draws: whether samples draw random numbers (augmentation). Each then has random streams of its own, which
                costs about 0.1 ms; torch's, NumPy's and Python's global ones. False where nothing is drawn.
            options: of ``torch.utils.data.DataLoader``: ``num_workers``, ``collate_fn``, ``pin_memory`` and so on.

        Raises:
            ConfigError: the data set is a stream or empty, no batch is full, or an option decides which samples come.
        """
        if wrong := [name for name in OURS if name in options]:
            raise ConfigError(
                f"ResumableLoader: got {', '.join(wrong)}; it decides itself which samples come, by "
                "global_batch, seed, shuffle and drop_last"
            )
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ConfigError(
                f"ResumableLoader: got a {type(dataset).__name__}, which has no samples by number, so "
                "nobody knows where to go on in it (a state_dict of its own counts what one process has read, which "
                "means nothing on other ranks); give a data set with __getitem__ and __len__"
            )
        self.batches = GlobalBatches(len(dataset), global_batch, seed, shuffle, drop_last)
        self._rank, self._size = topology.data.rank, topology.data.size
        self._fingerprint = fingerprint_of(dataset)
        self._taken = 0
        self._turn = 0  # which loop over the batches is the last one
        self._in_last = False  # whether that loop has given the last batch of an epoch, and goes on
        self._over = False  # whether the next loop has nothing left
        keyed = Keyed(dataset, seed) if draws else Plain(dataset)
        # A generator of its own: the loader would draw from that of the program, once more in a resumed run.
        self._loader: DataLoader[Any] = DataLoader(
            keyed,
            batch_sampler=_Rest(self),
            generator=torch.Generator().manual_seed(seed),
            **options,
        )

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        return len(self.batches)

    @property
    def taken(self) -> int:
        """Global batches given to the program since the start of the run."""
        return self._taken

    @property
    def epoch(self) -> int:
        """Number of the epoch that the program is in, from 0. The next one begins where the loop over this one ends."""
        return (self._taken - (self._in_last or self._over)) // len(self)

    def __iter__(self) -> Iterator[Any]:
        """What is left of the current epoch.

        Raises:
            ConfigError: ranks take different numbers of samples of some batch, so that a mean over ranks is not the
                mean over samples; ``weighted`` is for that.
        """
        if not self.batches.is_even(self._size):
            raise ConfigError(
                f"ResumableLoader: {self._size} ranks cannot take equal parts of {len(self.batches)} batches of "
                f"{self.batches.global_batch} of {self.batches.num_samples} samples; use a global batch that the ranks "
                "divide and drop_last=True, or `for weight, batch in loader.weighted()` and weight * loss"
            )
        return (batch for _, batch in self.weighted())

    def weighted(self) -> Iterator[tuple[float, Any]]:
        """What is left of the current epoch, each batch with the weight of this rank's mean loss.

        The mean over ranks of weight * loss is the mean loss over the global batch, and so are the gradients that a
        zeroified model averages. A rank without a sample gets one all the same, of weight 0.

        Raises:
            RuntimeError: another loop over this loader was begun meanwhile, or a state was loaded; or the data set
                raised StopIteration, which would end an epoch before its last batch.
        """
        self._turn += 1
        turn = self._turn
        if self._over:
            self._over = False
            return
        for batch in self._loader:
            weight = self.batches.share(self._taken, self._rank, self._size).weight
            self._taken += 1  # before: the program may save while it has the batch
            self._in_last = self._taken % len(self) == 0
            try:
                yield weight, batch
            finally:  # asked for the next one, or left
                if turn == self._turn:
                    self._in_last = False
            if turn != self._turn:
                raise RuntimeError(
                    "ResumableLoader: this loop is not the last one over the loader: another was begun, or a state was "
                    "loaded; leave the loop first"
                )
        if self._taken % len(self):
            raise RuntimeError(
                f"ResumableLoader: a sample of batch {self._taken % len(self)} of {len(self)} raised StopIteration, "
                "which ends a loop without a word; have the data set raise another error"
            )

    def state_dict(self) -> dict[str, int | str]:
        """What to keep in a checkpoint: how many batches were taken, and of what. Equal on all ranks.

        A data set may have a ``fingerprint``, a text that tells it from others of its length. One of ``datasets`` has
        one here, made of its rows.
        """
        fingerprint = {} if self._fingerprint is None else {"fingerprint": self._fingerprint}
        of_what = {name: int(value) for name, value in vars(self.batches).items()}
        ends = {IN_LAST: True} if self._in_last or self._over else {}
        return {BATCHES: self._taken, **of_what, **fingerprint, **ends}

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go on where ``state`` was made, on any number of ranks. Not collective.

        Raises:
            ConfigError: it is of other batches: the data set has another length, or an option differs.
        """
        mine = self.state_dict()
        if wrong := [
            f"{name} was {state.get(name)} and is {mine.get(name)}"
            for name in [*mine, *(["fingerprint"] if "fingerprint" not in mine else [])]
            if name not in (BATCHES, IN_LAST) and state.get(name) != mine.get(name)
        ]:
            raise ConfigError(
                f"ResumableLoader: the state is of other batches ({'; '.join(wrong)}); give the same data set and "
                "options"
            )
        taken = state.get(BATCHES)
        if not isinstance(taken, int) or taken < 0:
            raise ConfigError(
                f"ResumableLoader: the state has {taken!r} batches, expected 0 or more"
            )
        self._taken = taken
        self._over, self._in_last = bool(state.get(IN_LAST)), False
        self._turn += 1

    def _rest(self) -> Iterator[list[tuple[int, int]]]:
        """Keys of this rank's samples, batch after batch, from now on to the end of the epoch."""
        start = self._taken
        return (
            list(zip(share.samples.tolist(), share.positions.tolist(), strict=True))
            for share in (
                self.batches.share(batch, self._rank, self._size)
                for batch in range(start, (start // len(self) + 1) * len(self))
            )
        )


class _Rest:
    """What torch's loader and its workers read ahead from."""

    def __init__(self, loader: ResumableLoader) -> None:
        self._owner = loader

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._owner._rest()

    def __len__(self) -> int:
        return len(self._owner)
