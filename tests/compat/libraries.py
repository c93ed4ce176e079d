# mypy: disable-error-code="union-attr, operator, index, attr-defined"
"""What people put around models of transformers: its own switches and Trainer, peft, accelerate."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn

from tests.compat.architectures import ARCHITECTURES, text
from tests.compat.construct import SHARDED, Construct, Place, Training, of_net, plain_step, sgd

BY_NAME = {each.name: each for each in ARCHITECTURES}


def own_loss(model: Any, batch: Any) -> Tensor:
    return model(**batch).loss


def of_model(name: str, says: str, build: Any, **more: Any) -> Construct:
    return Construct(name, says, build, **({"batch": text, "loss": own_loss} | more))


def gpt2(**options: Any) -> nn.Module:
    return BY_NAME["gpt2"].build()


def recomputing(reentrant: bool) -> nn.Module:
    model = gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    return model


def with_lora() -> nn.Module:
    import peft

    config = peft.LoraConfig(
        r=2, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return peft.get_peft_model(BY_NAME["llama"].build(), config)


def with_ia3() -> nn.Module:
    import peft

    config = peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    )
    return peft.get_peft_model(BY_NAME["llama"].build(), config)


def merge_and_unmerge(training: Training) -> None:
    """Adapters merged into the weights for an evaluation, and taken out again."""
    plain_step(training)
    with training.whole(training.model, change=True):
        training.model.merge_adapter()
        with torch.no_grad():
            training.note(training.model(**text(Place(0, 7))).loss)
        training.model.unmerge_adapter()


def generates(training: Training) -> None:
    """Text between steps, by the model's own loop."""
    plain_step(training)
    training.model.eval()
    with training.whole(training.model), torch.no_grad():
        start = text(Place(0, 7))["input_ids"][:, :3]
        found = training.model.generate(start, max_new_tokens=4, do_sample=False, pad_token_id=0)
    training.model.train()
    training.note(found.double().mean())


def hidden_states(model: Any, batch: Any) -> Tensor:
    out = model(**batch, output_hidden_states=True, output_attentions=True, use_cache=True)
    features = torch.stack([each.square().mean() for each in out.hidden_states]).sum()
    return out.loss + 0.1 * features


def as_tuple(model: Any, batch: Any) -> Tensor:
    return model(**batch, return_dict=False)[0]


def base_only(model: Any, batch: Any) -> Tensor:
    """The inner model alone, as feature extractors do."""
    return model.transformer(batch["input_ids"]).last_hidden_state.square().mean()


def image_features(model: Any, batch: Any) -> Tensor:
    out = model.get_text_features(batch["input_ids"])
    return getattr(out, "pooler_output", out).square().mean()


def accelerated(training: Training) -> None:
    import accelerate

    accelerator = training.kept["accelerator"] = accelerate.Accelerator()
    training.kept["wrapper"], training.kept["optimizer"] = accelerator.prepare(
        training.model, training.optimizer
    )


def accelerated_step(training: Training) -> None:
    accelerator, optimizer = training.kept["accelerator"], training.kept["optimizer"]
    with accelerator.accumulate(training.kept["wrapper"]):
        loss = training.loss()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            training.note(accelerator.clip_grad_norm_(training.kept["wrapper"].parameters(), 0.3))
        optimizer.step()
        optimizer.zero_grad()


def with_trainer(training: Training) -> None:
    """The whole loop is the Trainer's: its dataloader, its clipping, its schedule."""
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


CONSTRUCTS = [
    of_model(
        "gradient-checkpointing", "`gradient_checkpointing_enable()`", lambda: recomputing(False)
    ),
    of_model(
        "gradient-checkpointing-reentrant",
        "the same, reentrant",
        lambda: recomputing(True),
        refused="use_reentrant=False",
        remark="`use_reentrant=False`",
    ),
    of_model(
        "hidden-states",
        "`output_hidden_states`, `output_attentions`, `use_cache`",
        gpt2,
        loss=hidden_states,
    ),
    of_model("return-tuple", "`return_dict=False`", gpt2, loss=as_tuple),
    of_model("generate", "`generate` between steps, inside `gathered`", gpt2, step=generates),
    of_model(
        "inner-model",
        "only the inner model is called (`model.transformer(...)`)",
        gpt2,
        loss=base_only,
        **SHARDED,
        remark="zeroify the inner model with a head of your own",
    ),
    of_model(
        "text-features",
        "`CLIPModel.get_text_features`",
        BY_NAME["clip"].build,
        batch=BY_NAME["clip"].batch,
        loss=image_features,
        **SHARDED,
        remark='`hpczero.register_forward(model, "get_text_features")`',
    ),
    of_model("peft-lora", "LoRA by peft", with_lora),
    of_model("peft-ia3", "IA3 by peft", with_ia3),
    of_model(
        "peft-merge",
        "`merge_adapter` and `unmerge_adapter` inside `gathered`",
        with_lora,
        step=merge_and_unmerge,
    ),
    of_net(
        "accelerate",
        "`Accelerator().prepare(model, optimizer)` after zeroify: `backward`, `clip_grad_norm_`, `step`",
        accelerated_step,
        after=accelerated,
        subject=lambda training: training.kept["wrapper"],
    ),
    of_model(
        "trainer",
        "transformers' `Trainer` with the zeroified model and optimizer",
        gpt2,
        step=with_trainer,
        steps=1,
        optimizer=lambda model: sgd(model),
    ),
]
