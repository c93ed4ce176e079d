"""Long sequences over ranks of which each has some tokens: two exchanges around attention (DeepSpeed Ulysses).

Owns: the exchange of own tokens of all heads for all tokens of own heads, and which positions own tokens have. Must not
know: MPI, shards, layers that are cut.

    q, k, v of own tokens, all heads | all-to-all | of all tokens, own heads | attention | all-to-all back

Every layer but attention works on own tokens. Parameters are whole on each of these ranks, and their gradients are
those of own tokens: ``zeroify`` averages them over ``topology.data_sequence``. The loss of a rank is the mean over its
own tokens, so all must have equally many.

Source: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509, sec. 3; issue 19.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from hpczero.comm.sums import Sums, sums_over
from hpczero.errors import ConfigError, PlanError
from hpczero.job.topology import Topology
from hpczero.models.gpt import GPT, Attention
from hpczero.parallel.tensor.functions import exchange
from hpczero.parallel.tensor.inspection import names_of
from hpczero.parallel.tensor.masks import PartDropout, own_masks
from hpczero.parallel.tensor.split import SUMS, Model
from hpczero.plan.placement import KEY, ModelPart

Attend = Callable[[Tensor, Tensor, Tensor, bool, float], Tensor]
HEADS, TIME = 1, 2  # of (B, H, T, D)


def share_sequence(model: Model, topology: Topology) -> Model:
    """Have ``model`` take own tokens of ``topology.sequence``, in place. Collective over the world.

    Call it with ``own_tokens`` of inputs and targets. It may come before or after ``split``, and before zeroify. A
    group of one leaves the model as it is.

    Args:
        model: a ``GPT`` of ``hpczero.models``.
        topology: its ``sequence`` group shares the tokens of each sample.

    Returns:
        ``model``. It returns the logits of own tokens, or the mean loss over them.

    Raises:
        PlanError: another model, or heads that do not divide; on every rank.
    """
    group = topology.sequence
    with topology.world.agreed("share sequences"):
        attentions = _attentions(model, group.size)
    if group.size == 1:
        return model
    assert isinstance(model, GPT), "checked"
    sums = sums_over(group)
    model.__dict__.setdefault(SUMS, []).append(sums)
    for attention in attentions:
        attention.attend = _Shared(sums, attention.attend)
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if isinstance(child, nn.Dropout) and child.p > 0.0:
                parent._modules[key] = PartDropout(child, sums)
    names, aliases = names_of(model)
    model.__dict__.setdefault(KEY, ModelPart(tuple(names.values()), aliases))
    model.span = partial(_own_span, sums=sums, context=model.config.context)
    return model


def own_tokens(tokens: Tensor, topology: Topology, dim: int = 1) -> Tensor:
    """This rank's part of the tokens of a sample, or of the targets. Not collective.

    Args:
        tokens: the same on all ranks of ``topology.sequence``.
        topology: as for ``share_sequence``.
        dim: of time.

    Raises:
        ConfigError: the tokens do not divide by the ranks.
    """
    size = topology.sequence.size
    if tokens.shape[dim] % size:
        raise ConfigError(
            f"got sequences of {tokens.shape[dim]} tokens, expected a multiple of the {size} ranks that share them; "
            "shorten the sequences or change the sequence degree"
        )
    return tokens.chunk(size, dim)[topology.sequence.rank]


def _attentions(model: nn.Module, size: int) -> list[Attention]:
    if not isinstance(model, GPT):
        raise PlanError(
            f"share_sequence: got a {type(model).__name__}, expected a GPT of hpczero.models, whose attention and "
            "positions it knows"
        )
    found = [module for module in model.modules() if isinstance(module, Attention)]
    for attention in found:
        if attention.heads % size:
            raise PlanError(
                f"share_sequence: an attention has {attention.heads} heads on this rank, expected a multiple of the "
                f"{size} ranks that share a sequence; change the sequence degree or the number of heads"
            )
    return found


class _Shared:
    """Attention over all tokens with own heads.

    Attributes:
        sums: over the ranks that share tokens.
        inner: attention on this rank.
    """

    def __init__(self, sums: Sums, inner: Attend) -> None:
        self.sums = sums
        self.inner = inner

    def __call__(
        self, q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, rotary: bool, dropout: float
    ) -> Tensor:
        """(B, H, own T, D) in and out."""
        # One exchange for the three; positions turn q and k where all tokens are.
        three = torch.stack((q_BHTD, k_BHTD, v_BHTD))
        q, k, v = exchange(three, self.sums, HEADS + 1, TIME + 1)
        if dropout == 0.0:
            y = self.inner(q, k, v, rotary, dropout)
        else:
            with own_masks(self.sums.rank, q.device):
                y = self.inner(q, k, v, rotary, dropout)
        return exchange(y, self.sums, TIME, HEADS)


def _own_span(length: int, *, sums: Sums, context: int) -> range:
    """Positions of own tokens.

    Raises:
        ValueError: the whole sequence is longer than the context; on every rank.
    """
    if length * sums.size > context:
        raise ValueError(
            f"GPT: got a sequence of {length * sums.size} tokens, {length} on each of {sums.size} ranks, the context "
            f"is {context}; shorten the sequences or build the model with a longer context"
        )
    return range(length * sums.rank, length * (sums.rank + 1))
