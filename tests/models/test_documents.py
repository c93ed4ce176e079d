"""Several documents in one sequence: the GPT gives what it gives for each of them alone."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from hpczero.data import Corpus, prepare
from hpczero.errors import ConfigError, PlanError
from hpczero.models import GPT, GPTConfig
from hpczero.models.gpt import mean_cross_entropy
from hpczero.options.reading import read_run_config
from hpczero.parallel.pipeline.stages import gpt_stages
from hpczero.parallel.tensor import gpt_rule
from hpczero.run.starting.reading import check_separate
from tests.helpers.runs import losses, train

SEPARATOR = 17
ENDS = [0, 1, 6, 7, 19, 31]  # of documents in a sequence; the last one goes on behind it


def model(**options: Any) -> GPT:
    sizes = {"vocab_size": 18, "context": 31, "layers": 2, "hidden": 12, "heads": 3}
    made = GPT(GPTConfig(**{**sizes, "separator": SEPARATOR, **options}))
    made.initialize_all(seed=3)
    return made


def packed() -> torch.Tensor:
    tokens = torch.randint(0, SEPARATOR, (2, 31), generator=torch.Generator().manual_seed(1))
    for end in ENDS[1:-1]:
        tokens[0, end - 1] = SEPARATOR
    tokens[1, 30] = SEPARATOR  # one document, whole
    return tokens


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_documents_of_a_sequence_are_computed_as_if_each_were_alone(
    positions: str, checkpointing: bool
) -> None:
    options = {"positions": positions, "checkpoint_activations": checkpointing}
    together, apart = model(**options), model(**options, separator=None)
    tokens = packed()
    targets = torch.randint(0, 18, tokens.shape, generator=torch.Generator().manual_seed(2))
    logits = together(tokens)
    pieces = [apart(tokens[:1, start:end]) for start, end in pairwise(ENDS)]
    torch.testing.assert_close(logits[:1], torch.cat(pieces, dim=1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(logits[1:], apart(tokens[1:]), atol=1e-6, rtol=1e-5)
    assert not torch.allclose(logits[:1], apart(tokens[:1]), atol=1e-3), "joined is another thing"

    together(tokens, targets).backward()
    rows = torch.cat([torch.cat(pieces, dim=1), apart(tokens[1:])])
    mean_cross_entropy(rows, targets).backward()
    for (name, one), other in zip(together.named_parameters(), apart.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad, atol=1e-6, rtol=1e-4, msg=name)


def test_two_forwards_before_their_backwards_keep_their_own_masks() -> None:
    """Blocks that are computed again in backward see the documents of their own forward."""
    one, other = model(checkpoint_activations=True), model()
    first = packed()
    second = first.flip(0).roll(5, 1)
    for each in (one, other):
        (each(first).square().sum() + each(second).sum()).backward()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_ranks_that_share_a_sample_are_refused_by_name() -> None:
    with pytest.raises(PlanError, match="keeps documents apart"):
        gpt_rule(model().config)
    with pytest.raises(PlanError, match="keeps documents apart"):
        gpt_stages(model())
    with pytest.raises(ValueError, match="separator is 18, expected 0 to 17"):
        model(separator=18)


def test_run_keeps_documents_apart_on_any_ranks_and_says_so_when_it_goes_on(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for n in range(300):
        (tmp_path / "texts" / str(n)).write_text(f"{n}: a text of {n % 7} words\n" * (1 + n % 3))
    prepare(Corpus.of_paths([tmp_path / "texts"]), tmp_path / "t.h5")
    given = {"data__path": tmp_path / "t.h5", "train__steps": 4, "model__context": 64}
    found = []
    for name, ranks, more in (
        ("joined", 1, {}),
        ("one", 1, {"data__documents": "separate"}),
        ("two", 2, {"data__documents": "separate", "activations__checkpointing": "block"}),
    ):
        train(tmp_path / name, ranks, **given, **more).ended()
        found.append(losses(tmp_path / name))
    assert found[1] == pytest.approx(found[2], rel=1e-6)
    assert found[0][0] != pytest.approx(found[1][0], rel=1e-6)
    other = train(tmp_path / "one", 1, **{**given, "train__steps": 6}).ended(78)
    assert "data.documents was separate and is joined" in other.stderr


@pytest.mark.parametrize("degree", ["tensor", "pipeline", "context"])
def test_run_whose_ranks_share_samples_is_refused(degree: str) -> None:
    with pytest.raises(ConfigError, match=rf"parallel.{degree} is 2; ranks that share a sample"):
        check_separate(read_run_config([f"--parallel.{degree}", "2"]))
