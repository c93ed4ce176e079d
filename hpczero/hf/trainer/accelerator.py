"""MpiAccelerator: accelerate's ``Accelerator`` whose ranks exchange over MPI, and whose models are in shards.

accelerate itself is told that nothing is distributed (arguments.py): its own gathers would return their input, its
clipping would find no gradients. Each call that would then be wrong is therefore here.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.optim import Optimizer

import hpczero
from hpczero.errors import ConfigError, PlanError
from hpczero.zero.sharding import KEY as ZEROIFIED

if TYPE_CHECKING:
    from hpczero.hf.trainer.arguments import HpczeroTrainingArguments
    from hpczero.job.messages import ChunkedExchange


class MpiAccelerator(Accelerator):  # type: ignore[misc]  # accelerate has no types
    """What ``Trainer`` and its users call; made of the accelerator that ``Trainer`` has made.

    Attributes:
        exchange: of the ranks.
        zeroify: shards a model and its optimizer.
    """

    exchange: ChunkedExchange
    zeroify: Callable[[nn.Module, Optimizer], nn.Module]

    @classmethod
    def adopt(
        cls,
        accelerator: Any,
        args: HpczeroTrainingArguments,
        exchange: ChunkedExchange,
        zeroify: Callable[[nn.Module, Optimizer], nn.Module],
    ) -> None:
        """Make ``accelerator``, an ``Accelerator``, one of this class. Not collective.

        Raises ConfigError where it would compile, autocast or distribute by itself.
        """
        backend = str(getattr(accelerator.state.dynamo_plugin.backend, "value", "NO"))
        if backend.upper() != "NO":
            raise ConfigError(
                f"torch.compile: accelerate was told to use {backend} (ACCELERATE_DYNAMO_BACKEND), and a model in "
                "shards is not compiled; unset that variable"
            )
        if str(accelerator.distributed_type.value) != "NO":
            raise ConfigError(
                f"accelerate distributes by {accelerator.distributed_type.value} (an ACCELERATE_USE_... variable); "
                "unset it: hpczero distributes"
            )
        accelerator.__class__ = cls
        accelerator.args, accelerator.exchange, accelerator.zeroify = args, exchange, zeroify

    # --- what is trained

    def prepare(self, *args: Any, **options: Any) -> Any:
        """As accelerate's; a model and its optimizer are sharded, which is collective over the world.

        Raises:
            ConfigError: a model comes without its one optimizer, or something has reset accelerate's state.
            PlanError: as of ``zeroify``.
        """
        self.args.check_state()
        models = [each for each in args if isinstance(each, nn.Module)]
        if not models:
            return super().prepare(*args, **options)
        if len(args) != 2 or len(models) != 1 or not isinstance(args[1], Optimizer):
            raise ConfigError(
                f"accelerator.prepare: got {', '.join(type(each).__name__ for each in args)}, expected a model and its "
                "optimizer, in this order"
            )
        model, plain = args
        while isinstance(plain, AcceleratedOptimizer):  # of a train() before this one
            plain = plain.optimizer
        if not is_sharded(model):
            self.zeroify(model, plain)
        elif all(each is not plain for each in hpczero.sharding(model).optimizers):
            raise PlanError(
                f"{type(plain).__name__}: is another optimizer than the one that {type(model).__name__} is trained "
                "with; keep trainer.optimizer for a second train(), or call hpczero.release(model, whole=True) first"
            )
        self._models.append(model)
        # Its own round trip through state_dict would make new groups, which the sharding does not know.
        return model, self.prepare_optimizer(plain, device_placement=False)

    def prepare_model(self, model: nn.Module, *args: Any, **options: Any) -> nn.Module:
        """As accelerate's; a model in shards is returned as it is.

        Raises:
            ConfigError: the model is not in shards yet, and has no values, or others than on rank 0; on every rank.
        """
        if is_sharded(model):
            self._models.append(model)
            return model
        if any(parameter.is_meta for parameter in model.parameters()):
            raise ConfigError(
                f"{type(model).__name__}: has parameters on the meta device, which have no values before training; "
                "train first, or build the model on the CPU"
            )
        digest = 0
        for value in model.state_dict().values():
            if isinstance(value, Tensor):
                data = value.detach().cpu().reshape(-1).contiguous()
                digest = zlib.crc32(data.view(torch.uint8).numpy().data, digest)
        found = self.exchange.objects(digest, "compare the weights")
        if len(set(found)) > 1:
            odd = next(rank for rank, other in enumerate(found) if other != found[0])
            raise ConfigError(
                f"{type(model).__name__}: rank {odd} has other weights than rank 0, and each evaluates with its own; "
                "build the model from the same seed or files on all ranks, or train first: rank 0's are given to all"
            ).on_all_ranks()
        prepared: nn.Module = super().prepare_model(model, *args, **options)
        return prepared

    def prepare_data_loader(self, *args: Any, **options: Any) -> Any:
        """As accelerate's, once its state is seen to be that of MPI."""
        self.args.check_state()
        return super().prepare_data_loader(*args, **options)

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """``hpczero.no_sync``. Not collective."""
        return hpczero.no_sync(model)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """The norm over ``parameters`` of a prepared model, before they are clipped. Collective over the world."""
        model = self._models[-1]
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        held = {id(each) for each in given}
        if all(id(each) in held for each in model.parameters() if each.requires_grad):
            return torch.tensor(
                hpczero.clip_grad_norm_(model, float(max_norm), float(norm_type)),
                dtype=torch.float32,
                device="cpu",
            )
        return torch.nn.utils.clip_grad_norm_(given, float(max_norm), float(norm_type))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """As accelerate's: each element of the gradients of ``parameters``. Not collective."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """Whole fp32 weights on rank 0, None elsewhere. Collective over the world."""
        return hpczero.full_state_dict(model) if is_sharded(model) else model.state_dict()

    def save_state(self, *args: Any, **options: Any) -> None:
        """Refused: raises ConfigError."""
        raise ConfigError(
            "accelerator.save_state: writes each rank's own part; use trainer checkpoints, or hpczero.checkpoint.save"
        )

    def load_state(self, *args: Any, **options: Any) -> None:
        """Refused: raises ConfigError."""
        raise ConfigError(
            "accelerator.load_state: use resume_from_checkpoint, or hpczero.checkpoint.load"
        )

    # --- what ranks exchange; collective over the world

    def gather(self, tensor: Any) -> Any:
        """Each tensor of all ranks in rank order along the first dimension; numbers become a vector."""
        return self._each(lambda each: self.exchange.joined(each, "gather"), tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As ``gather``, without the samples that fill up the last batch. Objects become one list."""
        if use_gather_object or not _are_tensors(input_data):
            found = self.exchange.objects(input_data, "gather_for_metrics")
            data: Any = [item for each in found for item in each]
            return data[: self._true_length(len(data))]
        return self._each(
            lambda each: each[: self._true_length(len(each))], self.gather(input_data)
        )

    def _true_length(self, length: int) -> int:
        """Of so many samples gathered from the present batch, those that are not repeated."""
        left = self.gradient_state.remainder if self.gradient_state.end_of_dataloader else 0
        return left if left > 0 else length

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Sum, mean or maximum of each tensor over ranks; ``none`` returns them as they are."""
        if reduction == "none":
            return tensor
        if reduction not in ("sum", "mean", "max"):
            raise ConfigError(f"reduce: got {reduction!r}, expected sum, mean, max or none")
        return self._each(lambda each: self.exchange.reduced(each, reduction, "reduce"), tensor)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: Any = 0, pad_first: bool = False
    ) -> Any:
        """Each tensor made as long in ``dim`` as the longest of any rank's."""
        what = "pad_across_processes"
        return self._each(
            lambda each: self.exchange.padded(each, dim, pad_index, first=pad_first, what=what),
            tensor,
        )

    def wait_for_everyone(self) -> None:
        """Wait for every rank."""
        self.exchange.topology.barrier()

    def main_process_first(self) -> Any:
        """Rank 0 runs the block before the others."""
        return self.args.main_process_first(local=False)

    def local_main_process_first(self) -> Any:
        """The first rank of each node runs the block before the others."""
        return self.args.main_process_first(local=True)

    @staticmethod
    def _each(act: Callable[[Tensor], Tensor], data: Any) -> Any:
        return recursively_apply(act, data, error_on_other_type=True)


def is_sharded(model: nn.Module) -> bool:
    """Whether ``zeroify`` was called on it."""
    return ZEROIFIED in model.__dict__


def _are_tensors(data: Any) -> bool:
    try:
        recursively_apply(lambda each: each, data, error_on_other_type=True)
    except TypeError:
        return False
    return True
