"""Llama-like models of Hugging Face cut over tensor ranks, against the plain ones."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch

from hpczero.errors import PlanError
from hpczero.parallel import llama_rule, split
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import raises_on_all
from tests.parallel.wholes import (
    check_gradients,
    equal_on_all,
    off,
    padding_is_zero,
    part,
    randomize,
    split_over,
    tensor_ranks,
)

if TYPE_CHECKING:
    from mpi4py import MPI

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.mpi, pytest.mark.ranks(2, 3)]

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 33,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 4,
    "max_position_embeddings": 32,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied, biases": ("Llama", {"tie_word_embeddings": True, "attention_bias": True}),
    "llama, checkpointing": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 4}),
}


def build(kind: str, **changes: Any) -> Any:
    name, own = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **own, **changes})
    return randomize(getattr(transformers, f"{name}ForCausalLM")(config))


def recompute(model: Any) -> None:
    """Checkpoint each layer. It puts a hook on the embedding, so a model is split before."""
    enable = "activation_checkpointing_enable"  # its name from version 5 on
    getattr(model, enable, model.gradient_checkpointing_enable)()
    model.train()


@pytest.mark.parametrize("sequence", [False, True], ids=["plain", "sequence"])
@pytest.mark.parametrize("kind", KINDS)
def test_loss_logits_and_gradients_are_those_of_the_plain_model(
    comm: MPI.Intracomm, kind: str, sequence: bool
) -> None:
    plain = build(kind)
    tokens = torch.randint(61, (2, 11), generator=torch.Generator().manual_seed(2))
    wanted = plain(input_ids=tokens, labels=tokens)
    wanted.loss.backward()
    whole = copy.deepcopy(plain)
    whole.zero_grad()
    with split_over(comm, whole, llama_rule(plain.config), sequence=sequence) as model:
        if "checkpointing" in kind:
            recompute(model)
        found = model(input_ids=tokens, labels=tokens)
        found.loss.backward()
        parallel_assert(comm, off(found.logits, wanted.logits) < 2e-6, "logits")
        parallel_assert(comm, equal_on_all(comm, found.loss), "bits")
        parallel_assert(comm, off(found.loss, wanted.loss) < 1e-6, "loss")
        check_gradients(comm, model, plain)
        parallel_assert(comm, padding_is_zero(model, gradients=True), "padding")
        parallel_assert(comm, part(model).names == tuple(dict(plain.named_parameters())))
        model.eval()
        plain.eval()
        again = model.generate(tokens[:, :5], max_new_tokens=4, do_sample=False)
        other = plain.generate(tokens[:, :5], max_new_tokens=4, do_sample=False)
        parallel_assert(comm, torch.equal(again, other), "generated text")


@pytest.mark.ranks(2)
def test_too_few_key_and_value_heads_and_dropout_are_refused(comm: MPI.Intracomm) -> None:
    with tensor_ranks(comm) as topology:

        def refused(pattern: str, **changes: Any) -> None:
            model = build("llama", **changes)
            raises_on_all(
                comm, PlanError, pattern, split, model, topology, llama_rule(model.config)
            )

        refused("fewer than the 2 tensor parallel ranks", num_key_value_heads=1)
        refused("attention_dropout=0", attention_dropout=0.1)
    with pytest.raises(PlanError, match="type 'gpt2'"):
        llama_rule(transformers.GPT2Config())
