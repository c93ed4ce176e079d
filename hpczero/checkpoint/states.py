"""What a checkpoint has beside parameters: options of groups, streams of random numbers, and buffers."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hpczero.checkpoint.disk import json_keys
from hpczero.checkpoint.disk.format import MOST, plain_name
from hpczero.errors import CheckpointError, CheckpointMismatch, ConfigError, CorruptCheckpoint
from hpczero.files.regular import parse_json, shown
from hpczero.job.group import unlike
from hpczero.job.topology import Topology
from hpczero.plan.placement import part_of
from hpczero.zero.buffers import bytes_of
from hpczero.zero.sharding import Sharding

# What a program and its modules add to a checkpoint: ``extra`` of a save, and extra states of modules.
#
# ``extra`` is one for all ranks, which a save compares. Extra states (``get_extra_state``) may differ: of each module
# there is one in the manifest, or one of every rank.

logger = logging.getLogger("hpczero.checkpoint")

STATES = "extra_states"  # the field of a manifest
MOST_NBYTES = 2**20  # of a tensor in a manifest
_SHOWN = 160  # characters of what a rank has
_ADVICE = "give numbers, texts, tensors of up to 1 MiB, lists, tuples and dictionaries of them"


# --- extra of a save


def extra_text(extra: Mapping[str, Any]) -> str:
    """Fields of the manifest that hold ``extra``, as JSON. Raises ConfigError: JSON cannot hold a part of it."""
    try:
        text = json.dumps(json_keys.extra_fields(_packed(dict(extra))))
        parse_json(text)  # nothing that could not be read again
        return text
    except json_keys.Unfit as error:
        raise ConfigError(
            f"save: extra cannot be written as JSON: extra{error}; {_ADVICE}"
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
    if isinstance(value, dict) and value and not json_keys.is_mark(value):
        for key, part in value.items():
            yield from _lines(part, f"{where}[{key!r}]")
    else:
        yield f"{where} = {json.dumps(value)}"


def loaded_extra(meta: Mapping[str, Any], path: Path) -> dict[Any, Any]:
    """``extra`` as it was given to the save of ``path``. Raises CorruptCheckpoint: a tensor in it is none."""
    found: dict[Any, Any] = _unpacked(json_keys.extra_of(meta), path)
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
            found[name] = json_keys.marked(_packed(module.get_extra_state()))
            parse_json(json.dumps(found[name]))
        except (json_keys.Unfit, ValueError, RecursionError) as error:
            what = error if isinstance(error, json_keys.Unfit) else f": {error}"
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
        (module, _unpacked(json_keys.unmarked(values[topology.rank % len(values)], "tuples"), path))
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
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise json_keys.Unfit(
                f"is a tensor without plain elements ({value.layout}, {value.device})"
            )
        if value.nbytes > MOST_NBYTES:
            raise json_keys.Unfit(
                f"is a tensor of {value.nbytes:,} bytes, more than the {MOST_NBYTES:,} for which there is room here: "
                "make it a buffer of the model"
            )
        dtype = str(value.dtype).removeprefix("torch.")
        return json_keys.Packed(
            dtype, tuple(value.shape), bytes_of(value.detach().cpu()).numpy().tobytes()
        )
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return value.item()  # a best loss, say: it comes back as Python's
    return _mapped(value, _packed)


def _mapped(value: Any, act: Callable[[Any], Any]) -> Any:
    """A dictionary, list or tuple of what ``act`` makes of its parts; any other value as it is."""
    if isinstance(value, dict) and not isinstance(value, Counter):
        return {key: json_keys.within(key, act, part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        parts = [json_keys.within(index, act, part) for index, part in enumerate(value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    return value


def _unpacked(value: Any, path: Path) -> Any:
    if isinstance(value, json_keys.Packed):
        dtype = getattr(torch, value.dtype, None)
        numel = prod(value.shape)
        if not isinstance(dtype, torch.dtype) or numel * dtype.itemsize != len(value.data):
            raise CorruptCheckpoint(
                f"{path}: manifest.json cannot be: a tensor of {value.dtype} {value.shape} has {len(value.data)} bytes"
            )
        if not numel:
            return torch.empty(value.shape, dtype=dtype, device="cpu")
        return torch.frombuffer(bytearray(value.data), dtype=dtype).view(value.shape)
    return _mapped(value, partial(_unpacked, path=path))


_OF_THIS_RANK = ("params", "param_names")  # of these ranks differ
_DATA = (Tensor, np.ndarray, np.generic, complex, int, bytes, bytearray, set, frozenset)


class _NoData(Exception):
    """A function or module in an option: the program gives it to its optimizer again."""


def options_of(group: Mapping[str, Any], place: int) -> tuple[dict[str, Any], dict[str, str]]:
    """Options of group ``place`` as JSON holds them, and those that are no data, each with its type.

    Raises:
        CheckpointError: an option is data that cannot be kept; the message names it.
    """
    kept: dict[str, Any] = {}
    left: dict[str, str] = {}
    for name, value in group.items():
        if name in _OF_THIS_RANK:
            continue
        try:
            kept[name] = json_keys.marked(_plain(value))
        except _NoData as error:
            left[name] = str(error)
        except (json_keys.Unfit, RecursionError) as error:
            what = error if isinstance(error, json_keys.Unfit) else " is nested too deeply"
            raise CheckpointError(
                f"option {name!r} of group {place} of the optimizer{what}, which a checkpoint cannot keep; expected "
                "numbers, texts, None, and tuples, lists or dictionaries of them"
            ) from error
    return kept, left


def _plain(value: Any) -> Any:
    """A value with Python's own numbers instead of a library's."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        count = value.numel() if isinstance(value, Tensor) else value.size
        number = value.item() if count == 1 else None
        if isinstance(number, bool | int | float):
            return _plain(number)
    elif isinstance(value, dict):
        return {
            key.item() if isinstance(key, np.generic) else key: json_keys.within(key, _plain, part)
            for key, part in value.items()
        }
    elif isinstance(value, list | tuple):
        return [json_keys.within(index, _plain, part) for index, part in enumerate(value)]
    elif (
        value is None
        or isinstance(value, bool | float | str)
        or (isinstance(value, int) and -MOST <= value <= MOST)
    ):
        return value
    if isinstance(value, _DATA):
        raise json_keys.Unfit(f"is {_described(value)}")
    raise _NoData(type(value).__name__)


def _described(value: Any) -> str:
    if isinstance(value, Tensor | np.ndarray):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} and {value.dtype}"
    if type(value) is int:
        return f"{shown(value)}, beyond 64 bits"
    return f"{shown(value)}, a {type(value).__name__}"


def fits(saved: object, current: object) -> bool:
    """Whether an option can replace another: a number stays a number."""
    if isinstance(current, tuple):
        return (
            isinstance(saved, list)
            and len(saved) == len(current)
            and all(map(fits, saved, current))
        )
    if isinstance(current, Tensor | np.ndarray | np.generic):
        with suppress(RuntimeError, TypeError, ValueError, OverflowError):  # beyond its dtype
            if isinstance(current, Tensor):
                torch.full_like(current, saved)  # type: ignore[arg-type]  # a number
                return type(saved) in (int, float)
            current.dtype.type(saved)
            return isinstance(saved, bool | int | float)
        return False
    if type(current) in (int, float):
        # Infinity and NaN are options, too: of a limit that nobody has set.
        return type(saved) is float or (type(saved) is int and -MOST <= saved <= MOST)
    return True


def restored(saved: Any, current: Any) -> Any:
    """The saved value with the types that ``current`` has at the same places; other places stay as JSON has them."""
    return _as(json_keys.unmarked(saved), current)


def _as(value: Any, current: Any) -> Any:
    if isinstance(value, dict):
        there = current if isinstance(current, dict) else {}
        return {key: _as(part, there.get(key)) for key, part in value.items()}
    if isinstance(value, list):
        places = list(current) if isinstance(current, list | tuple) else []
        places += [None] * (len(value) - len(places))
        parts = list(map(_as, value, places))
        return tuple(parts) if isinstance(current, tuple) else parts
    if isinstance(value, bool | int | float):
        if isinstance(current, Tensor):
            return torch.full_like(current, value)
        if isinstance(current, np.ndarray):
            return np.full_like(current, value)
        if isinstance(current, np.generic):
            return type(current)(value)
    return value


WORDS = 624  # of a Mersenne twister

Bytes = npt.NDArray[np.uint8]


def capture() -> dict[str, Bytes]:
    """State of each stream; each has the same length in every call."""
    version, words, gauss = random.getstate()
    assert version == 3, "of every Python that is supported"
    kind, keys, position, has_gauss, cached = np.random.get_state()  # noqa: NPY002  (users' code may draw from it)
    assert kind == "MT19937", "the global stream"
    device = {}
    if _device_has_stream():
        device["cuda"] = torch.cuda.get_rng_state().numpy().copy()
    return {
        **device,
        "torch": torch.get_rng_state().numpy().copy(),
        "numpy": _pack(np.append(keys, position), bool(has_gauss), float(cached)),
        "python": _pack(np.array(words), gauss is not None, gauss or 0.0),
    }


def restore(states: dict[str, Bytes]) -> None:
    """Continue the streams from where ``capture`` was called."""
    torch.set_rng_state(torch.from_numpy(states["torch"].copy()))
    if _device_has_stream():
        if "cuda" in states:
            torch.cuda.set_rng_state(torch.from_numpy(states["cuda"].copy()))
        else:  # saved where there was no device: one stream follows from the other
            torch.cuda.manual_seed(int(torch.initial_seed()))
    words, has_gauss, gauss = _unpack(states["numpy"])
    np.random.set_state(  # noqa: NPY002
        ("MT19937", words[:WORDS].astype(np.uint32), int(words[WORDS]), int(has_gauss), gauss)
    )
    words, has_gauss, gauss = _unpack(states["python"])
    random.setstate((3, tuple(map(int, words)), gauss if has_gauss else None))


def start_anew(key: int) -> None:
    """Start streams for a rank that no stored one belongs to; the same for the same ``key``."""
    torch.manual_seed(key)
    np.random.seed(key % 2**32)  # noqa: NPY002
    random.seed(key)


def _device_has_stream() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def _pack(words: npt.NDArray[np.integer], has_gauss: bool, gauss: float) -> Bytes:
    tail = np.array([float(has_gauss), gauss], dtype="<f8")
    return np.concatenate([words.astype("<u4").view(np.uint8), tail.view(np.uint8)])


def _unpack(state: Bytes) -> tuple[npt.NDArray[np.uint32], bool, float]:
    tail = state[-16:].copy().view("<f8")
    return state[:-16].copy().view("<u4"), bool(tail[0]), float(tail[1])


@dataclass(frozen=True)
class KeptBuffer:
    """One persistent buffer.

    Attributes:
        name: its first one in the model.
        names: all of them, at several places of the model.
        dtype: torch's name of it.
        shape: of it.
        stage: the first pipeline stage that has it.
    """

    name: str
    names: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    stage: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * int(getattr(torch, self.dtype).itemsize)


def buffers_of(sharding: Sharding) -> list[KeptBuffer]:
    """Of all stages, in the order of the whole model, each once. Collective over world where there are stages.

    Raises:
        CheckpointError: on every rank: two stages have one of a name with other shapes or dtypes.
    """
    topology = sharding.topology
    own = _own(sharding, topology.pipeline.rank)
    if topology.pipeline.size == 1:
        return own
    with topology.watchdog.collective("checkpoint: buffers of all stages"):
        stages = topology.pipeline.comm.allgather(own)
    with topology.agreed("put the buffers of all stages together"):
        part = part_of(sharding.model)
        return _merged(stages, [plain_name(name) for name in part.names] if part else ())


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers of a model, each once, by the names that a checkpoint has of them."""
    return {plain_name(name): buffer for name, buffer in model.named_buffers()}


def speaks_for(topology: Topology, kept: KeptBuffer) -> bool:
    """Whether this rank saves a buffer: it is the first of the stage."""
    stage, *others = topology.mesh.coordinates(topology.rank)
    return stage == kept.stage and not any(others)


def _own(sharding: Sharding, stage: int) -> list[KeptBuffer]:
    known = {id(buffer) for buffer in sharding.buffers}
    names: dict[int, list[str]] = {}
    for name, buffer in sharding.model.named_buffers(remove_duplicate=False):
        if id(buffer) in known:
            names.setdefault(id(buffer), []).append(plain_name(name))
    return [
        KeptBuffer(
            name,
            tuple(names[id(buffer)]),
            str(buffer.dtype).removeprefix("torch."),
            tuple(buffer.shape),
            stage,
        )
        for name, buffer in named_buffers(sharding.model).items()
        if id(buffer) in known
    ]


def _merged(stages: Sequence[Sequence[KeptBuffer]], names: Sequence[str]) -> list[KeptBuffer]:
    """Each once, where its module's parameters come in ``names``: a stage may have blocks 0 and 2."""
    first: dict[str, int] = {}  # parameter of a module and what is in it
    for index, name in enumerate(names):
        for prefix in _prefixes(name):
            first.setdefault(prefix, index)
    found: dict[str, tuple[int, KeptBuffer]] = {}
    for stage in stages:
        at = 0  # its own order is that of the whole model
        for kept in stage:
            at = max(at, next((first[p] for p in _prefixes(kept.name) if p in first), 0))
            _, before = found.setdefault(kept.name, (at, kept))
            if (before.dtype, before.shape) != (kept.dtype, kept.shape):
                raise CheckpointError(
                    f"buffer {kept.name!r} is {kept.dtype} {kept.shape} on stage {kept.stage}, and {before.dtype} "
                    f"{before.shape} on stage {before.stage}; give buffers of stages other names, or the same form"
                )
    return [kept for _, kept in sorted(found.values(), key=lambda pair: pair[0])]


def _prefixes(name: str) -> list[str]:
    """Modules that ``name`` is in, the innermost first."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, -1, -1)]
