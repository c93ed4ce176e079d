"""Parts: what of a GPT one rank has, where tensor ranks share its layers and pipeline stages its blocks.

Owns: the rule by which a GPT is cut, as shapes. Must not know: torch, shards, how anything is sent. It is what
``hpczero.parallel`` makes of the model, so that it can be counted before anyone builds it.

    attention.qkv        rows, three strips, heads stay together     the first product of attention
    attention.projection columns, heads stay together                the second: partial sums
    mlp.expansion        rows                                        the first product of the MLP
    mlp.projection       columns                                     the second: partial sums
    wte, lm_head         rows of the vocabulary
    the rest             whole on every tensor rank

Source: Shoeybi et al., Megatron-LM, arXiv 1909.08053, sec. 3; stages: Narayanan et al., arXiv 2104.04473, sec. 2.2.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from hpczero.models.config import GPTConfig, parameter_shapes
from hpczero.plan.placement import Placement

TIED = "wte.weight"
# Pattern of the name: dimension, strips, and whether heads stay together.
CUTS = (
    (r"attention\.qkv\.(weight|bias)", 0, 3, True),
    (r"attention\.projection\.weight", 1, 1, True),
    (r"mlp\.expansion\.(weight|bias)", 0, 1, False),
    (r"mlp\.projection\.weight", 1, 1, False),
    (r"wte\.weight|lm_head\.weight", 0, 1, False),
)


@dataclass(frozen=True)
class Part:
    """What one pipeline stage of one tensor rank has.

    Attributes:
        placements: of its parameters, in the order of the whole model; those of the tied weight on the last stage come
            where the head would.
        groups: blocks of each group that the stage runs one after the other; one group without interleaving.
        first: whether it has the embeddings.
        last: whether it has the head.
    """

    placements: tuple[Placement, ...]
    groups: tuple[range, ...]
    first: bool
    last: bool

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return sum(map(len, self.groups))

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Name and local shape of every parameter, padding included."""
        return tuple((each.name, each.local_shape) for each in self.placements)

    @property
    def numel(self) -> int:
        """Elements that this rank holds when everything is whole, padding included."""
        return sum(each.local_numel for each in self.placements)


def blocks_of(layers: int, parts: int, part: int) -> range:
    """Blocks of one of ``parts`` consecutive groups. Their numbers differ by at most one; the first ones have more."""
    each, more = divmod(layers, parts)
    start = part * each + min(part, more)
    return range(start, start + each + (part < more))


def placement_of(
    name: str, shape: tuple[int, ...], model: GPTConfig, tensor: int, rank: int, *, partial: bool
) -> Placement:
    """Where tensor rank ``rank`` has its part of the parameter ``name`` of a GPT.

    Args:
        name: in the whole model.
        shape: in the whole model.
        model: its sizes.
        tensor: number of ranks that share each layer.
        rank: one of them.
        partial: whether gradients of what is whole are partial sums, as under sequence parallelism.
    """
    if tensor == 1:
        return Placement(name, shape)
    for pattern, dim, strips, heads in CUTS:
        if re.fullmatch(rf"(.*\.)?({pattern})", name):
            grain = model.head_size if heads else 1
            return Placement(
                name, shape, dim=dim, strips=strips, grain=grain, part=rank, parts=tensor
            )
    return Placement(name, shape, partial=partial, counted=rank == 0)


@lru_cache(maxsize=512)  # each layout of a search asks for the same stages many times
def part_of_gpt(
    model: GPTConfig,
    *,
    tensor: int = 1,
    rank: int = 0,
    pipeline: int = 1,
    stage: int = 0,
    interleave: int = 1,
    partial: bool = False,
) -> Part:
    """The part of a GPT that tensor rank ``rank`` of pipeline stage ``stage`` has.

    Args:
        model: sizes of the whole.
        tensor: number of ranks that share each layer.
        rank: one of them; shapes are the same on all.
        pipeline: number of stages.
        stage: one of them, from 0.
        interleave: groups of blocks on each stage.
        partial: whether gradients of what is whole are partial sums.
    """
    groups = tuple(
        blocks_of(model.layers, pipeline * interleave, turn * pipeline + stage)
        for turn in range(interleave)
    )
    first, last = stage == 0, stage == pipeline - 1
    mine = {block for group in groups for block in group}
    found = []
    tied = model.tie_embeddings and pipeline > 1
    for name, shape in parameter_shapes(model):
        block = re.match(r"blocks\.(\d+)\.", name)
        here = (
            int(block[1]) in mine
            if block
            else (first if name.startswith(("wte.", "wpe.")) else last)
        )
        if here:
            found.append((name, shape))
    if tied and last and not first:
        found.append((TIED, (model.vocab_size, model.hidden)))
    placements = []
    for name, shape in found:
        place = placement_of(name, shape, model, tensor, rank, partial=partial)
        if tied and name == TIED:
            place = _tied(place, counted=first and place.counted)
        placements.append(place)
    return Part(tuple(placements), groups, first, last)


def _tied(place: Placement, *, counted: bool) -> Placement:
    return Placement(**{**vars(place), "tied": True, "counted": counted})
