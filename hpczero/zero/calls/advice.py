"""Advice: what is legal and seldom meant, said once, on rank 0, with a remedy.

Nothing here changes a result. What is known to be wrong is refused elsewhere.
"""

from __future__ import annotations

import gc
import itertools
import logging
import sys
import zlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.hooks import RemovableHandle

from hpczero.job.topology import Topology
from hpczero.zero.calls.ways import current_task, untraced

logger = logging.getLogger("hpczero.advice")

WORDS = 2  # uint32 numbers that ranks compare at a step


class Advice:
    """Advice about one model. Not collective. The step compares ``words`` over ranks with what it compares anyway.

    Attributes:
        weighted: whether the program weights losses by numbers of samples, so that batches may differ in size.
    """

    weighted = False

    def __init__(self, model: nn.Module, topology: Topology, *, drawn_anew: bool = False) -> None:
        """Look at the memory of the parameters, before the units take it. Nothing is hooked yet.

        ``drawn_anew``: each forward has random numbers of its own, whatever the generators are at a step.
        """
        self._drawn_anew = drawn_anew
        self._model = model
        self._topology = topology
        self._samples = 0
        self._steps = 0
        self._told: set[str] = set()
        self._handle: RemovableHandle | None = None
        self._held_elsewhere = _held_elsewhere(model)
        if self._held_elsewhere:
            gc.collect()  # a release a moment ago may have left buffers that nothing refers to
            self._held_elsewhere = _held_elsewhere(model)

    def attach(self) -> None:
        """Say at once what can be seen of the model, and look at its calls from now on."""
        if self._held_elsewhere:
            self._tell(
                "the memory of %d parameter(s), first %r, is held by something else too (state_dict(), p.data, a NumPy "
                "view, a module tied by .data), taken before zeroify: it keeps the initial values for ever, and the "
                "memory. Take it after zeroify, inside `with hpczero.gathered(model):`",
                len(self._held_elsewhere),
                self._held_elsewhere[0],
            )
        if self._topology.data.size > 1:
            self._handle = self._model.register_forward_pre_hook(self._count, with_kwargs=True)
            self._look_for_statistics()

    def remove(self) -> None:
        """Remove the hook."""
        if self._handle is not None:
            self._handle.remove()

    def words(self) -> tuple[int, int]:
        """Samples of this rank since the last step. In the first step also the source of its random numbers."""
        generator = (
            zlib.crc32(str(torch.initial_seed()).encode())
            if not self._steps
            else self._topology.data.rank
        )
        return self._samples % 2**32, generator

    def compared(self, *, same_samples: bool, same_generator: bool, same_parts: bool) -> None:
        """Take the result of the comparison of ``words``. A step is about to be taken.

        Args:
            same_samples: on all ranks with this part of the model.
            same_generator: on these.
            same_parts: the same generator on all ranks with this copy of the model.
        """
        if not same_samples and not self.weighted:
            self._tell(
                "ranks have batches of different sizes (rank 0: %d samples since the last step). The gradient is the "
                "mean of the ranks' means, which is not that of the global batch: scale each rank's loss by "
                "local_samples * topology.size / global_samples, or give all ranks equal batches",
                self._samples,
            )
        if not self._steps and self._topology.data.size > 1 and _accelerate_processes() == 1:
            self._tell(
                "accelerate was set up for 1 process, and %d ranks train: each has all samples of a loader that it "
                "prepares, and its gather returns those of one rank. After zeroify make Accelerator(cpu=True), on GPUs "
                "Accelerator() with LOCAL_RANK set, and prepare loaders alone: docs/bridge.md",
                self._topology.data.size,
            )
        alike = same_generator and self._topology.data.size > 1
        alike = alike or (same_parts and self._topology.pipeline.size > 1)
        if alike and not self._steps and not self._drawn_anew and self._drops():
            self._tell(
                "all ranks draw the same random numbers (torch.initial_seed() is equal), so dropout drops the same "
                "elements on each; call torch.manual_seed(seed + 1 + topology.rank // topology.tensor.size) after "
                "zeroify"
            )
        self._samples = 0
        self._steps += 1

    def about_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Say that ``initialize``, which was given, fills no buffers."""
        held = [b for b in buffers if b.is_floating_point()]
        if held:
            self._tell(
                "initialize fills parameters only: %d persistent buffer(s) keep the values that the model was built "
                "with (running statistics); to load saved ones, copy them into the model before zeroify",
                len(held),
            )

    def about_layers(self, modules: Iterable[nn.Module]) -> None:
        """Say what becomes of LayerDrop in ``modules``, of transformers, where all ranks run all layers."""
        configs = {id(c): c for m in modules if (c := getattr(m, "config", None)) is not None}
        for config in configs.values():
            rates = {name: rate for name, rate in vars(config).items() if "layerdrop" in name}
            if any(rates.values()):
                self._tell(
                    "LayerDrop (%s): at stage 3 every rank runs every layer. wav2vec2 and its kin do so by themselves "
                    "and drop none, as with FSDP; set the rate of other models to 0, or use stage 2, which drops",
                    ", ".join(f"{name}={rate}" for name, rate in rates.items()),
                )

    def about_hooks(self) -> None:
        """Say that a forward hook of the user's sees tensors inside the model, in fp16."""
        self._tell(
            "a forward hook inside the model sees tensors whose gradient carries no loss scale: a loss made of them "
            "would count next to nothing in fp16. Return them from the model, or use bf16; hooks that look are fine"
        )

    def about_weights(self) -> None:
        """Say that a graph was made of the parameters themselves, inside ``gathered``, in fp16."""
        self._tell(
            "a graph made of parameters inside gathered carries no loss scale: a penalty made there would count next "
            "to nothing in fp16. Compute it in the model's forward and return it, or use bf16; what is only logged "
            "belongs under torch.no_grad()"
        )

    def about_optimizer_state(self) -> None:
        """Say what ``optimizer.state_dict()``, which was called, holds."""
        self._tell(
            "optimizer.state_dict() holds the shards of the rank that calls it, flat and without names, for this "
            "number of ranks and this stage; hpczero.checkpoint.save keeps the optimizer for any number of ranks"
        )

    def about_option(self, name: str, kind: str, group: int) -> None:
        """Say that a checkpoint leaves out an option of the optimizer."""
        self._tell(
            f"option {name!r} of group {group} of the optimizer is a {kind}, which a checkpoint does not hold: after a "
            "load it is what the program gives to its optimizer then"
        )

    def about_fresh_state(self, path: object) -> None:
        """Say that a model with an optimizer has loaded a checkpoint without optimizer state."""
        self._tell(
            f"{path}: holds no optimizer state (imported weights, or a model saved without its optimizer), so the "
            "optimizer keeps its own: at the start of a job it begins anew, with averages of zero and the learning "
            "rate that it was built with. Fine for imported weights; to go on with a run, load one of its checkpoints"
        )

    def _look_for_statistics(self) -> None:
        found = [
            name
            for name, module in self._model.named_modules()
            if isinstance(module, _NormBase) and module.running_mean is not None
        ]
        if found:
            self._tell(
                "%d module(s) with batch statistics, first %r: each rank normalises over its own batch, as under DDP, "
                "and keeps rank 0's running statistics; large batches on each rank, or GroupNorm, avoid both",
                len(found),
                found[0],
            )

    def _drops(self) -> bool:
        modules = (m for m in self._model.modules() if isinstance(m, _DropoutNd))
        return any(module.training and module.p > 0 for module in modules)

    @untraced
    def _count(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or current_task() is not None:
            return
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.dim():
                self._samples += len(value)
                return

    def _tell(self, message: str, *values: object) -> None:
        if message not in self._told:
            self._told.add(message)
            if self._topology.is_root:
                logger.warning(message, *values)


def _accelerate_processes() -> int | None:
    """For how many processes accelerate was set up; None where it was not."""
    state = getattr(sys.modules.get("accelerate.state"), "PartialState", None)
    return getattr(state, "_shared_state", {}).get("num_processes")


def _held_elsewhere(model: nn.Module) -> list[str]:
    """Trained parameters whose memory other objects than the model's own tensors hold."""
    held = [t for t in itertools.chain(model.parameters(), model.buffers()) if _has_memory(t)]
    bases = (t._base for t in held)  # of views: autograd keeps them
    tensors = {id(t): t for t in itertools.chain(held, bases) if t is not None}
    own = Counter(t.untyped_storage()._cdata for t in tensors.values())
    found = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and _has_memory(parameter):
            storage = parameter.untyped_storage()  # one holder more
            holders = torch._C._storage_Use_Count(storage._cdata)
            if holders > own[storage._cdata] + 1:
                found.append(name)
    return found


def _has_memory(tensor: Tensor) -> bool:
    known = isinstance(tensor, nn.Parameter) or type(tensor) is Tensor
    return known and tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0
