"""What the training command knows of a model: the contract of an adapter, one file for each kind of model.

Owns: the contract. Must not know: any model; how it is sharded, fed or saved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hpczero.models.config import GPTConfig
    from hpczero.parallel.pipeline.stages import Stages
    from hpczero.parallel.tensor.rule import Rule


class Adapter(Protocol):
    """A model as the training command sees it (issue 17, seam S9). Nothing here is collective."""

    @property
    def config(self) -> GPTConfig:
        """Sizes of the model, under the names that checkpoints and weight files use."""
        ...

    @property
    def context(self) -> int:
        """Tokens of one sample."""
        ...

    @property
    def flops_per_token(self) -> float:
        """FLOPs of forward and backward for one token, without recomputation."""
        ...

    def with_vocabulary(self, size: int) -> Adapter:
        """The same model for another number of token ids."""
        ...

    def with_checkpointing(self, checkpointing: bool) -> Adapter:
        """The same model that checkpoints its activations, or keeps them."""
        ...

    def build(self) -> nn.Module:
        """The plain torch model, on the device that torch makes tensors on."""
        ...

    def stages(self, model: nn.Module) -> Stages:
        """How the forward of ``model`` falls into the stages of a pipeline."""
        ...

    def tensor_rule(self) -> Rule:
        """Which layers tensor ranks share, and how."""
        ...

    def call_blocks_by(self, model: nn.Module, call: Callable[..., Tensor]) -> None:
        """Have ``call(block, *inputs)`` call each block of ``model`` where gradients are wanted, from now on."""
        ...

    def initializer(self, model: nn.Module, seed: int) -> Callable[[str, Tensor], None]:
        """What ``zeroify`` fills parameters with: f(name, whole fp32 tensor). Values depend on seed, name and shape.

        With a method ``fill_range`` (``hpczero.RangeInitializer``) each rank draws its own shard alone.
        """
        ...

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss over the tokens of a micro batch, a scalar. ``inputs`` and ``targets`` are int64 (B, T)."""
        ...

    def decays(self, name: str, parameter: Tensor) -> bool:
        """Whether weight decay applies to this parameter."""
        ...
