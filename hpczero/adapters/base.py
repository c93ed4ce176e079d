"""What the training command knows of a model: the contract of an adapter, one file for each kind of model.

torch is not imported here.

    reads text        with_vocabulary, context; batches are (inputs, targets) from the token file
    brings samples    samples; batches are rows of what that returns
    both              build, loss; the rest may be left as it is
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpczero.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hpczero.job.topology import Topology
    from hpczero.models.config import GPTConfig
    from hpczero.parallel.pipeline.stages import Stages
    from hpczero.parallel.tensor.functions import Rule


class Adapter:
    """A model as the training command sees it. Nothing here is collective but ``pretrained``.

    A subclass has at least ``build``, and ``samples`` where it does not read text.

    Attributes:
        unit: what steps and rates count: "token" or "sample", or another word for what the model is shown.
        metric_name: what ``metric`` measures, such as "accuracy"; empty: there is none.
        reads_text: whether batches come from the token file of ``data.path``; otherwise from ``samples``.
        on_meta: whether the model is built on the meta device, without memory. Its ``initializer`` fills it then.
    """

    unit: str = "sample"
    metric_name: str = ""
    reads_text: bool = False
    on_meta: bool = False

    @property
    def transformer(self) -> GPTConfig | None:
        """Sizes by which the planner counts memory and time; None: it cannot, so neither is predicted."""
        return None

    @property
    def context(self) -> int:
        """Units in one sample: tokens of a text; 1 where samples themselves are counted."""
        return 1

    @property
    def flops_per_token(self) -> float | None:
        """FLOPs of forward and backward for one unit, without recomputation; None: torch counts them."""
        return None

    def card(self) -> Mapping[str, Any]:
        """What checkpoints and weight files state of the model, as JSON knows it; it must stay equal to go on."""
        return {}

    def with_vocabulary(self, size: int) -> Adapter:
        """The same model for another number of token ids."""
        raise ConfigError(
            f"{type(self).__name__} reads text and has no with_vocabulary(size); write one that returns an adapter for "
            "this number of token ids"
        )

    def with_separator(self, separator: int) -> Adapter:
        """The same model, which keeps documents apart that end with the id ``separator``."""
        raise ConfigError(
            f"data.documents: {type(self).__name__} has no with_separator(separator), so it cannot keep documents "
            "apart; expected joined"
        )

    def with_checkpointing(self, checkpointing: bool) -> Adapter:
        """The same model that checkpoints its activations, or keeps them."""
        return self

    def build(self) -> nn.Module:
        """The plain torch model, on the device that torch makes tensors on.

        Torch's generator has the seed of the run, the same on every rank.
        """
        raise NotImplementedError(f"{type(self).__name__}: build() returns the torch module")

    def pretrained(
        self, topology: Topology, seed: int
    ) -> tuple[nn.Module, Callable[[str, Tensor], None]] | None:
        """The model as of ``build`` and what ``zeroify`` fills it with, where its weights stand in files; else None.

        Collective over the topology's world, unlike all else here. ``seed``: of what no file has.
        """
        return None

    def samples(self) -> tuple[Any, Any]:
        """Samples to train on, and those held out; the same on every rank.

        Returns:
            Each a tuple of tensors of equal first dimension, whose rows are samples, or an object with ``__len__`` and
            ``__getitem__(index)``, as torch's map-style data sets. An index always gives the same sample. The second
            may be None.
        """
        raise ConfigError(
            f"{type(self).__name__} says nothing of its data; write samples() that returns (training, held out), or "
            "set reads_text = True for a model of tokens"
        )

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Mean loss over the samples of a micro batch, a scalar. Without a method of one's own: ``model(*batch)``.

        It must be a mean over samples that weigh the same; the mean over ranks is otherwise not that of one process.
        """
        loss: Tensor = model(*batch)
        return loss

    def metric(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """``metric_name`` as a mean over the samples of a batch, a scalar. The model is in eval mode.

        Under a pipeline ``model`` gives the outputs of the last stage: it may be called once, with the inputs, and has
        no other part.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has the metric {self.metric_name!r} and no metric(model, *batch)"
        )

    def decays(self, name: str, parameter: Tensor) -> bool:
        """Whether weight decay applies to this parameter: to matrices, and not to biases and norms."""
        return parameter.dim() >= 2

    def initializer(self, model: nn.Module, seed: int) -> Callable[[str, Tensor], None] | None:
        """What ``zeroify`` fills parameters with: f(name, whole fp32 tensor).

        None: the model keeps what it was built with. Values depend on seed, name and shape. With a method
        ``fill_range`` (``hpczero.RangeInitializer``) each rank draws its own shard alone.
        """
        return None

    def units(self, model: nn.Module) -> Sequence[tuple[str, ...]] | None:
        """Which modules are gathered and reduced at once, by name; None: ``hpczero.plan.rules.default_rule``."""
        return None

    def stages(self, model: nn.Module) -> Stages:
        """How the forward of ``model`` falls into the stages of a pipeline."""
        raise PlanError(
            f"parallel.pipeline: {type(self).__name__} does not say how {type(model).__name__} is cut; write "
            "stages(model), or leave parallel.pipeline at 1"
        )

    def tensor_rule(self) -> Rule:
        """Which layers tensor ranks share, and how."""
        raise PlanError(
            f"parallel.tensor: {type(self).__name__} does not say which layers ranks share; write tensor_rule(), or "
            "leave parallel.tensor at 1"
        )

    def call_blocks_by(self, model: nn.Module, call: Callable[..., Tensor]) -> None:
        """Have ``call(block, *inputs)`` call each block of ``model`` where gradients are wanted, from now on."""
        raise PlanError(
            f"activations.checkpointing: {type(self).__name__} does not say what the blocks of {type(model).__name__} "
            "are, so no blocks can be computed again; write call_blocks_by(model, call), or leave it at none"
        )
