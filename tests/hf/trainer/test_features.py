"""What else a script asks of Trainer: metrics, the best model, limits, final weights, other ways of giving data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hpczero
from hpczero.errors import ConfigError
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


def steps_in(folder: Path) -> list[int]:
    return sorted(
        int(each.name.removeprefix("step-")) for each in folder.glob("checkpoints/step-*")
    )


def furthest(mine: Any, other: Any) -> float:
    return max((mine[name] - other[name]).abs().max().item() for name in other)


@pytest.mark.parametrize("save_only_model", [False, True])
def test_best_model_is_kept_and_loaded_at_the_end(
    comm: MPI.Intracomm, folder: Path, save_only_model: bool
) -> None:
    """With a rate that grows, the loss of evaluation is least in the middle; as of plain Trainer."""
    from tests.hf.trainer.runs import done_with, plain, train, trainer_over_mpi

    options = {
        **SAVING,
        "learning_rate": 0.5,
        "warmup_steps": 8,
        "save_total_limit": 1,
        "save_only_model": save_only_model,
        "load_best_model_at_end": True,
        "lr_scheduler_type": "constant_with_warmup",
    }
    mine = plain(folder / "plain", GLOBAL_BATCH, **options) if comm.rank == 0 else None
    expected = comm.bcast(mine)
    trainer = trainer_over_mpi(folder / "mpi", GLOBAL_BATCH // comm.size, stage=3, **options)
    found = train(trainer, comm)
    best = trainer.state.best_global_step
    parallel_assert(comm, best in (2, 4, 6), f"{best}: {found.log}")
    far = furthest(found.weights, expected.weights)
    parallel_assert(comm, far < 1e-5, f"{far}")
    if save_only_model:
        left = [each.name for each in (folder / "mpi").glob("checkpoint-*")]
        parallel_assert(comm, left == [f"checkpoint-{best}"], str(left))
    else:
        parallel_assert(comm, steps_in(folder / "mpi") == [best, 8], str(steps_in(folder / "mpi")))
    done_with(trainer)


def test_predictions_and_metrics_are_those_of_all_samples(
    comm: MPI.Intracomm, folder: Path
) -> None:
    """Rows of several lengths are padded over ranks; those that fill up the last batch do not count."""
    from tests.hf.trainer.runs import (
        VOCABULARY,
        done_with,
        llama,
        state_of_accelerate,
        trainer_over_mpi,
    )

    generator = torch.Generator().manual_seed(8)
    samples = [
        {"input_ids": ids, "labels": ids.clone()}
        for length in (5, 9, 7, 11, 6, 8, 10)
        for ids in [torch.randint(0, VOCABULARY, (length,), generator=generator)]
    ]

    def metrics(found: Any) -> dict[str, float]:
        right = found.predictions.argmax(-1)[:, :-1] == found.label_ids[:, 1:]
        return {"right": float(right.sum()), "rows": float(len(found.label_ids))}

    given = {"compute_metrics": metrics}
    sets = {"train_dataset": samples, "eval_dataset": samples}
    trainer = trainer_over_mpi(folder / "mpi", 1, datasets=sets, given=given, stage=3, max_steps=1)
    trainer.train()
    whole = comm.bcast(hpczero.full_state_dict(trainer.model))
    found: Any = trainer.predict(samples)
    evaluated = trainer.evaluate()
    done_with(trainer)
    if comm.rank == 0:
        import transformers
        from accelerate.utils import DistributedType

        from tests.hf.trainer.runs import options

        with state_of_accelerate(0, 1, DistributedType.NO):
            args = transformers.TrainingArguments(
                **options(folder / "plain", 1, accelerator_config={"use_configured_state": True})
            )
            model = llama()
            model.load_state_dict(whole)
            other = transformers.Trainer(model, args, eval_dataset=samples, **given)  # type: ignore[arg-type]
            expected: Any = other.predict(samples)  # type: ignore[arg-type]
        far = abs(found.predictions[:, :5] - expected.predictions[:, :5]).max()
        problem = "" if far < 1e-5 else f"predictions differ by {far}"
        for name in ("right", "rows"):
            a, b = evaluated[f"eval_{name}"], expected.metrics[f"test_{name}"]
            problem += "" if abs(a - b) < 1e-5 else f"; {name}: {a} and {b}"
        problem += "" if found.label_ids.shape[0] == len(samples) else "; rows are missing"
    parallel_assert(comm, comm.rank > 0 or not problem, problem if comm.rank == 0 else "")


def test_iterable_data_set_equals_plain_trainer(comm: MPI.Intracomm, folder: Path) -> None:
    from torch.utils.data import IterableDataset

    from tests.hf.trainer.runs import done_with, plain, rows, train, trainer_over_mpi

    class Stream(IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter(rows(48, 1))

    sets = {"train_dataset": Stream(), "eval_dataset": rows(18, 2)}
    options: dict[str, Any] = {"datasets": sets, "max_steps": 6}
    mine = plain(folder / "plain", GLOBAL_BATCH, **options) if comm.rank == 0 else None
    expected = comm.bcast(mine)
    trainer = trainer_over_mpi(folder / "mpi", GLOBAL_BATCH // comm.size, **options)
    found = train(trainer, comm)
    parallel_assert(comm, not found.differs(expected), found.differs(expected))
    done_with(trainer)


@pytest.mark.ranks(2)
def test_bf16_is_hpczeros_own(comm: MPI.Intracomm, folder: Path) -> None:
    """fp32 masters, no autocast; the loss is near that of fp32."""
    from tests.hf.trainer.runs import done_with, plain, train, trainer_over_mpi

    mine = plain(folder / "plain", GLOBAL_BATCH) if comm.rank == 0 else None
    expected = comm.bcast(mine)
    trainer = trainer_over_mpi(folder / "mpi", GLOBAL_BATCH // comm.size, bf16=True)
    found = train(trainer, comm)
    parallel_assert(comm, hpczero.sharding(trainer.model).plan.precision.param == "bf16")
    parallel_assert(comm, not trainer.accelerator.native_amp)
    losses = [
        abs(a["loss"] - b["loss"])
        for a, b in zip(found.log, expected.log, strict=True)
        if "loss" in a
    ]
    parallel_assert(comm, 0 < max(losses) < 2e-2, str(losses))
    done_with(trainer)


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
            other = runs._plain_trainer(folder / "plain", GLOBAL_BATCH, None, None, options)
            other.train()
            other.train()
        expected = runs.Run.of(other, other.model.state_dict())
    expected = comm.bcast(expected)
    trainer = runs.trainer_over_mpi(folder / "mpi", GLOBAL_BATCH // comm.size, stage=2, **options)
    trainer.train()
    found = runs.train(trainer, comm)
    parallel_assert(comm, furthest(found.weights, expected.weights) < 1e-6)
    aside = len(list((folder / "mpi" / "checkpoints").glob("aside-*")))
    parallel_assert(comm, (steps_in(folder / "mpi"), aside) == ([3], 1))
    runs.done_with(trainer)


@pytest.mark.ranks(2)
def test_early_stopping_and_model_init_work(comm: MPI.Intracomm, folder: Path) -> None:
    """The state of the callback is in the checkpoint; each train() begins with a model of its own."""
    from transformers import EarlyStoppingCallback

    from hpczero.hf.trainer import HpczeroTrainer, HpczeroTrainingArguments
    from tests.hf.trainer.runs import data, done_with, llama
    from tests.hf.trainer.runs import options as of_run

    changes = {
        **SAVING,
        "load_best_model_at_end": True,
        "learning_rate": 0.5,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 8,
    }
    args = HpczeroTrainingArguments(**of_run(folder, GLOBAL_BATCH // comm.size, **changes))
    callbacks = [EarlyStoppingCallback(early_stopping_patience=2)]
    trainer = HpczeroTrainer(args=args, model_init=lambda: llama(), callbacks=callbacks, **data())
    ends = []
    for _ in range(2):
        trainer.train()
        ends.append(trainer.state.global_step)
    parallel_assert(comm, ends[0] == ends[1] < 8, str(ends))
    kept = trainer.state.stateful_callbacks["EarlyStoppingCallback"]
    parallel_assert(comm, kept["attributes"]["early_stopping_patience_counter"] >= 1, str(kept))
    done_with(trainer)


@pytest.mark.ranks(2)
def test_recomputation_and_evaluation_before_training_equal_plain_trainer(
    comm: MPI.Intracomm, folder: Path
) -> None:
    from tests.hf.trainer.runs import done_with, llama, plain, train, trainer_over_mpi

    options = {"activation_checkpointing": True}
    mine = plain(folder / "plain", GLOBAL_BATCH, **options) if comm.rank == 0 else None
    expected = comm.bcast(mine)
    trainer = trainer_over_mpi(folder / "mpi", GLOBAL_BATCH // comm.size, **options)
    with torch.no_grad():
        trainer.model.lm_head.weight.add_(comm.rank)
    text = ""
    try:
        trainer.evaluate()
    except ConfigError as error:
        text = str(error)
    parallel_assert(comm, "rank 1 has other weights than rank 0" in text, text)
    with torch.no_grad():
        trainer.model.lm_head.weight.copy_(llama().lm_head.weight)
    before = trainer.evaluate()["eval_loss"]
    found = train(trainer, comm)
    parallel_assert(comm, 4.0 < before < 4.2, str(before))
    parallel_assert(comm, furthest(found.weights, expected.weights) < 1e-6)
    done_with(trainer)


@pytest.mark.ranks(2)
def test_reset_state_of_accelerate_is_named(comm: MPI.Intracomm, folder: Path) -> None:
    """Another library that makes an Accelerator of its own would leave each rank with all samples."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    from tests.hf.trainer.runs import state_of_accelerate, trainer_over_mpi

    trainer = trainer_over_mpi(folder, 3)
    with state_of_accelerate(0, 1, DistributedType.NO):
        text = ""
        try:
            trainer.train()
        except ConfigError as error:
            text = str(error)
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == {}
    parallel_assert(comm, "process 0 of 1, expected" in text, text)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrapped", [True, False])
def test_adapters_of_peft_train_and_are_saved_alone(
    comm: MPI.Intracomm, folder: Path, wrapped: bool
) -> None:
    import peft

    from tests.hf.trainer.runs import done_with, llama, plain, train, trainer_over_mpi

    def adapted() -> Any:
        model = llama()
        torch.manual_seed(9)
        if not wrapped:
            model.add_adapter(peft.LoraConfig(r=3, target_modules=["q_proj"]))
            return model
        config = peft.LoraConfig(
            r=3,
            target_modules=["q_proj", "v_proj"],
            modules_to_save=["lm_head"],  # peft asks this module for its state dict
            task_type="CAUSAL_LM",
        )
        return peft.get_peft_model(model, config)

    mine = plain(folder / "plain", GLOBAL_BATCH, adapted()) if comm.rank == 0 else None
    expected = comm.bcast(mine)
    trainer = trainer_over_mpi(folder / "mpi", GLOBAL_BATCH // comm.size, adapted(), stage=3)
    found = train(trainer, comm)
    parallel_assert(comm, not found.differs(expected), found.differs(expected))
    trainer.save_model()
    done_with(trainer)
    again = llama()
    if wrapped:
        again = peft.PeftModel.from_pretrained(again, folder / "mpi")
    else:
        again.load_adapter(str(folder / "mpi"))
    parallel_assert(comm, furthest(again.state_dict(), found.weights) == 0.0)
    left = {each.name for each in (folder / "mpi").iterdir()}
    parallel_assert(comm, "adapter_model.safetensors" in left and "model.safetensors" not in left)


@pytest.mark.ranks(2)
def test_best_adapter_of_peft_is_loaded_at_the_end(comm: MPI.Intracomm, folder: Path) -> None:
    """With ``save_only_model`` its folder has the adapter alone, under peft's names."""
    import peft

    from tests.hf.trainer.runs import done_with, llama, plain, train, trainer_over_mpi

    def adapted() -> Any:
        model = llama()
        torch.manual_seed(9)
        config = peft.LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["lm_head"])
        return peft.get_peft_model(model, config)

    options = {
        **SAVING,
        "learning_rate": 0.5,
        "warmup_steps": 8,
        "save_only_model": True,
        "load_best_model_at_end": True,
        "lr_scheduler_type": "constant_with_warmup",
    }
    mine = None
    if comm.rank == 0:
        mine = plain(folder / "plain", GLOBAL_BATCH, adapted(), **options)
    expected = comm.bcast(mine)
    trainer = trainer_over_mpi(folder / "mpi", GLOBAL_BATCH // comm.size, adapted(), **options)
    found = train(trainer, comm)
    best = trainer.state.best_global_step
    parallel_assert(comm, best in (2, 4, 6), f"{best}: {found.log}")
    far = furthest(found.weights, expected.weights)
    parallel_assert(comm, far < 1e-5, f"{far}")
    done_with(trainer)


@pytest.mark.ranks(2)
def test_arguments_are_parsed_pickled_and_told_from_plain_ones(
    comm: MPI.Intracomm, folder: Path
) -> None:
    import pickle

    import transformers
    from accelerate.utils import DistributedType

    from hpczero.hf.trainer import HpczeroTrainer, HpczeroTrainingArguments
    from tests.hf.trainer.runs import data, llama, state_of_accelerate

    typed = ["--output_dir", str(folder), "--stage", "1", "--use_cpu", "--report_to", "none"]
    parser = transformers.HfArgumentParser(HpczeroTrainingArguments)
    (args,) = parser.parse_args_into_dataclasses(typed)
    again = pickle.loads(pickle.dumps(args))
    seen = [(each.world_size, each.process_index, each.stage) for each in (args, again)]
    parallel_assert(comm, seen == [(comm.size, comm.rank, 1)] * 2, str(seen))
    with state_of_accelerate(0, 1, DistributedType.NO):
        configured = {"use_configured_state": True}
        plain = transformers.TrainingArguments(
            str(folder), use_cpu=True, report_to=[], accelerator_config=configured
        )
        text = ""
        try:
            HpczeroTrainer(llama(), plain, **data())  # type: ignore[arg-type]
        except ConfigError as error:
            text = str(error)
    said = "got TrainingArguments, which says 1 process(es), and MPI has 2 rank(s)"
    parallel_assert(comm, said in text, text)
