"""Precision: dtypes of parameters, wire and masters, and what happens to a non-finite gradient.

It holds dtype *names*, so that the plan can count bytes without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hpczero.errors import ConfigError

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
DType = Literal["fp32", "bf16", "fp16"]
Reduced = Literal["fp32", "bf16", "fp16", "int8", "int4"]
Gathered = Literal["exact", "int8"]
CODES = ("int8", "int4")


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al., Mixed Precision Training, ICLR 2018, sec. 3.2).

    Attributes:
        initial: first scale, a power of two so that unscaling is exact.
        growth_interval: good steps in a row before the scale doubles.
        minimum: smallest scale. An overflow at it is an error.
    """

    initial: float = 2.0**16
    growth_interval: int = 1000
    minimum: float = 1.0


@dataclass(frozen=True)
class Precision:
    """Which dtype each kind of number has.

    Attributes:
        param: parameters and activations in forward and backward, and both on the wire.
        reduce: partial sums that travel between nodes: a dtype, or ``int8`` or ``int4`` for codes of that many bits,
            whose expected value is the sum. Sums themselves are always fp32.
        gather: parameters that travel between nodes for forward and backward at stage 3: ``exact``, or ``int8`` for
            codes of 8 bits, whose expected value is the parameter. Every rank computes with what the codes say.
        loss_scale: None, or dynamic scaling (fp16).
        nonfinite: what happens on a NaN or infinity in the agreed gradient without a loss scale. ``raise`` is an error
            on every rank. ``skip`` skips the step on every rank, counted in ``Sharding.skipped_steps``.
        max_skips: steps skipped in a row before the run stops with an error.
    """

    param: DType = "fp32"
    reduce: Reduced = "fp32"
    gather: Gathered = "exact"
    loss_scale: LossScale | None = None
    nonfinite: Literal["raise", "skip"] = "raise"
    max_skips: int = 50

    def __post_init__(self) -> None:
        sent, gathered = (*ITEMSIZE, *CODES), ("exact", "int8")
        for field, value, known in (
            ("param", self.param, tuple(ITEMSIZE)),
            ("reduce", self.reduce, sent),
            ("gather", self.gather, gathered),
        ):
            if value not in known:
                raise ConfigError(
                    f"precision.{field}: got {value!r}, expected one of {', '.join(known)}"
                )
        if self.nonfinite not in ("raise", "skip"):
            raise ConfigError(
                f"precision.nonfinite: got {self.nonfinite!r}, expected 'raise' or 'skip'"
            )
        if self.param == "fp16" and self.loss_scale is None:
            raise ConfigError(
                "precision: fp16 gradients underflow without a loss scale; "
                "use Precision.of('fp16') or pass loss_scale=LossScale()"
            )
        if self.param == "fp32" and self.loss_scale is not None:
            raise ConfigError(
                "precision: got param='fp32' and a loss scale, expected none: fp32 gradients do not underflow; leave "
                "loss_scale out, or take param='fp16'"
            )

    @classmethod
    def of(
        cls, precision: str | Precision, *, reduce: Reduced = "fp32", gather: Gathered = "exact"
    ) -> Precision:
        """The precision ``"fp32"``, ``"bf16"`` or ``"fp16"``, which has dynamic loss scaling.

        A Precision is returned as it is.

        Args:
            precision: its name.
            reduce: form of partial sums between nodes, beside a name.
            gather: form of parameters between nodes, beside a name.

        Raises:
            ConfigError: the name is unknown.
        """
        if isinstance(precision, Precision):
            return precision
        if precision == "fp16":
            return cls(param="fp16", reduce=reduce, gather=gather, loss_scale=LossScale())
        if precision in ITEMSIZE:
            return cls(param=precision, reduce=reduce, gather=gather)  # type: ignore[arg-type]  # membership was just checked
        raise ConfigError(
            f"precision: got {precision!r}, expected one of {', '.join(ITEMSIZE)} or a Precision"
        )

    @property
    def param_itemsize(self) -> int:
        """Bytes of one parameter in forward and backward, and on the wire."""
        return ITEMSIZE[self.param]

    @property
    def sends_codes(self) -> bool:
        """Whether gradients or parameters travel between nodes as codes, and not in a dtype."""
        return self.reduce in CODES or self.gather != "exact"

    @property
    def node_dtype(self) -> DType:
        """Dtype that a node's partial sum is rounded to, before codes are made of it."""
        return "fp32" if self.reduce in CODES else self.reduce  # type: ignore[return-value]  # no code

    @property
    def has_masters(self) -> bool:
        """Whether fp32 masters exist beside the parameters; in fp32 the parameter is its own master."""
        return self.param != "fp32"


class LossScaler:
    """The current loss scale. Every rank gives it the same agreed results, so it is equal on every rank."""

    def __init__(self, policy: LossScale | None) -> None:
        self.policy = policy
        self.scale = policy.initial if policy else 1.0
        self._good_steps = 0

    def update(self, *, overflow: bool) -> None:
        """Halve the scale after an overflow, double it after ``growth_interval`` good steps.

        Without a policy do nothing.
        """
        if self.policy is None:
            return
        if overflow:
            self.scale = max(self.scale / 2.0, self.policy.minimum)
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self.policy.growth_interval:
            self.scale *= 2.0
            self._good_steps = 0

    def state(self) -> dict[str, float]:
        """Plain numbers that ``restore`` takes."""
        return {
            "scaled": self.policy is not None,
            "scale": self.scale,
            "good_steps": self._good_steps,
        }

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue where another scaler was.

        The scale is the initial one if that scaler had no policy, and 1 if this one has none.
        """
        if self.policy is not None and state.get("scaled", True):
            self.scale = float(state["scale"])
            self._good_steps = int(state["good_steps"])

    @property
    def exhausted(self) -> bool:
        """Whether the scale is at its minimum: a smaller one cannot cure a further overflow."""
        return self.policy is not None and self.scale <= self.policy.minimum
