"""What backward still needs of one pipeline stage's forwards: how many are alive, and their bytes.

Owns: activations where ranks share layers, tokens and blocks. Must not know: torch, shards, how long anything takes.
On one rank it is ``sizing.activation_nbytes`` to the byte.

    of a token and block, in units of the width, ``t`` tensor ranks, ``f`` the MLP's multiple:
    4 + (4 + 2 f) / t       norms' inputs and outputs are whole; q, k, v, the attention's output and the MLP are cut
    2 + (6 + 2 f) / t       with sequence parallelism: norms' outputs are gathered, and kept so

Korthikanti et al. count 34 bytes (10 + 24 / t) of 16-bit numbers, two of them for dropout's masks. Without dropout it
is 32 (8 + 24 / t). With sequence parallelism they gather norms' outputs again in backward and have 34 / t; here it is 4
+ 28 / t. Their ``5 a s / h`` is of attention scores, which fused attention never stores.

Source: Korthikanti et al., arXiv 2205.05198, table 2; forwards alive: Narayanan et al., arXiv 2104.04473, sec. 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from hpczero.models.config import GPTConfig
from hpczero.options.config import Schedule
from hpczero.plan.sizing import (
    BACKWARD_FACTOR,
    BACKWARD_FFN_FACTOR,
    BLOCK_FACTOR,
    BLOCK_FFN_FACTOR,
    LOSS_PIECE_BYTES,
    ROTARY_FACTOR,
    loss_piece_numel,
)

# Of the block's own factor: inputs of both norms, which sequence parallelism cuts, and their outputs, which it gathers.
NORM_INPUTS, NORM_OUTPUTS = 2, 2


@dataclass(frozen=True)
class Held:
    """Sizes of one rank's forward.

    Attributes:
        model: sizes of the whole model.
        tokens: of one micro-batch, those of this rank where a sample's tokens are shared.
        itemsize: bytes of one activation.
        blocks: of this rank's stage.
        tensor: number of ranks that share each layer.
        sequence_parallel: whether norms share the tokens too.
        checkpointing: whether only inputs of blocks are kept.
        last: whether the stage has the head and the loss.
        on_device: whether it computes there, where pieces of the loss are larger.
    """

    model: GPTConfig
    tokens: int
    itemsize: int
    blocks: int
    tensor: int = 1
    sequence_parallel: bool = False
    checkpointing: bool = False
    last: bool = True
    on_device: bool = False

    @property
    def _wide(self) -> int:
        """Elements of one block's input over the whole width."""
        return self.model.hidden * self.tokens

    @property
    def _input_numel(self) -> Fraction:
        return Fraction(self._wide, self.tensor if self.sequence_parallel else 1)

    @property
    def _block_numel(self) -> Fraction:
        """Elements that one block keeps for its backward."""
        cut = BLOCK_FACTOR - NORM_INPUTS - NORM_OUTPUTS
        cut += BLOCK_FFN_FACTOR * self.model.ffn_multiple
        cut += ROTARY_FACTOR if self.model.positions == "rotary" else 0
        norms = NORM_INPUTS * self._input_numel + NORM_OUTPUTS * self._wide
        return norms + Fraction(cut * self._wide, self.tensor)

    @property
    def forward_nbytes(self) -> int:
        """Bytes that the blocks of one forward keep until its backward."""
        each = self._input_numel if self.checkpointing else self._block_numel
        return ceil(each * self.blocks * self.itemsize)

    @property
    def output_nbytes(self) -> int:
        """Bytes of what passes from this stage to the next, and of its gradient."""
        return ceil(self._input_numel * self.itemsize)

    @property
    def _logits(self) -> int:
        return self.tokens * -(-self.model.vocab_size // self.tensor)

    @property
    def head_nbytes(self) -> int:
        """Bytes that the head of one forward keeps: the final norm and the logits; 0 before the last stage."""
        if not self.last:
            return 0
        return ceil((self._input_numel + self._wide + self._logits) * self.itemsize)

    @property
    def working_nbytes(self) -> int:
        """Bytes at the larger of two moments beside what is kept: the loss, and the backward of one block."""
        live = BACKWARD_FACTOR * self._input_numel
        live += Fraction(BACKWARD_FFN_FACTOR * self.model.ffn_multiple * self._wide, self.tensor)
        live += self._block_numel - self._input_numel if self.checkpointing else 0
        if not self.last:
            return ceil(live * self.itemsize)
        width = -(-self.model.vocab_size // self.tensor)
        piece = loss_piece_numel(self._logits, width, on_device=self.on_device)
        loss = (self._input_numel + self._wide + 2 * self._logits - piece) * self.itemsize
        return ceil(max(loss + LOSS_PIECE_BYTES * piece, live * self.itemsize))

    def peak_nbytes(self, alive: Fraction) -> int:
        """Bytes at the peak with so many forwards alive; a part of one is some of its groups of blocks."""
        more = max(alive - 1, Fraction(0)) * self.head_nbytes
        return ceil(alive * self.forward_nbytes + more) + self.working_nbytes


def forwards_alive(
    schedule: Schedule, *, stage: int, pipeline: int, micro_batches: int, interleave: int = 1
) -> Fraction:
    """Forwards of a stage whose backward is still to come, at most.

    ``m`` for gpipe, ``min(p - stage, m)`` for 1f1b. With ``v`` groups of blocks on each stage it is ``min(2 (p - stage
    - 1) + (v - 1) p + 1, m v) / v``, which is ``1 + (p - 1) / (p v)`` times ``p`` on the first stage.

    Source: Narayanan et al., arXiv 2104.04473, sec. 2.2; Korthikanti et al., arXiv 2205.05198, sec. 4.2.3.
    """
    if pipeline == 1:
        return Fraction(1)
    if schedule == "gpipe":
        return Fraction(micro_batches)
    if interleave == 1:
        return Fraction(min(pipeline - stage, micro_batches))
    groups = 2 * (pipeline - stage - 1) + (interleave - 1) * pipeline + 1
    return Fraction(min(groups, micro_batches * interleave), interleave)


def bubble(*, pipeline: int, micro_batches: int, interleave: int = 1) -> Fraction:
    """Idle time over working time of a stage: ``(p - 1) / (v m)``, by gpipe as by 1f1b.

    Source: Narayanan et al., arXiv 2104.04473, sec. 2.2.
    """
    return Fraction(pipeline - 1, micro_batches * interleave)
