"""Modules and parameters that cannot be trained in shards, found before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from hpczero.errors import PlanError
from hpczero.job.mesh import Mesh
from hpczero.plan.placement import part_of
from hpczero.plan.precision import Precision
from hpczero.zero.units.guard import is_guarded


def overlaps(tensors: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
    """Pairs of places in ``tensors`` that share a byte, or a place twice where a tensor has one element at two indices.

    Each tensor that shares memory is in a pair, but not every pair is told. Columns of one matrix interleave and share
    nothing.
    """
    runs = [_runs(tensor) for tensor in tensors]
    starts = np.concatenate([np.empty(0, np.int64), *(begins for begins, _ in runs)])
    stops = np.concatenate([np.empty(0, np.int64), *(begins + length for begins, length in runs)])
    owners = np.repeat(np.arange(len(runs)), [len(begins) for begins, _ in runs])
    order = np.argsort(starts, kind="stable")
    starts, stops, owners = starts[order], stops[order], owners[order]
    reached = np.maximum.accumulate(stops)
    for place in np.flatnonzero(reached[:-1] > starts[1:]) + 1:
        earlier = int(np.argmax(stops[:place] == reached[place - 1]))
        yield int(owners[earlier]), int(owners[place])


def _runs(tensor: Tensor) -> tuple[np.ndarray, int]:
    """Addresses (runs,) int64 where the tensor's unbroken runs of bytes begin, and how long each is."""
    item = tensor.element_size()
    address = tensor.untyped_storage().data_ptr()
    if not address or not tensor.numel():  # meta, or a subclass that has its memory elsewhere
        return np.empty(0, np.int64), 0
    begins = np.array([address + tensor.storage_offset() * item], np.int64)
    length = item
    for step, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if step * item == length or extent == 1:
            length *= extent
        else:
            begins = (begins[:, None] + np.arange(extent) * (step * item)).reshape(-1)
    return begins, length


ALIENS = ("torch", "deepspeed")
WRAPPERS = (
    *("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"),
    *("DeepSpeedEngine", "PipelineEngine"),
)


# Names of parameters that DistributedDataParallel is to leave alone; it asks a model before anything else.
IGNORED_BY_DDP = "_ddp_params_and_buffers_to_ignore"


class NotForDDP:
    """What a zeroified model has there: DistributedDataParallel, which accelerate's ``prepare`` uses, is refused."""

    def __iter__(self) -> Iterator[str]:
        """Raises PlanError."""
        raise PlanError(
            "DistributedDataParallel of a zeroified model: its gradients are means over the ranks already; leave out "
            "the wrapper (accelerator.prepare(model)), and prepare loaders alone"
        )


def check_modules(model: nn.Module, precision: Precision) -> None:
    """Refuse what torch or the optimizer would fail at later, or what would make ranks differ.

    Args:
        model: as built.
        precision: precision that its parameters will have.

    Raises:
        PlanError: the message names the module or parameter, and what to do instead.
    """
    _check_alien(model)
    for name, parameter in model.named_parameters():
        if is_guarded(parameter):
            raise PlanError(
                f"parameter {name!r} belongs to a model that was zeroified already. Two models that share a module: "
                "zeroify one module that holds both (nn.ModuleDict), with all optimizers. A part of a model: zeroify "
                "the whole alone. To begin anew: hpczero.release(the other model), and build this one again"
            )
        _check_kind(name, parameter)
    _check_memory(model)
    for name, module in model.named_modules():
        title = f"module {name or 'model'!r} ({type(module).__name__})"
        if isinstance(module, torch.jit.ScriptModule):
            raise PlanError(
                f"{title} is a ScriptModule of torch.jit, which runs past the hooks of a zeroified model; zeroify the "
                "plain module, and compile blocks by torch.compile if need be"
            )
        if precision.has_masters:
            _check_half(title, module, precision)
        if any(p.is_meta for p in module.parameters(recurse=False)):
            _check_meta(title, module)
    check_embeddings(model)


def check_embeddings(model: nn.Module) -> None:
    """As ``check_modules``, of embeddings alone, whose weight may have been unfrozen."""
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        title = f"module {name or 'model'!r} ({type(module).__name__})"
        if module.max_norm is not None:
            raise PlanError(
                f"{title} has max_norm={module.max_norm:g}, which changes its weight in every forward, on each rank by "
                "its own batch, and the optimizer's copy not at all; build it with max_norm=None and scale the rows "
                "that forward looked up, or the weight after the step inside `with hpczero.gathered(model, "
                "modifier_rank=0):`"
            )


def _check_alien(model: nn.Module) -> None:
    """Refuse what other programs have wrapped or cut already. Their classes are known by name, so none is imported."""
    told = (
        "give zeroify the plain model, before it is wrapped or cut (of DDP: model.module). DDP, FSDP2 and DTensor "
        "alone run over MPI by hpczero.bridge"
    )
    for name, module in model.named_modules():
        if wrapper := _alien_base(module, WRAPPERS):
            raise PlanError(
                f"module {name or 'model'!r} is a {wrapper}, which shares gradients or parameters among ranks itself; "
                f"{told}"
            )
    for kind, tensors in (
        ("parameter", model.named_parameters()),
        ("buffer", model.named_buffers()),
    ):
        for name, tensor in tensors:
            if _alien_base(tensor, ("DTensor",)):
                raise PlanError(f"{kind} {name!r} is a DTensor, cut over ranks already; {told}")


def _alien_base(thing: object, names: Collection[str]) -> str:
    """The first class of ``thing`` that is torch's or DeepSpeed's and has one of ``names``; empty where none has."""
    kinds = [kind for kind in type(thing).__mro__ if kind.__name__ in names]
    return next((k.__name__ for k in kinds if k.__module__.split(".")[0] in ALIENS), "")


def _check_memory(model: nn.Module) -> None:
    """Refuse parameters that share memory, and views of parameters that a module keeps: zeroify separates them."""
    held: dict[str, Tensor] = {
        f"parameter {name!r}": parameter
        for name, parameter in model.named_parameters()
        if not is_lazy(parameter)
    }
    num_parameters = len(held)
    for path, module in model.named_modules():
        if module._forward_pre_hooks:
            continue  # which may make the view anew in each forward, as spectral_norm does
        for kind, tensors in (("attribute", vars(module)), ("buffer", module._buffers)):
            for key, tensor in tensors.items():
                if isinstance(tensor, Tensor) and tensor.layout is torch.strided:
                    held[f"{kind} {key!r} of module {path or 'model'!r}"] = tensor
    titles, values = list(held), list(held.values())
    for one, other in overlaps(values[:num_parameters]):
        if one != other:
            raise PlanError(
                f"{titles[one]} and {titles[other]} lie in the same memory, in whole or in part (tied by .data? views "
                "of one tensor?), and would be trained apart; tie whole parameters by assigning the parameter itself, "
                "b.weight = a.weight, and take parts of one in forward"
            )
        if values[one].requires_grad:
            raise PlanError(
                f"{titles[one]} of shape {tuple(values[one].shape)} has one element at several indices (expand? "
                "as_strided?), which would be trained apart; hold it in its own shape, and expand it in forward"
            )
    for one, other in map(sorted, overlaps(values)):
        if one < num_parameters <= other:
            raise PlanError(
                f"{titles[other]} is a view of {titles[one]} and would not see its training; take the view in forward"
            )


def check_gradients(model: nn.Module) -> None:
    """Refuse gradients that exist already. They would be dropped, and plain torch would add to them.

    Raises:
        PlanError: the message names the parameter.
    """
    for name, parameter in model.named_parameters():
        if _has_gradient(parameter):
            raise PlanError(
                f"parameter {name!r} has a gradient already, which zeroify would drop; call optimizer.zero_grad() "
                "before zeroify"
            )


def _has_gradient(parameter: nn.Parameter) -> bool:
    gradient = parameter.grad
    if gradient is None or gradient.is_meta:
        return False
    return gradient.layout is not torch.strided or bool(gradient.any())


def _check_kind(name: str, parameter: nn.Parameter) -> None:
    if is_lazy(parameter):
        raise PlanError(
            f"parameter {name!r} is uninitialized: a lazy module takes its shape from its first input. Call the model "
            "once before the optimizer is built and zeroify is called"
        )
    if parameter.is_complex():
        raise PlanError(
            f"parameter {name!r} is {parameter.dtype}, and only real numbers can be sharded; hold it as "
            "torch.view_as_real(...) and call torch.view_as_complex in forward"
        )
    if not parameter.is_floating_point():
        raise PlanError(
            f"parameter {name!r} is {parameter.dtype}, and only floating-point numbers can be sharded; it is never "
            "trained, so make it a buffer: register_buffer(name, tensor) in place of nn.Parameter"
        )


def _check_half(title: str, module: nn.Module, precision: Precision) -> None:
    """Refuse modules that keep numbers beside their weight which torch does not mix with half weights."""
    if isinstance(module, _NormBase) and module.running_mean is not None:
        raise PlanError(
            f"{title} keeps running statistics in fp32, and torch does not mix them with {precision.param} weights; "
            "train in fp32, or use GroupNorm or LayerNorm"
        )
    of_hook = any(isinstance(hook, SpectralNorm) for hook in module._forward_pre_hooks.values())
    of_parametrization = isinstance(module, ParametrizationList) and any(
        buffer.is_floating_point() for buffer in module.buffers()
    )
    if of_hook or of_parametrization:
        raise PlanError(
            f"{title} computes its weight from buffers in fp32 (spectral_norm, orthogonal), and torch does not mix "
            f"them with {precision.param} weights; train in fp32, under torch.autocast if need be, or use weight_norm"
        )


def _check_meta(title: str, module: nn.Module) -> None:
    if any(isinstance(hook, WeightNorm) for hook in module._forward_pre_hooks.values()):
        raise PlanError(
            f"{title} has torch.nn.utils.weight_norm on the meta device, whose weight is a tensor that nothing fills; "
            "use torch.nn.utils.parametrizations.weight_norm, or build the model on the CPU"
        )


def check_degrees(model: nn.Module, mesh: Mesh) -> None:
    """Refuse a whole model where ranks are to hold parts of one: each of them would train all of it by itself.

    Raises:
        PlanError: names the degrees.
    """
    degrees = (("tensor", mesh.tensor), ("sequence", mesh.sequence), ("pipeline", mesh.pipeline))
    more = [f"{name} {degree}" for name, degree in degrees if degree > 1]
    if more and part_of(model) is None:
        raise PlanError(
            f"got a mesh of {', '.join(more)} and a whole model, expected one whose layers, tokens or blocks are split "
            "over these ranks: call hpczero.parallel.split, share_sequence or cut on it first (docs/parallel.md). For "
            "several jobs side by side, give each Topology.create(comm) of its own ranks"
        )


def check_part(model: nn.Module) -> None:
    """Refuse parameters that came to a part of a model, or changed shape, after it was made one.

    Nobody has said then which ranks hold them: norms would count them several times, and files not at all.

    Raises:
        PlanError: names the parameter.
    """
    part = part_of(model)
    if part is None:
        return
    # A further name of a tied parameter is known by the first name.
    known = {*part.names, *part.placements}
    for name, parameter in model.named_parameters():
        placement = part.placements.get(name)
        if name not in known:
            what = "which was put into the model after that, so that no rank knows who else has it"
        elif placement is not None and tuple(parameter.shape) != placement.local_shape:
            what = f"expected one of {placement.local_shape}, this rank's part"
        else:
            continue
        raise PlanError(
            f"parameter {name!r} of shape {tuple(parameter.shape)} in a model that was split or cut, {what}; add and "
            "replace parameters (adapters, heads) before hpczero.parallel.split and cut, and name them in the rule"
        )
