"""Checkpointing: calls of blocks that are computed again in backward, whose inputs rest elsewhere meanwhile.

    y = checkpointing(block, x)      is    y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)

torch keeps the inputs of such a call through the hooks on saved tensors that are in force around it. What the block
itself saves goes through torch's own hooks, which are inside. So hooks around the call see inputs and nothing else, and
torch does all the rest: random streams, autocast, early stops, retained graphs, derivatives of derivatives.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from typing_extensions import Self

from hpczero.accelerator import Accelerator, HostAccelerator, choose_accelerator
from hpczero.activations.store import (
    DeviceInputs,
    InputStorage,
    KeptInput,
    Partitioned,
    TierInputs,
    changed,
    version_of,
)
from hpczero.comm.awareness import reach_of
from hpczero.comm.collectives import Flat
from hpczero.errors import PlanError, TierError
from hpczero.files.regular import Closing
from hpczero.job.group import Group, unlike
from hpczero.plan.offload import LEAST_NBYTES, MIB, Activations, Medium
from hpczero.tier import DiskTier, Flow, HostTier, Tier
from hpczero.zero.calls.ways import untraced
from hpczero.zero.sharding import KEY
from hpczero.zero.zeroify import sharding

# Policies: what selective recomputation keeps beside the inputs of blocks.
#
# Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198, sec. 5;
# the choice of operations is that of torch's own examples.

# bmm is not among them: where attention is computed in parts, it gives scores, the largest tensors of a block.
_PRODUCTS = ("mm", "addmm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
KEPT = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (*_PRODUCTS, *_ATTENTION)
    if hasattr(torch.ops.aten, name)
)


def keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what linear layers and attention give; compute norms, activation functions, dropout and sums again.

    A policy of ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.
    """
    kept = operation in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


# Arguments: which arguments of a block's call rest elsewhere until backward, and the call as a function of them.
#
# [Note: What moves]
# Tensors of floating-point numbers among the positional arguments, from a page on. Everything else stays as torch keeps
# it: parameters and other leaves, which the program holds in any case; keyword arguments and containers, which torch
# looks at again when it computes again; integers.


def agreed_moving(
    rest: InputStorage, block: object, args: Sequence[Any], device: torch.device, place: str
) -> list[int]:
    """As ``moving``, the same on all ranks that keep inputs together; collective over them."""
    try:
        places = moving(block, args, device, place)
    except PlanError as error:
        rest.begin(str(error))
        raise
    parts = [f"argument {at}: {list(args[at].shape)} {args[at].dtype}" for at in places]
    rest.begin("; ".join(parts) or "nothing")
    return places


def moving(block: object, args: Sequence[Any], device: torch.device, place: str) -> list[int]:
    """Positions among ``args`` of what moves; see [Note: What moves]. ``place``: where inputs rest, for messages.

    Raises:
        PlanError: none can move, so nothing would be saved.
    """
    numbers = [at for at, value in enumerate(args) if _is_plain(value)]
    if not numbers:
        raise PlanError(
            f"activations: none of the {len(args)} positional arguments of a checkpointed "
            f"{type(block).__name__} is a tensor of floating-point numbers, so none can rest {place}, "
            "and nothing is saved; pass activations as arguments of their own, not in containers or by keyword, or "
            "call this block by torch's checkpoint"
        )
    here = [at for at in numbers if args[at].device == device]
    if not here:
        raise PlanError(
            f"activations: inputs of a checkpointed {type(block).__name__} are on {args[numbers[0]].device}, "
            f"expected {device}; make the Checkpointing with device= of the model"
        )
    return [
        at
        for at in here
        if args[at].nbytes >= LEAST_NBYTES and not (args[at].is_leaf and args[at].requires_grad)
    ]


class BlockCall:
    """A call of a block as a function of the tensors that move; called in forward, and again in backward."""

    def __init__(
        self,
        block: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        places: Sequence[int],
        order: Sequence[int],
        inside: threading.local,
    ) -> None:
        """Holds none of what moves.

        Args:
            block: to be called.
            args: all of them.
            kwargs: all of them.
            places: positions among ``args`` of what moves.
            order: ids of what moves, each once, as it is passed to the call.
            inside: counts the calls under way on this thread.
        """
        self._block, self._kwargs, self._inside = block, kwargs, inside
        self._moving = {at: order.index(id(args[at])) for at in places}
        self._args = [None if at in self._moving else value for at, value in enumerate(args)]
        # torch looks whether tensors among the arguments have changed; these do not go through its hands.
        self._versions = [
            (value, version_of(value)) for value in self._args if isinstance(value, Tensor)
        ]
        self._called = False

    def __call__(self, *tensors: Tensor) -> Any:
        """The block's output, with ``tensors`` where they belong, in the order that was given."""
        if self._called:
            for tensor, version in self._versions:
                if (error := changed(tensor, version)) is not None:
                    raise error
        self._called = True
        args = list(self._args)
        for at, index in self._moving.items():
            args[at] = tensors[index]
        del tensors
        self._inside.depth = int(getattr(self._inside, "depth", 0)) + 1
        try:
            return self._block(*args, **self._kwargs)
        finally:
            self._inside.depth -= 1


def _is_plain(value: object) -> bool:
    """Whether it is a tensor whose bytes say all there is to it."""
    if type(value) is not Tensor or not value.is_floating_point():
        return False
    return value.layout is torch.strided and not value.is_neg() and value.device.type != "meta"


logger = logging.getLogger("hpczero.activations")

Policy = Callable[..., Any] | list[Any]


class Checkpointing(Closing):
    """Calls blocks so that only their inputs are kept for backward. One object serves all blocks of a model."""

    def __init__(
        self,
        rest: InputStorage | None = None,
        *,
        policy: Policy | None = None,
        accelerator: Accelerator | None = None,
        description: str = "on the device",
    ) -> None:
        """Over a rest of your own; ``create`` makes one. Not collective.

        Args:
            rest: where inputs lie; None leaves them to torch, on the device.
            policy: of selective recomputation, as ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` takes
                it; None computes everything again.
            accelerator: of the device that computes; None: the host.
            description: of ``rest``, for a run header.
        """
        self._rest, self._description = rest, description
        self._device = (accelerator or HostAccelerator()).device
        self._policy = policy
        self._calls = itertools.count()
        self._inside = threading.local()
        self._joined: Callable[[], bool] = lambda: False
        self._failure: TierError | None = None

    @classmethod
    def create(
        cls,
        rest: Medium = "device",
        *,
        folder: str | Path | None = None,
        group: Group | None = None,
        policy: Policy | None = None,
        device: str | Accelerator | None = None,
        window: int = 32 * MIB,
        buffers: int = 4,
        tier: Tier | None = None,
    ) -> Self:
        """Open what is needed to keep inputs at ``rest``. Collective over ``group``, where one is given.

        Args:
            rest: ``device``; ``host``, memory of the host beside a device; ``disk``.
            folder: for ``disk``: one on a disk of this node.
            group: ranks that compute each block together, with equal inputs; each keeps a part.
            policy: see the class.
            device: that computes: "cpu", "cuda", or an Accelerator; None: the CPU.
            window: most bytes of one block of staging.
            buffers: blocks of staging: ``buffers`` - 2 are read ahead.
            tier: one of your own in the place of host or disk, which ``close`` closes.

        Raises:
            PlanError: what is asked for does not go together, or saves nothing.
            TierError, ConfigError, OutOfMemory: the tier cannot be had.
        """
        accelerator = (
            device if isinstance(device, Accelerator) else choose_accelerator(device or "cpu")
        )
        asked = Activations("block", rest, folder, window, buffers)
        if tier is None:
            asked.check(on_host=accelerator.is_host)
        elif rest == "device":
            raise PlanError(
                "activations: got a tier and inputs on the device, expected host or disk"
            )
        if group is not None and group.size == 1:
            raise PlanError(
                "activations: got a group of one rank to keep a part of each input, which is all of it, so nothing "
                "would be saved; leave the group out"
            )
        inner: InputStorage | None = None
        words = "on the device"
        if asked.away:
            tier = tier or _opened(asked, accelerator)
            words = f"{tier.describe()}, {buffers} blocks of {window:,} bytes"
            inner = TierInputs(tier, blocks=buffers, block_nbytes=window, device=accelerator.device)
        if group is not None:
            collectives = Flat(group, reach=reach_of(accelerator, group))
            inner = Partitioned(inner or DeviceInputs(), collectives, fails=asked.away)
            words = f"a part of each on {group.size} ranks, {words}"
        return cls(inner, policy=policy, accelerator=accelerator, description=words)

    @untraced
    def __call__(self, block: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """``block(*args, **kwargs)``, of which backward computes again what it needs.

        Args:
            block: a module, or any function of its arguments.
            args: its inputs; see arguments.py, [Note: What moves].
            kwargs: as they are.

        Raises:
            PlanError: none of the inputs can move: this would save nothing.
            StepError: inputs differ between the ranks of the group; on all of them.
        """
        if not torch.is_grad_enabled():
            return block(*args, **kwargs)
        nested = bool(getattr(self._inside, "depth", False))
        if self._rest is None or nested:
            # Inside of a block, inputs are themselves computed again, and wait for a moment only.
            return self._checkpoint(partial(block, **kwargs), *args)
        places = agreed_moving(self._rest, block, args, self._device, self._description)
        if not places:
            return self._checkpoint(partial(block, **kwargs), *args)
        tensors = {id(args[at]): args[at] for at in places}
        call = BlockCall(block, args, kwargs, places, list(tensors), self._inside)
        waiting = deque(tensors.values())
        given = tuple(waiting)
        del args, tensors  # whatever holds them would keep their memory
        pack = partial(_pack, self._rest, waiting, next(self._calls))
        with saved_tensors_hooks(pack, self._unpack):
            return self._checkpoint(call, *given)

    def _checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._policy is None:
            return checkpoint(function, *args, use_reentrant=False)
        contexts = partial(create_selective_checkpoint_contexts, self._policy)
        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)

    def _unpack(self, kept: Any) -> Tensor:
        if not isinstance(kept, KeptInput):
            found: Tensor = kept
            return found
        assert self._rest is not None, "it has kept this"
        try:
            return self._rest.bring(kept)
        except TierError as error:
            if not self._joined():
                raise
            # Peers wait in collectives of this backward, so nobody can raise here: the step tells all of them.
            self._failure = self._failure or error
            logger.error("input of a checkpointed block: %s", error)
            return kept.form.lost(self._device)

    # --- the model it works in

    def join(self, model: nn.Module) -> None:
        """Have ``optimizer.step()`` of a zeroified model tell all ranks of a tier that fails.

        Collective over the model's world. Without it, an input that cannot be brought back is an error of
        backward, on its own rank alone.

        Raises:
            PlanError: the model was not zeroified, or ranks keep inputs in different ways.
        """
        joined = sharding(model)
        differs = unlike(joined.topology.world, [self._shape()])
        with joined.topology.agreed("agree on where inputs of blocks rest"):
            if differs:
                raise PlanError(
                    f"activations: rank {joined.topology.rank} keeps inputs of blocks {differs[0]}, where rank 0 keeps "
                    f"them {differs[1]}; give every rank the same options"
                )
        joined.attachment.also(self._check)
        behind, of = weakref.ref(joined), weakref.ref(model)

        def lives() -> bool:
            now, owner = behind(), of()
            return now is not None and owner is not None and owner.__dict__.get(KEY) is now

        self._joined = lives

    def _shape(self) -> str:
        rest = self._rest
        kinds = [type(rest).__name__]
        if isinstance(rest, Partitioned):
            kinds.append(type(rest.inner).__name__)
        return " over ".join(kinds) + (" selectively" if self._policy is not None else "")

    def _check(self) -> None:
        """Before a step: tell what was lost, once.

        Raises:
            TierError: an input could not be brought back, so gradients are not numbers.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise TierError(
                f"the input of a checkpointed block could not be brought back, so this step has no gradients: {failure}"
            ) from failure

    # --- accounts

    def describe(self) -> str:
        """Where inputs rest, in a few words, for a run header."""
        return self._description

    @property
    def kept_nbytes(self) -> int:
        """Bytes of inputs that are held on the device now, where they do not rest with torch; staging left out."""
        if self._rest is None:
            return 0
        self._rest.collect()
        return self._rest.memory.total

    @property
    def kept_peak_nbytes(self) -> int:
        """The most of ``kept_nbytes`` so far."""
        return 0 if self._rest is None else sum(self._rest.memory.peak.values())

    @property
    def staging_nbytes(self) -> int:
        """Bytes of memory through which inputs pass; the same however many there are."""
        tier = self._tier
        return 0 if tier is None else tier.staging_nbytes

    @property
    def traffic(self) -> Flow:
        """What went through the tier so far; nothing where there is none."""
        tier = self._tier
        return Flow() if tier is None else tier.traffic.total

    @property
    def _tier(self) -> Tier | None:
        rest = self._rest.inner if isinstance(self._rest, Partitioned) else self._rest
        return rest.tier if isinstance(rest, TierInputs) else None

    # --- ends

    def close(self) -> None:
        """Give staging and the tier back; a graph that still needs them raises. Collective over the group, if any."""
        if self._rest is not None:
            self._rest.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """This one: a copy of a model that holds it, as averaged weights are, calls its blocks by the same one."""
        return self

    def __reduce__(self) -> NoReturn:
        raise PlanError(
            "activations: a Checkpointing has a place on this node and cannot be pickled; leave it out of what is saved"
        )


def _pack(
    rest: InputStorage, waiting: deque[Tensor], call: int, saved: Tensor
) -> KeptInput | Tensor:
    """``saved`` is the memory of the next tensor that waits, under a version of its own."""
    if not waiting or waiting[0].data_ptr() != saved.data_ptr():
        return saved
    return rest.keep(waiting.popleft(), call)


def _opened(asked: Activations, accelerator: Accelerator) -> Tier:
    if asked.rest == "host":
        return HostTier(blocks=asked.buffers, block_nbytes=asked.window, accelerator=accelerator)
    assert asked.folder is not None, "checked"
    return DiskTier(
        Path(asked.folder), blocks=asked.buffers, block_nbytes=asked.window, accelerator=accelerator
    )
