"""Activations: which blocks are computed again in backward, and where their inputs rest until then.

Owns: the choice, what can be chosen together, its bytes. Must not know: torch, tiers, how anything is moved.

Source: Rajbhandari et al., ZeRO, SC20, sec. 6.1 (Pa, Pa+cpu); Chen et al., arXiv 1604.06174.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from hpczero.errors import PlanError
from hpczero.plan.offload import MEDIA, MIB, Medium, check_counts, check_folder

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
