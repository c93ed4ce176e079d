"""Sampling from a known distribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hpczero.models import generate

PROMPT = torch.tensor([2])


class Walk:
    """Logits that depend on the last token; remembers the sequences it was given."""

    def __init__(self, logits_VV: Tensor) -> None:
        self.logits_VV = logits_VV
        self.lengths: list[int] = []

    def __call__(self, tokens_BT: Tensor) -> Tensor:
        self.lengths.append(tokens_BT.shape[1])
        return self.logits_VV[tokens_BT]


def random_walk(vocab_size: int = 9) -> Walk:
    return Walk(torch.randn(vocab_size, vocab_size, generator=torch.Generator().manual_seed(0)))


def sample(walk: Walk, **options: Any) -> list[int]:
    defaults: dict[str, Any] = {"num_tokens": 30, "context": 4}
    return generate(walk, PROMPT, **{**defaults, **options}).tolist()


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}, {"temperature": 1e-4}])
def test_greedy_follows_the_largest_logit(options: dict[str, Any]) -> None:
    walk = random_walk()
    expected = [2]
    for _ in range(30):
        expected.append(int(walk.logits_VV[expected[-1]].argmax()))
    assert sample(walk, **options) == expected


def test_equal_seeds_give_equal_text_whatever_the_global_generator_says() -> None:
    texts = []
    for global_seed in (0, 1):
        torch.manual_seed(global_seed)
        texts.append(sample(random_walk(), seed=7))
    assert texts[0] == texts[1]
    assert sample(random_walk(), seed=8) != texts[0]


def test_model_is_called_once_per_token_with_at_most_the_context() -> None:
    walk = random_walk()
    assert len(sample(walk, num_tokens=6)) == 7
    assert walk.lengths == [1, 2, 3, 4, 4, 4]
    assert sample(random_walk(), num_tokens=0) == [2]


@pytest.mark.parametrize(("temperature", "top_k"), [(1.0, None), (0.5, None), (1.0, 2), (1.0, 99)])
def test_frequencies_are_the_softmax_of_the_kept_logits(
    temperature: float, top_k: int | None
) -> None:
    logits = torch.tensor([0.3, -0.5, 1.0, 0.0])
    walk = Walk(logits.expand(4, 4))
    drawn = sample(walk, num_tokens=4000, context=1, temperature=temperature, top_k=top_k)[1:]
    frequency = torch.bincount(torch.tensor(drawn), minlength=4) / len(drawn)
    kept = logits / temperature
    if top_k == 2:
        kept[[1, 3]] = -torch.inf
    # four standard deviations of 4000 draws
    torch.testing.assert_close(frequency, kept.softmax(0), atol=0.032, rtol=0)


@pytest.mark.parametrize("options", [{"temperature": -1.0}, {"top_k": 0}, {"context": 0}])
def test_senseless_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="generate: got temperature"):
        sample(random_walk(), **options)


def test_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="the prompt has shape"):
        generate(random_walk(), PROMPT[:0], num_tokens=1, context=4)
