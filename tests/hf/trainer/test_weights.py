"""Whole weights that a trainer leaves for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.helpers.parallel import parallel_assert

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(2, 3),
    pytest.mark.limit(300),
    pytest.mark.filterwarnings("ignore", "error:::hpczero"),
]
GLOBAL_BATCH = 6
SAVING = {"save_strategy": "steps", "save_steps": 2, "eval_steps": 2}


def furthest(mine: Any, other: Any) -> float:
    return max((mine[name] - other[name]).abs().max().item() for name in other)


def test_final_weights_load_in_transformers(comm: MPI.Intracomm, folder: Path) -> None:
    """Saved into a folder that holds checkpoints already, twice, with a tokenizer that has a folder of its own."""
    import tokenizers
    import transformers

    from tests.hf.trainer.runs import done_with, llama, train, trainer_over_mpi

    model = llama(tie_word_embeddings=True)
    words: Any = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    trainer = trainer_over_mpi(
        folder,
        GLOBAL_BATCH // comm.size,
        model,
        given={"processing_class": tokenizer, "data_collator": transformers.default_data_collator},
        max_steps=2,
        **SAVING,
    )
    found = train(trainer, comm)
    trainer.save_model()
    trainer.save_model()
    again = transformers.LlamaForCausalLM.from_pretrained(folder)
    state = again.state_dict()
    parallel_assert(comm, furthest(state, found.weights) == 0.0)
    parallel_assert(comm, again.lm_head.weight is again.model.embed_tokens.weight)
    left = sorted(each.name for each in folder.glob("checkpoints/step-*"))
    parallel_assert(comm, (folder / "training_args.bin").is_file() and left == ["step-000000002"])
    other: Any = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    parallel_assert(comm, other.chat_template == tokenizer.chat_template)
    hidden = [each.name for each in folder.glob(".*")]
    parallel_assert(comm, not hidden, str(hidden))
    done_with(trainer)
