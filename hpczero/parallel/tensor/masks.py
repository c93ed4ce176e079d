"""Dropout where activations lie in parts on tensor ranks: other masks on each, the same ones again in a recomputation.

Owns: the random stream of a rank within such a region, and the check that streams are equal outside. Must not know:
layers, what is dropped.

Where an activation is whole on all ranks, its mask must be the same on all: torch's default stream, seeded equally.
Where ranks hold parts of it, the masks must differ: a stream that follows from one number of the default stream and the
rank. Nothing is kept between calls. Whoever restores the default stream, as activation checkpointing does, gets the
same masks again.

Source: the idea of two streams is Megatron-LM's (``core/tensor_parallel/random.py``); issue 19.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from typing_extensions import override

from hpczero.comm.sums import Sums
from hpczero.errors import StepError

MOST_SEED = 2**62


@contextmanager
def own_masks(rank: int, device: torch.device) -> Iterator[None]:
    """Context: random numbers of ``rank`` alone. The default stream goes on by the same one number on all ranks.

    Not collective. Within another such context the numbers depend on both ranks.
    """
    seed = int(
        torch.randint(MOST_SEED, (), device="cpu")
    )  # on the host: nothing waits for the device
    own = (seed + rank * 0x9E3779B97F4A7C15) % MOST_SEED
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(own)
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(own)
        yield


class PartDropout(nn.Dropout):
    """Dropout of an activation that lies in parts on the ranks."""

    def __init__(self, plain: nn.Dropout, sums: Sums) -> None:
        """Take the place of ``plain``, which may be such a one of other ranks."""
        super().__init__(plain.p, plain.inplace)
        self.train(plain.training)
        self.ranks = (sums.rank, *getattr(plain, "ranks", ()))

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Drop elements by masks of this rank's own."""
        if not self.training or self.p == 0.0:
            return super().forward(input)
        with ExitStack() as stack:
            for rank in self.ranks:
                stack.enter_context(own_masks(rank, input.device))
            return super().forward(input)


def check_streams(sums: Sums, device: torch.device) -> None:
    """Refuse to drop by streams that differ. Collective over the ranks of ``sums``.

    Raises:
        StepError: ranks that share a layer are seeded differently; on every rank.
    """
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    mine = zlib.crc32(b"".join(state.numpy().tobytes() for state in states))
    found = sums.all_gather(torch.tensor([mine], dtype=torch.int64, device="cpu"), 0).tolist()
    if len(set(found)) > 1:
        odd = next(rank for rank, other in enumerate(found) if other != found[0])
        error = StepError(
            f"rank {odd} of the tensor parallel group has another random stream than rank 0, and the model drops: "
            "activations that are the same on all of these ranks would be dropped differently. Seed torch by the index "
            "in topology.data (torch.manual_seed), and draw equally often on all of them"
        )
        error.agreed = True
        raise error
