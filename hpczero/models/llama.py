"""A Llama-like decoder under the names of Hugging Face: its state dict is that of ``LlamaForCausalLM``.

Heads are counted by what a projection gives, so a part of them may stand on a rank.

Source: Touvron et al., LLaMA, arXiv 2302.13971, sec. 2.2; grouped queries: Ainslie et al., GQA, arXiv 2305.13245.

Shape suffixes: B batch, T time, C hidden, H heads, D width of a head, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpczero.models.config import LlamaConfig
from hpczero.models.gpt import call, mean_cross_entropy
from hpczero.models.initial import InitialWeights


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the mean square in fp32.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467, eq. 4.
    """

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.epsilon = epsilon

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Of the last dimension; the dtype of the input."""
        x = hidden_states.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * x.to(hidden_states.dtype)


class SelfAttention(nn.Module):
    """Causal attention with rotary positions; several query heads share a key and a value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_size, self.theta = config.head_size, config.rope_theta
        queries, keys = config.heads * self.head_size, config.key_value_heads * self.head_size
        self.q_proj = nn.Linear(config.hidden, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden, bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        batch, time, _ = hidden_states.shape
        q_BHTD, k_BHTD, v_BHTD = (
            projection(hidden_states).view(batch, time, -1, self.head_size).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q_BHTD, k_BHTD = rotate(q_BHTD, self.theta), rotate(k_BHTD, self.theta)
        seen_BHTD = F.scaled_dot_product_attention(
            q_BHTD, k_BHTD, v_BHTD, is_causal=True, enable_gqa=q_BHTD.shape[1] != k_BHTD.shape[1]
        )
        out_BTC: Tensor = self.o_proj(seen_BHTD.transpose(1, 2).reshape(batch, time, -1))
        return out_BTC


class LlamaMLP(nn.Module):
    """down(silu(gate(x)) * up(x)).

    Source: Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202, eq. 6.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """Norm and attention, norm and MLP, each with a residual."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.norm_epsilon)
        self.self_attn = SelfAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.norm_epsilon)
        self.mlp = LlamaMLP(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, C) to (B, T, C)."""
        x_BTC = hidden_states + self.self_attn(self.input_layernorm(hidden_states))
        out_BTC: Tensor = x_BTC + self.mlp(self.post_attention_layernorm(x_BTC))
        return out_BTC


class Decoder(nn.Module):
    """Embedding, layers, final norm.

    Attributes:
        call_block: calls a layer where gradients are wanted.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_epsilon)
        self.call_block: Callable[..., Tensor] = call

    def forward(self, input_ids: Tensor) -> Tensor:
        """Token ids, int64 (B, T), to (B, T, C)."""
        x_BTC = self.embed_tokens(input_ids)
        for layer in self.layers:
            x_BTC = self.run(layer, x_BTC)
        out_BTC: Tensor = self.norm(x_BTC)
        return out_BTC

    def run(self, layer: nn.Module, x_BTC: Tensor) -> Tensor:
        """One of the layers; (B, T, C) in and out."""
        return (self.call_block if torch.is_grad_enabled() else call)(layer, x_BTC)


class Llama(nn.Module):
    """The decoder with its head.

    Args:
        config: Sizes and switches.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits (B, T, V), or with targets, int64 (B, T), their mean cross entropy in nats per token."""
        return self.head(self.model(tokens_BT), targets_BT)

    def head(self, x_BTC: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """What ``forward`` returns, from what comes out of the final norm."""
        logits_BTV: Tensor = self.lm_head(x_BTC)
        return logits_BTV if targets_BT is None else mean_cross_entropy(logits_BTV, targets_BT)

    def initial_weights(self, *, seed: int) -> InitialWeights:
        """Normal(0, 0.02) for matrices, as transformers draws them, and ones for norms; any part of any parameter."""
        return InitialWeights(seed=seed, layers=self.config.layers)


def rotate(x_BHTD: Tensor, theta: float) -> Tensor:
    """Rotary position embedding: pair (i, i + D/2) at time t is turned by t / theta^(2i/D), the table in fp32.

    Source: Su et al., RoFormer, arXiv 2104.09864, sec. 3.4.2; the halves layout of GPT-NeoX.
    """
    time, head_size = x_BHTD.shape[-2:]
    device = x_BHTD.device
    exponent = torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size
    angle = torch.arange(time, device=device, dtype=torch.float32)[:, None] * (
        1.0 / theta**exponent
    )
    cos, sin = angle.cos().to(x_BHTD.dtype), angle.sin().to(x_BHTD.dtype)
    first, second = x_BHTD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
