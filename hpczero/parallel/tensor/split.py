"""split: a plain model becomes this rank's part of it, cut over the tensor parallel ranks.

model = split(model, topology, gpt_rule(config))     # before the optimizer is made
optimizer = torch.optim.AdamW(model.parameters())
zeroify(model, optimizer, topology=topology)
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hpczero.comm.sums import Sums, give_values, sums_over
from hpczero.errors import ConfigError, PlanError
from hpczero.job.group import told_all
from hpczero.job.topology import Topology
from hpczero.models.gpt import GPT, Attention
from hpczero.parallel.tensor.functions import (
    Attend,
    Kept,
    PartDropout,
    Rule,
    attend_by_own_masks,
    check_streams,
    compare_inputs,
    enter,
    exchange,
    gather,
    own_part,
    whole,
)
from hpczero.parallel.tensor.inspection import FoundLayer, Inspection, inspect, names_of, uncounted
from hpczero.parallel.tensor.layers import TIME, ColumnLinear, RowLinear, VocabularyEmbedding
from hpczero.plan.placement import KEY, ModelPart, Placement, part_of

logger = logging.getLogger("hpczero.parallel")

SUMS = "_hpczero_sums"  # in the ``__dict__`` of a model: what exchanges activations for it
Model = TypeVar("Model", bound=nn.Module)


def split(model: Model, topology: Topology, rule: Rule, *, sequence: bool = False) -> Model:
    """Cut the layers of ``model`` over ``topology.tensor``, in place. Collective over the world.

    Parameters keep their names. Ranks may have built the model with different values: those of world rank 0 are given
    to all first (of each stage's first rank, where the model is a pipeline stage). A model on the meta device gets its
    values later. ``plan.placement.part_of(model)`` then says what of the whole model each parameter is.

    Where a rank holds a parameter whole and sees only a part of what it acts on (``Placement.partial``), its gradient
    is a partial sum; the sum over ``topology.tensor`` is the gradient. Every rank must be given the same samples. On
    the host inputs of the model are compared; gradients of what is whole on all ranks are at each ``optimizer.step``.

    Args:
        model: a plain model, before its optimizer is made and before zeroify.
        topology: its ``tensor`` group shares the layers. A group of one leaves the model as it is.
        rule: what is cut, for instance ``gpt_rule(config)``.
        sequence: whether what lies between the cut layers is cut along time: less memory, the same bytes.

    Returns:
        ``model``.

    Raises:
        PlanError: the model cannot be split by this rule, or ranks have different models; on every rank, and the model
            is as it was.
        CommError: no memory can be shared between the ranks; on every rank.

    Source: Shoeybi et al., arXiv 1909.08053, sec. 3; Korthikanti et al., arXiv 2205.05198, sec. 4.2.2.
    """
    with topology.world.agreed("split the model"):
        found = inspect(model, topology.tensor, rule, sequence=sequence)
    if topology.tensor.size == 1:
        return model
    names = uncounted(model, found)
    if names and topology.is_root:
        logger.warning(
            "split: %d number(s) of heads beside cut layers are not in Rule.counts, first %s: each rank has a part of "
            "the heads, so one that a view uses must be counted, or heads are mixed without an error; compare the "
            "first loss with one rank",
            len(names),
            names[0],
        )
    _check_equal(model, topology, rule, sequence=sequence)
    _give(model, topology)
    sums = sums_over(topology.tensor)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if device.type != "meta":
        sums.open(device)
    _swap(model, _replacements(found, sums, sequence=sequence))
    for module, attribute, value in found.counts:
        setattr(module, attribute, value)
    _hook(found, sums, sequence=sequence)
    model.register_forward_pre_hook(partial(compare_inputs, sums=sums), with_kwargs=True)
    if found.dropouts:
        model.register_forward_pre_hook(partial(_look_at_streams, sums=sums), with_kwargs=True)
    model.__dict__[KEY] = found.part
    model.__dict__.setdefault(SUMS, []).append(sums)
    if rule.finish is not None:
        rule.finish(model, sums, sequence)
    return model


def close(model: nn.Module) -> None:
    """Give back the memory that ranks share for the activations of ``model``. Collective over its ranks.

    A later call of the model takes it anew.
    """
    for sums in model.__dict__.get(SUMS, ()):
        sums.close()


class PositionEmbedding(nn.Embedding):
    """An embedding of positions that every rank holds whole, and whose output it keeps of own tokens."""

    def __init__(self, plain: nn.Embedding, sums: Sums) -> None:
        """Take the place of ``plain``, with its weight."""
        rows, features = plain.weight.shape
        super().__init__(rows, features, plain.padding_idx, _weight=plain.weight)
        self.weight, self.sums = plain.weight, sums

    def forward(self, input: Tensor) -> Tensor:
        """(own tokens, features) of (tokens,) positions. Backward is collective."""
        return own_part(super().forward(input), self.sums, TIME)


# --- values


def _check_equal(model: nn.Module, topology: Topology, rule: Rule, *, sequence: bool) -> None:
    """Refuse ranks with different models, before they wait for each other's parameters."""
    facts = [
        (name, tuple(p.shape), str(p.dtype), p.device.type, p.requires_grad)
        for name, p in (*model.named_parameters(), *model.named_buffers())
    ]
    layers = sorted((pattern, str(word)) for pattern, word in rule.layers.items())
    entries = sorted(rule.entries.items())
    more = (rule.counts, rule.dropouts, entries, rule.cut_before, rule.join_after)
    mine = zlib.crc32(repr((facts, layers, more, sequence)).encode())
    group = topology.world if part_of(model) is None else topology.tensor
    codes = group.gather(float(mine))
    if len(set(codes)) > 1:
        odd = next(rank for rank, code in enumerate(codes) if code != codes[0])
        error = PlanError(
            f"rank {odd} of {group.size} split a model with other parameters, buffers, devices, rule or sequence than "
            "rank 0; build the same model on every rank"
        )
        raise told_all(error, group.comm)


def _give(model: nn.Module, topology: Topology) -> None:
    groups = [topology.world]
    if part_of(model) is not None:  # of this stage; the others have other parameters
        groups = [topology.tensor, topology.data_sequence]
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            for group in groups:
                give_values(group, tensor)


# --- layers


def _replacements(found: Inspection, sums: Sums, *, sequence: bool) -> dict[int, nn.Module]:
    """What takes the place of each module, by its id."""
    made: dict[int, nn.Parameter] = {}  # tied parameters are one again
    replaced: dict[int, nn.Module] = {}
    for layer in found.layers:
        module = _replacement(layer, found, made, sums, sequence=sequence)
        if module is not None:
            module.train(layer.module.training)
            replaced[id(layer.module)] = module
    if sequence:
        for dropout in found.dropouts.values():
            assert isinstance(dropout, nn.Dropout), "inspected"
            replaced[id(dropout)] = PartDropout(dropout, sums)
    return replaced


def _own(parameter: nn.Parameter, placement: Placement) -> nn.Parameter:
    """This rank's part of ``parameter``, with what a user has written on it."""
    if placement.dim is None:
        return parameter
    with torch.no_grad():
        local = torch.empty(placement.local_shape, dtype=parameter.dtype, device=parameter.device)
        if not local.is_meta:
            placement.take(parameter.detach(), local)
    own = nn.Parameter(local, requires_grad=parameter.requires_grad)
    own.__dict__.update(parameter.__dict__)
    return own


def _replacement(
    layer: FoundLayer,
    found: Inspection,
    made: dict[int, nn.Parameter],
    sums: Sums,
    *,
    sequence: bool,
) -> nn.Module | None:
    """The layer in place of a plain one; None where it stays. ``made``: own parts of parameters, by the whole's id."""

    def cut(parameter: nn.Parameter) -> tuple[nn.Parameter, Placement]:
        placement = found.part.placements[found.names[id(parameter)]]
        if id(parameter) not in made:
            made[id(parameter)] = _own(parameter, placement)
        return made[id(parameter)], placement

    module: Any = layer.module
    word = layer.word
    if word is Kept.POSITIONS and sequence:
        return PositionEmbedding(module, sums)
    if isinstance(word, Kept):
        return None
    sequence = sequence and not word.all_tokens
    weight, placement = cut(module.weight)
    if isinstance(module, nn.Embedding):
        table = VocabularyEmbedding(weight, None, placement, sums, sequence=sequence)
        table.padding_idx = module.padding_idx
        return table
    bias = None if module.bias is None else cut(module.bias)[0]
    if word.dim == 1:
        return RowLinear(weight, bias, placement, sums, sequence=sequence)
    column = ColumnLinear(weight, bias, placement, sums, sequence=sequence)
    column.entered, column.joined = word.entered, word.joined
    return column


def _swap(model: nn.Module, replaced: dict[int, nn.Module]) -> None:
    """Put the new modules wherever the old ones are."""
    for parent in list(model.modules()):
        for key, child in parent._modules.items():
            if id(child) in replaced:
                parent._modules[key] = replaced[id(child)]


# --- hooks


def _hook(found: Inspection, sums: Sums, *, sequence: bool) -> None:
    """What happens where activations come to a module, or leave it, that is not replaced."""
    enters = partial(gather, sums=sums, dim=TIME) if sequence else partial(enter, sums=sums)
    cuts = partial(own_part, sums=sums, dim=TIME)
    changes = [(module, argument, enters) for module, argument in found.entries]
    changes += [(module, "hidden_states", cuts) for module in found.cuts]
    for module, argument, change in changes:
        module.register_forward_pre_hook(
            partial(_change_first, change=change, argument=argument), with_kwargs=True
        )
    for module in found.joins:
        module.register_forward_hook(partial(_join, sums=sums))


def _change_first(
    module: nn.Module, args: Any, kwargs: Any, *, change: Callable[[Tensor], Tensor], argument: str
) -> tuple[Any, Any]:
    """Change the first argument, which may have been given by its name."""
    if args:
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, argument: change(kwargs[argument])}


def _join(module: nn.Module, args: Any, output: Tensor, *, sums: Sums) -> Tensor:
    return whole(output, sums, TIME)


def _look_at_streams(module: nn.Module, args: Any, kwargs: Any, *, sums: Sums) -> None:
    """Before a forward with dropout: masks that must be equal will be."""
    if module.training:
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))
        check_streams(sums, next((x.device for x in tensors), torch.device("cpu")))


# Long sequences over ranks of which each has some tokens: two exchanges around attention (DeepSpeed Ulysses).
#
#     q, k, v of own tokens, all heads | all-to-all | of all tokens, own heads | attention | all-to-all back
#
# Every layer but attention works on own tokens. Parameters are whole on each of these ranks, and their gradients are
# those of own tokens: ``zeroify`` averages them over ``topology.data_sequence``. The loss of a rank is the mean over
# its own tokens, so all must have equally many.
#
# Source: Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509, sec. 3.

HEADS, ULYSSES_TIME = 1, 2  # of (B, H, T, D)


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
        attention.attend = partial(_attend_to_all_tokens, sums=sums, inner=attention.attend)
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


def _attend_to_all_tokens(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    rotary: bool,
    dropout: float,
    *,
    sums: Sums,
    inner: Attend,
) -> Tensor:
    """Attention over all tokens with own heads: (B, H, own T, D) in and out."""
    # One exchange for the three; positions turn q and k where all tokens are.
    three = torch.stack((q_BHTD, k_BHTD, v_BHTD))
    q, k, v = exchange(three, sums, HEADS + 1, ULYSSES_TIME + 1)
    y = attend_by_own_masks(q, k, v, rotary, dropout, sums=sums, inner=inner)
    return exchange(y, sums, ULYSSES_TIME, HEADS)


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
