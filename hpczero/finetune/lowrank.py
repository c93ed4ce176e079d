"""LowRank: a trained product of two small matrices beside a frozen linear layer (LoRA), and how a model gets them.

    y = W x + b + scale * B A drop(x)       W (out, in) frozen; A (rank, in) drawn; B (out, rank) zero at first

The layer stays the object that it was, with its names. Its product is a child, ``layer.lora``, which a forward hook
adds. So a module that reads the layer's hooks, as ``nn.TransformerEncoderLayer`` does before its fused path, sees them.
A layer may have a product for each of several tasks, ``layer.lora_<task>``; a forward adds that of one of them.

Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, ICLR 2022, sec. 4.1.
"""

from __future__ import annotations

import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpczero.data.sources import Turns
from hpczero.errors import ConfigError, PlanError, StepError
from hpczero.zero.calls.ways import leaves_nothing
from hpczero.zero.filling import KnownValues, RangeInitializer
from hpczero.zero.sharding import KEY as ZEROIFIED

ALL_LINEAR = "all-linear"
CHILD = "lora"
DRAWN = re.compile(rf"(.*\.)?{CHILD}(_\w+)?\.[AB]")
NAMED = 8  # names in a message


class LowRank(nn.Module):
    """The product of one layer; called with the layer's input it gives what is added to the layer's output.

    Attributes:
        A: (rank, in) fp32.
        B: (out, rank) fp32.
        scale: of the product, alpha / rank.
        dropout: of the input.
        transposed: whether the layer keeps its weight as (in, out).
        task: of several, whose product it is; None: every forward adds it.
        chosen: the task that ``use`` has chosen last.
    """

    chosen: str | None = None

    def __init__(
        self,
        size_in: int,
        size_out: int,
        rank: int,
        *,
        scale: float,
        dropout: float = 0.0,
        transposed: bool = False,
        task: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Values are not set; ``draw`` follows."""
        super().__init__()
        self.A = nn.Parameter(torch.empty(rank, size_in, dtype=torch.float32, device=device))
        self.B = nn.Parameter(torch.empty(size_out, rank, dtype=torch.float32, device=device))
        self.scale, self.transposed, self.task = scale, transposed, task
        self.dropout = nn.Dropout(dropout)

    @property
    def rank(self) -> int:
        """Of the product."""
        return int(self.A.shape[0])

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out), in the dtype of the two matrices."""
        y = self.dropout(x.to(self.A.dtype))
        result: Tensor = nn.functional.linear(nn.functional.linear(y, self.A), self.B) * self.scale
        return result

    def extra_repr(self) -> str:
        """What ``repr`` says."""
        return f"rank={self.rank}, scale={self.scale:g}"


def draw(name: str, values: Tensor, seed: int = 0) -> None:
    """First values of ``A`` of a product (uniform, variance 1 / (3 in)) or ``B`` (zero), in place, fp32 on the host.

    The bits depend on ``seed`` and the qualified name, not on ranks or on other parameters.
    """
    with torch.no_grad():
        if name.endswith(".B"):
            values.zero_()
            return
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        bound = 1 / math.sqrt(max(values.shape[1], 1))
        values.uniform_(-bound, bound, generator=generator)


def lora(
    model: nn.Module,
    *,
    rank: int = 8,
    alpha: float | None = None,
    targets: str | Sequence[str] = ALL_LINEAR,
    dropout: float = 0.0,
    seed: int = 0,
    task: str | None = None,
) -> nn.Module:
    """Freeze ``model`` and put a trained low-rank product beside each target. Not collective; same on every rank.

    Call it before the optimizer is made, which gets ``finetune.trained(model)``. Names in ``state_dict()`` stay; those
    of the products, ``<layer>.lora.A`` and ``<layer>.lora.B``, come to them. What else shall train is unfrozen by hand
    afterwards: ``model.score.requires_grad_(True)``.

    Args:
        model: plain, on any device; it is changed in place.
        rank: of each product, at least 1.
        alpha: the product is scaled by ``alpha / rank``; None: by 1.
        targets: which layers: names, or last parts of names (``"q_proj"``), or regular expressions for whole names; or
            "all-linear": every ``nn.Linear`` (and ``Conv1D`` of transformers) but the output layer of a model of
            transformers and layers whose weight is tied.
        dropout: probability with which an element of a product's input is dropped in training.
        seed: of the first values.
        task: an identifier: the products are those of this task, named ``<layer>.lora_<task>``, and a forward adds them
            after ``use(model, task)`` alone. One call for each task; products of earlier calls go on to train.

    Returns:
        ``model`` itself.

    Raises:
        ConfigError: ``rank``, ``alpha``, ``dropout`` or ``task`` cannot be; a target matches nothing, or a layer that
            cannot have a product. The message names it.
        PlanError: the model was zeroified, or has products already.
    """
    if type(rank) is not int or rank < 1:
        raise ConfigError(f"rank: got {rank!r}, expected a whole number, at least 1")
    if not 0.0 <= dropout < 1.0:
        raise ConfigError(f"dropout: got {dropout!r}, expected at least 0 and below 1")
    if alpha is not None and not (math.isfinite(alpha) and alpha > 0):
        raise ConfigError(f"alpha: got {alpha!r}, expected a number above 0, or None for {rank}")
    if task is not None and not (
        isinstance(task, str) and re.fullmatch(r"[A-Za-z0-9]\w*", task, re.ASCII)
    ):
        raise ConfigError(f"task: got {task!r}, expected letters, digits and underscores")
    earlier, now = set(), None
    for name, module in model.named_modules():
        if ZEROIFIED in module.__dict__:
            raise PlanError(
                f"module {name or 'model'!r} was zeroified already; call finetune.lora before zeroify, which shards "
                "what it finds"
            )
        if isinstance(module, LowRank):
            if task is None or module.task in (None, task):
                raise PlanError(
                    f"the model has low-rank products already, first {name!r}; call finetune.lora once for each task, "
                    "or finetune.merge first"
                )
            earlier |= {id(module.A), id(module.B)}
            now = module.chosen
    chosen = _chosen(model, targets)
    for name, module in chosen.items():
        if hasattr(module, child_of(task)):
            raise ConfigError(
                f"task: got {task!r}, and {name!r} has a {child_of(task)!r} already; choose another name"
            )
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in earlier)
    for name, module in chosen.items():
        size_in, size_out, transposed = _sizes(module)
        product = LowRank(
            size_in,
            size_out,
            rank,
            scale=1.0 if alpha is None else alpha / rank,
            dropout=dropout,
            transposed=transposed,
            task=task,
            device=module.weight.device,  # type: ignore[arg-type]
        )
        for part, parameter in (("A", product.A), ("B", product.B)):
            if not parameter.is_meta:
                values = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
                draw(f"{name}.{child_of(task)}.{part}", values, seed)
                parameter.data.copy_(values)
        product.train(module.training)
        product.chosen = now
        module.add_module(child_of(task), product)
        if _add not in module._forward_hooks.values():
            module.register_forward_hook(_add, with_kwargs=True)
    return model


def child_of(task: str | None) -> str:
    """Name of the product in its layer."""
    return CHILD if task is None else f"{CHILD}_{task}"


def use(model: nn.Module, task: str) -> None:
    """From now on forwards add the products of ``task``. Not collective: ranks may train different tasks in one step.

    Call it before a forward, and not again before the backward that follows: activation checkpointing repeats the
    forward in it.

    Raises:
        ConfigError: ``finetune.lora`` made no products for ``task``.
    """
    products = [each for each in model.modules() if isinstance(each, LowRank)]
    known = sorted({each.task for each in products if each.task is not None})
    if task not in known:
        raise ConfigError(f"task: got {task!r}, expected one of {known}, which finetune.lora made")
    for each in products:
        each.chosen = task


class Tasks:
    """Which task each micro-batch is of: exact proportions, on any number of ranks, with nothing to save.

    Micro-batches are counted through the whole run, over steps, micro steps and ranks. Up to any of them a task has its
    weight's share of them, less than one micro-batch for each task before it away.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """``weights``: above 0, by task; those of decimal digits are taken as they are written.

        Raises:
            ConfigError: a weight is not above 0, or they have no common period of at most a million.
        """
        self._names = list(weights)
        self._turns = Turns([*weights.values()])

    def of(
        self, step: int, rank: int, world_size: int, micro_step: int = 0, accumulation: int = 1
    ) -> tuple[str, int]:
        """The task of one micro-batch, and how many micro-batches that task had before. Not collective.

        The second number is the ``step`` that ``hpczero.data.Batches`` of the task's data takes on one rank.

        Raises:
            ConfigError: a number is out of range.
        """
        if not (0 <= rank < world_size and 0 <= micro_step < accumulation and step >= 0):
            raise ConfigError(
                f"got step {step}, rank {rank} of {world_size} and micro step {micro_step} of {accumulation}, expected "
                "all in range"
            )
        place = (step * accumulation + micro_step) * world_size + rank
        task, before = self._turns.of(np.array([place]))
        return self._names[int(task[0])], int(before[0])


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that train, for the optimizer."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def merge(model: nn.Module, *, task: str | None = None) -> nn.Module:
    """Add each product to its layer's weight and take it away. Not collective.

    The sum is taken in fp32 and rounded once to the dtype of the weight. All parameters are frozen afterwards as they
    were.

    Args:
        model: plain: before ``zeroify``, or after ``hpczero.release(model, whole=True)``.
        task: of several, whose products are added; those of the others are taken away too.

    Returns:
        ``model`` itself, with the names that it had before ``lora``.

    Raises:
        ConfigError: there are products of tasks, and ``task`` is none of them.
        PlanError: the model is zeroified, or its values are not there.
    """
    check_task(model, task)
    if any(ZEROIFIED in module.__dict__ for module in model.modules()):
        raise PlanError(
            "the model is zeroified, so no rank has its values; write the merged weights by "
            "finetune.save_merged(model, folder), or call hpczero.release(model, whole=True) first"
        )
    for name, module in model.named_modules():
        products = products_of(module)
        for child, product in products.items():
            weight = module.weight
            if weight.is_meta or weight.numel() != product.A.shape[1] * product.B.shape[0]:
                raise PlanError(
                    f"the values of {name}.weight are not there; load them first, or release with whole=True"
                )
            if product.task == task:
                with torch.no_grad():
                    weight.copy_(
                        merged(weight, product.A, product.B, product.scale, product.transposed)
                    )
            del module._modules[child]
        for key, hook in list(module._forward_hooks.items()):
            if hook is _add:
                del module._forward_hooks[key]
                module._forward_hooks_with_kwargs.pop(key, None)
    return model


def products_of(layer: nn.Module) -> dict[str, LowRank]:
    """Products of one layer by their names in it."""
    return {name: each for name, each in layer._modules.items() if isinstance(each, LowRank)}


def check_task(model: nn.Module, task: str | None) -> None:
    """Raise ConfigError unless ``task`` is one of those that the model has products of; None where there are none."""
    products = (each for each in model.modules() if isinstance(each, LowRank))
    known = sorted({each.task for each in products if each.task is not None})
    if (task is None) == bool(known) or (known and task not in known):
        raise ConfigError(
            f"task: got {task!r}, expected {f'one of {known}' if known else 'None: the products are of no task'}"
        )


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float, transposed: bool) -> Tensor:
    """The weight with the product in it, fp32, of the weight's shape."""
    product = (b.float() @ a.float()) * scale
    return weight.float() + (product.T if transposed else product)


@leaves_nothing
def _add(
    module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Tensor
) -> Tensor:
    """The hook: what the layer gives, and its product."""
    x = arguments[0] if arguments else next(iter(named.values()))
    for product in module._modules.values():
        if not isinstance(product, LowRank):
            continue
        if product.task is not None and product.chosen is None:
            raise StepError(
                f"a forward reached the products of task {product.task!r} before a task was chosen; expected "
                "finetune.use(model, task) before it"
            )
        if product.task == product.chosen:
            output = output + product(x).to(output.dtype)
    return output


# --- which layers ----------------------------------------------------------------------------------------------------


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is the transposed linear layer of transformers, which need not be installed."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _sizes(module: nn.Module) -> tuple[int, int, bool]:
    """in, out, and whether the weight is (in, out)."""
    rows, columns = module.weight.shape  # type: ignore[misc]
    transposed = _is_conv1d(module)
    return (rows, columns, True) if transposed else (columns, rows, False)


def _chosen(model: nn.Module, targets: str | Sequence[str]) -> dict[str, nn.Module]:
    """Modules by their first names, in the order of the model."""
    modules = dict(model.named_modules())
    users = Counter(
        id(parameter)
        for module in modules.values()
        for parameter in module._parameters.values()
        if parameter is not None
    )
    if targets == ALL_LINEAR:
        given = getattr(model, "get_output_embeddings", None)
        output = given() if callable(given) else None
        found = {
            name: module
            for name, module in modules.items()
            if not _unfit(module, users) and module is not output
        }
        if not found:
            raise ConfigError(
                f"{type(model).__name__} has no nn.Linear that can have a low-rank product; name targets, or train "
                "the model whole"
            )
        return found
    wanted = [targets] if isinstance(targets, str) else list(targets)
    chosen = {}
    for name, module in modules.items():
        if name and any(_matches(each, name) for each in wanted):
            reason = _unfit(module, users)
            if reason:
                raise ConfigError(f"targets: {name!r} {reason}; leave it out")
            chosen[name] = module
    unused = [each for each in wanted if not any(_matches(each, name) for name in modules)]
    if unused or not wanted:
        known = dict.fromkeys(
            name.rpartition(".")[2] for name, module in modules.items() if not _unfit(module, users)
        )
        more = " and others" if len(known) > NAMED else ""
        raise ConfigError(
            f"targets: {unused or wanted} match(es) no module of {type(model).__name__}; its linear layers are "
            f"{', '.join(list(known)[:NAMED])}{more}"
        )
    return chosen


def _matches(target: str, name: str) -> bool:
    if name == target or name.endswith(f".{target}"):
        return True
    try:
        return re.fullmatch(target, name) is not None
    except re.error as error:
        raise ConfigError(
            f"targets: {target!r} is neither a name nor a regular expression ({error})"
        ) from error


def _unfit(module: nn.Module, users: Counter[int]) -> str:
    """Why it cannot have a product; empty if it can."""
    # A subclass may use its weight without a call, as that of nn.MultiheadAttention does: no hook would run.
    if type(module) is not nn.Linear and not _is_conv1d(module):
        return (
            f"is a {type(module).__name__}, expected exactly nn.Linear (or Conv1D of transformers)"
        )
    if users[id(module.weight)] > 1:
        return "has a weight that other modules use too, and would be merged into all of them"
    return ""


def first_values(
    initialize: Callable[[str, Tensor], None], *, seed: int = 0
) -> Callable[[str, Tensor], None]:
    """``initialize`` of ``zeroify`` for a model on the meta device that has low-rank products.

    Args:
        initialize: fills all other parameters: a function, or what ``hpczero.hf.load`` gave.
        seed: of the products.
    """
    known = isinstance(initialize, KnownValues)
    ranges = isinstance(initialize, RangeInitializer)
    kind = _Known if known else _Ranges if ranges else _Whole
    return kind(initialize, seed)


class _Whole:
    """Of a base that fills whole parameters."""

    def __init__(self, base: Any, seed: int) -> None:
        self._base, self._seed = base, seed

    def __call__(self, name: str, tensor: Tensor) -> None:
        if _is_drawn(name):
            draw(name, tensor, self._seed)
        else:
            self._base(name, tensor)


class _Ranges(_Whole):
    """Of a base that is filled by ranges; products are small, and are drawn whole."""

    def fill_range(self, name: str, shape: tuple[int, ...], start: int, values: Tensor) -> None:
        if not _is_drawn(name):
            self._base.fill_range(name, shape, start, values)
            return
        whole = torch.empty(shape, dtype=torch.float32, device="cpu")
        draw(name, whole, self._seed)
        values.copy_(whole.view(-1)[start : start + len(values)])


class _Known(_Ranges):
    """Of a base whose values stand in files."""

    def bind(self, parameters: Mapping[str, nn.Parameter], model: nn.Module) -> None:
        loaded = {name: each for name, each in parameters.items() if not _is_drawn(name)}
        self._base.bind(loaded, model)

    def fingerprint(self, name: str) -> int:
        if _is_drawn(name):
            return zlib.crc32(repr((name, self._seed)).encode())
        return int(self._base.fingerprint(name))


def _is_drawn(name: str) -> bool:
    return DRAWN.fullmatch(name) is not None
