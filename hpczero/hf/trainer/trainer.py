"""HpczeroTrainer: ``transformers.Trainer`` over MPI, with its model, gradients and optimizer state in shards.

train -> newest sound checkpoint -> prepare (zeroify, load) -> batches agreed -> step -> decisions agreed
-> loss averaged, evaluated, saved
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel, Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_callback import CallbackHandler, ExportableState, TrainerControl

import hpczero
from hpczero.errors import ConfigError, CorruptCheckpoint, DataError
from hpczero.finetune.adapted import is_peft, saved_by_peft, saves_adapters
from hpczero.hf.files import HIDDEN
from hpczero.hf.trainer.accelerator import MpiAccelerator, is_sharded
from hpczero.hf.trainer.arguments import HpczeroTrainingArguments
from hpczero.hf.trainer.checkpoints import (
    bring_in,
    load_adapter,
    make_room,
    put_in_place,
    rotate,
    write_hidden,
)

# Losses of models that take the number of items of a whole batch and do not use it.
#
# transformers gives ``num_items_in_batch``, a sum over ranks, to every model whose forward takes ``**kwargs``, and then
# multiplies the loss by the number of ranks: right for a sum that was divided by the number, and many times too much
# for a mean over this rank's samples, as of BERT, T5 and BART. What the forward did with the number says which one it
# was.

_Trainer: Any = Trainer  # its annotations are not strict
# What hooks and containers ask of any tensor, and what gives the same number once more.
_LOOKS = {"dim", "size", "numel", "element_size", "stride", "storage_offset", "untyped_storage"}
_LOOKS |= {"is_contiguous", "is_floating_point", "is_complex", "__hash__", "__get__"}
_SAME = {"to", "cpu", "cuda", "detach", "clone"}


class ItemCount(Tensor):
    """A number of items that notes in ``uses`` the names of the functions that compute with it."""

    uses: list[str]

    @classmethod
    def of(cls, number: Tensor, uses: list[str] | None = None) -> ItemCount:
        """``number``, with the notes of another one that it was made from."""
        made: ItemCount = number.as_subclass(cls)
        made.uses = [] if uses is None else uses
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
        name, first = getattr(func, "__name__", str(func)), args[0] if args else None
        if name in _SAME and isinstance(first, cls):
            return cls.of(found, first.uses)
        if name not in _LOOKS:
            for each in (*args, *(kwargs or {}).values()):
                if isinstance(each, cls):
                    each.uses.append(name)
        return found


DECISIONS = [
    each.name for each in dataclasses.fields(TrainerControl) if each.name.startswith("should_")
]
logger = logging.getLogger("hpczero.hf")


class NotSound(Exception):
    """A checkpoint that turned out to be damaged when its values were read."""


_CallbackHandler: Any = CallbackHandler  # its annotations are not strict


class HpczeroTrainer(_Trainer):  # type: ignore[misc]
    """``Trainer``, on the ranks of MPI. All methods are collective over the world.

    ``train``, ``evaluate``, ``predict`` and ``save_model`` mean what they mean there. After ``train`` the model stays
    in shards: use ``trainer.save_model()`` for whole weights, or ``hpczero.gathered(model)``.

    Checkpoints are hpczero's: ``output_dir/checkpoints/step-...``, one file of all ranks each, with the state of the
    trainer in it. ``resume_from_checkpoint=True`` takes the newest sound one; the number of ranks and the stage may be
    others than at the save.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: HpczeroTrainingArguments | None = None,
        *positional: Any,
        topology: hpczero.Topology | None = None,
        sharding: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        """Collective over the world.

        Args:
            model: as of ``Trainer``; on the meta device with ``sharding={"initialize": ...}``.
            args: equal on all ranks, but for what a rank says (``log_level``, ``report_to``, ...).
            positional: as of ``Trainer``.
            topology: the ranks of MPI's world, as ``Topology.of_world(mesh=...)`` gives them; None: all share shards.
            sharding: further keywords of ``hpczero.zeroify``: ``rule``, ``offload``, ``initialize``, ...
            named: as of ``Trainer``.

        Raises:
            ConfigError: arguments of another class, or such that differ between ranks; a topology of other ranks.
            DataError: ranks have data sets of different lengths.
        """
        # These start MPI, which comes after the device.
        from hpczero.hf.trainer.arguments import check_equal, check_topology
        from hpczero.job.messages import ChunkedExchange

        if args is None:
            args = HpczeroTrainingArguments("tmp_trainer")
        if not isinstance(args, HpczeroTrainingArguments):
            ranks = hpczero.Topology.of_world()
            size = ranks.size
            ranks.free()
            raise ConfigError(
                f"args: got {type(args).__name__}, which says {args.world_size} process(es), and MPI has {size} "
                "rank(s); make it an HpczeroTrainingArguments"
            )
        if topology is not None:
            check_topology(topology, args)
        self._exchange = ChunkedExchange(topology or args.topology)
        self._sharding = dict(sharding or {})
        self._resumed: Path | None = None
        check_equal(self._exchange, args, positional, named)
        super().__init__(model, args, *positional, **named)
        self.callback_handler.__class__ = _AgreedCallbacks
        self.callback_handler.agree = self._agree_on_control
        from hpczero.hf.trainer.checkpoints import TrainerCheckpoints

        self._saved = TrainerCheckpoints(args.output_dir, self._exchange)

    def create_accelerator_and_postprocess(self) -> None:
        """As ``Trainer`` does, with exchanges over MPI."""
        super().create_accelerator_and_postprocess()
        MpiAccelerator.adopt(self.accelerator, self.args, self._exchange, self._zeroify)
        self.gather_function = partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def _zeroify(self, model: nn.Module, optimizer: Optimizer) -> nn.Module:
        given = {
            "stage": self.args.stage,
            "transport": self.args.transport,
            "precision": self.args.precision,
            "device": None if self.args.device.type == "cpu" else "cuda",
            **self._sharding,
        }
        return hpczero.zeroify(model, optimizer, topology=self._exchange.topology, **given)

    def call_model_init(self, trial: Any = None) -> Any:
        """As ``Trainer`` does; the model before is taken out of its shards."""
        if self.model is not None and is_sharded(self.model):
            hpczero.release(self.model)
        return super().call_model_init(trial)

    # --- training

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """As ``Trainer`` does; a loss that leaves ``num_items_in_batch`` aside is not multiplied. Not collective."""
        multiplied = self.args.average_tokens_across_devices and (
            self.model_accepts_loss_kwargs or self.compute_loss_func
        )
        if not multiplied or not isinstance(num_items_in_batch, Tensor):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        items = ItemCount.of(num_items_in_batch)
        found = super().compute_loss(model, inputs, return_outputs, items)
        if items.uses:
            return found
        size = self.args.world_size
        return (found[0] / size, found[1]) if return_outputs else found / size

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """As ``Trainer.train``.

        Args:
            resume_from_checkpoint: True for the newest sound checkpoint of ``output_dir``; the path of a checkpoint,
                or of a folder of them; None or False to begin anew.
            trial: must be None.
            ignore_keys_for_eval: as there.

        Raises:
            ConfigError: there is no checkpoint.
            CorruptCheckpoint: none is sound.
            CheckpointMismatch: it is of another model, or of another program.
        """
        if trial is not None:
            self.hyperparameter_search()
        asked = resume_from_checkpoint or None
        with self._saved:
            if asked is None:
                self._resumed = None
                return super().train(None, None, ignore_keys_for_eval)
            failed: list[str] = []
            for path in self._saved.to_resume(asked):
                try:
                    self._resumed = path
                    with self._saved.unpacked(path) as folder:
                        return super().train(folder, None, ignore_keys_for_eval)
                except (CorruptCheckpoint, NotSound) as error:
                    failed.append(str(error))
                    if self._exchange.topology.is_root:
                        logger.warning("%s; looking for an older checkpoint", error)
            raise CorruptCheckpoint(
                f"{failed[0]}; {len(failed) - 1} other(s) were not sound either. Restore one from a copy, or begin anew"
            ).on_all_ranks()

    def _prepare_for_training(self, *args: Any, **named: Any) -> Any:
        found = super()._prepare_for_training(*args, **named)
        if self._resumed is None:
            self._saved.begin(self.model)
        return found

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """As ``Trainer`` does, once all ranks have as many batches.

        Raises:
            DataError: they have not; without this some would wait for the others for ever.
        """
        batches, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        counts = self._exchange.objects(len(batches), "count the batches of a step")
        if len(set(counts)) > 1:
            raise DataError(
                f"batches of this step: ranks have {counts}, expected equal numbers; give every rank the same data set "
                "(each takes its own part of it), or data that ends nowhere with max_steps"
            ).on_all_ranks()
        return batches, items

    def _maybe_log_save_evaluate(self, tr_loss: Tensor, *args: Any, **named: Any) -> None:
        self._agree_on_control()
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            tr_loss.copy_(self._exchange.mean(tr_loss, "average the loss"))
        super()._maybe_log_save_evaluate(tr_loss, *args, **named)
        self._agree_on_control()

    def _finalize_training(self, *args: Any, **named: Any) -> Any:
        self._tr_loss.copy_(self._exchange.mean(self._tr_loss, "average the loss"))
        return super()._finalize_training(*args, **named)

    def _agree_on_control(self) -> None:
        """What one rank's callbacks decide is decided for all: else the others would wait for it."""
        mine = {name: bool(getattr(self.control, name)) for name in DECISIONS}
        for name, value in self._exchange.any_of(mine, "agree on what is next").items():
            setattr(self.control, name, value)

    def store_flos(self) -> None:
        """Add up operations of all ranks."""
        self.state.total_flos += self._exchange.topology.world.total(
            float(vars(self)["current_flos"])
        )
        self.current_flos = 0

    def hyperparameter_search(self, *args: Any, **named: Any) -> NoReturn:
        """Refused: raises ConfigError."""
        raise ConfigError(
            "hyperparameter_search: a search would begin runs on one rank alone; start one job for each trial"
        )

    # --- evaluation

    def prediction_step(self, *args: Any, **named: Any) -> Any:
        """As ``Trainer`` does, once all ranks have a batch to evaluate."""
        self._exchange.objects(None, "evaluate a batch")
        return super().prediction_step(*args, **named)

    def evaluation_loop(self, *args: Any, **named: Any) -> Any:
        """As ``Trainer`` does, until all ranks are done."""
        found = super().evaluation_loop(*args, **named)
        self._exchange.objects(None, "end an evaluation")
        return found

    def evaluate(self, *args: Any, **named: Any) -> dict[str, float]:
        """As ``Trainer`` does; the numbers are those of rank 0 on every rank."""
        mine: dict[str, float] = super().evaluate(*args, **named)
        numbers = {k: v for k, v in mine.items() if isinstance(v, int | float)}
        return {**mine, **self._exchange.of_root(numbers, "share the metrics")}

    # --- checkpoints

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.store_flos()
        step, limit = self.state.global_step, self.args.save_total_limit
        if self.args.save_only_model:
            self._save_weights(Path(self.args.output_dir), step, limit)
            return
        best_step = self.state.best_global_step
        if best_step and (best_step == step or self._saved.exists(best_step)):
            self.state.best_model_checkpoint = str(self._saved.path(best_step))
        best = self.state.best_model_checkpoint
        trainer = {
            # As transformers has it: run times in its log differ between ranks.
            "state": self._exchange.of_root(self._state_text(), "share the state of the trainer"),
            "scheduler": self.lr_scheduler.state_dict(),
            "global_batch": self.get_total_train_batch_size(self.args),
        }
        self._saved.save(self.model, step, trainer, limit=limit, best=Path(best) if best else None)

    def _state_text(self) -> str:
        """The state of trainer and callbacks as transformers writes it."""
        found: dict[str, list[Any]] = {}
        for each in (*self.callback_handler.callbacks, self.control):
            if isinstance(each, ExportableState):
                found.setdefault(type(each).__name__, []).append(each.state())
        self.state.stateful_callbacks = {
            name: states if len(states) > 1 else states[0] for name, states in found.items()
        }
        return json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True)

    def _save_weights(self, folder: Path, step: int, limit: int | None) -> None:
        """``checkpoint-...`` with whole weights, which appears at once; for ``save_only_model``."""
        target, hidden = folder / f"checkpoint-{step}", folder / f".checkpoint-{step}"
        best_step = self.state.best_global_step
        if best_step:
            self.state.best_model_checkpoint = str(folder / f"checkpoint-{best_step}")
        self.save_model(str(hidden), _internal_call=True)
        text = self._state_text()

        def commit() -> None:
            (hidden / "trainer_state.json").write_text(text, encoding="utf-8")
            put_in_place(hidden, target)
            rotate(folder, limit, self.state.best_model_checkpoint)

        self._exchange.on_root(commit, "save the weights")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write whole weights, configuration and tokenizer, for ``from_pretrained``.

        Of a model of transformers rank 0 holds one unit at a time (``hpczero.hf.save_pretrained``), of others all. Of a
        model with adapters of peft the adapter is written alone.

        Args:
            output_dir: None: that of the trainer.
            _internal_call: transformers' own.
        """
        place = Path(output_dir or self.args.output_dir)
        self._exchange.on_root(lambda: make_room(place), "make room")
        streamed = isinstance(self.model, PreTrainedModel) and not saves_adapters(self.model)
        if streamed and is_sharded(self.model):
            hpczero.hf.save_pretrained(self.model, place / HIDDEN, tokenizer=self._tokenizer())
        else:
            state = self.accelerator.get_state_dict(self.model)
            self._exchange.on_root(
                lambda: write_hidden(place, partial(self._save_whole, state)), "write the model"
            )

        def commit() -> None:
            torch.save(self.args, place / HIDDEN / TRAINING_ARGS_NAME)
            bring_in(place)

        self._exchange.on_root(commit, "save the model")
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_whole(self, state: Any, place: str) -> None:
        with saved_by_peft(self.model, state) as given:
            self._save(place, state_dict=given)

    def _tokenizer(self) -> Any:
        found = self.processing_class
        return getattr(self.data_collator, "tokenizer", None) if found is None else found

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Nothing: weights come with the optimizer's state, once the model is in shards."""

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self._resumed is None:
            return
        try:
            found = self._saved.load(self._resumed, self.model)
        except CorruptCheckpoint as error:
            raise NotSound(str(error)) from error
        self.lr_scheduler.load_state_dict(found["scheduler"])
        size = self.get_total_train_batch_size(self.args)
        if found["global_batch"] != size and self._exchange.topology.is_root:
            logger.warning(
                "%s: was saved with %d samples a step, and this run takes %d: its place in the data is counted in "
                "steps, so samples are left out or come twice; set per_device_train_batch_size so that they are equal",
                self._resumed,
                found["global_batch"],
                size,
            )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self._saved.restore_streams()

    def _init_training_state(self, *args: Any, **named: Any) -> Any:
        found = super()._init_training_state(*args, **named)
        best = self.state.best_model_checkpoint  # each rank has looked for it
        self.state.best_model_checkpoint = self._exchange.of_root(best, "look for the best model")
        return found

    def _load_best_model(self) -> None:
        """The weights of the best checkpoint, and the optimizer's state with them."""
        best = Path(self.state.best_model_checkpoint)
        if self.args.save_only_model and is_peft(self.model):
            load_adapter(best, self.model, self._exchange)
        elif self.args.save_only_model:
            hpczero.checkpoint.import_weights(best, self.model)
        else:
            self._saved.load_weights(best, self.model)


class _AgreedCallbacks(_CallbackHandler):  # type: ignore[misc]
    """Callbacks, after which ranks agree where the loop may leave between two steps."""

    agree: Any

    def on_substep_end(self, *args: Any, **named: Any) -> Any:
        control = super().on_substep_end(*args, **named)
        self.agree()
        return control


# Seq2seq: ``Seq2SeqTrainer`` over MPI, which evaluates texts that the model writes.
#
# [Note: Lengths of texts]
# A rank is done when the texts of its own batch have ended, so ranks take different numbers of forwards. A forward of a
# sharded model is collective. The parameters are therefore whole on every rank while texts are written.

# Their annotations are not strict.
_Seq2SeqTrainer: Any = Seq2SeqTrainer
_Arguments: Any = Seq2SeqTrainingArguments


@dataclass
class HpczeroSeq2SeqTrainingArguments(HpczeroTrainingArguments, _Arguments):  # type: ignore[misc]
    """``Seq2SeqTrainingArguments`` for ``HpczeroSeq2SeqTrainer``, as ``HpczeroTrainingArguments``. Collective."""


class HpczeroSeq2SeqTrainer(HpczeroTrainer, _Seq2SeqTrainer):  # type: ignore[misc]
    """``Seq2SeqTrainer``, on the ranks of MPI, as ``HpczeroTrainer``. All methods are collective over the world.

    With ``predict_with_generate`` each rank writes the texts of its own samples. Meanwhile it has all parameters, in
    the dtype that the model computes in.
    """

    def __init__(self, model: Any = None, args: Any = None, *positional: Any, **named: Any) -> None:
        """As ``HpczeroTrainer``. Collective over the world.

        Args:
            model: as there.
            args: must be ``HpczeroSeq2SeqTrainingArguments``.
            positional: as there.
            named: as there.

        Raises:
            ConfigError: as there, or other arguments.
        """
        if not isinstance(args, HpczeroSeq2SeqTrainingArguments):
            raise ConfigError(
                f"args: got {type(args).__name__}, expected HpczeroSeq2SeqTrainingArguments"
            )
        super().__init__(model, args, *positional, **named)

    def evaluation_loop(self, *args: Any, **named: Any) -> Any:
        """As ``Seq2SeqTrainer`` does in one process: samples that fill up the last batch do not count.

        Raises:
            ConfigError: ranks shall write in step, which needs ``torch.distributed``.
        """
        if vars(self).get("_gen_kwargs", {}).get("synced_gpus"):
            raise ConfigError(
                "synced_gpus: is not needed, since every rank has all parameters while it writes; leave it out"
            )
        self.gather_function = partial(  # else samples come twice, as they do with DDP
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )
        return super().evaluation_loop(*args, **named)

    def prediction_step(
        self, model: Any, inputs: Any, prediction_loss_only: bool, *args: Any, **named: Any
    ) -> Any:
        """As ``Seq2SeqTrainer`` does; see [Note: Lengths of texts]. If a rank fails, all do."""
        writes = self.args.predict_with_generate and not prediction_loss_only
        if not writes or not is_sharded(self.model):
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **named)
        with hpczero.gathered(self.model), self._exchange.topology.agreed("write texts"):
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **named)
