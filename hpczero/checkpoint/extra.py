"""What a program and its modules add to a checkpoint: ``extra`` of a save, and extra states of modules.

Owns: their form in the manifest, tensors among them, and what becomes of ranks that differ. Must not know: files,
parameters.

``extra`` is one for all ranks, which a save compares. Extra states (``get_extra_state``) may differ: of each module
there is one in the manifest, or one of every rank.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpczero.checkpoint.disk.format import plain_name
from hpczero.checkpoint.disk.json_keys import (
    Packed,
    Unfit,
    extra_fields,
    extra_of,
    is_mark,
    marked,
    unmarked,
    within,
)
from hpczero.errors import CheckpointError, CheckpointMismatch, ConfigError, CorruptCheckpoint
from hpczero.files.regular import parse_json
from hpczero.job.group import unlike
from hpczero.job.topology import Topology
from hpczero.zero.buffers import bytes_of

logger = logging.getLogger("hpczero.checkpoint")

STATES = "extra_states"  # the field of a manifest
MOST_NBYTES = 2**20  # of a tensor in a manifest
_SHOWN = 160  # characters of what a rank has
_ADVICE = "give numbers, texts, tensors of up to 1 MiB, lists, tuples and dictionaries of them"


# --- extra of a save


def extra_text(extra: Mapping[str, Any]) -> str:
    """Fields of the manifest that hold ``extra``, as JSON.

    Raises:
        ConfigError: JSON cannot hold a part of it.
    """
    try:
        text = json.dumps(extra_fields(_packed(dict(extra))))
        parse_json(text)  # nothing that could not be read again
        return text
    except Unfit as error:
        raise ConfigError(
            f"save: extra cannot be written as JSON: extra{error.where} {error.what}; {_ADVICE}"
        ) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"save: extra cannot be written as JSON ({error}); {_ADVICE}") from error


def check_equal(topology: Topology, text: str) -> None:
    """Refuse an ``extra`` that ranks have differently. Collective over world.

    Raises:
        ConfigError: on every rank; the message says which key.
    """
    differs = unlike(topology.world, sorted(_lines(json.loads(text)["extra"], "extra")))
    with topology.agreed("compare extra of all ranks"):
        if differs:
            mine, expected = (part[:_SHOWN] + "..." * (len(part) > _SHOWN) for part in differs)
            raise ConfigError(
                f"save: rank {topology.rank} has {mine}, and rank 0 has {expected}; a checkpoint keeps one extra for "
                "all ranks, so give every rank the same: what all ranks have is "
                "topology.world.comm.allgather(value), of which rank r takes entry r after the load"
            )


def _lines(value: Any, where: str) -> Iterator[str]:
    """A text of each value in dictionaries of dictionaries, with the way to it."""
    if isinstance(value, dict) and value and not is_mark(value):
        for key, part in value.items():
            yield from _lines(part, f"{where}[{key!r}]")
    else:
        yield f"{where} = {json.dumps(value)}"


def loaded_extra(meta: Mapping[str, Any], path: Path) -> dict[Any, Any]:
    """``extra`` as it was given to the save of ``path``.

    Raises:
        CorruptCheckpoint: a tensor in it is none.
    """
    found: dict[Any, Any] = _unpacked(extra_of(meta), path)
    return found


# --- extra states of modules


def states_of(model: nn.Module) -> dict[str, Any]:
    """What ``get_extra_state`` of every module gives, as JSON holds it. Not collective.

    Raises:
        CheckpointError: JSON cannot hold it; the message names the module.
    """
    found = {}
    for name, module in _with_state(model).items():
        try:
            found[name] = marked(_packed(module.get_extra_state()))
            parse_json(json.dumps(found[name]))
        except (Unfit, ValueError, RecursionError) as error:
            what = f"{error.where} {error.what}" if isinstance(error, Unfit) else f": {error}"
            raise CheckpointError(
                f"save: get_extra_state() of the module {name!r} ({type(module).__name__}) cannot be kept: "
                f"state{what}; {_ADVICE}"
            ) from error
    return found


def of_all_ranks(ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """For each module its one state, or that of every rank; a rank of another stage has the first one's."""
    found: dict[str, list[Any]] = {}
    for name in dict.fromkeys(name for states in ranks for name in states):
        first = next(states[name] for states in ranks if name in states)
        values = [states.get(name, first) for states in ranks]
        equal = len({json.dumps(value) for value in values}) == 1
        found[name] = values[:1] if equal else values
    return found


def loaded_states(
    meta: Mapping[str, Any], model: nn.Module, topology: Topology, path: Path
) -> list[tuple[nn.Module, Any]]:
    """Modules of this rank, each with what its ``set_extra_state`` is to be given. Not collective.

    A rank that the save did not have takes that of one it had, modulo their number.

    Raises:
        CheckpointMismatch: there is a state of a module that the model has not.
        CorruptCheckpoint: a tensor in it is none.
    """
    saved, modules = meta.get(STATES, {}), _with_state(model)
    unknown = [name for name in saved if name not in modules]
    if unknown and topology.pipeline.size == 1:  # else it may be another stage's
        raise CheckpointMismatch(
            f"{path}: holds the extra state of the module {unknown[0]!r}, and the model has no module of this name "
            "with set_extra_state; build the model it was saved from"
        )
    stage, *others = topology.mesh.coordinates(topology.rank)
    if not any(others):
        if new := [name for name in modules if name not in saved]:
            logger.warning("%s: holds no extra state of %s, which stays as it is", path, new)
        several = {name: len(v) for name, v in saved.items() if len(v) not in (1, topology.size)}
        if several and not stage:
            count = next(iter(several.values()))
            logger.warning(
                "%s: the extra states of %s differ between the %d ranks that saved them; rank r of the %d here takes "
                "that of rank r modulo %d",
                *(path, ", ".join(several), count, topology.size, count),
            )
    return [
        (module, _unpacked(unmarked(values[topology.rank % len(values)], "tuples"), path))
        for name, module in modules.items()
        if (values := saved.get(name))
    ]


def _with_state(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that have an extra state, by name, as torch's ``state_dict()`` tells them."""
    plain = nn.Module.get_extra_state
    return {
        plain_name(name): module
        for name, module in model.named_modules()
        if type(module).get_extra_state is not plain
    }


# --- tensors


def _packed(value: Any) -> Any:
    """The value with bytes for tensors.

    Raises:
        Unfit: a tensor is too large, or its elements do not lie one after the other.
    """
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise Unfit(f"is a tensor without plain elements ({value.layout}, {value.device})")
        if value.nbytes > MOST_NBYTES:
            raise Unfit(
                f"is a tensor of {value.nbytes:,} bytes, more than the {MOST_NBYTES:,} for which there is room here: "
                "make it a buffer of the model"
            )
        dtype = str(value.dtype).removeprefix("torch.")
        return Packed(dtype, tuple(value.shape), bytes_of(value.detach().cpu()).numpy().tobytes())
    if isinstance(value, dict) and not isinstance(value, Counter):
        return {key: within(key, _packed, part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [within(index, _packed, part) for index, part in enumerate(value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()  # a best loss, say: it comes back as Python's
    return value


def _unpacked(value: Any, path: Path) -> Any:
    if isinstance(value, Packed):
        dtype = getattr(torch, value.dtype, None)
        numel = prod(value.shape)
        if not isinstance(dtype, torch.dtype) or numel * dtype.itemsize != len(value.data):
            raise CorruptCheckpoint(
                f"{path}: manifest.json cannot be: a tensor of {value.dtype} {value.shape} has {len(value.data)} bytes"
            )
        if not numel:
            return torch.empty(value.shape, dtype=dtype, device="cpu")
        return torch.frombuffer(bytearray(value.data), dtype=dtype).view(value.shape)
    if isinstance(value, list | tuple):
        parts = [_unpacked(part, path) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if isinstance(value, dict) and not isinstance(value, Counter):
        return {key: _unpacked(part, path) for key, part in value.items()}
    return value
