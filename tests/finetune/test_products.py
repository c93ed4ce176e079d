"""Which layers get a product, what it computes, and what is refused; one process of plain torch."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import hpczero
from hpczero import finetune
from hpczero.errors import ConfigError, PlanError
from hpczero.models import GPT
from tests.finetune.models import adapted_gpt
from tests.helpers.small_models import tiny_gpt, tiny_tokens


def products(model: nn.Module) -> list[str]:
    found = [name for name, m in model.named_modules() if isinstance(m, finetune.LowRank)]
    return [name.removesuffix(".lora") for name in found]


def test_a_layer_computes_its_own_output_and_the_scaled_product() -> None:
    plain = nn.Linear(5, 7)
    model = finetune.lora(nn.Sequential(copy.deepcopy(plain)), rank=3, alpha=6)
    a, b = model.get_parameter("0.lora.A"), model.get_parameter("0.lora.B")
    torch.manual_seed(0)
    x = torch.randn(4, 5)
    assert torch.equal(model(x), plain(x)), "B is zero at first"
    with torch.no_grad():
        b.normal_()
    expected = plain(x) + 2.0 * (x @ a.T @ b.T)
    torch.testing.assert_close(model(x), expected)
    torch.testing.assert_close(model.get_submodule("0")(input=x), expected)


def test_first_values_do_not_depend_on_torchs_defaults() -> None:
    expected = finetune.lora(nn.Sequential(nn.Linear(5, 7)), rank=3).get_parameter("0.lora.A")
    model, whole = nn.Sequential(nn.Linear(5, 7)), torch.zeros(3, 5)
    first = finetune.first_values(Zeros())
    try:
        torch.set_default_dtype(torch.bfloat16)
        found = finetune.lora(model, rank=3).get_parameter("0.lora.A")
        for row in range(3):
            first.fill_range("0.lora.A", (3, 5), 5 * row, whole[row])  # type: ignore[attr-defined]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, expected)
    assert torch.equal(whole, expected)


class Zeros:
    """First values that are given by ranges."""

    def __call__(self, name: str, tensor: torch.Tensor) -> None:
        tensor.zero_()

    def fill_range(self, name: str, shape: Any, start: int, values: torch.Tensor) -> None:
        values.zero_()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_model_keeps_its_products(copied: Any) -> None:
    model = adapted_gpt()
    assert torch.equal(copied(model)(tiny_tokens(0)), model(tiny_tokens(0)))


def test_merging_keeps_the_output_and_gives_the_names_of_before() -> None:
    model, names = adapted_gpt(), list(tiny_gpt().state_dict())
    before = model(tiny_tokens(0))
    finetune.merge(model)
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model(tiny_tokens(0)), before, atol=1e-5, rtol=1e-5)
    assert not torch.equal(model(tiny_tokens(0)), tiny_gpt()(tiny_tokens(0)))


def test_names_of_the_base_stay_and_values_depend_on_seed_and_name_alone() -> None:
    one, other = tiny_gpt(), tiny_gpt()
    names = set(one.state_dict())
    finetune.lora(one, rank=2, targets=["qkv", r"blocks\.1\.mlp\..*"], seed=5)
    assert products(one) == [
        "blocks.0.attention.qkv",
        "blocks.1.attention.qkv",
        "blocks.1.mlp.expansion",
        "blocks.1.mlp.projection",
    ]
    finetune.lora(other, rank=2, targets="blocks.1.mlp.expansion", seed=5)
    name = "blocks.1.mlp.expansion.lora.A"
    assert names < set(one.state_dict())
    assert torch.equal(one.state_dict()[name], other.state_dict()[name])
    again = finetune.lora(tiny_gpt(), rank=2, seed=6).state_dict()[name]
    assert not torch.equal(again, one.state_dict()[name])
    assert 0.5 < one.state_dict()[name].abs().max() * 18**0.5 <= 1.0


def test_all_linear_leaves_tied_layers_and_layers_that_are_not_called_alone() -> None:
    assert "lm_head" not in products(finetune.lora(tiny_gpt()))
    assert "lm_head" in products(finetune.lora(tiny_gpt(tie_embeddings=False)))
    # nn.MultiheadAttention computes with out_proj.weight and never calls the layer.
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    found = products(finetune.lora(nn.ModuleList([block])))
    assert found == ["0.linear1", "0.linear2"]


def test_the_fused_path_of_a_transformer_layer_sees_the_products() -> None:
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0).eval()
    finetune.lora(block)
    with torch.no_grad():
        block.get_parameter("linear2.lora.B").fill_(0.3)
    x = torch.randn(2, 3, 8)
    with torch.no_grad():  # where torch would take the fused path
        fused = block(x)
    torch.testing.assert_close(fused, block(x), atol=1e-6, rtol=1e-5)


def test_a_model_on_meta_gets_the_same_first_values() -> None:
    sizes = tiny_gpt().config
    with torch.device("meta"):
        model = GPT(sizes)
    finetune.lora(model, seed=4)
    expected = finetune.lora(tiny_gpt(), seed=4)

    def seven(name: str, values: torch.Tensor) -> None:
        values.fill_(7.0)

    fill = finetune.first_values(seven, seed=4)
    for name, parameter in model.named_parameters():
        values = torch.full(parameter.shape, torch.nan)
        fill(name, values)
        if ".lora." in name:
            assert torch.equal(values, expected.get_parameter(name)), name
        else:
            assert values.eq(7.0).all(), name


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rank 0": ({"rank": 0}, "rank: got 0"),
    "rank 2.0": ({"rank": 2.0}, "rank: got 2.0"),
    "dropout 1": ({"dropout": 1.0}, "dropout: got 1.0"),
    "alpha 0": ({"alpha": 0.0}, "alpha: got 0.0"),
    "no such layer": ({"targets": ["q_proj"]}, r"\['q_proj'\] match.*qkv, projection, expansion"),
    "no target": ({"targets": []}, "match"),
    "no pattern": ({"targets": "qkv("}, "neither a name nor a regular expression"),
    "a norm": ({"targets": "attention_norm"}, "'blocks.0.attention_norm' is a LayerNorm"),
    "a table": ({"targets": "wte"}, "'wte' is a Embedding"),
    "a tied head": ({"targets": "lm_head"}, "'lm_head' has a weight that other modules use"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_and_the_model_is_as_before(name: str) -> None:
    options, says = REFUSED[name]
    model = tiny_gpt()
    with pytest.raises(ConfigError, match=says):
        finetune.lora(model, **options)
    assert not products(model)
    assert all(p.requires_grad for p in model.parameters())


def test_a_second_time_is_refused() -> None:
    with pytest.raises(PlanError, match="low-rank products already"):
        finetune.lora(adapted_gpt())


@pytest.mark.mpi
@pytest.mark.ranks(1)
def test_a_zeroified_model_is_refused(topology: hpczero.Topology) -> None:
    model = adapted_gpt()
    hpczero.zeroify(model, None, topology=topology)
    try:
        for call in (finetune.lora, finetune.merge):
            with pytest.raises(PlanError, match="zeroified"):
                call(model)
    finally:
        hpczero.release(model)
