"""Offload: where optimizer state, gradients and parameters rest between uses, and what can be chosen together.

Source: Rajbhandari et al., ZeRO-Infinity, SC21, sec. 5; Ren et al., ZeRO-Offload, ATC21.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from hpczero.errors import PlanError
from hpczero.plan.plan import Stage

Medium = Literal["device", "host", "disk"]
MEDIA: tuple[str, ...] = get_args(Medium)

Side = Literal["device", "host"]
SIDES: tuple[str, ...] = get_args(Side)

MIB = 2**20
LEAST_WINDOW = 2**14  # bytes


@dataclass(frozen=True)
class Offload:
    """Where the parts of a rank's shards rest: ``device``, where it computes; ``host``, its memory; or ``disk``.

    Attributes:
        optimizer: state of the optimizer, and fp32 masters where there are any.
        gradients: mean gradients, from their reduction to the step.
        parameters: this rank's shard of them, stage 3 only; they pass through memory whole, as without offload.
        folder: for ``disk``: one on a disk of this node; each rank keeps a file there that nobody else sees.
        window: bytes of one block of staging: what passes through memory at a time, all parts of some elements.
        buffers: blocks of staging of each rank; two are being used, the others read ahead and write behind.
        ahead: units whose parameters are read before they are used.
        fraction: of all trained elements, at least so many rest there, in whole units, those that forward uses last
            first; the other units stay on the device with all they have.
        step: who updates what rests elsewhere: the device, to which state is copied and from which it returns; or the
            host, where it rests in its memory and does not move: gradients come down during backward, and values go up
            in their own dtype.
        delayed: whether the host's step of a batch is taken while the next batch is computed. Parameters are then one
            step late, which changes the result: w[k] = w[k-1] + update(gradient at w[k-2]).
    """

    optimizer: Medium = "device"
    gradients: Medium = "device"
    parameters: Medium = "device"
    folder: str | Path | None = None
    window: int = 32 * MIB
    buffers: int = 6
    ahead: int = 2
    fraction: float = 1.0
    step: Side = "device"
    delayed: bool = False

    @property
    def parts(self) -> dict[str, Medium]:
        """Where each part rests, by its option."""
        return {name: getattr(self, name) for name in ("optimizer", "gradients", "parameters")}

    @property
    def typed(self) -> list[str]:
        """The options of what rests elsewhere."""
        return [f"--offload.{name} {on}" for name, on in self.parts.items() if on != "device"]

    @property
    def on_host(self) -> bool:
        """Whether the host updates what rests in its memory."""
        return self.step == "host" and self.any

    @property
    def any(self) -> bool:
        """Whether anything rests elsewhere than where it is computed with."""
        return self.medium != "device" and self.fraction > 0

    @property
    def medium(self) -> Medium:
        """The one medium of what rests elsewhere; ``device`` for none."""
        media = {self.optimizer, self.gradients, self.parameters} - {"device"}
        return media.pop() if len(media) == 1 else "device"

    def check(self, stage: Stage) -> None:
        """Refuse what does not go together.

        Raises:
            PlanError: says what, and what to choose instead.
        """
        self._check_types()
        for name, medium in self.parts.items():
            if medium not in MEDIA:
                raise PlanError(
                    f"offload.{name}: got {medium!r}, expected one of {', '.join(MEDIA)}"
                )
        away = {name: medium for name, medium in self.parts.items() if medium != "device"}
        if len(set(away.values())) > 1:
            raise PlanError(
                f"offload: got {', '.join(f'{n} on {m}' for n, m in away.items())}, expected one medium for all that "
                "does not rest on the device"
            )
        if away and "optimizer" not in away:
            raise PlanError(
                f"offload: got {', '.join(away)} on {self.medium} with the optimizer on the device, expected the "
                "optimizer there first: its state is the largest part, and the step brings the others along with it"
            )
        if away and not stage.shards_optimizer:
            raise PlanError(
                f"offload: got optimizer on {self.optimizer} at stage {int(stage)}, expected stage 1, 2 or 3: at stage "
                "0 every rank would move the whole state"
            )
        if self.parameters != "device" and not stage.shards_parameters:
            raise PlanError(
                f"offload: got parameters on {self.parameters} at stage {int(stage)}, expected stage 3: below it every "
                "rank keeps all parameters whole"
            )
        if self.medium == "disk" and self.folder is None:
            raise PlanError(
                "offload: got disk without a folder, expected offload.folder: one on a disk of each node, on SLURM "
                "often $TMPDIR or $SLURM_TMPDIR"
            )
        if self.window < LEAST_WINDOW or self.buffers < 3 or self.ahead < 0:
            raise PlanError(
                f"offload: got window {self.window:,} bytes, {self.buffers} buffers, {self.ahead} units ahead; "
                f"expected at least {LEAST_WINDOW:,}, 3 and 0"
            )
        if self.step not in SIDES:
            raise PlanError(f"offload.step: got {self.step!r}, expected one of {', '.join(SIDES)}")
        if self.step == "host" and self.optimizer != "host":
            raise PlanError(
                f"offload: got step on the host with the optimizer on {self.optimizer}, expected optimizer on host: "
                "the host steps on what rests in its memory"
            )
        if self.delayed:
            self._check_delayed()
        if not 0 <= self.fraction <= 1:
            raise PlanError(
                f"offload.fraction: got {self.fraction!r}, expected a number from 0 (all stays on the device) to 1"
            )
        if self.fraction < 1 and not away:
            raise PlanError(
                f"offload: got fraction {self.fraction:g} and nothing that rests elsewhere, expected a medium for the "
                "optimizer at least: host or disk"
            )

    def _check_types(self) -> None:
        """Refuse values of other types here; a byte count such as 32e6 would else fail in the middle of a step."""
        check_counts("offload", window=self.window, buffers=self.buffers, ahead=self.ahead)
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, int | float):
            raise PlanError(
                f"offload.fraction: got {self.fraction!r}, expected a number from 0 (all stays on the device) to 1"
            )
        if not isinstance(self.delayed, bool):
            raise PlanError(f"offload.delayed: got {self.delayed!r}, expected True or False")
        check_folder("offload", self.folder)

    def _check_delayed(self) -> None:
        """Refuse a delay beside what it would make wrong."""
        wanted = "step host, gradients host, parameters device and fraction 1"
        wrong = ""
        if self.step != "host":
            wrong = f"step {self.step}: only the host can step while the device computes"
        elif self.gradients != "host":
            wrong = (
                f"gradients on {self.gradients}: they are dropped while the host still needs them"
            )
        elif self.parameters != "device":
            wrong = (
                f"parameters on {self.parameters}: the next batch would read them while they change"
            )
        elif self.fraction != 1:
            wrong = f"fraction {self.fraction:g}: a part of the model would be one step late, and the rest not"
        if wrong:
            raise PlanError(f"offload: got delayed with {wrong}; expected {wanted}")

    def describe(self) -> str:
        """One line for a run header; empty where nothing rests elsewhere."""
        if not self.any:
            return ""
        said = ", ".join(f"{name} on {medium}" for name, medium in self.parts.items())
        said += ", stepped on by the host" if self.step == "host" else ""
        said += ", one step late (this changes the result)" if self.delayed else ""
        return said if self.fraction == 1 else f"{said}, at least {self.fraction:.1%} of them"


NOTHING_AWAY = Offload()


def check_counts(options: str, **counts: object) -> None:
    """Refuse counts that are no ``int``.

    Raises:
        PlanError: names the first of them.
    """
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise PlanError(f"{options}.{name}: got {count!r}, expected a whole number, as an int")


def check_folder(options: str, folder: object) -> None:
    """Refuse what names no folder.

    Raises:
        PlanError: says what it is.
    """
    if folder is not None and (not isinstance(folder, str | Path) or folder == ""):
        raise PlanError(f"{options}.folder: got {folder!r}, expected a path, as a str or a Path")


# Activations: which blocks are computed again in backward, and where their inputs rest until then.
#
# Source: Rajbhandari et al., ZeRO, SC20, sec. 6.1 (Pa, Pa+cpu); Chen et al., arXiv 1604.06174.

Kind = Literal["none", "block", "selective"]
KINDS: tuple[str, ...] = get_args(Kind)

SPARE = 2  # blocks of staging that reading ahead leaves alone: one to work in, one that is being written
LEAST_NBYTES = 4096  # an input below a page stays: it would take a page on the way and there
PAGE = 4096
ENDS = 16  # pages that a block of staging has to spare


@dataclass(frozen=True)
class Activations:
    """What is computed again in backward, and where inputs of blocks rest: ``device``, ``host`` or ``disk``.

    Attributes:
        checkpointing: ``none``; ``block``: of each block only the input is kept; ``selective``: and what costs most to
            compute again, by a policy.
        rest: of the inputs. ``host`` is memory of the host beside a device.
        folder: for ``disk``: one on a disk of this node; each rank keeps a file there that nobody else sees.
        window: most bytes of one block of staging, through which inputs pass.
        buffers: blocks of staging of each rank: one is being used, one written, the others read ahead.
    """

    checkpointing: Kind = "none"
    rest: Medium = "device"
    folder: str | Path | None = None
    window: int = 32 * MIB
    buffers: int = 4

    @property
    def away(self) -> bool:
        """Whether inputs rest elsewhere than where blocks compute."""
        return self.rest != "device"

    def check(self, *, on_host: bool) -> None:
        """Refuse what does not go together, or saves nothing.

        Args:
            on_host: whether blocks compute in memory of the host.

        Raises:
            PlanError: says what, and what to choose instead.
        """
        check_counts("activations", window=self.window, buffers=self.buffers)
        check_folder("activations", self.folder)
        if self.checkpointing not in KINDS:
            raise PlanError(
                f"activations.checkpointing: got {self.checkpointing!r}, expected one of {', '.join(KINDS)}"
            )
        if self.rest not in MEDIA:
            raise PlanError(
                f"activations.rest: got {self.rest!r}, expected one of {', '.join(MEDIA)}"
            )
        if self.away and self.checkpointing == "none":
            raise PlanError(
                f"activations: got inputs of blocks on {self.rest} without checkpointing, so nothing rests there and "
                "nothing is saved; expected activations.checkpointing block or selective"
            )
        if self.rest == "host" and on_host:
            raise PlanError(
                "activations: got inputs of blocks on host where blocks compute on the host: it is the same memory, so "
                "nothing would be saved; let them rest on disk, or on the device"
            )
        if self.rest == "disk" and self.folder is None:
            raise PlanError(
                "activations: got disk without a folder, expected activations.folder: one on a disk of each node, on "
                "SLURM often $TMPDIR or $SLURM_TMPDIR"
            )
        if self.away and (self.window < LEAST_NBYTES or self.buffers < SPARE):
            raise PlanError(
                f"activations: got a window of {self.window:,} bytes and {self.buffers} buffers, expected at least "
                f"{LEAST_NBYTES:,} and {SPARE}"
            )

    def block_nbytes(self, input_nbytes: int) -> int:
        """Bytes of one block of staging for inputs of this size."""
        return max(min(self.window, input_nbytes), 1)

    def staging_nbytes(self, input_nbytes: int) -> int:
        """Bytes of memory through which inputs of this size pass; the same for any number of blocks."""
        if not self.away:
            return 0
        block = -(-self.block_nbytes(input_nbytes) // PAGE) * PAGE
        return self.buffers * (block + ENDS * PAGE)

    def kept(self, inputs: int) -> int:
        """How many of a forward's inputs are in memory when it ends: all, or the newest alone."""
        return min(inputs, 1) if self.away else inputs

    def check_saves(self, *, inputs: int, input_nbytes: int) -> None:
        """Refuse inputs elsewhere that take no less memory than where they were.

        Args:
            inputs: of one forward.
            input_nbytes: of each.

        Raises:
            PlanError: with both figures.
        """
        if not self.away:
            return
        here = inputs * input_nbytes
        there = self.kept(inputs) * input_nbytes + self.staging_nbytes(input_nbytes)
        if input_nbytes < LEAST_NBYTES or there >= here:
            raise PlanError(
                f"activations: got inputs of blocks on {self.rest}, and that saves nothing: {inputs} inputs of "
                f"{input_nbytes:,} bytes take {here:,}, and the way there takes {there:,} of memory ({self.buffers} "
                "blocks of staging and the newest input); expected more blocks, longer sequences, larger micro-batches "
                "or fewer buffers (at least 2); else leave them on the device"
            )

    def describe(self) -> str:
        """One line for a run header; empty where nothing is computed again."""
        if self.checkpointing == "none":
            return ""
        what = "each block" if self.checkpointing == "block" else "each block but its products"
        return f"activations: {what} computed again in backward, inputs on {self.rest}"


EVERYTHING_KEPT = Activations()
