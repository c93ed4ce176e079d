"""A GPT-2 style decoder in plain PyTorch.

There are no buffers, so a model built under ``torch.device("meta")`` needs nothing but its parameters. Every weight is
used through the module that holds it, so hooks on modules see each use.

Shape suffixes: B batch, T time, C hidden, H heads, D head size, V vocabulary, N = B * T.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hpczero.models.config import GPTConfig
from hpczero.models.initial import InitialWeights


@torch.no_grad()
def generate(
    logits_of: Callable[[Tensor], Tensor],
    prompt_T: Tensor,
    *,
    num_tokens: int,
    context: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Tensor:
    """Continue a prompt by ``num_tokens`` tokens.

    Random numbers come from ``seed`` alone, so ranks that see equal logits choose equal tokens. Collective if
    ``logits_of`` is: it is called exactly ``num_tokens`` times.

    Args:
        logits_of: Maps tokens (1, T) int64, T at most ``context``, to logits (1, T, V).
        prompt_T: int64, at least one token.
        num_tokens: How many to add.
        context: Longest sequence given to ``logits_of``; older tokens are cut off.
        temperature: 0 takes the most likely token; above, logits are divided by it.
        top_k: Choose among the k most likely tokens only; None means all.
        seed: Of the random choice.

    Returns:
        Prompt and continuation, (T + num_tokens,) int64.

    Raises:
        ValueError: Empty prompt, negative temperature or count, or top_k or context below 1.
    """
    if prompt_T.ndim != 1 or prompt_T.numel() == 0:
        raise ValueError(
            f"generate: the prompt has shape {tuple(prompt_T.shape)}, expected one row of at least one token"
        )
    if temperature < 0 or num_tokens < 0 or context < 1 or (top_k is not None and top_k < 1):
        raise ValueError(
            f"generate: got temperature {temperature}, num_tokens {num_tokens}, context {context}, top_k {top_k}; "
            "expected temperature and num_tokens of at least 0, context and top_k of at least 1"
        )
    generator = torch.Generator().manual_seed(seed)
    tokens_T = prompt_T
    for _ in range(num_tokens):
        # fp32 on the CPU: the same random stream for every device and parameter dtype
        logits_V = logits_of(tokens_T[None, -context:])[0, -1].float().cpu()
        next_1 = _choose(logits_V, temperature, top_k, generator)
        tokens_T = torch.cat((tokens_T, next_1.to(tokens_T.device)))
    return tokens_T


def _choose(
    logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator
) -> Tensor:
    if temperature == 0:
        return logits_V.argmax(dim=-1, keepdim=True)
    logits_K, ids_K = logits_V.topk(min(top_k or logits_V.numel(), logits_V.numel()))
    # In fp64, and the largest first made 0: what a temperature close to 0 divides overflows to minus infinity alone.
    scaled_K = ((logits_K.double() - logits_K[0].double()) / temperature).float()
    choice_1 = torch.multinomial(scaled_K.softmax(dim=-1), 1, generator=generator)
    return ids_K[choice_1]


# Several documents in one sequence: where each begins, and what attention may look at.
#
# Shape suffixes: B batch, T time.


def document_numbers(tokens_BT: Tensor, separator: int) -> Tensor:
    """Which document of its sequence each token is of, counted from 0; int64 (B, T)."""
    ends_BT = tokens_BT == separator
    return ends_BT.cumsum(1) - ends_BT.long()


def document_positions(documents_BT: Tensor) -> Tensor:
    """Place of each token in its document, as far as the sequence shows it; int64 (B, T)."""
    place_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    start_BT = torch.where(begins_BT, place_T, 0).cummax(1).values
    return place_T - start_BT


def document_mask(documents_BT: Tensor) -> Tensor:
    """Whether a token (row) may look at another (column): of its document, and not after it; bool (B, 1, T, T)."""
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return same_BTT.tril()[:, None]


# Logits per piece of the loss: 64 MiB in fp32, and 1 GiB on a device. See mean_cross_entropy.
LOSS_CHUNK_NUMEL = 2**24
DEVICE_LOSS_CHUNK_NUMEL = 2**28


class Attention(nn.Module):
    """Causal self-attention over all heads at once.

    Attributes:
        attend: (q, k, v, rotary, dropout) -> y, all (B, H, T, D). Another one may get them from further ranks. Where
            a sequence has several documents, it is also given what may be looked at.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.rotary = config.positions == "rotary"
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.projection = nn.Linear(config.hidden, config.hidden)
        self.attend: Callable[..., Tensor] = attend

    def forward(self, x_BTC: Tensor, *mask: Tensor) -> Tensor:
        """Attend to earlier positions, of those that ``mask`` allows; (B, T, C) in and out."""
        qkv_BTC = self.qkv(x_BTC).chunk(3, dim=-1)
        q_BHTD, k_BHTD, v_BHTD = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv_BTC
        )
        dropout = self.dropout if self.training else 0.0
        y_BHTD = self.attend(q_BHTD, k_BHTD, v_BHTD, self.rotary, dropout, *mask)
        out_BTC: Tensor = self.projection(y_BHTD.transpose(1, 2).flatten(-2))
        return out_BTC


class MLP(nn.Module):
    """Two linear layers around a GELU, in the tanh form GPT-2 was trained with."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.expansion = nn.Linear(config.hidden, config.ffn_multiple * config.hidden)
        self.projection = nn.Linear(config.ffn_multiple * config.hidden, config.hidden)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Each position by itself; (B, T, C) in and out."""
        out_BTC: Tensor = self.projection(F.gelu(self.expansion(x_BTC), approximate="tanh"))
        return out_BTC


class Block(nn.Module):
    """One transformer block, normalised before each branch (pre-LN)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC: Tensor, *mask: Tensor) -> Tensor:
        """Add both branches to the residual stream; (B, T, C) in and out. ``mask`` is for attention."""
        x_BTC = x_BTC + self.dropout(self.attention(self.attention_norm(x_BTC), *mask))
        x_BTC = x_BTC + self.dropout(self.mlp(self.mlp_norm(x_BTC)))
        return x_BTC


class Embedding(nn.Embedding):
    """torch's embedding, which fills nothing on the meta device.

    torch's own filling on the meta device loads its compiler: seconds and 100 MB in every process.
    """

    def reset_parameters(self) -> None:
        """Fill the weight with a standard normal, as torch does; on the meta device do nothing."""
        if not self.weight.is_meta:
            super().reset_parameters()


class GPT(nn.Module):
    """A stack of blocks between a token embedding and a head.

    The constructor leaves torch's default weights in place (none on the meta device); ``initialize`` or
    ``initialize_all`` sets the ones to train from.

    Attributes:
        config: sizes and switches.
        call_block: calls a block where gradients are wanted: (block, x) -> y, and with what attention may look at where
            ``config.separator`` is set. Another one may keep less for backward.
        span: positions of the tokens in their sequence, by their number. Another one may begin later than at 0.
        finish_logits: what a call without targets returns, from what the head gives.
        mean_loss: what a call with targets returns, from what the head gives and the targets.
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = Embedding(config.vocab_size, config.hidden)
        self.wpe = (
            Embedding(config.context, config.hidden) if config.positions == "learned" else None
        )
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.hidden)
        self.lm_head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.wte.weight
        self.call_block: Callable[..., Tensor] = (
            checkpointed if config.checkpoint_activations else call
        )
        self.span: Callable[[int], range] = range
        self.finish_logits: Callable[[Tensor], Tensor] = unchanged
        self.mean_loss: Callable[[Tensor, Tensor], Tensor] = mean_cross_entropy

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits, or the loss if targets are given.

        Args:
            tokens_BT: int64, T at most ``config.context``.
            targets_BT: int64, the token that follows each position; all of them count.

        Returns:
            Logits (B, T, V) in the dtype of the parameters, or the mean cross entropy as an fp32 scalar.

        Raises:
            ValueError: The sequence is longer than the context.
        """
        x_BTC = self.embed(tokens_BT)
        mask: tuple[Tensor, ...] = ()
        if self.config.separator is not None:
            mask = (document_mask(document_numbers(tokens_BT, self.config.separator)),)
        for block in self.blocks:
            x_BTC = self.run(block, x_BTC, *mask)
        return self.head(x_BTC, targets_BT)

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """What goes into the first block, (B, T, C); raises as ``forward``."""
        span = self.span(tokens_BT.shape[1])
        if span.stop > self.config.context:
            raise ValueError(
                f"GPT: got a sequence of {span.stop} tokens, the context is {self.config.context}; "
                "shorten the sequences or build the model with a longer context"
            )
        x_BTC = self.wte(tokens_BT)
        if self.wpe is not None:
            place = torch.arange(span.start, span.stop, device=tokens_BT.device)
            if self.config.separator is not None:
                place = document_positions(document_numbers(tokens_BT, self.config.separator))
            x_BTC = x_BTC + self.wpe(place)
        out_BTC: Tensor = self.dropout(x_BTC)
        return out_BTC

    def run(self, block: nn.Module, x_BTC: Tensor, *mask: Tensor) -> Tensor:
        """One of the blocks; (B, T, C) in and out."""
        return (self.call_block if torch.is_grad_enabled() else call)(block, x_BTC, *mask)

    def head(self, x_BTC: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """What ``forward`` returns, from what comes out of the last block."""
        logits_BTV: Tensor = self.lm_head(self.final_norm(x_BTC))
        if targets_BT is None:
            return self.finish_logits(logits_BTV)
        return self.mean_loss(logits_BTV, targets_BT)

    def initial_weights(self, *, seed: int) -> InitialWeights:
        """What fills parameters of this model, whole ones or any part, with their initial values."""
        return InitialWeights(seed=seed, layers=self.config.layers)

    def initialize(self, name: str, tensor: Tensor, *, seed: int) -> None:
        """Fill one whole parameter in place with its initial value. The model may live on the meta device.

        Args:
            name: As in ``named_parameters()``.
            tensor: fp32 on the CPU, contiguous, the whole shape of the parameter.
            seed: Of the run.

        Raises:
            ValueError: The tensor is not fp32 on the CPU, or not contiguous.
        """
        self.initial_weights(seed=seed)(name, tensor)

    def initialize_all(self, *, seed: int) -> None:
        """Fill every parameter of a model that lies whole on the CPU in fp32."""
        fill = self.initial_weights(seed=seed)
        for name, parameter in self.named_parameters():
            fill(name, parameter)


def call(block: nn.Module, x_BTC: Tensor, *mask: Tensor) -> Tensor:
    """The block as it is; autograd keeps what its backward needs."""
    y_BTC: Tensor = block(x_BTC, *mask)
    return y_BTC


def checkpointed(block: nn.Module, x_BTC: Tensor, *mask: Tensor) -> Tensor:
    """The same, with its input alone kept, and everything else computed again in backward."""
    # The module itself is called, not its forward: hooks on the block must run again in the recomputation.
    y_BTC: Tensor = checkpoint(block, x_BTC, *mask, use_reentrant=False)
    return y_BTC


def unchanged(logits_BTV: Tensor) -> Tensor:
    """The logits as the head gives them."""
    return logits_BTV


def attend(
    q_BHTD: Tensor,
    k_BHTD: Tensor,
    v_BHTD: Tensor,
    rotary: bool,
    dropout: float,
    mask_B1TT: Tensor | None = None,
) -> Tensor:
    """Causal attention of each head, over positions from 0 on, or over those that a mask allows."""
    if rotary:  # it tells distances alone, so positions need not begin anew with a document
        q_BHTD, k_BHTD = rotate(q_BHTD), rotate(k_BHTD)
    return F.scaled_dot_product_attention(
        q_BHTD, k_BHTD, v_BHTD, attn_mask=mask_B1TT, dropout_p=dropout, is_causal=mask_B1TT is None
    )


def rotate(x_BHTD: Tensor) -> Tensor:
    """Rotary position embedding: pair (i, i + D/2) at time t is turned by the angle t / 10000^(2i/D).

    The table is computed anew in each call. That costs nothing next to the block's products, and a stored table would
    be a buffer.

    Source: Su et al., RoFormer, arXiv 2104.09864, sec. 3.4.2; the halves layout of GPT-NeoX.
    """
    seq_len, head_size = x_BHTD.shape[-2:]
    exponent = torch.arange(0, head_size, 2, device=x_BHTD.device, dtype=torch.float32) / head_size
    time = torch.arange(seq_len, device=x_BHTD.device, dtype=torch.float32)
    angle = time[:, None] / 10000.0**exponent  # (T, D/2)
    cos, sin = angle.cos().to(x_BHTD.dtype), angle.sin().to(x_BHTD.dtype)
    first, second = x_BHTD.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def mean_cross_entropy(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross entropy in fp32, a scalar, over at most ``loss_chunk_numel`` logits at a time.

    With a large vocabulary the fp32 copy and its log-softmax would be the largest tensors of a step. Each piece is
    recomputed in backward instead, so only the logits themselves are kept.
    """
    logits_NV, targets_N = logits_BTV.flatten(0, 1), targets_BT.flatten()
    rows = max(1, loss_chunk_numel(logits_NV.device) // logits_NV.shape[1])
    pieces = [
        checkpoint(
            _sum_cross_entropy, logits, targets, use_reentrant=False, preserve_rng_state=False
        )
        for logits, targets in zip(
            torch.split(logits_NV, rows), torch.split(targets_N, rows), strict=True
        )
    ]
    total: Tensor = torch.stack(pieces).sum()
    return total / targets_N.numel()


def loss_chunk_numel(device: torch.device) -> int:
    """Most logits in a piece of the loss. A piece costs the host 0.25 ms, for which a device would wait."""
    return LOSS_CHUNK_NUMEL if device.type == "cpu" else DEVICE_LOSS_CHUNK_NUMEL


def _sum_cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    return F.cross_entropy(logits_NV.float(), targets_N, reduction="sum")
