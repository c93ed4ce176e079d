"""Rules: which layers of a model are cut over tensor parallel ranks, and what stands between them.

Owns: the words of a rule and how its patterns match. Must not know: torch's layers, ranks, how layers are cut.

A rule names every module that holds parameters. What it does not name is refused, because a layer that works on a part
of the features without anybody's knowledge would be silently wrong.

Patterns are names of modules with ``*`` for any text without a dot: ``blocks.*.attention.qkv``.
"""

from __future__ import annotations

import enum
import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from hpczero.comm.sums import Sums


@dataclass(frozen=True)
class Split:
    """How the weight of a layer is cut.

    Attributes:
        dim: 0 cuts the outputs of a linear layer or the ids of an embedding; 1 the inputs of a linear layer.
        strips: equal ranges of ``dim`` that are cut each by itself: q, k and v in one weight are three.
        grain: elements of ``dim`` that stay together: the size of a head.
        entered: whether the layer's input has been entered for several layers together (``Rule.entries``).
        joined: whether the outputs are gathered: every rank has all of them.
        all_tokens: whether it stands where all ranks have all tokens, under sequence parallelism too: before
            ``Rule.cut_before`` or behind ``Rule.join_after``.
    """

    dim: int
    strips: int = 1
    grain: int = 1
    entered: bool = False
    joined: bool = False
    all_tokens: bool = False


class Kept(enum.Enum):
    """Where a layer stands that every rank keeps whole. It decides whether ranks have parts of its gradient."""

    STREAM = "between cut layers: under sequence parallelism it sees own tokens, and gradients are partial sums"
    ALL_TOKENS = (
        "where all ranks have all tokens, always: before Rule.cut_before, behind Rule.join_after"
    )
    INSIDE = "within cut features, a norm of each head: gradients are partial sums"
    POSITIONS = "an embedding of positions: under sequence parallelism its output is cut along time"


@dataclass(frozen=True)
class Rule:
    """How one kind of model is cut.

    Attributes:
        layers: by pattern. Every module with parameters of its own matches exactly one.
        counts: attributes that count what is cut, heads say: ``blocks.*.attention.heads``.
        dropouts: ``nn.Dropout`` modules between cut layers, whose masks differ on ranks under sequence parallelism.
        entries: modules whose first argument enters once for several layers in it; with the argument's name.
        cut_before: modules whose first argument is cut along time, under sequence parallelism. Empty where embeddings
            do it.
        join_after: modules whose output is gathered along time, under sequence parallelism. Empty where the head does.
        check: raises PlanError for a model that the rule does not fit, before anything is changed. None: nothing.
        finish: sets what the model calls: (model, sums, sequence). None: nothing.
    """

    layers: Mapping[str, Split | Kept]
    counts: tuple[str, ...] = ()
    dropouts: tuple[str, ...] = ()
    entries: Mapping[str, str] = field(default_factory=dict)
    cut_before: tuple[str, ...] = ()
    join_after: tuple[str, ...] = ()
    check: Callable[[nn.Module], None] | None = None
    finish: Callable[[nn.Module, Sums, bool], None] | None = None

    def found(self, name: str) -> list[str]:
        """Patterns of ``layers`` that the module ``name`` matches."""
        return [pattern for pattern in self.layers if matches(pattern, name)]


def matches(pattern: str, name: str) -> bool:
    """Whether ``name`` is one of ``pattern``, part by part."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))
