"""The GPT against a reference written in another way, and the properties that sharding relies on."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hpczero.models import GPT, GPTConfig
from hpczero.models import gpt as gpt_module
from hpczero.models.gpt import mean_cross_entropy

CONFIG = GPTConfig(vocab_size=37, context=16, layers=2, hidden=24, heads=3)
VARIANTS = [
    CONFIG,
    dataclasses.replace(CONFIG, positions="rotary"),
    dataclasses.replace(CONFIG, tie_embeddings=False, ffn_multiple=2),
]


def build(config: GPTConfig, seed: int = 0) -> GPT:
    """A model whose biases and norms are not trivial either, so that none of them goes untested."""
    model = GPT(config)
    model.initialize_all(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def batch(config: GPTConfig, seq_len: int = 13) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab_size, (3, seq_len + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def reference_logits(config: GPTConfig, weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """One sequence, head by head and position by position, in fp64; rotary as multiplication of complex numbers."""
    w = {name: value.double() for name, value in weights.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return centred / scale * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def turned(x: Tensor, time: int) -> Tensor:
        if config.positions == "learned":
            return x
        half = len(x) // 2
        angles = [time * 10000.0 ** (-index / half) for index in range(half)]
        turns = torch.polar(torch.ones(half).double(), torch.tensor(angles).double())
        z = torch.complex(x[:half], x[half:]) * turns
        return torch.cat((z.real, z.imag))

    x = w["wte.weight"][tokens]
    if config.positions == "learned":
        x = x + w["wpe.weight"][: len(tokens)]
    size = config.hidden // config.heads
    for layer in range(config.layers):
        block = f"blocks.{layer}"
        q, k, v = linear(norm(x, f"{block}.attention_norm"), f"{block}.attention.qkv").split(
            config.hidden, dim=-1
        )
        mixed = torch.zeros_like(x)
        for head in range(config.heads):
            part = slice(head * size, (head + 1) * size)
            for now in range(len(tokens)):
                past = torch.stack([turned(k[time, part], time) for time in range(now + 1)])
                weight = (past @ turned(q[now, part], now) / math.sqrt(size)).softmax(0)
                mixed[now, part] = weight @ v[: now + 1, part]
        x = x + linear(mixed, f"{block}.attention.projection")
        wide = linear(norm(x, f"{block}.mlp_norm"), f"{block}.mlp.expansion")
        wide = 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
        x = x + linear(wide, f"{block}.mlp.projection")
    return norm(x, "final_norm") @ w["lm_head.weight"].T


@pytest.mark.parametrize("config", VARIANTS, ids=["learned", "rotary", "untied"])
def test_logits_and_loss_equal_a_reference_in_fp64(config: GPTConfig) -> None:
    model = build(config)
    x, y = batch(config)
    expected = torch.stack([reference_logits(config, model.state_dict(), row) for row in x])
    # fp32 against fp64 over two blocks; the logits are of order one
    torch.testing.assert_close(model(x).double(), expected, atol=1e-5, rtol=1e-5)
    loss = F.cross_entropy(expected.flatten(0, 1), y.flatten())
    assert model(x, y).item() == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("config", VARIANTS[:2], ids=["learned", "rotary"])
def test_logits_do_not_see_the_future(config: GPTConfig) -> None:
    model = build(config)
    x, _ = batch(config)
    changed = x.clone()
    changed[:, 8] = (changed[:, 8] + 1) % config.vocab_size
    before, after = model(x), model(changed)
    torch.testing.assert_close(after[:, :8], before[:, :8], atol=1e-6, rtol=0)
    assert ((after - before)[:, 8:].abs().amax(dim=(0, 2)) > 1e-3).all()


def test_rotary_depends_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 1, 1, 8, generator=torch.Generator().manual_seed(0))
    q_turned, k_turned = (gpt_module.rotate(x.expand(1, 1, 12, 8)) for x in (q, k))
    products = q_turned[0, 0] @ k_turned[0, 0].T
    for distance in (-3, 0, 5):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert (products[0, 0] - products[0, 5]).abs() > 1e-3


def test_tied_weight_is_one_parameter_with_the_gradient_of_both_uses() -> None:
    tied = build(CONFIG)
    assert tied.lm_head.weight is tied.wte.weight
    untied = GPT(dataclasses.replace(CONFIG, tie_embeddings=False))
    untied.load_state_dict(tied.state_dict())
    for model in (tied, untied):
        model(*batch(CONFIG)).backward()
    assert untied.wte.weight.grad is not None
    assert untied.lm_head.weight.grad is not None
    both = untied.wte.weight.grad + untied.lm_head.weight.grad
    torch.testing.assert_close(tied.wte.weight.grad, both)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointed_blocks_run_their_hooks_again_and_give_the_same_bits(dropout: float) -> None:
    results: list[tuple[int, list[Tensor]]] = []
    for checkpointed in (False, True):
        config = dataclasses.replace(
            CONFIG, dropout=dropout, checkpoint_activations=checkpointed, positions="rotary"
        )
        model = build(config)
        calls: list[int] = []
        for block in model.blocks:
            block.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        torch.manual_seed(5)
        loss = model(*batch(config))
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        results.append((len(calls), [loss.detach(), *gradients]))
    (plain_calls, plain), (checkpointed_calls, recomputed) = results
    assert (plain_calls, checkpointed_calls) == (CONFIG.layers, 2 * CONFIG.layers)
    assert len(plain) == len(recomputed) == 1 + len(list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


@pytest.mark.parametrize("chunk_numel", [1, 37 * 4, 37 * 7 + 5, 2**24])
def test_loss_in_pieces_equals_the_loss_at_once(
    monkeypatch: pytest.MonkeyPatch, chunk_numel: int
) -> None:
    monkeypatch.setattr(gpt_module, "LOSS_CHUNK_NUMEL", chunk_numel)
    logits = torch.randn(3, 13, 37, generator=torch.Generator().manual_seed(0), requires_grad=True)
    _, targets = batch(CONFIG)
    loss = mean_cross_entropy(logits, targets)
    loss.backward()
    wide = logits.detach().double().requires_grad_()
    expected = F.cross_entropy(wide.flatten(0, 1), targets.flatten())
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert wide.grad is not None
    torch.testing.assert_close(logits.grad, wide.grad.float())


@pytest.mark.parametrize(("device", "pieces"), [("cpu", 12), ("meta", 2)])
def test_a_device_gets_few_pieces_of_the_loss(
    monkeypatch: pytest.MonkeyPatch, device: str, pieces: int
) -> None:
    """Another device than the CPU, which computes nothing."""
    monkeypatch.setattr(gpt_module, "LOSS_CHUNK_NUMEL", 37 * 4)
    monkeypatch.setattr(gpt_module, "DEVICE_LOSS_CHUNK_NUMEL", 37 * 24)
    taken: list[int] = []

    def counted(function: Any, logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
        taken.append(len(logits))
        total: Tensor = function(logits, targets)
        return total

    monkeypatch.setattr(gpt_module, "checkpoint", counted)
    targets = torch.zeros(4, 12, dtype=torch.int64, device=device)
    mean_cross_entropy(torch.zeros(4, 12, 37, device=device), targets)
    assert (len(taken), sum(taken)) == (pieces, 48)


def test_loss_of_a_bf16_model_is_summed_in_fp32() -> None:
    model = build(CONFIG).bfloat16()
    x, y = batch(CONFIG)
    loss = model(x, y)
    expected = F.cross_entropy(model(x).double().flatten(0, 1), y.flatten())
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_initial_weights_depend_on_seed_and_name_alone() -> None:
    with torch.device("meta"):
        model = GPT(CONFIG)
    shapes = {name: p.shape for name, p in model.named_parameters()}

    def fill(names: list[str], seed: int) -> dict[str, Tensor]:
        filled = {name: torch.full(shapes[name], math.nan) for name in names}
        for name, tensor in filled.items():
            model.initialize(name, tensor, seed=seed)
        return filled

    torch.manual_seed(1)
    forward = fill(list(shapes), seed=3)
    torch.manual_seed(2)
    backward = fill(list(reversed(shapes)), seed=3)
    whole = GPT(CONFIG)
    whole.initialize_all(seed=3)
    assert all(torch.equal(forward[name], backward[name]) for name in shapes)
    assert all(torch.equal(forward[name], p) for name, p in whole.named_parameters())
    other = fill(list(shapes), seed=4)
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    assert not any(torch.equal(forward[name], other[name]) for name in matrices)
    first, second = (forward[f"blocks.{layer}.attention.qkv.weight"] for layer in (0, 1))
    assert not torch.equal(first, second)


def test_initial_weights_have_the_spread_of_gpt2() -> None:
    model = GPT(GPTConfig(vocab_size=500, context=64, layers=8, hidden=96, heads=4))
    model.initialize_all(seed=0)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        elif name.endswith("bias"):
            assert (parameter == 0).all()
        else:
            expected = 0.02 / 4 if name.endswith("projection.weight") else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.05 * expected, name


def test_initialize_refuses_what_would_round_the_weights() -> None:
    with pytest.raises(ValueError, match=r"'wte.weight': got torch.bfloat16 on cpu"):
        GPT(CONFIG).initialize("wte.weight", torch.empty(37, 24, dtype=torch.bfloat16), seed=0)


@pytest.mark.parametrize("config", VARIANTS, ids=["learned", "rotary", "untied"])
def test_model_has_no_buffers_and_builds_on_meta(config: GPTConfig) -> None:
    with torch.device("meta"):
        model = GPT(config)
    assert not list(model.buffers())
    assert all(p.is_meta for p in model.parameters())
    assert (model.lm_head.weight is model.wte.weight) is config.tie_embeddings


def test_sequence_beyond_the_context_is_refused() -> None:
    tokens: Any = torch.zeros(1, 17, dtype=torch.int64)
    with pytest.raises(ValueError, match="sequence of 17 tokens, the context is 16"):
        GPT(CONFIG)(tokens)
