"""Models of the library transformers train in stages as they do in one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero import Mesh, Pipeline, Topology
from hpczero.errors import PlanError
from hpczero.parallel import cut, hugging_face_stages
from tests.helpers.parallel import parallel_assert
from tests.helpers.small_models import adamw
from tests.parallel.wholes import off

if TYPE_CHECKING:
    from mpi4py import MPI


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": (
        "LlamaForCausalLM",
        {
            "hidden_size": 24,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        },
    ),
    "GPT2": (
        "GPT2LMHeadModel",
        {
            "n_positions": 16,
            "n_embd": 24,
            "n_layer": 3,
            "n_head": 4,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        },
    ),
}


def build(kind: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    name, sizes = KINDS[kind]
    config = getattr(transformers, f"{kind}Config")(vocab_size=61, **sizes, **options)
    return getattr(transformers, name)(config)


@pytest.mark.mpi
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("tied", [True, False])
def test_stages_of_a_hugging_face_model_equal_it(
    comm: MPI.Intracomm, kind: str, attention: str, tied: bool
) -> None:
    options = {"attn_implementation": attention, "tie_word_embeddings": tied}
    plain = build(kind, **options)
    generator = torch.Generator().manual_seed(4)
    tokens = list(torch.randint(61, (2, 2, 9), generator=generator))
    expected = sum(plain(input_ids=each, labels=each).loss / 2 for each in tokens)
    expected.backward()
    gradients = {n: p.grad for n, p in plain.named_parameters(remove_duplicate=False)}
    topology = Topology.create(comm, mesh=Mesh(pipeline=comm.size))
    model = build(kind, **options)
    cut(model, topology, hugging_face_stages(model))
    optimizer = adamw(model)
    hpczero.zeroify(model, optimizer, stage=3, topology=topology)
    pipeline = Pipeline(model, micro_batches=2)
    logits = pipeline.outputs(tokens)
    if logits is not None:
        assert torch.allclose(logits[0], plain(input_ids=tokens[0]).logits, atol=1e-6)
    loss = pipeline.step(tokens, tokens)
    found = hpczero.full_gradients(model)
    parallel_assert(comm, abs(loss - expected.item()) < 1e-6 * loss, f"{loss} {expected}")
    wrong = [name for name, value in found.items() if not off(value, gradients[name]) <= 2e-6]
    parallel_assert(comm, found and not wrong, f"{wrong}")
    hpczero.release(model)
    topology.free()


def test_a_model_of_another_kind_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match="got Linear, expected LlamaForCausalLM or GPT2LMHeadModel"):
        hugging_face_stages(nn.Linear(2, 2))
