"""Local steps: groups of ranks, each a job of its own, train apart and average their weights every few steps.

    round of step s   each rank writes its part of the weights | the group says that it is ready
                      | one group decides who is in | each rank reads the same part of all members, and takes the mean

Groups meet in a folder that all of them see, and send each other nothing else. So a group that is killed ends no other,
and a group that starts again, or late, goes on with the newest mean. Means have the same bits in all groups. Moments of
the optimizer stay each group's own.

[Note: Who is waited for]
A group touches its sign of life while it runs. A round waits for every group that lives, and for no other. So a group
that begins late misses one round at most: the next one waits for it. A group whose process stood still for so long that
it counts as dead finds that the others have gone on, and ends with an error; started again, it takes the newest mean.

Source: Stich, Local SGD, arXiv 1805.09767; Douillard et al., DiLoCo, arXiv 2311.08105 (there with an outer optimizer).
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from typing_extensions import Self

import hpczero
from hpczero.errors import ConfigError, StepError
from hpczero.files import durable
from hpczero.files.regular import is_there, parse_json, read_text
from hpczero.options.config import LocalOptions
from hpczero.zero.averages import publish

BEATS = 5  # signs of life in the time after which a group counts as dead
LOOK_S = 0.2  # between two looks at what others have written
KEPT = 2  # rounds that stay: somebody may still read the last one

Floats = npt.NDArray[np.float32]


class LocalSteps:
    """Averages of one run's weights with those of other groups; a context manager around the steps.

    Methods are collective over the topology's world.

    Attributes:
        read_nbytes, written_nbytes: of the folder, by this rank so far.
    """

    def __init__(self, options: LocalOptions, model: nn.Module, *, steps: int, run: Path) -> None:
        """Not collective. ``steps``: of the whole run; the last one ends with an average. ``run``: its folder."""
        assert options.folder is not None, "checked"
        self._options, self._steps, self._run = options, steps, str(run.resolve())
        self._sharding = hpczero.sharding(model)
        self._topology = self._sharding.topology
        self._units = [unit for unit in self._sharding.units if unit.spec.trainable]
        self._folder = Path(options.folder)
        self._ended = threading.Event()
        self._beating: threading.Thread | None = None
        self.read_nbytes = self.written_nbytes = 0
        plan = repr(
            [self._sharding.plan.units, self._topology.size, options.steps, options.groups, steps]
        )
        self._plan = zlib.crc32(plan.encode())  # of this rank: others may hold other layers

    def __enter__(self) -> Self:
        if self._topology.is_root:
            self._beating = threading.Thread(target=self._beat, daemon=True, name="hpczero-local")
            self._beating.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._beating is not None:
            self._beating.join()
            self._beating = None
            with suppress(OSError):  # from now on nobody waits for this group
                self._alive(self._options.group).unlink()

    def rejoin(self, start: int, *, began: bool) -> int:
        """Take the newest mean, if it is newer than step ``start``. Returns the step that the run goes on from.

        Args:
            start: steps done.
            began: whether this run has trained before.

        Raises:
            ConfigError: another run trains as this group, or the folder is left over from runs that have ended.
        """
        newest = start
        with self._topology.agreed("look for averages of other groups"):
            if self._topology.is_root:
                self._folder.mkdir(parents=True, exist_ok=True)
                newest = self._newest(start, began)
        newest = int(self._topology.broadcast_text(str(newest)))
        if newest > start:
            self._take(newest, self._checked(newest, self._members(newest)))
        self._leave()
        return newest

    def _newest(self, start: int, began: bool) -> int:
        """Step of the newest mean, or ``start``; from now on the others wait for this group."""
        own, group = self._alive(self._options.group), self._options.group
        if self._lives(group) and (other := read_text(own)) != self._run:
            raise ConfigError(
                f"local.group: got {group}, and {other} is training as group {group}; give each group a number of its "
                f"own (if that run was killed, wait {self._options.patience_s:g} s)"
            )
        living = [other for other in range(self._options.groups) if self._lives(other)]
        newest = max([start, *self._decided()])
        if newest > start and not began and not living:
            raise ConfigError(
                f"local.folder: {self._folder} holds averages up to step {newest}, no group is training, and this run "
                "has not begun; expected a new folder (or, to go on with those runs, start one of them first that has "
                "a checkpoint)"
            )
        own.unlink(missing_ok=True)
        self._live()
        return newest

    def after_step(self, done: int) -> str:
        """Average, if that is due after ``done`` steps. Returns what has happened, in words; empty where nothing has.

        Raises:
            StepError: the others have gone on without this group for more than a round.
        """
        if done % self._options.steps and done != self._steps:
            return ""
        start = time.monotonic()
        self._write(done)
        members = self._agreed_members(done)
        self._take(done, members, holds=True)
        self._leave()
        missing = sorted({*range(self._options.groups)} - {*members})
        without = f"; without group(s) {', '.join(map(str, missing))}" if missing else ""
        own = "" if self._options.group in members else ", which came too late to be in it"
        return (
            f"local steps: average of {len(members)} of {self._options.groups} groups after step {done}{own}"
            f"{without}; {time.monotonic() - start:.1f} s"
        )

    # --- what this group writes

    def _write(self, step: int) -> None:
        """Write this rank's part, and say that the group is ready once all ranks have."""
        checksum = 0
        with self._topology.agreed("write the weights of this group"):
            path = self._part(step, self._options.group)
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            with temporary.open("wb") as file:
                for part in self._parts():
                    with part as values:
                        raw = _bytes_of(values)
                        checksum = zlib.crc32(raw, checksum)
                        file.write(raw)
                        self.written_nbytes += raw.nbytes
            temporary.replace(path)
        checksums, plans = (
            [int(each) for each in self._topology.gather(float(mine))]
            for mine in (checksum, self._plan)
        )
        with self._topology.agreed("say that this group is ready"):
            if self._topology.is_root:
                said = {"plans": plans, "checksums": checksums}
                durable.write_text(self._ready(step, self._options.group), json.dumps(said))

    def _parts(self, *, changes: bool = False) -> Iterator[Any]:
        """Contexts of fp32 values: this rank's part of each unit, and the buffers that are no whole numbers."""
        for unit in self._units:
            yield unit.owned_values(changes=changes)
        for buffer in self._sharding.buffers:
            if buffer.is_floating_point():
                yield _as_floats(buffer)

    # --- who is in

    def _agreed_members(self, step: int) -> list[int]:
        """The groups of the round, as the first group that saw all of them ready has written down."""
        while True:
            said = ""
            with self._topology.agreed("look for the other groups"):
                if self._topology.is_root:
                    said = self._decide(step)
            if said := self._topology.broadcast_text(said):
                return self._checked(step, json.loads(said))
            time.sleep(LOOK_S)

    def _decide(self, step: int) -> str:
        """What was decided, or is now; empty while a living group is not ready."""
        decided = self._decided()
        if any(other > step for other in decided):
            raise StepError(
                f"group {self._options.group} showed no sign of life for {self._options.patience_s:g} s, and the "
                f"others have gone on to step {max(decided)} without it; start it again, and it goes on from there "
                "(local.patience_s must be longer than a step)"
            )
        if step not in decided:
            groups = range(self._options.groups)
            ready = [group for group in groups if is_there(self._ready(step, group))]
            if any(self._lives(group) for group in groups if group not in ready):
                return ""
            self._publish(step, ready)
        return read_text(self._decision(step))

    def _publish(self, step: int, members: Sequence[int]) -> None:
        """Write the decision down, unless another group was faster."""
        path = self._decision(step)
        temporary = path.with_name(f".{path.name}.{self._options.group}.{os.getpid()}")
        temporary.write_text(json.dumps([*members]))
        with suppress(FileExistsError):
            os.link(temporary, path)
        temporary.unlink()

    def _lives(self, group: int) -> bool:
        """Whether a group has shown life of late. See [Note: Who is waited for]."""
        clock = self._folder / f".group-{self._options.group}.clock"
        clock.touch()  # both times are the file server's
        try:
            seen = self._alive(group).stat().st_mtime
            return clock.stat().st_mtime - seen <= self._options.patience_s
        except FileNotFoundError:
            return False

    def _checked(self, step: int, members: list[int]) -> list[int]:
        """Refuse members that train another model, or on other ranks."""
        with self._topology.agreed("compare the groups"):
            for group in members:
                said = parse_json(read_text(self._ready(step, group)))
                plans = said["plans"]
                if len(plans) != self._topology.size or plans[self._topology.rank] != self._plan:
                    raise StepError(
                        f"group {group} trains another model than group {self._options.group}, or on another number of "
                        "ranks, or with other local.steps, local.groups or train.steps; expected the same in all groups"
                    )
        return members

    # --- the mean

    def _take(self, step: int, members: Sequence[int], *, holds: bool = False) -> None:
        """Set weights and buffers to the mean of ``members``. ``holds``: the model has what this group wrote."""
        own = self._options.group if holds else None
        with self._topology.agreed("read the weights of the groups"), ExitStack() as stack:
            files = {
                group: stack.enter_context(self._part(step, group).open("rb"))
                for group in members
                if group != own
            }
            checksums = dict.fromkeys(files, 0)
            for part in self._parts(changes=True):
                self._live()
                with part as values, torch.no_grad():
                    total = np.zeros(values.numel(), np.float64)
                    for group in members:  # in one order everywhere: sums of fp64 have one, too
                        if group == own:
                            total += np.frombuffer(_bytes_of(values), np.float32)
                            continue
                        raw = files[group].read(4 * values.numel())
                        if len(raw) < 4 * values.numel():
                            raise self._changed(step, group)
                        checksums[group] = zlib.crc32(raw, checksums[group])
                        self.read_nbytes += len(raw)
                        total += np.frombuffer(raw, np.float32)
                    mean = torch.from_numpy((total / len(members)).astype(np.float32))
                    values.copy_(mean.view(values.shape))
            for group, found in checksums.items():
                said = parse_json(read_text(self._ready(step, group)))["checksums"]
                if said[self._topology.rank] != found:
                    raise self._changed(step, group)
        publish(self._sharding)

    def _changed(self, step: int, group: int) -> StepError:
        return StepError(
            f"{self._part(step, group)}: the bytes are not those that group {group} wrote; start this group again"
        )

    def _leave(self) -> None:
        """This group lives, and old rounds go."""
        with self._topology.agreed("leave the round"):
            self._live()
            if self._topology.is_root:
                for old in self._decided()[:-KEPT]:
                    shutil.rmtree(self._round(old), ignore_errors=True)

    # --- names of files

    def _members(self, step: int) -> list[int]:
        found: list[int] = parse_json(read_text(self._decision(step)))
        return found

    def _decided(self) -> list[int]:
        """Rounds that were decided, ascending."""
        found = (path.parent.name for path in self._folder.glob("step-*/members.json"))
        return sorted(int(name.removeprefix("step-")) for name in found)

    def _round(self, step: int) -> Path:
        return self._folder / f"step-{step:09d}"

    def _decision(self, step: int) -> Path:
        return self._round(step) / "members.json"

    def _ready(self, step: int, group: int) -> Path:
        return self._round(step) / f"group-{group}.json"

    def _part(self, step: int, group: int) -> Path:
        return self._round(step) / f"group-{group}.rank-{self._topology.rank}"

    def _alive(self, group: int) -> Path:
        return self._folder / f"group-{group}.alive"

    def _live(self) -> None:
        """A sign of life."""
        if self._topology.is_root:
            path = self._alive(self._options.group)
            try:
                os.utime(path)
            except FileNotFoundError:  # somebody tidied up
                durable.write_text(path, self._run)

    def _beat(self) -> None:
        """Runs on a thread until the steps are over."""
        while not self._ended.wait(self._options.patience_s / BEATS):
            with suppress(OSError):
                self._live()


def _bytes_of(values: torch.Tensor) -> memoryview:
    """Of a copy: NumPy's views of memory that torch gives back later would keep torch from it."""
    copy = values.detach().to("cpu", copy=True).contiguous()
    return copy.view(-1).numpy().view(np.uint8).data


@contextmanager
def _as_floats(buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    values = buffer.float()
    yield values
    if values is not buffer:
        buffer.copy_(values)
