"""Codec: in which form frozen matrices rest and travel, and how many bytes that takes.

Owns: names, bits and sizes. Must not know: torch, how values are encoded (``kernels.blockwise``), who does it.

    a shard of n elements, n a multiple of 64:   [ codes, n * bits / 8 bytes | scales, n / 64 of fp32 ]

Shards begin at multiples of 64 elements of their unit, so a block is the same for every number of ranks.

Source: Dettmers et al., QLoRA, NeurIPS 2023, sec. 3; 8-bit Optimizers via Block-wise Quantization, ICLR 2022, sec. 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpczero.errors import ConfigError
from hpczero.plan.layout import DEFAULT_ALIGN

BITS = {"int8": 8, "nf4": 4}
FP32_BYTES = 4


@dataclass(frozen=True)
class Codec:
    """One form.

    Attributes:
        name: ``int8``: 255 even levels; ``nf4``: the 16 levels of QLoRA's NormalFloat.
        block: elements that share a scale.
    """

    name: str
    block: int = DEFAULT_ALIGN

    @classmethod
    def of(cls, name: str | Codec | None) -> Codec | None:
        """By its name; None stays None.

        Raises:
            ConfigError: there is no such form.
        """
        if name is None or isinstance(name, Codec):
            return name
        if name not in BITS:
            raise ConfigError(f"quantize: got {name!r}, expected {', '.join(BITS)} or None")
        return cls(name)

    @property
    def bits(self) -> int:
        """Of one code."""
        return BITS[self.name]

    def nbytes(self, numel: int) -> int:
        """Bytes of ``numel`` elements, a multiple of the block: 1.0625 each in int8, 0.5625 in nf4."""
        return numel * self.bits // 8 + numel // self.block * FP32_BYTES

    def words(self, numel: int) -> int:
        """The same in words of 4 bytes."""
        return self.nbytes(numel) // FP32_BYTES
