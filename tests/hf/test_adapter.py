"""Folders of transformers by the training command, beside transformers and torch's AdamW in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import hpczero
from hpczero.data import TokenFile
from hpczero.errors import ConfigError
from hpczero.finetune import lora
from hpczero.hf.adapter import causal_lm
from hpczero.run.results.metrics import read_metrics
from tests.helpers.mpirun import run_ranks

STEPS, BATCH, CONTEXT, RATE = 3, 4, 24, 3e-3
SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
KINDS: dict[str, dict[str, Any]] = {"Llama": {}, "Mixtral": {"num_local_experts": 4}}
LORA = {"rank": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}


@pytest.fixture(scope="module")
def library() -> Any:
    return pytest.importorskip("transformers")


def make(library: Any, folder: Path, kind: str, **changes: Any) -> Path:
    config = getattr(library, f"{kind}Config")(**SIZES, **KINDS[kind], **changes)
    torch.manual_seed(0)
    getattr(library, f"{kind}ForCausalLM")(config).save_pretrained(folder / "model")
    (folder / "text.txt").write_text("".join(f"line {n} of the text\n" for n in range(300)))
    return folder / "model"


def losses(
    folder: Path, ranks: int, *more: str, steps: int = STEPS, **arguments: Any
) -> list[float]:
    """Of the training command on the model in ``folder``."""
    given = {"folder": str(folder / "model"), "context": CONTEXT, **arguments}
    options = {
        "model.factory": "hpczero.hf.adapter:causal_lm",
        "model.arguments": json.dumps(given),
        "run.folder": folder,
        "run.name": "r",
        "data.path": folder / "text.txt",
        "data.cache": folder,
        "train.global_batch": BATCH,
        "train.learning_rate": RATE,
        "train.warmup": 1,
        "train.schedule": "constant",
        "train.steps": steps,
        "evaluation.batches": 0,
        "log.plot": "false",
        "log.tensorboard": "false",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    run_ranks(ranks, ["-m", "hpczero.train", *words, *more], 90).ended()
    return [m.loss for m in read_metrics(folder / "r" / "metrics.jsonl")]


def plain(
    library: Any, folder: Path, products: dict[str, Any] | None = None
) -> tuple[Any, list[float]]:
    """The trained model and its losses, by transformers, with its own loss, and torch."""
    model = library.AutoModelForCausalLM.from_pretrained(folder / "model").train()
    if products is not None:
        lora(model, **products)
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, others = (
        [p for p in trained if (p.dim() >= 2) is is_one] for is_one in (True, False)
    )
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    found = []
    (path,) = folder.glob("*.h5")
    with TokenFile.open(path) as tokens:
        batches = tokens.batches(CONTEXT, BATCH, 0)
        for step in range(STEPS):
            inputs, targets = map(torch.as_tensor, batches.micro_batch(step, 0, 0, 1))
            loss = model(input_ids=inputs, labels=targets, shift_labels=targets).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return model.eval(), found


def test_llama_trains_as_by_transformers_and_goes_back_to_a_folder(
    library: Any, tmp_path: Path
) -> None:
    folder = make(library, tmp_path, "Llama")
    ours = losses(tmp_path, 2)
    model, theirs = plain(library, tmp_path)
    assert ours == pytest.approx(theirs, rel=1e-6)
    hpczero.hf.export(tmp_path / "r" / "checkpoints", tmp_path / "out", like=folder)
    again = library.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.arange(20)[None]
    torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-5)


def test_mixtral_trains_with_the_loss_of_its_router_and_blocks_computed_again(
    library: Any, tmp_path: Path
) -> None:
    make(library, tmp_path, "Mixtral", output_router_logits=True, router_aux_loss_coef=0.1)
    ours = losses(tmp_path, 1, "--activations.checkpointing", "block")
    assert ours == pytest.approx(plain(library, tmp_path)[1], rel=1e-6)


@pytest.mark.slow
def test_low_rank_products_train_on_a_frozen_model_and_resume(library: Any, tmp_path: Path) -> None:
    make(library, tmp_path, "Llama")
    losses(tmp_path, 1, steps=2, lora=LORA)
    ours = losses(tmp_path, 2, lora=LORA)
    assert ours == pytest.approx(plain(library, tmp_path, LORA)[1], rel=1e-6)


@pytest.mark.slow
def test_weights_from_scratch_do_not_depend_on_the_ranks(library: Any, tmp_path: Path) -> None:
    folder = make(library, tmp_path, "Llama")
    (folder / "model.safetensors").unlink()
    alone = losses(tmp_path, 1, scratch=True)
    split = losses(tmp_path, 2, "--parallel.tensor", "2", "--run.overwrite", "true", scratch=True)
    cut = losses(
        tmp_path,
        2,
        *("--parallel.pipeline", "2", "--train.accumulation", "2", "--run.overwrite", "true"),
        scratch=True,
    )
    assert split == pytest.approx(alone, rel=1e-6)
    assert cut == pytest.approx(alone, rel=1e-6)


def test_flops_are_six_for_each_weight_that_a_token_meets(library: Any, tmp_path: Path) -> None:
    for kind, mlps in (("Llama", 1), ("Mixtral", 2)):  # a token meets two experts
        make(library, tmp_path, kind)
        adapter = causal_lm(str(tmp_path / "model"), CONTEXT)
        attention, mlp = 32 * (32 + 16 + 16 + 32), mlps * 3 * 32 * 48
        router = 32 * 4 if kind == "Mixtral" else 0
        products = 2 * (attention + mlp + router) + 32 * 257
        assert adapter.flops_per_token == 6 * products + 12 * 2 * 32 * CONTEXT
    with pytest.raises(ConfigError, match="257 token ids, and the data have 300"):
        adapter.with_vocabulary(300)
    wrong: tuple[tuple[dict[str, Any], str], ...] = (
        ({"scratch": "no"}, "scratch: got 'no', expected true or false"),
        ({"context": "24"}, "context: got '24', expected a number"),
        ({"lora": {"ranks": 4}}, "lora: .*'ranks'"),
    )
    for arguments, message in wrong:
        with pytest.raises(ConfigError, match=message):
            causal_lm(str(tmp_path / "model"), **arguments)
    with pytest.raises(ConfigError, match="context: got 65, expected 1 to 64"):
        causal_lm(str(tmp_path / "model"), 65)
