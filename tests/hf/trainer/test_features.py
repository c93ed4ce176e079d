"""What else a script asks of Trainer: metrics, the best model, limits, final weights, other ways of giving data."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hpczero
from hpczero.errors import ConfigError
from tests.helpers.parallel import on_root, parallel_assert, told
from tests.helpers.small_models import raises_on_all

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.ranks(2, 3),
    pytest.mark.limit(300),
    pytest.mark.filterwarnings("ignore", "error:::hpczero"),
]
SAVING = {"save_strategy": "steps", "save_steps": 2, "eval_steps": 2}
# With a rate that grows, the loss of evaluation is least in the middle.
BEST = {
    **SAVING,
    "learning_rate": 0.5,
    "warmup_steps": 8,
    "load_best_model_at_end": True,
    "lr_scheduler_type": "constant_with_warmup",
}


def steps_in(folder: Path) -> list[int]:
    found = folder.glob("checkpoints/step-*")
    return sorted(int(each.name.removeprefix("step-")) for each in found)


def adapted(*, wrapped: bool = True) -> Any:
    """With products of peft."""
    import peft

    from tests.hf.trainer import runs

    model = runs.llama()
    torch.manual_seed(9)
    if not wrapped:
        model.add_adapter(peft.LoraConfig(r=3, target_modules=["q_proj"]))
        return model
    # peft asks lm_head for its state dict
    options: Any = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}
    return peft.get_peft_model(model, peft.LoraConfig(r=3, task_type="CAUSAL_LM", **options))


@pytest.mark.parametrize("kind", ["whole", "weights alone", "adapter alone"])
def test_best_model_is_kept_and_loaded_at_the_end(
    comm: MPI.Intracomm, folder: Path, kind: str
) -> None:
    """As of plain Trainer; with ``save_only_model`` the folder of an adapter has that alone, under peft's names."""
    from tests.hf.trainer import runs

    make, alone = adapted if kind == "adapter alone" else runs.llama, kind != "whole"
    options = {**BEST, "save_total_limit": 1, "save_only_model": alone}
    trainer, found, expected = runs.beside_plain(
        comm, folder, make, sharding={"stage": 3}, **options
    )
    best = trainer.state.best_global_step
    parallel_assert(comm, best in (2, 4, 6), f"{best}: {found.log}")
    far = runs.furthest(found.weights, expected.weights)
    parallel_assert(comm, far < 1e-5, f"{far}")
    if alone:
        left = [each.name for each in (folder / "mpi").glob("checkpoint-*")]
        parallel_assert(comm, left == [f"checkpoint-{best}"], str(left))
    else:
        parallel_assert(comm, steps_in(folder / "mpi") == [best, 8], str(steps_in(folder / "mpi")))
    runs.done_with(trainer)


def test_predictions_and_metrics_are_those_of_all_samples(
    comm: MPI.Intracomm, folder: Path
) -> None:
    """Rows of several lengths are padded over ranks; those that fill up the last batch do not count."""
    import transformers
    from accelerate.utils import DistributedType

    from tests.hf.trainer import runs

    generator = torch.Generator().manual_seed(8)
    samples: Any = [
        {"input_ids": ids, "labels": ids.clone()}
        for length in (5, 9, 7, 11, 6, 8, 10)
        for ids in [torch.randint(0, runs.VOCABULARY, (length,), generator=generator)]
    ]

    def metrics(found: Any) -> dict[str, float]:
        right = found.predictions.argmax(-1)[:, :-1] == found.label_ids[:, 1:]
        return {"right": float(right.sum()), "rows": float(len(found.label_ids))}

    given: Any = {"compute_metrics": metrics}
    sets = {"train_dataset": samples, "eval_dataset": samples}
    trainer = runs.trainer_over_mpi(
        folder / "mpi", 1, None, sets, given=given, stage=3, max_steps=1
    )
    trainer.train()
    whole = comm.bcast(hpczero.full_state_dict(trainer.model))
    found: Any = trainer.predict(samples)
    evaluated = trainer.evaluate()
    runs.done_with(trainer)

    def judge() -> None:
        configured = {"accelerator_config": {"use_configured_state": True}}
        with runs.state_of_accelerate(0, 1, DistributedType.NO):
            args = transformers.TrainingArguments(**runs.options(folder / "plain", 1, **configured))
            model = runs.llama()
            model.load_state_dict(whole)
            other = transformers.Trainer(model, args, eval_dataset=samples, **given)
            expected: Any = other.predict(samples)
        assert abs(found.predictions[:, :5] - expected.predictions[:, :5]).max() < 1e-5
        for name in ("right", "rows"):
            theirs = expected.metrics[f"test_{name}"]
            assert evaluated[f"eval_{name}"] == pytest.approx(theirs, abs=1e-5)
        assert found.label_ids.shape[0] == len(samples), "rows are missing"

    on_root(comm, judge)


def test_iterable_data_set_equals_plain_trainer(comm: MPI.Intracomm, folder: Path) -> None:
    from torch.utils.data import IterableDataset

    from tests.hf.trainer import runs

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter(runs.rows(48, 1))

    sets = {"train_dataset": Stream(), "eval_dataset": runs.rows(18, 2)}
    trainer, found, expected = runs.beside_plain(comm, folder, None, sets, max_steps=6)
    parallel_assert(comm, not found.differs(expected), found.differs(expected))
    runs.done_with(trainer)


@pytest.mark.ranks(2)
def test_bf16_is_hpczeros_own(comm: MPI.Intracomm, folder: Path) -> None:
    """fp32 masters, no autocast; the loss is near that of fp32."""
    from tests.hf.trainer import runs

    trainer, found, expected = runs.beside_plain(comm, folder, sharding={"bf16": True})
    parallel_assert(comm, hpczero.sharding(trainer.model).plan.precision.param == "bf16")
    parallel_assert(comm, not trainer.accelerator.native_amp)
    pairs = zip(found.log, expected.log, strict=True)
    losses = [abs(a["loss"] - b["loss"]) for a, b in pairs if "loss" in a]
    parallel_assert(comm, 0 < max(losses) < 2e-2, str(losses))
    runs.done_with(trainer)


@pytest.mark.ranks(2)
def test_second_train_goes_on_with_the_model_and_sets_the_first_ones_checkpoints_aside(
    comm: MPI.Intracomm, folder: Path
) -> None:
    """As plain Trainer: weights and state of the optimizer stay, steps count from 0."""
    from accelerate.utils import DistributedType

    from tests.hf.trainer import runs

    options = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3}
    expected = None
    if comm.rank == 0:
        with runs.state_of_accelerate(0, 1, DistributedType.NO):
            other = runs._plain_trainer(folder / "plain", 6, None, None, options)
            other.train()
            other.train()
        expected = runs.Run.of(other, other.model.state_dict())
    expected = comm.bcast(expected)
    trainer = runs.trainer_over_mpi(folder / "mpi", 6 // comm.size, stage=2, **options)
    trainer.train()
    found = runs.train(trainer, comm)
    parallel_assert(comm, runs.furthest(found.weights, expected.weights) < 1e-6)
    aside = len(list((folder / "mpi" / "checkpoints").glob("aside-*")))
    parallel_assert(comm, (steps_in(folder / "mpi"), aside) == ([3], 1))
    runs.done_with(trainer)


@pytest.mark.ranks(2)
def test_early_stopping_and_model_init_work(comm: MPI.Intracomm, folder: Path) -> None:
    """The state of the callback is in the checkpoint; each train() begins with a model of its own."""
    from transformers import EarlyStoppingCallback

    from hpczero.hf.trainer import HpczeroTrainer, HpczeroTrainingArguments
    from tests.hf.trainer import runs

    args = HpczeroTrainingArguments(**runs.options(folder, 6 // comm.size, **BEST))
    given: Any = {"callbacks": [EarlyStoppingCallback(early_stopping_patience=2)], **runs.data()}
    trainer = HpczeroTrainer(args=args, model_init=lambda: runs.llama(), **given)
    ends = []
    for _ in range(2):
        trainer.train()
        ends.append(trainer.state.global_step)
    parallel_assert(comm, ends[0] == ends[1] < 8, str(ends))
    kept = trainer.state.stateful_callbacks["EarlyStoppingCallback"]
    parallel_assert(comm, kept["attributes"]["early_stopping_patience_counter"] >= 1, str(kept))
    runs.done_with(trainer)


@pytest.mark.ranks(2)
def test_recomputation_equals_plain_trainer(comm: MPI.Intracomm, folder: Path) -> None:
    from tests.hf.trainer import runs

    trainer, found, expected = runs.beside_plain(comm, folder, activation_checkpointing=True)
    parallel_assert(comm, not found.differs(expected), found.differs(expected))
    runs.done_with(trainer)


@pytest.mark.ranks(2)
def test_evaluation_before_training_is_of_equal_weights(comm: MPI.Intracomm, folder: Path) -> None:
    from tests.hf.trainer import runs

    trainer = runs.trainer_over_mpi(folder, 3)
    with torch.no_grad():
        trainer.model.lm_head.weight.add_(comm.rank)
    said = "rank 1 has other weights than rank 0"
    raises_on_all(comm, ConfigError, said, trainer.evaluate)
    with torch.no_grad():
        trainer.model.lm_head.weight.copy_(runs.llama().lm_head.weight)
    before = trainer.evaluate()["eval_loss"]
    parallel_assert(comm, 4.0 < before < 4.2, str(before))
    runs.train(trainer, comm)
    runs.done_with(trainer)


@pytest.mark.ranks(2)
def test_reset_state_of_accelerate_is_named(comm: MPI.Intracomm, folder: Path) -> None:
    """Another library that makes an Accelerator of its own would leave each rank with all samples."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    from tests.hf.trainer import runs

    trainer = runs.trainer_over_mpi(folder, 3)
    with runs.state_of_accelerate(0, 1, DistributedType.NO):
        text = told(ConfigError, trainer.train)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == {}
    parallel_assert(comm, "process 0 of 1, expected" in text, text)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapped", [True, False])
def test_adapters_of_peft_train_and_are_saved_alone(
    comm: MPI.Intracomm, folder: Path, wrapped: bool
) -> None:
    import peft

    from tests.hf.trainer import runs

    make = partial(adapted, wrapped=wrapped)
    trainer, found, expected = runs.beside_plain(comm, folder, make, sharding={"stage": 3})
    parallel_assert(comm, not found.differs(expected), found.differs(expected))
    trainer.save_model()
    runs.done_with(trainer)
    again = runs.llama()
    if wrapped:
        again = peft.PeftModel.from_pretrained(again, folder / "mpi")
    else:
        again.load_adapter(str(folder / "mpi"))
    parallel_assert(comm, runs.furthest(again.state_dict(), found.weights) == 0.0)
    left = {each.name for each in (folder / "mpi").iterdir()}
    parallel_assert(comm, "adapter_model.safetensors" in left and "model.safetensors" not in left)


@pytest.mark.ranks(2)
def test_arguments_are_parsed_pickled_and_told_from_plain_ones(
    comm: MPI.Intracomm, folder: Path
) -> None:
    import pickle

    import transformers
    from accelerate.utils import DistributedType

    from hpczero.hf.trainer import HpczeroTrainer, HpczeroTrainingArguments
    from tests.hf.trainer import runs

    typed = ["--output_dir", str(folder), "--stage", "1", "--use_cpu", "--report_to", "none"]
    parser = transformers.HfArgumentParser(HpczeroTrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(typed)
    again = pickle.loads(pickle.dumps(args))
    seen = [(each.world_size, each.process_index, each.stage) for each in (args, again)]
    parallel_assert(comm, seen == [(comm.size, comm.rank, 1)] * 2, str(seen))
    with runs.state_of_accelerate(0, 1, DistributedType.NO):
        configured = {"use_configured_state": True}
        plain = transformers.TrainingArguments(
            str(folder), use_cpu=True, report_to=[], accelerator_config=configured
        )
        text = told(ConfigError, HpczeroTrainer, runs.llama(), plain, **runs.data())
    said = "got TrainingArguments, which says 1 process(es), and MPI has 2 rank(s)"
    parallel_assert(comm, said in text, text)


# --- whole weights for other programs


def test_final_weights_load_in_transformers(comm: MPI.Intracomm, folder: Path) -> None:
    """Saved into a folder that holds checkpoints already, twice, with a tokenizer that has a folder of its own."""
    import tokenizers
    import transformers

    from tests.hf.trainer import runs

    model = runs.llama(tie_word_embeddings=True)
    words: Any = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer: Any = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    given = {"processing_class": tokenizer, "data_collator": transformers.default_data_collator}
    saving = {"save_strategy": "steps", "save_steps": 2, "eval_steps": 2, "max_steps": 2}
    trainer = runs.trainer_over_mpi(folder, 6 // comm.size, model, given=given, **saving)
    found = runs.train(trainer, comm)
    trainer.save_model()
    trainer.save_model()
    again = transformers.LlamaForCausalLM.from_pretrained(folder)
    state = again.state_dict()
    parallel_assert(comm, runs.furthest(state, found.weights) == 0.0)
    parallel_assert(comm, again.lm_head.weight is again.model.embed_tokens.weight)
    left = sorted(each.name for each in folder.glob("checkpoints/step-*"))
    parallel_assert(comm, (folder / "training_args.bin").is_file() and left == ["step-000000002"])
    other: Any = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    parallel_assert(comm, other.chat_template == tokenizer.chat_template)
    hidden = [each.name for each in folder.glob(".*")]
    parallel_assert(comm, not hidden, str(hidden))
    runs.done_with(trainer)
