"""What a fine-tuned model leaves for other programs: its adapter alone, or its weights with the products merged.

    save_adapter   adapter_config.json, adapter_model.safetensors   peft's format, of our own products too
    save_merged    config.json, model.safetensors                   the names of the model before the products

World rank 0 writes an adapter; all ranks write merged weights. Each holds the trained parameters and, of the frozen
ones, a unit at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from typing_extensions import override

from hpczero.checkpoint.foreign.streaming import FolderWriter, NewFolder, Pairs, stream
from hpczero.checkpoint.foreign.weight_files import cast
from hpczero.errors import ConfigError
from hpczero.finetune.adapted import PEFT_PREFIX, Adapted, Product, is_peft, saved_by_peft
from hpczero.finetune.lowrank import child_of, merged, products_of
from hpczero.job.team import Team
from hpczero.memory.buffers import DTYPES
from hpczero.zero.full_state import is_whole
from hpczero.zero.sharding import Sharding
from hpczero.zero.zeroify import sharding

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
        adapter: where there are several, peft's name of the adapter or the task of ``finetune.lora``.
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
            with NewFolder(folder) as made, made.told():
                if is_peft(model):
                    with saved_by_peft(model, values) as given:
                        model.save_pretrained(  # type: ignore[operator]
                            str(made.path),
                            state_dict=given,
                            save_embedding_layers=False,
                            **({} if adapter is None else {"selected_adapters": [adapter]}),
                        )
                else:
                    _write_own(model, values, made.path, base, adapter)
                made.commit()
    return folder


def save_merged(
    model: nn.Module, folder: str | Path, *, dtype: str = "fp32", task: str | None = None
) -> Path:
    """Write the weights with each product added to its layer, under the base model's names. Collective over world.

    Sums are taken in fp32 from the trained masters and from the frozen values as they are held: in the dtype of
    training, rounded to it, and decoded where the base is quantised. Then they are rounded to ``dtype`` once.

    Args:
        model: zeroified; with products of ``finetune.lora``, or of peft's plain LoRA.
        folder: made; it must not exist yet, or be empty. Models of transformers put their config there too, so
            ``from_pretrained(folder)`` loads it.
        dtype: "fp32", "bf16" or "fp16", of parameters. Buffers keep theirs.
        task: of several, whose products are added.

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
        adapted = Adapted.of(model, task)
    stream(model, lambda tensors, team: _Merging(adapted, tensors, DTYPES[dtype], folder, team))
    return folder


class _Merging(FolderWriter):
    """Parameters of a model and its products on their way into merged weights; products come before layers."""

    def __init__(
        self,
        adapted: Adapted,
        tensors: Mapping[str, Any],
        dtype: torch.dtype,
        folder: Path,
        team: Team,
    ) -> None:
        self._names = {id(tensor): name for name, tensor in reversed(list(tensors.items()))}
        self._products = {product.weight: product for product in adapted.products}
        self._waits = {name for product in adapted.products for name in (product.a, product.b)}
        self._factors: dict[str, Tensor] = {}
        self._keys: dict[int, str] = {}  # in the merged weights
        written: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            key = adapted.plain_name(name)
            if key is not None and isinstance(tensor, Tensor) and id(tensor) not in self._keys:
                self._keys[id(tensor)] = key
                own = dtype if tensor.is_meta else tensor.dtype
                written[key] = torch.empty(tensor.shape, dtype=own, device="meta")
        super().__init__(
            folder, written, 2**63, lambda place: _write_config(adapted.base, place, dtype), team
        )

    @override
    def put(self, pairs: Pairs) -> None:
        for stand, value in pairs:
            name = self._names[id(stand)]
            if name in self._waits:
                self._factors[name] = value.clone()  # the unit's buffer would stay with it
            elif (key := self._keys.get(id(stand))) is not None and self.is_mine(key):
                self.write(
                    key, cast(self._with_product(name, value), self._tensors[key].dtype, name)
                )

    def _with_product(self, name: str, value: Tensor) -> Tensor:
        product: Product | None = self._products.get(name)
        if product is None:
            return value
        a, b = self._factors[product.a], self._factors[product.b]
        return merged(value, a, b, product.scale, product.transposed)


# --- our own products in peft's format -------------------------------------------------------------------------------


def _write_own(
    model: nn.Module,
    values: dict[str, Tensor],
    folder: Path,
    base: str | None,
    task: str | None,
) -> None:
    adapted, child = Adapted.of(model, task), child_of(task)
    products = adapted.products
    values = {name: each for name, each in values.items() if name not in adapted.left_out}
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
    tensors = {_peft_name(name, child): value.contiguous() for name, value in values.items()}
    save_file(tensors, folder / ADAPTER, metadata={"format": "pt"})
    first = next(p[child] for m in model.modules() if child in (p := products_of(m)))
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


def _peft_name(name: str, child: str) -> str:
    for part in ("A", "B"):
        if name.endswith(f".{child}.{part}"):
            return f"{PEFT_PREFIX}{name.removesuffix(f'.{child}.{part}')}.lora_{part}.weight"
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
