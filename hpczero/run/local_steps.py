"""Local steps: groups of ranks, each a job of its own, train apart and average their weights every few steps.

    round of step s   each rank writes its part of the weights | the group says that it is ready
                      | one group decides who is in | each rank reads the same part of all members, and takes the mean

    meeting.json               what all groups must have in common
    group-G.alive              run and start of the group; touched while it lives
    step-S/group-G.START.json  this start of the group is ready; checksums of its parts, group-G.START.rank-R
    step-S/members.json        the starts whose parts are in the mean

Groups meet in a folder that all of them see, and send each other nothing else. So a group that is killed ends no other,
and a group that starts again, or late, goes on with the newest mean. Means have the same bits in all groups. Moments of
the optimizer stay each group's own.

[Note: Who is waited for]
A group touches its sign of life while it runs. A round waits for every group that lives, and for no other. So a group
that begins late misses one round at most: the next one waits for it. A group whose process stood still for so long that
it counts as dead finds that the others have gone on, and ends with an error; started again, it takes the newest mean.

[Note: Starts]
A group that is killed after it was ready has a part that others may already read. Started again it may compute another
part for the same round. So each start has an id, files of one start are never written by another, and a decision names
starts: all groups read the same bytes.

Source: Stich, Local SGD, arXiv 1805.09767; Douillard et al., DiLoCo, arXiv 2311.08105 (there with an outer optimizer).
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from typing_extensions import Self

import hpczero
from hpczero.errors import ConfigError, StepError
from hpczero.files import durable
from hpczero.files.regular import WHY, Explained, is_there, parse_json, read_text, shown
from hpczero.options.config import LocalOptions
from hpczero.run.stopping import Stops, Wish
from hpczero.zero.averages import publish

BEATS = 5  # signs of life in the time after which a group counts as dead
LOOK_S = 0.2  # between two looks at what others have written
MEMBERS = "members.json"
KEPT = 2  # rounds that stay: somebody may still read the last one


class LocalSteps:
    """Averages of one run's weights with those of other groups; a context manager around the steps.

    Methods are collective over the topology's world.

    Attributes:
        read_nbytes, written_nbytes: of the folder, by this rank so far.
        heard: what the run was asked for while it waited in the last round.
        owes: whether the run begins with the round of its first step, before which it was asked to stop.
    """

    def __init__(
        self,
        options: LocalOptions,
        model: nn.Module,
        *,
        steps: int,
        run: Path,
        identity: Mapping[str, Any],
    ) -> None:
        """Not collective.

        Args:
            options: of this group.
            model: zeroified.
            steps: of the whole run; the last one ends with an average.
            run: folder of the run.
            identity: what all groups must have in common besides the model, as JSON knows it.
        """
        assert options.folder is not None, "checked"
        self._options, self._steps, self._run = options, steps, str(run.resolve())
        self._sharding = hpczero.sharding(model)
        self._topology = self._sharding.topology
        self._units = [unit for unit in self._sharding.units if unit.spec.trainable]
        self._folder = Path(options.folder)
        self._start = secrets.token_hex(8)  # rank 0's counts. See [Note: Starts].
        self._ended = threading.Event()
        self._beating: threading.Thread | None = None
        self.read_nbytes = self.written_nbytes = 0
        self.heard, self.owes = Wish.NOTHING, False
        self._identity = {"local.steps": options.steps, "local.groups": options.groups, **identity}
        self._plan = zlib.crc32(repr(self._sharding.plan.units).encode())  # of this rank

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
        """Take the newest mean, if it is of step ``start`` or newer. Returns the step that the run goes on from.

        Args:
            start: steps done.
            began: whether this run has trained before.

        Raises:
            ConfigError: another run trains as this group, the groups are unlike, or the folder cannot be used.
        """
        self._start = self._topology.broadcast_text(self._start)
        plans = [int(each) for each in self._topology.gather(float(self._plan))]
        newest = -1
        with self._topology.agreed("look for averages of other groups"):
            if self._topology.is_root:
                with Explained(
                    ConfigError, f"local.folder: {self._folder}: {WHY}; expected a folder"
                ):
                    self._folder.mkdir(parents=True, exist_ok=True)
                    self._compare({**self._identity, "ranks": len(plans)}, plans)
                    newest = self._newest(start, began)
        newest = int(self._topology.broadcast_text(str(newest)))
        self.owes = newest < 0 and began and start > 0 and self._is_due(start)
        if newest >= 0:
            self._take(newest, self._members(newest))
        self._leave()
        return max(newest, start)

    def _compare(self, identity: dict[str, Any], plans: list[int]) -> None:
        """Refuse groups that are unlike; the first group of the folder says what they are."""
        mine = {"plans": plans, **identity}
        path = self._folder / "meeting.json"
        self._write_once(path, mine)
        theirs = parse_json(read_text(path))
        mine = json.loads(json.dumps(mine))
        unlike = [name for name in mine if theirs.get(name) != mine[name]]
        if unlike == ["plans"]:
            raise ConfigError(
                f"local.folder: {self._folder}: the other groups train another model, or spread it over ranks in "
                "another way; expected the same in all groups, or a new folder for other runs"
            )
        if unlike:
            name = next(name for name in unlike if name != "plans")
            raise ConfigError(
                f"local.folder: {self._folder}: the other groups have {name} {shown(theirs.get(name))}, this one "
                f"{shown(mine[name])}; expected the same in all groups, or a new folder for other runs"
            )

    def _newest(self, start: int, began: bool) -> int:
        """Step of the newest mean, or -1; from now on the others wait for this group."""
        group = self._options.group
        if self._lives(group) and (other := self._said(group).get("run")) != self._run:
            raise ConfigError(
                f"local.group: got {group}, and {other} is training as group {group}; give each group a number of its "
                f"own (if that run was killed, wait {self._options.patience_s:g} s)"
            )
        living = any(self._lives(other) for other in range(self._options.groups))
        if self._rounds() and not began and not living:
            raise ConfigError(
                f"local.folder: {self._folder} holds rounds of earlier runs, no group is training, and this run has "
                "not begun; expected a new folder (or, to go on with those runs, start one of them first that has a "
                "checkpoint)"
            )
        said = {"run": self._run, "start": self._start}
        durable.write_text(self._alive(group), json.dumps(said))
        return max((step for step in self._decided() if step >= start), default=-1)

    def _is_due(self, done: int) -> bool:
        return done % self._options.steps == 0 or done == self._steps

    def after_step(self, done: int, stops: Stops | None = None, *, save_s: float = 0.0) -> str:
        """Average, if that is due after ``done`` steps. Returns what has happened, in words; empty where nothing has.

        Args:
            done: steps.
            stops: who may ask the run to stop meanwhile; the average is then not taken, and ``heard`` says so.
            save_s: seconds that a save would take.

        Raises:
            StepError: the others have gone on without this group for more than a round; files are gone or changed; or
                the run was asked to stop in its last round.
        """
        self.heard, self.owes = Wish.NOTHING, False
        if not self._is_due(done):
            return ""
        began = time.monotonic()
        self._write(done)
        members = self._agreed_members(done, stops, save_s)
        if members is None:
            if done == self._steps:
                raise StepError(
                    "asked to stop while waiting for the other groups after the last step; start this group again by "
                    "the same command, and it takes the average"
                )
            return f"local steps: asked to stop before the average after step {done}"
        self._take(done, members)
        self._leave()
        missing = sorted({*range(self._options.groups)} - {*members})
        without = f"; without group(s) {', '.join(map(str, missing))}" if missing else ""
        own = "" if self._options.group in members else ", which came too late to be in it"
        return (
            f"local steps: average of {len(members)} of {self._options.groups} groups after step {done}{own}"
            f"{without}; {time.monotonic() - began:.1f} s"
        )

    # --- what this group writes

    def _write(self, step: int) -> None:
        """Write this rank's part, and say that the group is ready once all ranks have."""
        checksum, group = 0, self._options.group
        with self._topology.agreed("write the weights of this group"):
            path = self._part(step, group, self._start)
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for part in self._parts():
                    with part as values:
                        raw = _bytes_of(values)
                        checksum = zlib.crc32(raw, checksum)
                        file.write(raw)
                        self.written_nbytes += raw.nbytes
        checksums = [int(each) for each in self._topology.gather(float(checksum))]
        with self._topology.agreed("say that this group is ready"):
            if self._topology.is_root:
                said = json.dumps({"checksums": checksums})
                durable.write_text(self._ready(step, group, self._start), said)

    def _parts(self, *, changes: bool = False) -> Iterator[Any]:
        """Contexts of values: this rank's part of each unit in fp32, and the buffers that are no whole numbers."""
        for unit in self._units:
            yield unit.owned_values(changes=changes)
        for buffer in self._sharding.buffers:
            if buffer.is_floating_point() or buffer.is_complex():
                yield _as_floats(buffer)

    # --- who is in

    def _agreed_members(
        self, step: int, stops: Stops | None, save_s: float
    ) -> dict[int, str] | None:
        """Starts of the round's groups, as the first group that saw all of them ready has written down.

        None: the run was asked to stop.
        """
        while True:
            said = ""
            with self._topology.agreed("look for the other groups"):
                if self._topology.is_root:
                    with Explained(StepError, f"local.folder: {self._folder}: {WHY}"):
                        said = self._decide(step)
            if self._topology.broadcast_text(said):
                return self._members(step)
            if stops is not None:
                self.heard = max(self.heard, stops.wish(save_s=save_s))
                if self.heard is Wish.STOP:
                    return None
            time.sleep(LOOK_S)

    def _decide(self, step: int) -> str:
        """Something once it is decided, or is now; empty while a living group is not ready."""
        group, decided = self._options.group, self._decided()
        if any(other > step for other in decided):
            raise StepError(
                f"group {group} showed no sign of life for {self._options.patience_s:g} s, and the others have gone on "
                f"to step {max(decided)} without it; start it again, and it goes on from there (local.patience_s must "
                "be longer than a step)"
            )
        if step in decided:
            return "decided"
        if not is_there(self._ready(step, group, self._start)):
            raise StepError(
                f"local.folder: {self._folder}: what group {group} wrote after step {step} is gone; start the group "
                "again, and let nobody tidy up there"
            )
        self._live()
        ready = {group: self._start}
        for other in {*range(self._options.groups)} - {group}:
            start = self._said(other).get("start", "")
            if start and is_there(self._ready(step, other, start)):
                ready[other] = start
            elif self._lives(other):
                return ""
        self._write_once(self._round(step) / MEMBERS, dict(sorted(ready.items())))
        return "decided"

    def _write_once(self, path: Path, said: Mapping[Any, Any]) -> None:
        """Write a file, unless another group was faster."""
        temporary = path.with_name(f".{path.name}.{self._start}")
        temporary.write_text(json.dumps(said))
        with suppress(FileExistsError):
            os.link(temporary, path)
        temporary.unlink()

    def _said(self, group: int) -> dict[str, str]:
        """What a group's sign of life says, old or new; empty where there is none."""
        try:
            found: dict[str, str] = json.loads(self._alive(group).read_text())
            return found
        except (FileNotFoundError, ValueError):
            return {}

    def _lives(self, group: int) -> bool:
        """Whether a group has shown life of late. See [Note: Who is waited for]."""
        clock = self._folder / f".group-{self._options.group}.clock"
        clock.touch()  # both times are the file server's
        try:
            seen = self._alive(group).stat().st_mtime
            return clock.stat().st_mtime - seen <= self._options.patience_s
        except FileNotFoundError:
            return False

    # --- the mean

    def _take(self, step: int, members: Mapping[int, str]) -> None:
        """Set weights and buffers to the mean of ``members``."""
        own = {self._options.group: self._start}.items()  # the model has what this start wrote
        with self._topology.agreed("read the weights of the groups"), ExitStack() as stack:
            files = {
                each[0]: stack.enter_context(self._part(step, *each).open("rb"))
                for each in members.items()
                if each not in own
            }
            checksums = dict.fromkeys(files, 0)
            for part in self._parts(changes=True):
                self._live()
                with part as values, torch.no_grad():
                    kind = np.float64 if values.dtype is torch.float64 else np.float32
                    nbytes = values.numel() * values.element_size()
                    total = np.zeros(values.numel(), np.float64)
                    for group in members:  # in one order everywhere: sums of fp64 have one, too
                        raw = _bytes_of(values) if group not in files else files[group].read(nbytes)
                        if len(raw) < nbytes:
                            raise self._changed(step, group)
                        if group in files:
                            checksums[group] = zlib.crc32(raw, checksums[group])
                            self.read_nbytes += nbytes
                        total += np.frombuffer(raw, kind)
                    mean = torch.from_numpy((total / len(members)).astype(kind))
                    values.copy_(mean.view(values.shape))
            for group, found in checksums.items():
                said = parse_json(read_text(self._ready(step, group, members[group])))
                if said["checksums"][self._topology.rank] != found:
                    raise self._changed(step, group)
        publish(self._sharding)

    def _changed(self, step: int, group: int) -> StepError:
        return StepError(
            f"{self._round(step)}: the bytes of group {group}, rank {self._topology.rank} are not those that it wrote; "
            "start this group again"
        )

    def _leave(self) -> None:
        """This group lives, and old rounds go."""
        with self._topology.agreed("leave the round"):
            self._live()
            if self._topology.is_root:
                kept = self._decided()[-KEPT:]
                for old in self._rounds():
                    if kept and old < kept[0]:
                        shutil.rmtree(self._round(old), ignore_errors=True)

    # --- names of files

    def _members(self, step: int) -> dict[int, str]:
        """Starts that are in the mean, by group. Collective."""
        said = ""
        with self._topology.agreed("read who is in the average"):
            if self._topology.is_root:
                said = read_text(self._round(step) / MEMBERS)
        return {
            int(group): start
            for group, start in json.loads(self._topology.broadcast_text(said)).items()
        }

    def _rounds(self) -> list[int]:
        """Of all kinds, ascending."""
        return sorted(int(path.name.removeprefix("step-")) for path in self._folder.glob("step-*"))

    def _decided(self) -> list[int]:
        """Rounds that were decided, ascending."""
        return [step for step in self._rounds() if is_there(self._round(step) / MEMBERS)]

    def _round(self, step: int) -> Path:
        return self._folder / f"step-{step:09d}"

    def _ready(self, step: int, group: int, start: str) -> Path:
        return self._round(step) / f"group-{group}.{start}.json"

    def _part(self, step: int, group: int, start: str) -> Path:
        return self._round(step) / f"group-{group}.{start}.rank-{self._topology.rank}"

    def _alive(self, group: int) -> Path:
        return self._folder / f"group-{group}.alive"

    def _live(self) -> None:
        """A sign of life; StepError where another start gives it in the place of this one."""
        if self._topology.is_root:
            group = self._options.group
            said = {"run": self._run, "start": self._start}
            if (found := self._said(group)) and found != said:
                raise StepError(
                    f"local.group: {found.get('run')} has begun to train as group {group} too; give each group a "
                    "number of its own"
                )
            if not found:  # somebody tidied up
                durable.write_text(self._alive(group), json.dumps(said))
            os.utime(self._alive(group))

    def _beat(self) -> None:
        """Runs on a thread until the steps are over."""
        while not self._ended.wait(self._options.patience_s / BEATS):
            with suppress(OSError):
                os.utime(self._alive(self._options.group))


def _bytes_of(values: torch.Tensor) -> memoryview:
    """Of a copy: NumPy's views of memory that torch gives back later would keep torch from it."""
    copy = values.detach().to("cpu", copy=True).contiguous()
    return copy.view(-1).numpy().view(np.uint8).data


@contextmanager
def _as_floats(buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """The buffer in fp32, or fp64, to be changed; pairs of them where it is complex."""
    parts = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    values = parts if parts.dtype is torch.float64 else parts.float()
    yield values
    if values is not parts:
        parts.copy_(values)
