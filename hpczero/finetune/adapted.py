"""Adapted: the low-rank products in a model, ours or peft's, and the names that the model has without them.

peft itself is never imported: whoever has its modules has imported it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hpczero.errors import ConfigError
from hpczero.finetune.lowrank import LowRank, check_task, products_of
from hpczero.zero.buffers import persistent_buffers


def is_peft(model: nn.Module) -> bool:
    """Whether it is a model that peft wraps."""
    return any(kind.__module__.startswith("peft.") for kind in type(model).__mro__)


def saves_adapters(model: nn.Module) -> bool:
    """Whether ``save_pretrained`` of the model writes its adapter alone: one of peft, or one given by add_adapter."""
    return is_peft(model) or bool(getattr(model, "_hf_peft_config_loaded", False))


def first_adapter(model: nn.Module) -> str | None:
    """The first module that belongs to an adapter, of peft's or of ``hpczero.finetune``, inside of the model."""
    for name, module in model.named_modules():
        if isinstance(module, LowRank) or type(module).__module__.startswith("peft."):
            return str(name)
    return None


@contextmanager
def saved_by_peft(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Context: ``save_pretrained`` of a model of peft looks at no parameter.

    Not collective; nothing is done for others.

    For a module that trains whole (``modules_to_save``) peft asks the module for its names, by ``state_dict()``. Yields
    what
    to give it as ``state_dict``: ``values``, whole parameters by name, and buffers.
    """
    given, asked = dict(values), []
    if type(model).__module__.startswith("peft."):  # which takes out what belongs to the adapter
        given |= {name: each for name, each in _all_buffers(model) if name not in given}
    for name, module in model.named_modules():
        whole = getattr(module, "modules_to_save", None)
        if not (type(module).__module__.startswith("peft.") and isinstance(whole, nn.ModuleDict)):
            continue
        for adapter, inner in whole.items():
            prefix = f"{name}.modules_to_save.{adapter}."
            given |= {f"{prefix}{key}": each for key, each in persistent_buffers(inner).items()}
            own = {k.removeprefix(prefix): v for k, v in given.items() if k.startswith(prefix)}
            inner.__dict__["state_dict"] = own.copy
            asked.append(inner)
    try:
        yield given
    finally:
        for inner in asked:
            inner.__dict__.pop("state_dict", None)


def _all_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Persistent buffers under each of their names: layers share some, and peft asks for one by a certain name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}" if prefix else name, buffer


PEFT_PREFIX = "base_model.model."
_LAYERS = "peft.tuners.lora.layer"


@dataclass(frozen=True)
class Product:
    """One product: names of parameters as the model has them.

    ``weight`` is that of the frozen layer, ``a`` (rank, in) and ``b`` (out, rank) those of the product.
    """

    weight: str
    a: str
    b: str
    scale: float
    transposed: bool


@dataclass(frozen=True)
class Adapted:
    """All products of one model.

    Attributes:
        base: the model below the products, whose names the merged weights have: the model itself, or what peft wraps.
        products: in the order of the model.
        adapter: peft's name of the adapter; None where the products are ours.
        left_out: names of the parameters of other tasks' products.
    """

    base: nn.Module
    products: tuple[Product, ...]
    adapter: str | None = None
    left_out: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: nn.Module, task: str | None = None) -> Adapted:
        """Find them; of several tasks those of ``task``. Not collective.

        Raises ConfigError: there are none, or they are of a kind that cannot be merged tensor by tensor.
        """
        if is_peft(model):
            return _of_peft(model)
        check_task(model, task)
        products, left_out = [], set()
        for name, module in model.named_modules():
            for child, product in products_of(module).items():
                a, b = f"{name}.{child}.A", f"{name}.{child}.B"
                if product.task == task:
                    products.append(
                        Product(f"{name}.weight", a, b, product.scale, product.transposed)
                    )
                else:
                    left_out |= {a, b}
        if not products:
            raise ConfigError(
                f"{type(model).__name__} has no low-rank products; make them by finetune.lora(model) or by peft before "
                "zeroify"
            )
        return cls(model, tuple(products), left_out=frozenset(left_out))

    def plain_name(self, name: str) -> str | None:
        """The name that a parameter or buffer has in the model without products; None: it is not there."""
        if self.adapter is None:
            return None if self._is_product(name) or name in self.left_out else name
        if self._is_product(name) or ".original_module." in name:
            return None
        name = name.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")
        return name.replace(f".modules_to_save.{self.adapter}.", ".")

    def _is_product(self, name: str) -> bool:
        return any(name in (each.a, each.b) for each in self.products)


def _of_peft(model: Any) -> Adapted:
    active = list(model.active_adapters) if hasattr(model, "active_adapters") else []
    names = list(model.peft_config)
    if len(names) != 1 or active != names:
        raise ConfigError(
            f"the peft model has adapters {names}, of which {active} are active, expected one, active; write each by "
            "finetune.save_adapter(model, folder, adapter=...) and merge with peft"
        )
    adapter = names[0]
    config = model.peft_config[adapter]
    if getattr(config.peft_type, "value", config.peft_type) != "LORA" or config.bias != "none":
        raise ConfigError(
            f"the peft model has {config.peft_type} with bias={getattr(config, 'bias', None)!r}, expected LoRA without "
            "biases to merge tensor by tensor; write it by finetune.save_adapter(model, folder) and merge with peft"
        )
    products = []
    for name, module in model.named_modules():
        if adapter not in getattr(module, "lora_A", {}) and adapter not in getattr(
            module, "lora_embedding_A", {}
        ):
            continue
        plain = (type(module).__module__, type(module).__name__) == (_LAYERS, "Linear")
        variant = getattr(module, "lora_variant", {}).get(adapter)
        if not plain or variant is not None or module.merged or module.lora_bias.get(adapter):
            raise ConfigError(
                f"{name!r} is a {type(module).__name__} of peft ({'merged already' if module.merged else variant}), "
                "expected its plain LoRA of a linear layer, not merged; write it by finetune.save_adapter(model, "
                "folder) and merge with peft"
            )
        products.append(
            Product(
                f"{name}.base_layer.weight",
                f"{name}.lora_A.{adapter}.weight",
                f"{name}.lora_B.{adapter}.weight",
                float(module.scaling[adapter]),
                bool(module.fan_in_fan_out),
            )
        )
    found = Adapted(model.get_base_model(), tuple(products), adapter)
    all_names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        all_names.setdefault(id(parameter), []).append(name)
    for product in products:
        tied = [
            n for n in all_names[id(model.get_parameter(product.weight))] if n != product.weight
        ]
        if tied:
            raise ConfigError(
                f"{product.weight!r} is that of {tied[0]!r} too, into which the product would be merged as well; write "
                "it by finetune.save_adapter(model, folder), or untie the two before zeroify"
            )
    for name, _ in model.named_parameters(remove_duplicate=False):
        if not _is_mergeable(model, name, found):
            raise ConfigError(
                f"{name!r} is neither of a product of peft's nor of a layer below one, expected nothing else to merge; "
                "write it by finetune.save_adapter(model, folder) and merge with peft"
            )
    return found


def _is_mergeable(model: Any, name: str, adapted: Adapted) -> bool:
    """Whether the merged weights have the parameter under its plain name, or the product that it is of."""
    if adapted._is_product(name):
        return True
    module = model.get_base_model()
    parts = name.removeprefix(PEFT_PREFIX).split(".")
    for place, part in enumerate(parts):
        if type(module).__module__.startswith("peft."):
            if part == "original_module":  # left out: another stands for it
                return bool(getattr(module, "modules_to_save", None))
            if part not in ("base_layer", "modules_to_save"):
                return False
            if part == "modules_to_save":
                return parts[place + 1] == adapted.adapter
        module = getattr(module, part)
    return True
