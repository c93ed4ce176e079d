"""Models of transformers for the training command: the causal language model of a folder, with its weights or anew.

python -m hpczero.train --model.factory hpczero.hf.adapter:causal_lm --model.arguments '{"folder": "models/llama"}'
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hpczero import finetune
from hpczero.adapters.base import Adapter
from hpczero.errors import ConfigError
from hpczero.hf.building import ModelChoice, build, config_and_class, of_folder
from hpczero.hf.loading import drawn, load
from hpczero.job.topology import Topology
from hpczero.parallel.pipeline.stages import Stages, hugging_face_stages
from hpczero.parallel.tensor.functions import Rule
from hpczero.parallel.tensor.models import llama_rule


@dataclass(frozen=True)
class CausalLMAdapter(Adapter):
    """A causal language model of transformers, which reads text.

    Its loss is the mean cross entropy in nats per token, of inputs and targets, int64 (B, T), with the loss of the
    router where config.json asks for one (``output_router_logits``).

    Attributes:
        folder: with a config.json, and with safetensors files unless ``scratch``.
        length: tokens of one sample.
        scratch: whether weights are drawn by the model's own initialisation.
        products: arguments of ``finetune.lora``; None: the whole model trains.
        config: of transformers.
    """

    folder: Path
    length: int
    scratch: bool
    products: Mapping[str, Any] | None
    config: Any = field(compare=False)

    unit = "token"
    reads_text = True

    @property
    def context(self) -> int:
        """Tokens of one sample."""
        return self.length

    @cached_property
    def flops_per_token(self) -> float:
        """FLOPs of forward and backward for one token.

        Each weight of a product counts 2 in forward, 2 in backward, and 2 more if it trains; those of experts by the
        share of experts that a token meets. Attention counts the whole sequence.

        Source: Chowdhery et al., PaLM, arXiv 2204.02311, appendix B.
        """
        model: Any = self.build()
        head = model.get_output_embeddings()
        lookups = {
            id(module.weight)
            for module in model.modules()
            if isinstance(module, nn.Embedding)
            and (head is None or module.weight is not head.weight)
        }
        config = self.config
        experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
        met = getattr(config, "num_experts_per_tok", None)
        found: float = 12.0 * config.num_hidden_layers * config.hidden_size * self.length
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and id(parameter) not in lookups:
                share = met / experts if ".experts." in name and experts and met else 1.0
                found += (6 if parameter.requires_grad else 4) * share * parameter.numel()
        return found

    def with_vocabulary(self, size: int) -> CausalLMAdapter:
        """The same model, if it has all ``size`` token ids.

        Raises:
            ConfigError: it has not.
        """
        if size > self.config.vocab_size:
            raise ConfigError(
                f"{self.folder}: the model has {self.config.vocab_size} token ids, and the data have {size}; prepare "
                "the text with the tokenizer of this folder (python -m hpczero.data prepare --help)"
            )
        return self

    def build(self) -> nn.Module:
        """The model, parameters on the meta device and buffers with their values."""
        return self._prepared(build(lambda: of_folder(self.folder, ModelChoice()), seed=0))

    def _prepared(self, model: nn.Module) -> nn.Module:
        return (
            model.train()
            if self.products is None
            else finetune.lora(model.train(), **self.products)
        )

    def pretrained(
        self, topology: Topology, seed: int
    ) -> tuple[nn.Module, Callable[[str, Tensor], None]] | None:
        """The model and the weights of the folder, by ``hpczero.hf.load``; None with ``scratch``. Collective."""
        if self.scratch:
            return None
        model, weights = load(self.folder, topology=topology, seed=seed)
        fill = weights if self.products is None else finetune.first_values(weights, seed=seed)
        return self._prepared(model), fill

    def initializer(self, model: nn.Module, seed: int) -> Callable[[str, Tensor], None]:
        """The model's own initialisation, by seed and name; the same for every number of ranks."""
        whole = build(lambda: of_folder(self.folder, ModelChoice()), seed=0)

        def fill(name: str, tensor: Tensor) -> None:
            tensor.copy_(drawn(whole, seed, name))

        return fill if self.products is None else finetune.first_values(fill, seed=seed)

    def loss(self, model: nn.Module, *batch: Tensor) -> Tensor:
        """Of inputs and targets, int64 (B, T)."""
        tokens_BT, targets_BT = batch
        found = model(input_ids=tokens_BT, use_cache=False)
        loss = cross_entropy(found.logits.float().flatten(0, 1), targets_BT.flatten())
        router = getattr(found, "aux_loss", None)
        return loss if router is None else loss + self.config.router_aux_loss_coef * router

    def stages(self, model: nn.Module) -> Stages:
        """Of a Llama or a GPT-2."""
        stages = hugging_face_stages(model)

        def leave(model: Any, x: Tensor, *targets: Tensor) -> Any:
            logits_BTV = stages.leave(model, x)
            if not targets:
                return logits_BTV
            return cross_entropy(logits_BTV.float().flatten(0, 1), targets[0].flatten())

        return dataclasses.replace(stages, leave=leave)

    def tensor_rule(self) -> Rule:
        """Of a Llama, or a model like it."""
        return llama_rule(self.config)

    def call_blocks_by(self, model: Any, call: Callable[..., Tensor]) -> None:
        """Each block, as by ``gradient_checkpointing_enable``."""
        if not model.supports_gradient_checkpointing:
            super().call_blocks_by(model, call)
        model._set_gradient_checkpointing(gradient_checkpointing_func=call)


def causal_lm(
    folder: str,
    context: int = 1024,
    scratch: bool = False,
    lora: Mapping[str, Any] | None = None,
) -> CausalLMAdapter:
    """The adapter of a folder. Not collective.

    Args:
        folder: of transformers, with a config.json and safetensors files.
        context: tokens in a sample.
        scratch: draw the weights by the model's own initialisation instead; the folder then needs no more than a
            config.json.
        lora: arguments of ``finetune.lora``, such as ``{"rank": 16, "alpha": 32, "targets": ["q_proj", "v_proj"]}``:
            low-rank products train, and the model is frozen.

    Raises:
        ConfigError: an argument is of another kind, config.json cannot be used, or its model has fewer positions than
            ``context``.
    """
    for name, value, kind in (("context", context, int), ("scratch", scratch, bool)):
        if type(value) is not kind:
            raise ConfigError(
                f"model.arguments: {name}: got {value!r}, expected {'true or false' if kind is bool else 'a number'}"
            )
    try:
        inspect.signature(finetune.lora).bind(None, **(lora or {}))
    except TypeError as error:
        raise ConfigError(f"model.arguments: lora: {error}") from error
    config, _ = config_and_class(Path(folder), ModelChoice())
    most = getattr(config, "max_position_embeddings", None) or context
    if not 1 <= context <= most:
        raise ConfigError(
            f"model.arguments: context: got {context}, expected 1 to {most}, the positions that {folder} has"
        )
    return CausalLMAdapter(Path(folder), context, scratch, lora, config)
