"""The sizes of a batch: any two of three fix the third.

Owns: that arithmetic. Must not know: MPI, torch, data.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpczero.errors import ConfigError
from hpczero.options.config import DEFAULT_GLOBAL_BATCH, TrainOptions


@dataclass(frozen=True)
class Batch:
    """Sequences per step, and how they are distributed.

    Attributes:
        global_batch: sequences per step over all ranks.
        micro_batch: sequences per rank in one forward.
        accumulation: forwards per step.
    """

    global_batch: int
    micro_batch: int
    accumulation: int

    @classmethod
    def resolve(cls, options: TrainOptions, world_size: int) -> Batch:
        """Any two of the three sizes fix the third: ``global = micro * accumulation * world_size``.

        A global batch alone means one forward per step. If it is neither given nor fixed by the other two, it is the
        default, rounded up to a multiple of the rest.

        Raises:
            ConfigError: the sizes contradict each other or do not divide.
        """
        micro, accumulation = options.micro_batch, options.accumulation
        whole = options.global_batch
        if whole is None:
            parts = world_size * (micro or 1) * (accumulation or 1)
            fixed = micro is not None and accumulation is not None
            whole = parts if fixed else -(-DEFAULT_GLOBAL_BATCH // parts) * parts
        if micro is None:
            accumulation = accumulation or 1
            micro = cls._divide(
                whole,
                world_size * accumulation,
                f"{world_size} rank(s) x accumulation {accumulation}",
            )
        elif accumulation is None:
            accumulation = cls._divide(
                whole, world_size * micro, f"{world_size} rank(s) x micro_batch {micro}"
            )
        if whole != micro * accumulation * world_size:
            raise ConfigError(
                f"train.global_batch: got {whole}, but micro_batch {micro} x accumulation {accumulation} x "
                f"{world_size} rank(s) is {micro * accumulation * world_size}; "
                "give two of the three and the third follows"
            )
        return cls(global_batch=whole, micro_batch=micro, accumulation=accumulation)

    @staticmethod
    def _divide(whole: int, parts: int, what: str) -> int:
        if whole % parts:
            below, above = whole // parts * parts, -(-whole // parts) * parts
            near = f"{below} or {above}" if below else f"{above}"
            raise ConfigError(
                f"train.global_batch: got {whole}, expected a multiple of {what} = {parts}, such as {near}"
            )
        return whole // parts
