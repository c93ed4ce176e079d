"""What a fine-tuned model leaves for other programs: its adapter alone, or its weights with the products merged.

    save_adapter   adapter_config.json, adapter_model.safetensors   peft's format, of our own products too
    save_merged    config.json, model.safetensors                   the names of the model before the products

World rank 0 writes. It holds the trained parameters and, of the frozen ones, a unit at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from hpczero.checkpoint.foreign.safe_file import WeightsWriter
from hpczero.checkpoint.foreign.weight_files import cast
from hpczero.errors import CheckpointNotWritten, ConfigError
from hpczero.files.durable import Hidden, is_free
from hpczero.finetune.adapted import PEFT_PREFIX, Adapted, Product, is_peft, saved_by_peft
from hpczero.finetune.lowrank import CHILD, LowRank, merged
from hpczero.memory.buffers import DTYPES
from hpczero.zero.full_state import StateByUnit, is_whole
from hpczero.zero.sharding import Sharding
from hpczero.zero.zeroify import sharding

WEIGHTS = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
NAMED = 5


def save_adapter(
    model: nn.Module, folder: str | Path, *, adapter: str | None = None, base: str | None = None
) -> Path:
    """Write what trains, in peft's format. Collective over world.

    ``peft.PeftModel.from_pretrained(base_model, folder)`` loads it. Values are fp32, from the masters.

    Args:
        model: zeroified; with products of ``finetune.lora``, or a model of peft with any adapter of its.
        folder: made; it must not exist yet, or be empty.
        adapter: peft's name of the adapter, where there are several.
        base: name or folder of the base model, for the adapter's config; None: as the model's config has it.

    Returns:
        ``folder``.

    Raises:
        ConfigError: on every rank: the folder is there, there are no products, or a module trains in part.
        CheckpointNotWritten: on every rank: it cannot be written.
    """
    state, folder = _checked(model), Path(folder)
    values = _trained_values(state)
    with state.topology.agreed("write the adapter"):
        if state.topology.is_root:
            with _made(folder) as temporary:
                if is_peft(model):
                    with saved_by_peft(model, values) as given:
                        model.save_pretrained(  # type: ignore[operator]
                            str(temporary),
                            state_dict=given,
                            save_embedding_layers=False,
                            **({} if adapter is None else {"selected_adapters": [adapter]}),
                        )
                else:
                    _write_own(model, values, temporary, base)
    return folder


def save_merged(model: nn.Module, folder: str | Path, *, dtype: str = "fp32") -> Path:
    """Write the weights with each product added to its layer, under the base model's names. Collective over world.

    Sums are taken in fp32 from the trained masters and from the frozen values as they are held: in the dtype of
    training, rounded to it, and decoded where the base is quantised. Then they are rounded to ``dtype`` once.

    Args:
        model: zeroified; with products of ``finetune.lora``, or of peft's plain LoRA.
        folder: made; it must not exist yet, or be empty. Models of transformers put their config there too, so
            ``from_pretrained(folder)`` loads it.
        dtype: "fp32", "bf16" or "fp16", of parameters. Buffers keep theirs.

    Returns:
        ``folder``.

    Raises:
        ConfigError: on every rank: the folder is there, no such dtype, or products of a kind that cannot be merged so.
        CheckpointMismatch: on every rank: ``dtype`` cannot hold a value.
        CheckpointError: on every rank: it cannot be written.
    """
    state, folder = _checked(model), Path(folder)
    topology = state.topology
    with topology.agreed("look for products to merge"):
        if dtype not in DTYPES:
            raise ConfigError(f"dtype: got {dtype!r}, expected one of {', '.join(DTYPES)}")
        adapted = Adapted.of(model)
    by_unit = StateByUnit(model)
    with ExitStack() as stack:
        writer: WeightsWriter | None = None
        with topology.agreed("begin the merged weights"):
            if by_unit.tensors is not None:
                temporary = stack.enter_context(_made(folder))
                _write_config(adapted.base, temporary, DTYPES[dtype])
                merging = _Merging(adapted, by_unit.tensors, DTYPES[dtype])
                writer = WeightsWriter(temporary / WEIGHTS, merging.named, {"format": "pt"})
                stack.enter_context(writer)
                writer.put((buffer, buffer) for buffer in merging.buffers)
        for pairs in by_unit.units():
            with topology.agreed("write the merged weights"):
                if writer is not None:
                    writer.put(merging.merged(pairs))
        with topology.agreed("write the merged weights"):
            if writer is not None:
                writer.commit()
                stack.close()
    return folder


class _Merging:
    """Parameters of a model and its products on their way into the merged weights; products come before their layers.

    Attributes:
        named: what is written, by the names without products; parameters without values.
        buffers: those of them that have values.
    """

    def __init__(self, adapted: Adapted, tensors: Mapping[str, Any], dtype: torch.dtype) -> None:
        self._name = {id(tensor): name for name, tensor in reversed(list(tensors.items()))}
        self._products = {product.weight: product for product in adapted.products}
        self._waits = {name for product in adapted.products for name in (product.a, product.b)}
        self._parts: dict[str, Tensor] = {}
        self._out: dict[int, Tensor] = {}
        self.named: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            plain = adapted.plain_name(name)
            if plain is not None and isinstance(tensor, Tensor):
                kept = tensor.device.type != "meta"
                made = tensor if kept else torch.empty(tensor.shape, dtype=dtype, device="meta")
                self.named[plain] = self._out.setdefault(id(tensor), made)
        self.buffers = {id(t): t for t in self.named.values() if t.device.type != "meta"}.values()

    def merged(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """What of a unit is written, each with its value.

        Args:
            pairs: what stands for each parameter of the unit, and its value.
        """
        for stand, value in pairs:
            name = self._name[id(stand)]
            if name in self._waits:
                self._parts[name] = value.clone()  # the unit's buffer would stay with it
            elif id(stand) in self._out:
                found = self._out[id(stand)]
                yield found, cast(self._with_product(name, value), found.dtype, name)

    def _with_product(self, name: str, value: Tensor) -> Tensor:
        product: Product | None = self._products.get(name)
        if product is None:
            return value
        a, b = self._parts[product.a], self._parts[product.b]
        return merged(value, a, b, product.scale, product.transposed)


# --- our own products in peft's format -------------------------------------------------------------------------------


def _write_own(model: nn.Module, values: dict[str, Tensor], folder: Path, base: str | None) -> None:
    products = Adapted.of(model).products
    own = {name for product in products for name in (product.a, product.b)}
    others = [name for name in values if name not in own]
    whole = sorted({name.rpartition(".")[0] for name in others})
    for path in whole:
        kept = dict(model.get_submodule(path).named_parameters())
        frozen = [f"{path}.{name}" for name in kept if f"{path}.{name}" not in values]
        if frozen or not path:
            raise ConfigError(
                f"module {path or 'model'!r} trains in part ({', '.join((frozen or others)[:NAMED])} and so on), and "
                "peft's format has whole modules beside products; train all of it or nothing, or write the merged "
                "weights by finetune.save_merged"
            )
    tensors = {_peft_name(name): value.contiguous() for name, value in values.items()}
    save_file(tensors, folder / ADAPTER, metadata={"format": "pt"})
    first = next(m for m in model.modules() if isinstance(m, LowRank))
    config = getattr(model, "config", None)
    said = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base or getattr(config, "_name_or_path", None) or None,
        "r": first.rank,
        "lora_alpha": first.scale * first.rank,
        "lora_dropout": first.dropout.p,
        "target_modules": sorted(product.weight.rpartition(".")[0] for product in products),
        "modules_to_save": whole or None,
        "fan_in_fan_out": first.transposed,
        "bias": "none",
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def _peft_name(name: str) -> str:
    for part in ("A", "B"):
        if name.endswith(f".{CHILD}.{part}"):
            return f"{PEFT_PREFIX}{name.removesuffix(f'.{CHILD}.{part}')}.lora_{part}.weight"
    return PEFT_PREFIX + name


def _trained_values(state: Sharding) -> dict[str, Tensor]:
    """Whole fp32 values of what trains, on world rank 0; empty elsewhere. Collective over world."""
    values: dict[str, Tensor] = {}
    for unit in state.units:
        if not unit.spec.trainable:
            continue
        flat = unit.gather_values().cpu()
        if state.topology.is_root:
            for slot in unit.spec.layout.slots:
                values[slot.name] = flat[slot.offset : slot.stop].view(slot.shape).clone()
    return values


# --- the folder ------------------------------------------------------------------------------------------------------


def _checked(model: nn.Module) -> Sharding:
    """The model's sharding, once its values can be collected. Collective over world."""
    state = sharding(model)
    state.step.finish_updates()
    with state.topology.agreed("collect the weights"):
        if not is_whole(state):
            raise ConfigError(
                "ranks hold parts of the model, whose products cannot be told from here; save a checkpoint and take "
                "its weights by `python -m hpczero.checkpoint export`"
            )
        state.attachment.check()
        state.check_values()
    state.step.agreement.replicas.check()
    return state


@contextmanager
def _made(folder: Path) -> Iterator[Path]:
    """A folder under a hidden name inside, which takes its own at the end; nothing of it stays after an error."""
    try:
        if not is_free(folder.absolute()):
            raise ConfigError(f"{folder}: is there already; give another name, or take it away")
        with Hidden(folder) as hidden:
            hidden.path.mkdir()
            yield hidden.path
            hidden.commit()
    except OSError as error:
        raise CheckpointNotWritten(
            f"{folder}: cannot be written ({error}); check the path, space and permissions"
        ) from error


def _write_config(base: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """Config files of a model of transformers; nothing for others."""
    for name in ("config", "generation_config"):
        found = getattr(base, name, None)
        save: Callable[[str], None] | None = getattr(found, "save_pretrained", None)
        if callable(save):
            save(str(folder))
            path = folder / f"{name}.json"
            if name == "config" and path.is_file():
                said = json.loads(path.read_text(encoding="utf-8"))
                said["dtype"] = str(dtype).removeprefix("torch.")
                said["architectures"] = said.get("architectures") or [type(base).__name__]
                path.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
