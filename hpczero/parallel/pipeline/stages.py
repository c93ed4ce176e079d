"""Stages: a model cut into the stages of a pipeline, each with some of its blocks; and how known models are cut.

    whole model     before | block 0 .. block n-1 | after
    2 stages        before, blocks 0 .. k-1  |  blocks k .. n-1, after
    interleave 2    stage s has pieces s and stages + s, of 2 * stages pieces of consecutive blocks

What is not this stage's is taken out of the model. Blocks keep their number in the whole model, and so their names.
Modules without parameters and without persistent buffers stay on all stages.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hpczero.comm.sums import give_values
from hpczero.errors import PlanError, StepError
from hpczero.job.group import Group
from hpczero.job.topology import Topology
from hpczero.plan.placement import KEY, ModelPart, Placement, part_of
from hpczero.zero.buffers import persistent_buffers
from hpczero.zero.sharding import KEY as SHARDING

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def check_model(model: object) -> None:
    """Refuse what a stage would not do as the whole model does.

    Raises:
        PlanError: the message names the module or parameter, and what to do instead.
    """
    if not isinstance(model, nn.Module):
        raise PlanError(f"cut: got {type(model).__name__}, expected a torch.nn.Module")
    if part_of(model) is not None:
        raise PlanError("cut: the model is a part of one already; cut the whole model, once")
    for name, module in model.named_modules():
        title = f"module {name or 'model'!r} ({type(module).__name__})"
        if SHARDING in module.__dict__:
            raise PlanError(f"cut: {title} was zeroified; cut the model before zeroify")
        if "forward" in module.__dict__ and not name:
            raise PlanError(
                "cut: model.forward was replaced, and a stage has a forward of its own; cut before whatever replaces it"
            )
        hooks = (hook for kind in HOOKS for hook in getattr(module, kind).values())
        # Torch's own make the module's weight, as weight_norm and spectral_norm do.
        if not all(type(hook).__module__.startswith("torch.nn.utils.") for hook in hooks):
            raise PlanError(
                f"cut: {title} has a hook, which would see one stage's part of the model, or nothing where the module "
                "is taken out; register hooks after the cut, on the stages that have the module"
            )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise PlanError(
                f"cut: parameter {name!r} is uninitialized: a lazy module takes its shape from its first input. Call "
                "the model once before the cut"
            )


@dataclass(frozen=True)
class Owners:
    """Which stage holds what of one model.

    Attributes:
        stage_of_block: by the block's name in its container.
        aliases: further names of parameters, each with the first one.
        tied: parameters that the first and the last stage both hold, by their first name in the whole model: the first
            name of each on either stage, by stage.
    """

    stage_of_block: Mapping[str, int]
    aliases: Mapping[str, str]
    tied: Mapping[str, Mapping[int, str]]

    @classmethod
    def of(cls, model: nn.Module, how: Stages, counts: Sequence[int], stages: int) -> Owners:
        """Find the owner of everything in the whole ``model``, whose pieces have ``counts`` blocks.

        Raises:
            PlanError: a name that is none, or is listed twice; a parameter or persistent buffer that no stage or
                several stages would hold.
        """
        _check_names(model, how)
        keys = list(model.get_submodule(how.blocks)._modules)
        pieces = [piece for piece, count in enumerate(counts) for _ in range(count)]
        stage_of_block = {key: piece % stages for key, piece in zip(keys, pieces, strict=True)}
        places = {f"{how.blocks}.{key}": stage for key, stage in stage_of_block.items()}
        places |= dict.fromkeys(how.before, 0) | dict.fromkeys(how.after, stages - 1)
        aliases: dict[str, str] = {}
        tied: dict[str, dict[int, str]] = {}
        for names in _names_of(dict(model.named_parameters(remove_duplicate=False))):
            aliases |= dict.fromkeys(names[1:], names[0])
            found = _stages_of(names, places, "parameter")
            if len(found) > 1:
                if set(found) != {0, stages - 1}:
                    raise PlanError(
                        f"cut: parameter {names[0]!r} is shared by the stages {sorted(found)}, as "
                        f"{', '.join(map(repr, found.values()))}; only the first and the last stage can share one. "
                        "Choose another balance, or give each its own parameter"
                    )
                tied[names[0]] = found
        kept = {id(buffer) for buffer in persistent_buffers(model).values()}
        named = model.named_buffers(remove_duplicate=False)
        for names in _names_of({name: buffer for name, buffer in named if id(buffer) in kept}):
            found = _stages_of(names, places, "persistent buffer")
            if len(found) > 1:
                raise PlanError(
                    f"cut: persistent buffer {names[0]!r} is shared by the stages {sorted(found)}, each of which would "
                    "change its own; give each stage its own buffer, or register it with persistent=False"
                )
        return cls(stage_of_block, aliases, tied)


def _names_of(named: Mapping[str, Tensor]) -> Iterable[list[str]]:
    """All names of each tensor, in the order of first names."""
    names: dict[int, list[str]] = {}
    for name, tensor in named.items():
        names.setdefault(id(tensor), []).append(name)
    return names.values()


def _stages_of(names: Sequence[str], places: Mapping[str, int], what: str) -> dict[int, str]:
    """The stages that hold a tensor, each with the first of its names there."""
    found: dict[int, str] = {}
    for name in names:
        parts = name.split(".")
        paths = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        stage = next((places[path] for path in paths if path in places), None)
        if stage is None:
            raise PlanError(
                f"cut: {what} {name!r} is neither in the blocks nor before nor after them, so no stage would hold it; "
                "name it, or the module that has it, in Stages(before=...) or Stages(after=...)"
            )
        found.setdefault(stage, name)
    return found


def _check_names(model: nn.Module, how: Stages) -> None:
    listed = (model.named_modules, model.named_parameters, model.named_buffers)
    known = {name for named in listed for name, _ in named(remove_duplicate=False)}
    blocks = how.blocks
    seen: set[str] = set()
    for where, names in (("before", how.before), ("after", how.after)):
        for name in names:
            if name not in known or not name:
                raise PlanError(
                    f"stages: {where} names {name!r}, which is no module, parameter or buffer of the model; use names "
                    "as model.named_modules() lists them"
                )
            if _overlap(blocks, name):
                raise PlanError(
                    f"stages: {where} names {name!r}, and the blocks are in {blocks!r}; name what lies beside the "
                    "blocks, not what they are in or what is in them"
                )
            nested = next((other for other in seen if _overlap(other, name)), None)
            if nested is not None:
                raise PlanError(
                    f"stages: {nested!r} and {name!r} in before and after are the same or one in the other; name each "
                    "module once, and give each of two that share a weight a name of its own"
                )
            seen.add(name)


def _overlap(one: str, other: str) -> bool:
    """Whether the names are those of one module, or of a module and one in it."""
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


STAGE = "_hpczero_stage"  # in the ``__dict__`` of a model that was cut


@dataclass(frozen=True)
class Stages:
    """How a model's forward falls into parts.

    ``leave(model, call(model, block, ... enter(model, *inputs)), *targets)``, with ``call`` for each block in turn,
    must be what ``model(*inputs, *targets)`` computes.

    Attributes:
        blocks: name of the ModuleList, ModuleDict or Sequential that the blocks are in.
        before: names of modules, parameters and buffers that ``enter`` needs.
        after: the same of ``leave``. One that both need has a name in each: the two are then tied.
        enter: f(model, *inputs) -> x, a floating point tensor.
        call: f(model, block, x) -> x.
        leave: f(model, x, *targets) -> the loss, a scalar; without targets the outputs.
    """

    blocks: str
    before: tuple[str, ...]
    after: tuple[str, ...]
    enter: Callable[..., Tensor]
    call: Callable[..., Tensor]
    leave: Callable[..., Any]


class StageForward:
    """The forward of one stage, in place of the model's.

    Attributes:
        group: the stages.
        chunks: (chunks of this stage,) the names of their blocks.
    """

    def __init__(
        self, model: nn.Module, stages: Stages, group: Group, chunks: Sequence[Sequence[str]]
    ) -> None:
        self._model, self._stages = model, stages
        self.group = group
        self.chunks = tuple(tuple(names) for names in chunks)

    def piece(self, chunk: int) -> int:
        """Which piece of the whole model a chunk is."""
        return chunk * self.group.size + self.group.rank

    def is_first(self, chunk: int) -> bool:
        """Whether a chunk takes the inputs of the model."""
        return self.piece(chunk) == 0

    def is_last(self, chunk: int) -> bool:
        """Whether a chunk makes the outputs of the model."""
        return self.piece(chunk) == self.group.size * len(self.chunks) - 1

    def part(self, chunk: int | None = None) -> ModelPart:
        """What of the whole model the stage is, or one chunk of it."""
        part = part_of(self._model)
        assert part is not None, "noted by the cut"
        if chunk is None:
            return part
        return replace(part, first=self.is_first(chunk), last=self.is_last(chunk))

    def trains(self, chunk: int) -> bool:
        """Whether a chunk has parameters that get gradients: of its blocks, and of what is before or after them."""
        names = [f"{self._stages.blocks}.{name}" for name in self.chunks[chunk]]
        names += self._stages.before if self.is_first(chunk) else ()
        names += self._stages.after if self.is_last(chunk) else ()
        paths = tuple(f"{name}." for name in names)
        parameters = self._model.named_parameters(remove_duplicate=False)
        return any(f"{name}.".startswith(paths) for name, p in parameters if p.requires_grad)

    def __call__(
        self, *inputs: Any, targets: tuple[Any, ...] = (), chunk: int | None = None
    ) -> Any:
        """One chunk's part of the model's forward.

        Args:
            inputs: of the model, where the chunk is the first; else the x of the piece before.
            targets: of the model, where the chunk is the last.
            chunk: which; not None if there are other stages.

        Returns:
            x for the piece after, or what the model returns.

        Raises:
            StepError: the model was called by itself.
        """
        model, stages = self._model, self._stages
        if chunk is None and self.group.size > 1:
            raise StepError(
                f"{type(model).__name__} was called by itself, and this rank has stage {self.group.rank} of "
                f"{self.group.size} alone; call evaluate or outputs of hpczero.Pipeline, on every stage"
            )
        chunk = chunk or 0
        if self.is_first(chunk):
            x = stages.enter(model, *inputs)
        else:
            (x,) = inputs
        container = model.get_submodule(stages.blocks)
        for name in self.chunks[chunk]:
            x = stages.call(model, container.get_submodule(name), x)
        return stages.leave(model, x, *targets) if self.is_last(chunk) else x


def cut(
    model: nn.Module,
    topology: Topology,
    stages: Stages,
    *,
    interleave: int = 1,
    balance: Sequence[int] | None = None,
) -> nn.Module:
    """Keep this rank's stage of ``model``, in place. Collective over the topology's world.

    Call it before tensor parallelism, the optimizer and ``zeroify``. ``model`` is then called by
    ``hpczero.Pipeline`` alone. ``hpczero.plan.placement.part_of(model)`` says what of the whole model it is.

    Args:
        model: whole, on any device; where it has values, those of world rank 0 are given to all.
        topology: its ``pipeline`` group has the stages, in order.
        stages: how the model's forward falls into parts.
        interleave: chunks of blocks on each stage.
        balance: blocks of each of the ``interleave`` * stages pieces, in the order of the model; None: equal numbers,
            the first pieces with one more where they do not divide.

    Returns:
        ``model`` itself.

    Raises:
        PlanError: the model cannot be cut so, or ranks have other models; the same on every rank.

    Source: Narayanan et al., Megatron-LM, arXiv 2104.04473, sec. 2.2.
    """
    group = topology.pipeline
    with topology.agreed("cut the model into stages"):
        check_model(model)
        container = _container(model, stages.blocks)
        counts = _balance(len(container._modules), group.size, interleave, balance)
        owners = Owners.of(model, stages, counts, group.size)
        part = _part(model, owners, group)
    _check_equal(model, topology, (stages.blocks, stages.before, stages.after, counts))
    tensors = [*model.parameters(), *persistent_buffers(model).values()]
    for tensor in tensors:
        if not tensor.is_meta and topology.size > 1:
            give_values(topology.world, tensor)
    names = list(container._modules)
    for name in names:
        if owners.stage_of_block[name] != group.rank:
            del container._modules[name]
    for stage, taken in ((0, stages.before), (group.size - 1, stages.after)):
        for path in taken if stage != group.rank else ():
            _take_out(model, path)
    starts = [sum(counts[:piece]) for piece in range(len(counts) + 1)]
    mine = range(group.rank, len(counts), group.size)
    chunks = [names[starts[piece] : starts[piece + 1]] for piece in mine]
    stage_forward = StageForward(model, stages, group, chunks)
    model.__dict__.update({KEY: part, STAGE: stage_forward, "forward": stage_forward})
    return model


def stage_of(model: nn.Module) -> StageForward:
    """What ``cut`` made of a model.

    Raises:
        PlanError: it was not cut.
    """
    found = model.__dict__.get(STAGE)
    if not isinstance(found, StageForward):
        raise PlanError(
            f"{type(model).__name__} was not cut into stages; call hpczero.parallel.cut(model, topology, stages) "
            "before zeroify, and pass that model"
        )
    return found


def _container(model: nn.Module, name: str) -> nn.Module:
    container = dict(model.named_modules()).get(name)
    if not isinstance(container, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        found = "nothing" if container is None else type(container).__name__
        raise PlanError(
            f"stages: blocks={name!r} is {found}, expected a ModuleList, ModuleDict or Sequential of the model, by its "
            "name in model.named_modules()"
        )
    return container


def _balance(
    blocks: int, stages: int, interleave: int, given: Sequence[int] | None
) -> tuple[int, ...]:
    """Blocks of each piece."""
    if isinstance(interleave, bool) or not isinstance(interleave, int) or interleave < 1:
        raise PlanError(f"cut: got interleave {interleave!r}, expected a number of at least 1")
    if interleave > 1 and stages == 1:
        raise PlanError(
            f"cut: got interleave {interleave} for one stage, which has nobody to take turns with; leave it out, or "
            "start more stages (Mesh(pipeline=...))"
        )
    pieces = stages * interleave
    if given is None:
        if blocks < pieces:
            raise PlanError(
                f"cut: the model has {blocks} block(s) for {stages} stage(s) of {interleave} chunk(s), expected at "
                f"least {pieces}; take fewer stages, or less interleave"
            )
        return tuple(blocks // pieces + (piece < blocks % pieces) for piece in range(pieces))
    counts = tuple(given)
    whole = all(isinstance(count, int) and not isinstance(count, bool) for count in counts)
    if len(counts) != pieces or not whole or min(counts) < 1 or sum(counts) != blocks:
        raise PlanError(
            f"cut: got balance={list(counts)}, expected {pieces} numbers of at least 1, one for each chunk of each "
            f"stage in the order of the model, with the sum {blocks}"
        )
    return counts


def _part(model: nn.Module, owners: Owners, group: Group) -> ModelPart:
    """What of the whole model this rank's stage is going to be."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    placements = {
        names[group.rank]: Placement(whole, shapes[whole], tied=True, counted=group.rank == 0)
        for whole, names in owners.tied.items()
        if group.rank in names
    }
    return ModelPart(
        names=tuple(shapes),
        aliases=owners.aliases,
        placements=placements,
        first=group.rank == 0,
        last=group.rank == group.size - 1,
    )


def _check_equal(model: nn.Module, topology: Topology, decisions: object) -> None:
    tensors = [*model.named_parameters(), *persistent_buffers(model).items()]
    described = [(name, tuple(t.shape), str(t.dtype), t.is_meta) for name, t in tensors]
    words = topology.gather(float(zlib.crc32(repr((described, decisions)).encode())))
    odd = [rank for rank, word in enumerate(words) if word != words[0]]
    with topology.agreed("compare the models"):
        if odd:
            raise PlanError(
                f"cut: rank(s) {odd[:8]} have another model, other stages or another balance than rank 0; every rank "
                "must build the same whole model and cut it the same way"
            )


def _take_out(model: nn.Module, path: str) -> None:
    """Leave None in the place of a module, parameter or buffer."""
    parent_path, _, name = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    for kind in (parent._modules, parent._parameters, parent._buffers):
        if name in kind:
            kind[name] = None


def gpt_stages(model: Any) -> Stages:
    """Of ``hpczero.models.GPT``: inputs are (tokens,), targets (targets,); its loss is the mean cross entropy.

    Raises:
        PlanError: the model keeps documents apart, which only a stage with the tokens could.
    """
    if model.config.separator is not None:
        raise PlanError(
            "gpt_stages: got a GPT that keeps documents apart (separator), and only the first stage has the tokens; "
            "expected separator None, or one stage"
        )

    positions = () if model.wpe is None else ("wpe",)
    return Stages(
        "blocks",
        ("wte", *positions),
        ("final_norm", "lm_head"),
        enter=lambda model, tokens: model.embed(tokens),
        call=lambda model, block, x: model.run(block, x),
        leave=lambda model, x, *targets: model.head(x, *targets),
    )


def llama_stages(model: Any) -> Stages:
    """The stages of ``hpczero.models.Llama``, which has Hugging Face's names and no mask to pass on."""
    return _llama(
        lambda model, block, x: model.model.run(block, x),
        lambda model, x, *targets: model.head(x, *targets),
    )


def _llama(call: Callable[..., Any], head: Callable[..., Any]) -> Stages:
    """``head`` is given what comes out of the last norm."""
    return Stages(
        "model.layers",
        ("model.embed_tokens",),
        ("model.norm", "lm_head"),
        enter=lambda model, tokens: model.model.embed_tokens(tokens),
        call=call,
        leave=lambda model, x, *targets: head(model, model.model.norm(x), *targets),
    )


def hugging_face_stages(model: Any) -> Stages:
    """Of ``LlamaForCausalLM`` and ``GPT2LMHeadModel`` of the library transformers, for samples without padding.

    Inputs are (input_ids,), targets (labels,), which the model's own loss shifts by one. Without targets ``leave``
    returns the logits. Masks and rotary tables are made by the model's own functions, anew for every block.

    Raises:
        PlanError: another class, whose forward may do more than these parts.

    Source: ``forward`` of both classes in transformers 5.
    """
    kind = type(model).__name__
    if kind == "LlamaForCausalLM":
        return _llama(
            _call_llama, lambda model, x, *labels: _loss(model, model.lm_head(x), *labels)
        )
    if kind == "GPT2LMHeadModel":
        return Stages(
            "transformer.h",
            ("transformer.wte", "transformer.wpe"),
            ("transformer.ln_f", "lm_head"),
            enter=_enter_gpt2,
            call=_call_gpt2,
            leave=lambda model, x, *labels: _loss(
                model, model.lm_head(model.transformer.ln_f(x)), *labels
            ),
        )
    raise PlanError(
        f"hugging_face_stages: got {kind}, expected LlamaForCausalLM or GPT2LMHeadModel; say in "
        "hpczero.parallel.Stages how its forward falls into parts"
    )


def _call_llama(model: Any, block: Any, x: Any) -> Any:
    positions, mask = _positions_and_mask(model.model, x)
    rotary = model.model.rotary_emb(x, position_ids=positions)
    options = {"attention_mask": mask, "position_embeddings": rotary, "position_ids": positions}
    return block(x, **options, use_cache=False)


def _enter_gpt2(model: Any, tokens: Any) -> Any:
    base = model.transformer
    positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
    return base.drop(base.wte(tokens) + base.wpe(positions))


def _call_gpt2(model: Any, block: Any, x: Any) -> Any:
    positions, mask = _positions_and_mask(model.transformer, x)
    return block(x, None, mask, None, use_cache=False, position_ids=positions)


def _positions_and_mask(base: Any, x: Any) -> tuple[Any, Any]:
    """As the model's own forward makes them; which mask there is depends on its kind of attention."""
    positions = torch.arange(x.shape[1], device=x.device)[None]
    make = sys.modules[type(base).__module__].create_causal_mask
    mask = make(
        config=base.config,
        inputs_embeds=x,
        attention_mask=None,
        past_key_values=None,
        position_ids=positions,
    )
    return positions, mask


def _loss(model: Any, logits: Any, *labels: Any) -> Any:
    if not labels:
        return logits
    (targets,) = labels
    return model.loss_function(logits=logits, labels=targets, vocab_size=model.config.vocab_size)
