"""What docs/hugging-face.md and the README show of transformers runs as it stands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.foreign import llama
from tests.helpers.mpirun import ROOT, run_ranks
from tests.helpers.transcripts import blocks

PAGE = ROOT / "docs" / "hugging-face.md"
README = ROOT / "README.md"


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.filterwarnings("ignore", "error:::hpczero")
def test_program_of_the_page_trains_and_saves(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    llama.made().save_pretrained(tmp_path / "my-model")
    words = ["sample", "of", "rank", "0", "1", "2", "[UNK]"]
    plain = Tokenizer(WordLevel({word: place for place, word in enumerate(words)}, "[UNK]"))
    plain.pre_tokenizer = Whitespace()
    fast: Any = llama.library().PreTrainedTokenizerFast(tokenizer_object=plain)
    fast.save_pretrained(tmp_path / "my-model")
    (tmp_path / "program.py").write_text(blocks(PAGE, "python")[0])
    finished = run_ranks(2, ["program.py"], 240, cwd=tmp_path)
    assert finished.returncode == 0, str(finished)
    kind: Any = llama.library().AutoModelForCausalLM
    again = kind.from_pretrained(tmp_path / "trained")
    assert again.dtype == torch.bfloat16
    before = llama.made().state_dict()["model.embed_tokens.weight"]
    assert not torch.equal(again.get_input_embeddings().weight.float(), before.bfloat16().float())
    assert (tmp_path / "trained" / "tokenizer.json").exists()


SCHEDULE = """
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
scheduler.step()
from hpczero.data.loading import ResumableLoader
samples = torch.utils.data.TensorDataset(tokens)
loader = ResumableLoader(samples, global_batch=2, topology=topology)
"""


@pytest.mark.slow
@pytest.mark.limit(300)
@pytest.mark.filterwarnings("ignore", "error:::hpczero")
def test_programs_of_the_readme_train_save_and_go_on(tmp_path: Path) -> None:
    llama.made().save_pretrained(tmp_path / "my-model")
    shown = blocks(README, "python")
    whole, calls = (next(b for b in shown if word in b) for word in ("hf.load", "checkpoint.save"))
    end = "assert (step, scheduler.last_epoch) == (1, 1)"
    (tmp_path / "program.py").write_text(f"{whole}\n{SCHEDULE}\nstep = 1\n{calls}\n{end}\n")
    finished = run_ranks(2, ["program.py"], 240, cwd=tmp_path)
    assert finished.returncode == 0, str(finished)
    kind: Any = llama.library().AutoModelForCausalLM
    again = kind.from_pretrained(tmp_path / "trained").state_dict()
    before = llama.made().state_dict()
    product = "model.layers.0.self_attn.q_proj.weight"
    # B is zero at first: one step moves it, and the product with it.
    assert not torch.equal(again[product], before[product].bfloat16().float())
    norm = "model.layers.0.input_layernorm.weight"
    assert torch.equal(again[norm], before[norm].bfloat16().float())
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()
