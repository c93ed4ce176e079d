"""Which folder a name means: a folder of this machine, or a model of the Hugging Face hub in the cache.

world rank 0 downloads | then one rank of each other node, which finds all if nodes share the cache | then all look
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from hpczero.errors import ConfigError
from hpczero.job.topology import Topology


def transformers() -> ModuleType:
    """The library. Raises ConfigError where it is not installed."""
    return _module("transformers")


def model_kind() -> Any:  # Any: the library ships no types
    """The class of all its models."""
    return transformers().PreTrainedModel


def conversion(name: str) -> Any:
    """A function or class of transformers that knows names and layouts of weights in files.

    Raises ConfigError where this version does not have it.
    """
    homes = ("transformers.core_model_loading", "transformers.conversion_mapping")
    for home in homes:
        try:
            found = getattr(_module(home), name, None)
        except ModuleNotFoundError:
            found = None
        if found is not None:
            return found
    version = getattr(transformers(), "__version__", "unknown")
    raise ConfigError(
        f"transformers {version} has no {name} in {' or '.join(homes)}; hpczero.hf was tested with the version in "
        "install/constraints.txt: pip install 'transformers>=5.20,<6'"
    )


def _module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == "transformers":
            raise ConfigError(
                "transformers is not installed, and hpczero.hf loads and saves its models; "
                "type: pip install 'transformers>=5.20,<6'"
            ) from error
        raise


WANTED = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py")


@dataclass(frozen=True)
class Hub:
    """How a model of the hub is found.

    Attributes:
        revision: branch, tag or commit; None takes the newest.
        cache_dir: of downloads; None takes the library's own (``HF_HOME``), which all ranks of a node must see.
        local_files_only: whether nothing is downloaded, as with ``HF_HUB_OFFLINE=1``.
        token: for models that ask for one; None takes what ``hf auth login`` has kept.
    """

    revision: str | None = None
    cache_dir: str | None = None
    local_files_only: bool = False
    token: str | None = None


def find(name: str | Path, hub: Hub, topology: Topology) -> Path:
    """The folder that ``name`` means on this rank. Collective over world.

    Raises:
        ConfigError: on every rank: there is no such folder, and the hub has no such model, or cannot be asked.
    """
    with topology.agreed("look for the model"):
        local = os.path.isdir(name)
        if not local and (isinstance(name, Path) or str(name).startswith((".", "/", "~"))):
            raise ConfigError(f"{name}: no such folder; give a folder with a config.json")
    here = topology.gather(float(local))
    if all(here):
        return Path(name)
    if any(here):
        lost = [rank for rank, found in enumerate(here) if not found]
        with topology.agreed("look for the model"):
            raise ConfigError(
                f"{name}: no such folder on rank(s) {lost[:8]}, and a folder on others; put it where every node sees it"
            )
    for mine in (topology.is_root, topology.local_rank == 0):
        with topology.agreed("fetch the model"):
            if mine:
                _fetched(str(name), hub, only_here=hub.local_files_only)
    with topology.agreed("find the model in the cache"):
        path = _fetched(str(name), hub, only_here=True)
    return path


def _fetched(name: str, hub: Hub, *, only_here: bool) -> Path:
    try:
        library: Any = importlib.import_module("huggingface_hub")
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{name}: no such folder, and huggingface_hub, which would fetch it, is not installed"
        ) from error
    try:
        return Path(
            library.snapshot_download(
                name,
                revision=hub.revision,
                cache_dir=hub.cache_dir,
                local_files_only=only_here,
                token=hub.token,
                allow_patterns=list(WANTED),
            )
        )
    except (OSError, ValueError, RuntimeError, library.errors.HfHubHTTPError) as error:
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{name}: no such folder, and not fetched from the hub: {said}; give a folder, or fetch it first where "
            f"there is a network: hf download {name}"
        ) from error
