"""Sampling text from any function that maps tokens to logits.

Owns: the choice of the next token. Must not know: which model gives the logits, or on how many ranks it lies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


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
