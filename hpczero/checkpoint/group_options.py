"""Options of an optimizer's group: what a checkpoint keeps of them, and how they are restored.

Owns: which values are numbers, of any library, and the refusal of what cannot be kept. Must not know: files, MPI,
shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpczero.checkpoint.disk.json_keys import Unfit, marked, unmarked, within
from hpczero.checkpoint.disk.manifest_form import MOST
from hpczero.errors import CheckpointError
from hpczero.files.regular import shown

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
