# mypy: disable-error-code="union-attr, operator, index, attr-defined"
"""What people put around models of transformers: its own switches and Trainer, peft, accelerate."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn

from tests.compat.architectures import ARCHITECTURES, text
from tests.compat.construct import SHARDED, Habits, Place, Training, plain_step, the_wrapper

BY_NAME = {each.name: each for each in ARCHITECTURES}


habits = Habits()


def own_loss(model: Any, batch: Any) -> Tensor:
    return model(**batch).loss


gpt2 = BY_NAME["gpt2"].build
OF_TEXT: dict[str, Any] = {"batch": text, "loss": own_loss}
OF_GPT2 = {"build": gpt2, "batch": text}


def recomputing(reentrant: bool) -> nn.Module:
    model = gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return model


@habits.build("peft-lora", **OF_TEXT)
def with_lora() -> nn.Module:
    """LoRA by peft."""
    import peft

    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return peft.get_peft_model(BY_NAME["llama"].build(), config)


@habits.build("peft-ia3", **OF_TEXT)
def with_ia3() -> nn.Module:
    """IA3 by peft."""
    import peft

    config = peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    )
    return peft.get_peft_model(BY_NAME["llama"].build(), config)


@habits.step("peft-merge", build=with_lora, **OF_TEXT)
def merge_and_unmerge(training: Training) -> None:
    """`merge_adapter` and `unmerge_adapter` inside `gathered`."""
    plain_step(training)
    with training.whole(training.model, change=True):
        training.model.merge_adapter()
        with torch.no_grad():
            training.note(training.model(**text(Place(0, 7))).loss)
        training.model.unmerge_adapter()


@habits.step("generate", loss=own_loss, **OF_GPT2)
def generates(training: Training) -> None:
    """`generate` between steps, inside `gathered`."""
    plain_step(training)
    training.model.eval()
    with training.whole(training.model), torch.no_grad():
        start = text(Place(0, 7))["input_ids"][:, :3]
        found = training.model.generate(start, max_new_tokens=4, do_sample=False, pad_token_id=0)
    training.model.train()
    training.note(found.double().mean())


@habits.loss("hidden-states", **OF_GPT2)
def hidden_states(model: Any, batch: Any) -> Tensor:
    """`output_hidden_states`, `output_attentions`, `use_cache`."""
    out = model(**batch, output_hidden_states=True, output_attentions=True, use_cache=True)
    features = torch.stack([each.square().mean() for each in out.hidden_states]).sum()
    return out.loss + 0.1 * features


@habits.loss("return-tuple", **OF_GPT2)
def as_tuple(model: Any, batch: Any) -> Tensor:
    """`return_dict=False`."""
    return model(**batch, return_dict=False)[0]


@habits.loss(
    "inner-model", remark="zeroify the inner model with a head of your own", **OF_GPT2, **SHARDED
)
def base_only(model: Any, batch: Any) -> Tensor:
    """Only the inner model is called (`model.transformer(...)`)."""
    return model.transformer(batch["input_ids"]).last_hidden_state.square().mean()


@habits.loss(
    "text-features",
    build=BY_NAME["clip"].build,
    batch=BY_NAME["clip"].batch,
    **SHARDED,
    remark='`hpczero.register_forward(model, "get_text_features")`',
)
def text_features(model: Any, batch: Any) -> Tensor:
    """`CLIPModel.get_text_features`."""
    out = model.get_text_features(batch["input_ids"])
    return getattr(out, "pooler_output", out).square().mean()


def accelerated(training: Training) -> None:
    import accelerate

    accelerator = training.kept["accelerator"] = accelerate.Accelerator()
    training.kept["wrapper"], training.kept["optimizer"] = accelerator.prepare(
        training.model, training.optimizer
    )


@habits.step("accelerate", after=accelerated, subject=the_wrapper)
def accelerated_step(training: Training) -> None:
    """`Accelerator().prepare(model, optimizer)` after zeroify: `backward`, `clip_grad_norm_`, `step`."""
    accelerator, optimizer = training.kept["accelerator"], training.kept["optimizer"]
    with accelerator.accumulate(training.kept["wrapper"]):
        loss = training.loss()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            training.note(accelerator.clip_grad_norm_(training.kept["wrapper"].parameters(), 0.3))
        optimizer.step()
        optimizer.zero_grad()


@habits.step("trainer", loss=own_loss, steps=1, **OF_GPT2)
def with_trainer(training: Training) -> None:
    """Transformers' `Trainer` with the zeroified model and optimizer.

    The whole loop is the Trainer's: its dataloader, its clipping, its schedule.
    """
    import transformers

    class MeanLoss(transformers.Trainer):
        """One process stands for all ranks; the batch says only which one it is."""

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
            training.step = int(inputs["step"][0])
            return training.mean(lambda place: own_loss(model, text(place)))

    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(
            folder,
            max_steps=3,
            per_device_train_batch_size=1,
            max_grad_norm=0.3,
            learning_rate=0.1,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        trainer = MeanLoss(
            training.model,
            options,
            train_dataset=[{"step": torch.tensor(step)} for step in range(3)],
            data_collator=lambda rows: {"step": torch.stack([row["step"] for row in rows])},
            optimizers=(training.optimizer, None),
        )
        trainer.train()


habits.add(
    "gradient-checkpointing",
    "`gradient_checkpointing_enable()`",
    build=lambda: recomputing(False),
    **OF_TEXT,
)
habits.add(
    "gradient-checkpointing-reentrant",
    "the same, reentrant",
    build=lambda: recomputing(True),
    **OF_TEXT,
    refused="use_reentrant=False",
    remark="`use_reentrant=False`",
)
