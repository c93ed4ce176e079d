"""Step: what happens around ``optimizer.step()``.

Owns: the agreement of all ranks before an update (same collectives so far, finite gradients, used parameters), the
gradient norm, skipping, and what follows the update. Must not know: modules, hooks on them, MPI calls.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hpczero.comm.base import Collectives
from hpczero.errors import CommError, ConfigError, StepError
from hpczero.optimizers import describe_options
from hpczero.precision import LossScaler, Precision
from hpczero.unit import Unit

logger = logging.getLogger("hpczero.step")


@dataclass
class StepCounts:
    """Steps that were skipped because some gradient was not finite; equal on every rank."""

    skipped: int = 0
    in_a_row: int = 0


class Step:
    """Pre- and post-hook of one optimizer. All public methods are collective over topology.world."""

    def __init__(
        self,
        units: Sequence[Unit],
        comm: Collectives,
        *,
        precision: Precision,
        scaler: LossScaler,
        in_backward: Callable[[], bool],
        check_attachment: Callable[[], None],
        after_update: Callable[[], None],
    ) -> None:
        """Not collective.

        Args:
            units: in unit order.
            comm: the transport.
            precision: what a non-finite gradient means.
            scaler: the loss scale, told of every step.
            in_backward: whether a backward runs, or was interrupted.
            check_attachment: raises StepError if model or optimizer hold parameters that no unit knows.
            after_update: called once the parameters are up to date.
        """
        self.counts = StepCounts()
        self._all_units = list(units)
        self._units = [unit for unit in units if unit.spec.trainable]
        self._comm = comm
        self._precision = precision
        self._scaler = scaler
        self._in_backward = in_backward
        self._check_attachment = check_attachment
        self._after_update = after_update
        self._norms: dict[float, float] = {}
        self._skipping = False
        self._handles: list[RemovableHandle] = []

    def attach(self, optimizer: Optimizer) -> None:
        """Drive ``optimizer.step`` through torch's own hooks."""
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    def detach(self) -> None:
        """Take the hooks away; not collective. The optimizer must not step for this model any more."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def forget_norm(self) -> None:
        """The gradients changed: a norm computed before is void."""
        self._norms.clear()

    def grad_norm(self, norm_type: float) -> float:
        """Norm of the mean gradient over all parameters, the same bits on every rank and in every stage.

        Args:
            norm_type: 2.0 or inf.

        Raises:
            ConfigError: another norm.
        """
        if norm_type not in (2.0, math.inf):
            raise ConfigError(f"norm_type: got {norm_type!r}, expected 2.0 or inf")
        if norm_type not in self._norms:
            self._check_reduced()
            local = _norms(
                [unit.owned_gradient for unit in self._units if unit.has_gradient], norm_type
            )
            mine = sum(n * n for n in local) if norm_type == 2.0 else _largest(local)
            everybody = self._comm.share(np.array([mine]), name="grad_norm")[:, 0].tolist()
            total = math.sqrt(sum(everybody)) if norm_type == 2.0 else _largest(everybody)
            self._norms[norm_type] = total
        return self._norms[norm_type]

    def clip(self, max_norm: float, norm_type: float) -> float:
        """Scale the gradients so that their norm is at most ``max_norm``; returns the norm before, as torch does.

        A norm that is not finite leaves the gradients alone: the step decides what that means.
        """
        if not max_norm > 0:
            raise ConfigError(f"max_norm: got {max_norm!r}, expected a number above 0")
        norm = self.grad_norm(norm_type)
        factor = max_norm / (norm + 1e-6)
        if math.isfinite(norm) and factor < 1.0:
            for unit in self._units:
                if unit.has_gradient:
                    unit.scale_gradient(factor)
            self._norms.clear()
        return norm

    def _check_reduced(self) -> None:
        if self._in_backward():
            raise StepError(
                f"rank {self._comm.topology.rank}: the last backward did not finish (an exception?), so some "
                "gradients are missing; call optimizer.zero_grad() and run backward again before the step"
            )
        waiting = [unit.spec.name for unit in self._units if unit.has_local_gradients]
        if waiting:
            raise StepError(
                f"rank {self._comm.topology.rank}: {len(waiting)} unit(s), first {waiting[0]!r}, hold gradients "
                "that were never reduced over ranks; run the last backward before the step outside no_sync"
            )

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs.get("closure") is not None or any(a is not None for a in args[1:]):
            raise ConfigError(
                "optimizer.step(closure) would run backward inside the step; call backward first, "
                "then optimizer.step()"
            )
        finite, used = self._agree(optimizer)
        self._skipping = not finite
        if self._skipping:
            self._skip()
            return
        for unit, flags in zip(self._units, used, strict=True):
            if unit.has_gradient:
                unit.skip_unused(flags)

    def _agree(self, optimizer: Optimizer) -> tuple[bool, list[npt.NDArray[np.bool_]]]:
        """One exchange: same calls and options on all ranks, every gradient finite, and which parameters were used.

        A rank that finds something wrong at home tells the others here instead of raising alone.
        """
        error = self._local_error()
        options = describe_options(optimizer)
        words = [self._comm.fingerprint, zlib.crc32("\n".join(options).encode())]
        seen = np.array(words, dtype=np.uint32).view(np.uint8)  # 4 bytes each, equal on all ranks
        used = np.concatenate([unit.used for unit in self._units] or [np.zeros(0, dtype=bool)])
        # Last: here a device is waited for, which is better busy while the host does the rest.
        finite = _all_finite([u.owned_gradient for u in self._units if u.has_gradient])
        verdict = np.array([not finite, error is not None], dtype=np.uint8)
        mine = np.concatenate([seen, ~seen, verdict, np.packbits(used)])
        agreed = self._comm.agree(mine, name="step")
        equal = agreed[0:8] == ~agreed[8:16]
        if not equal[0:4].all():
            raise self._sequence_error()
        if not equal[4:8].all():
            self._refuse_unequal(options)
        if agreed[17]:
            with self._comm.topology.agreed("take the step"):
                if error is not None:
                    raise error
        flags = np.unpackbits(agreed[18:], count=len(used)).astype(bool)
        ends = np.cumsum([len(unit.used) for unit in self._units])
        return not agreed[16], np.split(flags, ends[:-1]) if len(ends) else []

    def _local_error(self) -> StepError | None:
        try:
            self._check_attachment()
            self._check_reduced()
            for unit in self._all_units:
                unit.whole.check_untouched()
        except StepError as error:
            return error
        return None

    def _refuse_unequal(self, options: Sequence[str]) -> None:
        """Raise on every rank; those whose options differ from rank 0's say in what. Collective."""
        topology = self._comm.topology
        expected = topology.broadcast_text("\n".join(options)).split("\n")
        with topology.agreed("take the step"):
            if list(options) != expected:
                mine = "; ".join(option for option in options if option not in expected)
                others = "; ".join(option for option in expected if option not in options)
                raise StepError(
                    f"rank {topology.rank}: the optimizer has {mine or 'nothing'}, where rank 0 has "
                    f"{others or 'nothing'}. Give schedulers that look at a loss the mean over ranks "
                    "(sum(topology.gather(loss.item())) / topology.size)"
                )

    def _sequence_error(self) -> CommError:
        error = CommError(
            f"step {self._comm.step}: ranks have made different sequences of collectives, so their buffers may "
            "be mixed up; nothing was updated. Run once with HPCZERO_STRICT=1 to see which rank departs where"
        )
        error.agreed = True
        return error

    def _skip(self) -> None:
        """Make this step do nothing, on every rank, or stop where that cannot help."""
        self.counts.skipped += 1
        self.counts.in_a_row += 1
        scaled = self._precision.loss_scale is not None
        if not scaled and self._precision.nonfinite == "raise":
            reason = "precision.nonfinite='skip' would skip such steps"
        elif scaled and self._scaler.exhausted:
            reason = f"the loss scale is at its minimum {self._scaler.scale:g}"
        elif self.counts.in_a_row >= self._precision.max_skips:
            reason = f"{self.counts.in_a_row} steps in a row were skipped"
        else:
            if self._comm.topology.is_root:
                logger.warning(
                    "step %d skipped: a gradient is not finite (loss scale %g, %d skipped so far)",
                    self._comm.step,
                    self._scaler.scale,
                    self.counts.skipped,
                )
            for unit in self._units:
                unit.drop_gradients()
            return
        raise self._nonfinite_error(reason)

    def _nonfinite_error(self, reason: str) -> StepError:
        """Names ranks and units; a rank named here owns the element, it need not have made it."""
        bad = [
            u.spec.name
            for u in self._units
            if u.has_gradient and not _all_finite([u.owned_gradient])
        ]
        counts = self._comm.share(np.array([len(bad)], dtype=np.float64), name="nonfinite")[:, 0]
        ranks = [int(rank) for rank in np.flatnonzero(counts)]
        here = f"; in this rank's shards: {', '.join(bad[:4])}" if bad else ""
        error = StepError(
            f"step {self._comm.step}: the mean gradient has NaN or infinity (shards of rank(s) "
            f"{ranks}{here}), and {reason}. Nothing was updated. Lower the learning rate, check the data, "
            "or use bf16 instead of fp16"
        )
        error.agreed = True
        return error

    def _after(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._skipping:
            self.counts.in_a_row = 0
            for unit in self._units:
                unit.refresh()
            for unit in self._units:
                unit.whole.wait_for_update()
            self._after_update()
        self._scaler.update(overflow=self._skipping)
        self._norms.clear()
        self._comm.step += 1


def _largest(values: Sequence[float]) -> float:
    """Maximum in which NaN wins; 0 for nothing."""
    return math.nan if any(math.isnan(v) for v in values) else max(values, default=0.0)


def _norms(gradients: Sequence[torch.Tensor], norm_type: float) -> list[float]:
    """Norm of each shard; again in fp64 where fp32 overflows. One transfer, however many there are."""
    held = [gradient for gradient in gradients if gradient.numel()]
    if not held:
        return []
    found = torch.stack([torch.linalg.vector_norm(g, norm_type) for g in held]).tolist()
    return [
        float(torch.linalg.vector_norm(g, norm_type, dtype=torch.float64)) if math.isinf(n) else n
        for g, n in zip(held, found, strict=True)
    ]


def _all_finite(gradients: Sequence[torch.Tensor]) -> bool:
    """Whether every element is finite; the sums tell, unless one overflows by itself. One transfer if they do."""
    if not gradients:
        return True
    sums = torch.stack([gradient.sum() for gradient in gradients])
    if bool(torch.isfinite(sums).all()):
        return True
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
