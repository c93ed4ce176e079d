"""What a checkpoint has beside parameters: options of groups, streams of random numbers, and buffers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hpczero.checkpoint.disk.format import plain_name
from hpczero.checkpoint.disk.json_keys import Unfit, marked, unmarked, within
from hpczero.checkpoint.disk.manifest_form import MOST
from hpczero.errors import CheckpointError
from hpczero.files.regular import shown
from hpczero.job.topology import Topology
from hpczero.plan.placement import part_of
from hpczero.zero.sharding import Sharding

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
            kept[name] = marked(_plain(value))
        except _NoData as error:
            left[name] = str(error)
        except (Unfit, RecursionError) as error:
            what = (
                f"{error.where} {error.what}"
                if isinstance(error, Unfit)
                else " is nested too deeply"
            )
            raise CheckpointError(
                f"option {name!r} of group {place} of the optimizer{what}, which a checkpoint cannot keep; expected "
                "numbers, texts, None, and tuples, lists or dictionaries of them"
            ) from error
    return kept, left


def _plain(value: Any) -> Any:
    """A value with Python's own numbers instead of a library's."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        number = value.item() if _count(value) == 1 else None
        if isinstance(number, bool | int | float):
            return _plain(number)
    elif isinstance(value, dict):
        return {_plain_key(key): within(key, _plain, part) for key, part in value.items()}
    elif isinstance(value, list | tuple):
        return [within(index, _plain, part) for index, part in enumerate(value)]
    elif (
        value is None
        or isinstance(value, bool | float | str)
        or (isinstance(value, int) and -MOST <= value <= MOST)
    ):
        return value
    if isinstance(value, _DATA):
        raise Unfit(f"is {_described(value)}")
    raise _NoData(type(value).__name__)


def _plain_key(key: Any) -> Any:
    return key.item() if isinstance(key, np.generic) else key


def _count(value: Any) -> int:
    return value.numel() if isinstance(value, Tensor) else value.size


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
    if isinstance(current, Tensor):
        return type(saved) in (int, float) and _holds(current, saved)
    if isinstance(current, np.ndarray | np.generic):
        return isinstance(saved, bool | int | float) and _becomes(saved, current.dtype)
    if type(current) in (int, float):
        # Infinity and NaN are options, too: of a limit that nobody has set.
        return type(saved) is float or (type(saved) is int and -MOST <= saved <= MOST)
    return True


def _holds(tensor: Tensor, value: object) -> bool:
    with suppress(RuntimeError, OverflowError):  # beyond the range of its dtype
        torch.full_like(tensor, value)  # type: ignore[arg-type]  # a number
        return True
    return False


def _becomes(value: object, dtype: np.dtype[Any]) -> bool:
    with suppress(TypeError, ValueError, OverflowError):
        dtype.type(value)
        return True
    return False


def restored(saved: Any, current: Any) -> Any:
    """The saved value with the types that ``current`` has at the same places; other places stay as JSON has them."""
    return _as(unmarked(saved), current)


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
class Kept:
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


def buffers_of(sharding: Sharding) -> list[Kept]:
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


def speaks_for(topology: Topology, kept: Kept) -> bool:
    """Whether this rank saves a buffer: it is the first of the stage."""
    stage, *others = topology.mesh.coordinates(topology.rank)
    return stage == kept.stage and not any(others)


def _own(sharding: Sharding, stage: int) -> list[Kept]:
    known = {id(buffer) for buffer in sharding.buffers}
    names: dict[int, list[str]] = {}
    for name, buffer in sharding.model.named_buffers(remove_duplicate=False):
        if id(buffer) in known:
            names.setdefault(id(buffer), []).append(plain_name(name))
    return [
        Kept(
            name,
            tuple(names[id(buffer)]),
            str(buffer.dtype).removeprefix("torch."),
            tuple(buffer.shape),
            stage,
        )
        for name, buffer in named_buffers(sharding.model).items()
        if id(buffer) in known
    ]


def _merged(stages: Sequence[Sequence[Kept]], names: Sequence[str]) -> list[Kept]:
    """Each once, where its module's parameters come in ``names``: a stage may have blocks 0 and 2.

    Raises:
        CheckpointError: two stages have one of a name with other shapes or dtypes.
    """
    first: dict[str, int] = {}  # parameter of a module and what is in it
    for index, name in enumerate(names):
        for prefix in _prefixes(name):
            first.setdefault(prefix, index)
    found: dict[str, tuple[int, Kept]] = {}
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
