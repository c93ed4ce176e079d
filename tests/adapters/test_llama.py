"""The Llama of hpczero.models: as the training command sees it, and beside that of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from hpczero.adapters.llama import LlamaAdapter, build
from hpczero.errors import ConfigError
from hpczero.models.config import LlamaConfig
from hpczero.models.llama import Llama
from hpczero.options.config import LayoutOptions
from tests.adapters.equal import check_losses, text_rows
from tests.adapters.suite import AdapterSuite
from tests.parallel.layouts import laid_out

if TYPE_CHECKING:
    from mpi4py import MPI

SIZES: dict[str, Any] = {"vocab_size": 61, "context": 24, "layers": 2, "hidden": 32, "ffn": 40}


class TestLlama(AdapterSuite):
    @staticmethod
    def make() -> LlamaAdapter:
        return build(hidden=16, layers=2, heads=4, key_value_heads=2, context=8)

    @staticmethod
    def blocks(model: Any) -> list[nn.Module]:
        return list(model.model.layers)


@pytest.fixture(scope="module")
def library() -> Any:
    return pytest.importorskip("transformers")


@pytest.mark.parametrize(
    "changes",
    [
        {"heads": 4, "key_value_heads": 2},
        {"heads": 8, "key_value_heads": 1, "rope_theta": 500000.0, "norm_epsilon": 1e-5},
        {"heads": 2, "key_value_heads": 2, "tie_embeddings": True},
    ],
)
def test_logits_and_loss_are_those_of_transformers_in_both_directions(
    library: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = LlamaConfig(**SIZES, **changes)
    (tmp_path / "config.json").write_text(json.dumps(config.to_hugging_face()))
    torch.manual_seed(0)
    theirs = library.AutoModelForCausalLM.from_config(
        library.AutoConfig.from_pretrained(tmp_path)
    ).eval()
    assert type(theirs).__name__ == "LlamaForCausalLM"
    ours = Llama(config)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.randint(61, (3, 24))
    with torch.no_grad():
        expected = theirs(tokens, labels=tokens)
        torch.testing.assert_close(ours(tokens), expected.logits, rtol=1e-5, atol=1e-5)
        loss = ours(tokens[:, :-1], tokens[:, 1:])
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-6)
    fill = ours.initial_weights(seed=1)
    for name, parameter in ours.named_parameters():
        fill(name, parameter)
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=1e-5, atol=1e-5)
    theirs.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    assert LlamaConfig.from_hugging_face(said) == config


def test_flops_are_those_of_the_products(library: Any) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    config = LlamaConfig(**SIZES, heads=4, key_value_heads=2)
    with torch.device("meta"):
        model, tokens = Llama(config), torch.zeros(2, 24, dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(tokens)
    whole = 3 * counter.get_total_flops() / tokens.numel()
    # Torch counts every position of the attention, of which a causal one sees half.
    attention = 6.0 * config.layers * config.context * config.hidden
    assert whole == pytest.approx(config.flops_per_token + attention)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"hidden": 30, "heads": 4}, "hidden is 30 and heads 4"),
        ({"heads": 4, "key_value_heads": 3}, "expected a multiple of key_value_heads"),
        ({"hidden": "64"}, "hidden is '64', expected a whole number"),
        ({"config": "none.json"}, "none.json: No such file"),
    ],
)
def test_sizes_that_cannot_be_are_refused(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build(**arguments)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"head_dim": 3}, "head_dim is 3"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_scaling is"),
        ({"hidden_size": None}, "hidden_size missing"),
    ],
)
def test_configuration_that_would_give_other_logits_is_refused(
    changes: dict[str, Any], told: str
) -> None:
    said = LlamaConfig(**SIZES, heads=4, key_value_heads=2).to_hugging_face() | changes
    with pytest.raises(ValueError, match=told):
        LlamaConfig.from_hugging_face(said)


LAYOUTS: list[dict[str, Any]] = [{"tensor": 2}, {"tensor": 2, "sequence": True}, {"pipeline": 2}]


@pytest.mark.mpi
@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_parts_of_it_learn_what_the_whole_does(comm: MPI.Intracomm, layout: dict[str, Any]) -> None:
    adapter = TestLlama.make().with_vocabulary(12)
    rows = text_rows(adapter, 12)
    with laid_out(comm, LayoutOptions(**layout)) as topology:
        check_losses(topology, adapter, rows, rows, stage=3, **layout)
