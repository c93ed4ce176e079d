"""The model that the config.json of a folder describes.

Owns: what is read beside the weights, and which class of transformers it is. Must not know: weights, shards, MPI.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hpczero.errors import ConfigError
from hpczero.hf.library import transformers


def of_folder(path: Path, model_class: Any = None, changes: Mapping[str, Any] | None = None) -> Any:
    """The model of a folder with a config.json, in fp32, initialised by itself. Not collective.

    Args:
        path: of the folder.
        model_class: of transformers; None takes the one that config.json names.
        changes: of the configuration, and ``attn_implementation``.

    Raises:
        ConfigError: config.json cannot be used, or says that weights are quantised.
    """
    changes = changes or {}
    library: Any = transformers()
    built = {key: changes[key] for key in ("attn_implementation",) if key in changes}
    try:
        config, unused = library.AutoConfig.from_pretrained(
            path,
            local_files_only=True,
            return_unused_kwargs=True,
            **{key: value for key, value in changes.items() if key not in built},
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}: its config.json cannot be used: {_first_line(error)}"
        ) from error
    if unused:
        raise ConfigError(
            f"{path}: {type(config).__name__} has no {', '.join(sorted(map(str, unused)))}; expected fields of "
            "config.json"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{path}: its weights are quantised (quantization_config in config.json), expected floating point; take "
            "the model's original weights"
        )
    kind = model_class or _named_class(library, path, config)
    model = _of_class(kind, path, config, built)
    stated = path / "generation_config.json"
    if stated.exists() and model.can_generate():
        model.generation_config = library.GenerationConfig.from_pretrained(
            path, local_files_only=True
        )
    return model


def _named_class(library: Any, path: Path, config: Any) -> Any:
    named = (config.architectures or [None])[0]
    found = getattr(library, named, None) if named else None
    if found is None:
        raise ConfigError(
            f"{path}: config.json names {named or 'no architecture'}, which transformers {library.__version__} does "
            "not have; give model_class=, such as transformers.AutoModelForCausalLM"
        )
    return found


def _of_class(kind: Any, path: Path, config: Any, options: dict[str, Any]) -> Any:
    """A model of a class of transformers, or of the one that an Auto class finds."""
    expected = getattr(kind, "config_class", None)
    if expected is not None and not isinstance(config, expected):
        raise ConfigError(
            f"{path}: config.json is a {type(config).__name__}, and {kind.__name__} needs a {expected.__name__}; give "
            "the model_class of this model"
        )
    make = getattr(kind, "_from_config", None) or kind.from_config
    try:
        return make(config, dtype=torch.float32, **options)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"{path}: {kind.__name__}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
