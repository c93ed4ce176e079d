"""HpczeroStrategy: Lightning Fabric over MPI, with models, gradients and optimizer state in shards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning_fabric.plugins.precision import Precision
from lightning_fabric.strategies.strategy import Strategy
from torch import Tensor, nn
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

import hpczero
from hpczero.accelerator.choice import choose_accelerator
from hpczero.checkpoint.disk.folder import Folder, is_checkpoint, read_manifest
from hpczero.checkpoint.disk.json_keys import extra_of
from hpczero.checkpoint.disk.lines import step_of
from hpczero.errors import ConfigError, HpcZeroError, StepError
from hpczero.job.messages import ChunkedExchange
from hpczero.job.topology import Topology

KEY = "fabric"  # in ``extra``


def _save(path: Path, state: dict[str, Any], exchange: ChunkedExchange) -> None:
    """As ``HpczeroStrategy.save_checkpoint``. Collective over the world."""
    model = _model_in(state, exchange)
    values = {name: _state_of(each) for name, each in state.items() if not _is_models(each)}
    held = [name for name, each in state.items() if _is_models(each)]
    before = exchange.of_root(_newest_step(path), "look for the checkpoint before")
    step = state.get("step", 0)
    step = step if type(step) is int and step > 0 else 0
    hpczero.checkpoint.save(
        path,
        model,
        # A step that begins anew is no way back: what was before goes, and is not set aside.
        step=step if step >= before else before + 1,
        extra={KEY: {"held": held, "values": values}},
        keep=1,
    )


def _load(path: Path, state: Any, exchange: ChunkedExchange, *, strict: bool) -> dict[str, Any]:
    """As ``HpczeroStrategy.load_checkpoint``; nothing is changed where a name is missing. Collective over the world."""
    model = _model_in(state, exchange)
    if strict:
        _check_names(path, state, exchange.of_root(_written(path), "look at its names"))
    found = hpczero.checkpoint.load(path, model).extra.get(KEY)
    if not isinstance(found, dict):
        raise ConfigError(
            f"{path}: was not saved by fabric.save; load it with hpczero.checkpoint.load(path, model)"
        )
    values: dict[str, Any] = dict(found["values"])
    if strict:
        _check_names(path, state, [*found["held"], *values])
    for name, each in list(state.items()):
        if _is_models(each) or name not in values:
            continue
        value = values.pop(name)
        if _is_stateful(each):
            each.load_state_dict(value)
        elif isinstance(each, torch.Generator):
            each.set_state(value)
        else:
            state[name] = value
    return values


def _newest_step(path: Path) -> int:
    """Of what is in the folder; 0 where nothing is. Not collective."""
    with suppress(HpcZeroError):
        return max((step_of(each.name) or 0 for each in Folder(path).candidates()), default=0)
    return 0  # the save says what is wrong


def _written(path: Path) -> list[str] | None:
    """Names of what the newest checkpoint has; None where only a load can tell. Not collective."""
    with suppress(HpcZeroError):
        manifest = (
            read_manifest(path)
            if is_checkpoint(path)
            else next((manifest for _, manifest in Folder(path).valid()), None)
        )
        found = extra_of(manifest.meta).get(KEY) if manifest else None
        if isinstance(found, dict):
            return [*found["held"], *found["values"]]
    return None


def _check_names(path: Path, state: Any, written: list[str] | None) -> None:
    missing = [name for name in state if written is not None and name not in written]
    if missing and written is not None:
        raise KeyError(
            f"{path}: holds no {missing[0]!r}, but {', '.join(written)}; pass strict=False"
        )


def _model_in(state: Any, exchange: ChunkedExchange) -> nn.Module:
    """The model among the entries. Raises ConfigError on every rank: there is none, several, or a foreign optimizer."""
    with exchange.topology.agreed("look at what is in the checkpoint"):
        entries = state if isinstance(state, dict) else {}
        models = {name: each for name, each in entries.items() if isinstance(each, nn.Module)}
        if len(models) != 1:
            raise ConfigError(
                f"state: got {len(models)} model(s) ({', '.join(models) or type(state).__name__}), expected one "
                "that fabric.setup returned: {'model': model, 'optimizer': optimizer, ...}"
            )
        model = next(iter(models.values()))
        own = list(hpczero.sharding(model).optimizers)
        for name, each in entries.items():
            if isinstance(each, Optimizer) and all(each is not known for known in own):
                raise ConfigError(
                    f"state: {name!r} is an optimizer of another model than {next(iter(models))!r}; save each "
                    "model to a path of its own"
                )
    return model


def _is_models(each: Any) -> bool:
    """Whether it is part of the model's own checkpoint."""
    return isinstance(each, nn.Module | Optimizer)


def _state_of(each: Any) -> Any:
    if isinstance(each, torch.Generator):
        return each.get_state()
    return each.state_dict() if _is_stateful(each) else each


def _is_stateful(each: Any) -> bool:
    return callable(getattr(each, "state_dict", None)) and callable(
        getattr(each, "load_state_dict", None)
    )


_ClusterEnvironment: Any = ClusterEnvironment  # its annotations are not strict


class _MpiRanks(_ClusterEnvironment):  # type: ignore[misc]
    """Ranks of a topology. Not collective."""

    creates_processes_externally = True

    def __init__(self, topology: Topology) -> None:
        super().__init__()
        self._topology = topology

    @property
    def main_address(self) -> str:
        raise ConfigError("main_address: ranks meet by MPI; leave torch.distributed out")

    @property
    def main_port(self) -> int:
        raise ConfigError("main_port: ranks meet by MPI; leave torch.distributed out")

    @staticmethod
    def detect() -> bool:
        return False  # Fabric does not choose it by itself: a strategy brings it

    def world_size(self) -> int:
        return self._topology.size

    def global_rank(self) -> int:
        return self._topology.rank

    def local_rank(self) -> int:
        return self._topology.local_rank

    def node_rank(self) -> int:
        return self._topology.node_index

    def set_world_size(self, size: int) -> None:
        """Nothing: it is MPI's."""

    def set_global_rank(self, rank: int) -> None:
        """Nothing: it is MPI's."""


PRECISIONS = {"32-true": "fp32", "bf16-mixed": "bf16"}
REDUCTIONS = {"mean": "mean", "avg": "mean", "sum": "sum", "max": "max"}

_Strategy: Any = Strategy  # its annotations are not strict


class _BackwardSync:
    """What Fabric asks for ``no_backward_sync``."""

    def no_backward_sync(
        self, module: nn.Module, enabled: bool = True
    ) -> AbstractContextManager[None]:
        return hpczero.no_sync(module) if enabled else nullcontext()


class HpczeroStrategy(_Strategy):  # type: ignore[misc]
    """Give it to ``Fabric(strategy=HpczeroStrategy(stage=3), devices=1)``, then ``fabric.launch()``.

    The ranks are those of MPI; ``devices`` is what one of them uses. ``fabric.setup(model, optimizer)`` shards both.
    """

    def __init__(
        self, topology: Topology | None = None, *, device: str = "auto", **sharding: Any
    ) -> None:
        """Collective over MPI's world where no topology is given.

        Args:
            topology: the ranks; None takes MPI's world.
            device: ``cpu``, ``cuda``, or ``auto``: cuda where torch sees a device.
            sharding: keywords of ``hpczero.zeroify``, but for precision, which is Fabric's.

        Raises:
            ConfigError: ``sharding`` has a precision, or ranks of the topology share samples.
            TopologyError: the launcher has started several ranks, and MPI sees one.
        """
        super().__init__()
        if "precision" in sharding:
            raise ConfigError("precision: give it to Fabric: Fabric(precision='bf16-mixed', ...)")
        self._device = choose_accelerator(device).device
        self.topology = topology or Topology.of_world()
        if self.topology.data.size != self.topology.size:
            raise ConfigError(
                f"topology: {self.topology.data.size} of {self.topology.size} ranks train on samples of their own, "
                "expected all; leave tensor, sequence and pipeline degrees out of the mesh"
            )
        self.cluster_environment = _MpiRanks(self.topology)
        self._exchange = ChunkedExchange(self.topology)
        self._sharding = sharding
        self._dtype = "fp32"
        self._backward_sync_control = _BackwardSync()

    # --- who is who; not collective

    root_device = property(lambda self: self._device)
    is_global_zero = property(lambda self: self.topology.is_root)
    global_rank = property(lambda self: self.topology.rank)
    local_rank = property(lambda self: self.topology.local_rank)
    node_rank = property(lambda self: self.topology.node_index)
    world_size = property(lambda self: self.topology.size)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """By which Fabric gives each rank its own samples."""
        return {"num_replicas": self.topology.size, "rank": self.topology.rank}

    @property
    def precision(self) -> Precision:
        """fp32 for Fabric: ``zeroify`` casts, where Fabric would autocast."""
        return Precision()

    @precision.setter
    def precision(self, precision: Precision | None) -> None:
        name = "32-true" if precision is None else str(precision.precision)
        if name not in PRECISIONS:
            raise ConfigError(
                f"precision: got {name!r}, expected one of {', '.join(PRECISIONS)}: masters are fp32, and hpczero casts"
            )
        self._dtype = PRECISIONS[name]

    # --- training

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Shard a model and its optimizers. Collective over the world; errors are those of ``zeroify``."""
        self._zeroify(module, optimizers)
        return module, optimizers, scheduler

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard a model that is not trained; its parameters are frozen. Collective over the world."""
        return self._zeroify(module, [])

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Refused: raises ConfigError."""
        raise ConfigError(
            f"setup_optimizers: got {type(optimizer).__name__} alone; model and optimizer are sharded together: "
            "fabric.setup(model, optimizer)"
        )

    def _zeroify(self, module: nn.Module, optimizers: Sequence[Optimizer]) -> nn.Module:
        given = {"device": None if self._device.type == "cpu" else "cuda", **self._sharding}
        given |= {"topology": self.topology, "precision": self._dtype}
        return hpczero.zeroify(module, optimizers or None, **given)

    def module_to_device(self, module: nn.Module) -> None:
        """Nothing: ``zeroify`` moves the model."""

    def module_init_context(self, empty_init: bool | None = None) -> AbstractContextManager[Any]:
        """On the meta device where first values come from ``initialize``; else on the CPU."""
        return torch.device("meta" if "initialize" in self._sharding else "cpu")

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """The norm over the parameters of ``optimizer``, before they are clipped. Collective over the world.

        Raises:
            StepError: the norm is infinite or no number; on every rank.
            ConfigError: ``optimizer`` was not set up with ``module``.
        """
        parameters = _parameters_of(module, optimizer)
        of_part = len(hpczero.sharding(module).optimizers) > 1
        if of_part:
            grads = [p.grad for p in parameters if p.grad is not None]
            norm = get_total_norm(grads, float(norm_type))
        else:
            value = hpczero.clip_grad_norm_(module, float(max_norm), float(norm_type))
            norm = torch.tensor(value, dtype=torch.float32, device="cpu")
        if error_if_nonfinite and not norm.isfinite():
            raise StepError(
                f"clip_gradients: the norm of the gradients is {norm.item()}, expected a number; look for the loss "
                "that is none, or pass error_if_nonfinite=False"
            ).on_all_ranks()
        if of_part:
            clip_grads_with_norm_(parameters, float(max_norm), norm)
        return norm

    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float
    ) -> None:
        """Bring each element of the gradients of ``optimizer`` into -clip_val to clip_val. Not collective.

        Raises ConfigError where ``optimizer`` was not set up with ``module``.
        """
        clip_grad_value_(_parameters_of(module, optimizer), float(clip_val))

    # --- what ranks exchange; collective over the world

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """``tensor`` of every rank: (ranks, ...); of one rank alone as it is.

        Raises:
            ConfigError: with a group of some ranks, or with gradients.
            CommError: shapes differ between ranks.
        """
        self._check_group(group)
        if sync_grads:
            raise ConfigError(
                "all_gather: sync_grads is not there; gather values, or average the loss"
            )
        if self.topology.size == 1:
            return tensor
        return self._exchange.joined(tensor[None], "all_gather")

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """The mean, sum or maximum over ranks, in place where it is a tensor of that dtype.

        Raises:
            ConfigError: with a group of some ranks, or for another operation.
        """
        self._check_group(group)
        if not isinstance(tensor, Tensor):
            return tensor
        name = str(reduce_op).rpartition(".")[2].lower()
        if name not in REDUCTIONS:
            raise ConfigError(
                f"all_reduce: got {reduce_op!r}, expected one of {', '.join(REDUCTIONS)}"
            )
        found = self._exchange.reduced(tensor, REDUCTIONS[name], "all_reduce")
        if found.dtype != tensor.dtype or tensor.requires_grad:
            return found
        return tensor.copy_(found)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """``obj`` of rank ``src``; it can be pickled."""
        return self._exchange.of_rank(obj, src, f"broadcast from rank {src}")

    def barrier(self, name: str | None = None) -> None:
        """Wait for every rank."""
        self.topology.barrier()

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all ranks, or any, are of that mind."""
        votes = self._exchange.objects(bool(decision), "reduce_boolean_decision")
        return bool(min(votes) if all else max(votes))

    @staticmethod
    def _check_group(group: Any) -> None:
        # Fabric itself gives the group of all ranks where torch.distributed has one.
        if group is not None and group is not torch.distributed.group.WORLD:
            raise ConfigError(
                f"group: got {type(group).__name__} of torch.distributed, expected none, or that of all ranks"
            )

    # --- checkpoints; collective over the world

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Write ``path/step-...``: a whole checkpoint of hpczero's, or none. Other entries of ``state`` go with it.

        Args:
            path: a folder; its earlier checkpoint is replaced.
            state: one model that was set up, its optimizers, and numbers, texts, small tensors, lists, dictionaries,
                generators of torch, or objects with ``state_dict`` made of these; equal on all ranks. ``step`` names
                the checkpoint; 0 without.
            storage_options: must be None.
            filter: must be None.

        Raises:
            ConfigError: no model, several, or what a checkpoint cannot hold; on every rank.
            CheckpointError: as of ``hpczero.checkpoint.save``.
        """
        if storage_options is not None or filter:
            raise ConfigError(
                "save: storage_options and filter are not there: a checkpoint holds the whole model; export parts of "
                "it with python -m hpczero.checkpoint export"
            )
        _save(Path(path), state, self._exchange)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Restore what ``save_checkpoint`` was given, at any number of ranks and stage.

        Args:
            path: what was given there.
            state: as there; values are put into it. A model alone takes weights of another program from ``path``.
            strict: whether everything in ``state`` must be in the checkpoint.
            weights_only: nothing here is ever executed, whatever it is.

        Returns:
            What is in the checkpoint and not in ``state``.

        Raises:
            ConfigError: there is no checkpoint, or ``state`` has no model.
            KeyError: ``state`` has what the checkpoint has not; on every rank.
            CheckpointError: as of ``hpczero.checkpoint.load``.
        """
        if isinstance(state, nn.Module):
            hpczero.checkpoint.import_weights(path, state)
            return {}
        return _load(Path(path), state, self._exchange, strict=strict)


def _parameters_of(module: nn.Module, optimizer: Optimizer) -> list[nn.Parameter]:
    """The model's parameters that ``optimizer`` steps on; its own groups have pieces of them."""
    for stepper in hpczero.sharding(module).step.steppers:
        if stepper.optimizer is optimizer:
            return [unit.parameters[place] for unit, own in stepper.slots.items() for place in own]
    raise ConfigError(
        f"clip_gradients: got a {type(optimizer).__name__} that {type(module).__name__} is not trained with, expected "
        "one that fabric.setup(model, ...) returned"
    )
