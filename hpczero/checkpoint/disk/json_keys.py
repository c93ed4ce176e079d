"""Tuples, and dictionaries whose keys are not texts, in JSON and back.

Owns: what JSON holds of a program's values, and the marks for what it would change. Must not know: files, MPI, torch: a
tensor is its bytes (``Packed``).

[Note: Pairs]
Keys are texts in JSON: it makes ``{"3": 1}`` of ``{3: 1}`` without a word, and a scheduler's milestones would never be
met again. Such a dictionary is therefore written as ``{"__pairs__": [[3, 1]]}``, and a Counter as ``{"__counter__":
[[3, 1]]}``. A dictionary that holds such a mark itself is written so too. Every mark in the file is thus ours.
Bytes of a tensor are ``{"__tensor__": [dtype, shape, base64]}``, and a tuple is ``{"__tuple__": [part, ...]}``. Files
of before know no such marks, so a mark counts only where the form has it.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from hpczero.files.regular import shown

PAIRS, COUNTER, TENSOR, TUPLE = "__pairs__", "__counter__", "__tensor__", "__tuple__"
FORM = "extra_form"  # of ``meta``: what ``extra`` is written as; absent: as it is

_FORMS = {  # marks of each; one that comes later by its name has those before, too
    "pairs": {PAIRS, COUNTER},
    "tensors": {PAIRS, COUNTER, TENSOR},
    "tuples": {PAIRS, COUNTER, TENSOR, TUPLE},
}
_MARKS = _FORMS["tuples"]

T = TypeVar("T")


@dataclass(frozen=True)
class Packed:
    """Elements of a tensor: torch's name of their type, the shape, and the bytes in this order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Unfit(TypeError):
    """A value that JSON cannot hold. The message says which, and where."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.where = ""

    def inside(self, key: object) -> Unfit:
        """The same error, one level further up."""
        self.where = f"[{shown(key)}]{self.where}"
        return self


def within(key: object, act: Callable[[Any], T], part: Any) -> T:
    """``act(part)``; an ``Unfit`` from it says that the part is at ``key``."""
    try:
        return act(part)
    except Unfit as error:
        raise error.inside(key) from None


def extra_fields(extra: Mapping[Any, Any]) -> dict[str, Any]:
    """Fields of ``meta`` that hold ``extra``.

    Raises:
        Unfit: JSON cannot hold a part of it.
    """
    plain = dict(extra)
    forms = set(_forms(plain))
    if not forms:
        return {"extra": plain}
    return {"extra": marked(plain), FORM: max(forms)}


def extra_of(meta: Mapping[str, Any]) -> dict[Any, Any]:
    """``extra`` from the fields that ``extra_fields`` made; a tensor is ``Packed``.

    Raises:
        ValueError: it has no form that this version knows, or there are no pairs behind a mark.
    """
    extra, form = meta["extra"], meta.get(FORM)
    if form is not None:
        if form not in _FORMS:
            raise ValueError(f"is written as {shown(form)}, expected {' or '.join(sorted(_FORMS))}")
        extra = unmarked(extra, form)
    if not isinstance(extra, dict):
        raise ValueError(f"is {shown(extra)}, expected a dictionary")
    return extra


def _forms(value: Any) -> Iterator[str]:
    """Forms that the value needs, at any depth: for a key that JSON would change, a Counter, a tensor, or a tuple.

    Raises:
        Unfit: it holds what JSON cannot hold.
    """
    if isinstance(value, dict):
        _check_keys(value)
        if isinstance(value, Counter) or not all(isinstance(key, str) for key in value):
            yield "pairs"
        for key, part in value.items():
            yield from within(key, _listed, part)
    elif isinstance(value, list | tuple):
        if isinstance(value, tuple):
            yield "tuples"
        for index, part in enumerate(value):
            yield from within(index, _listed, part)
    elif isinstance(value, Packed):
        yield "tensors"
    else:
        _check_scalar(value)


def _listed(value: Any) -> list[str]:
    return list(_forms(value))


def is_mark(value: Mapping[Any, Any]) -> bool:
    """Whether a dictionary of ``marked`` stands for something else."""
    return len(value) == 1 and not _MARKS.isdisjoint(value)


def marked(value: Any) -> Any:
    """The value with marks ([Note: Pairs]).

    Raises:
        Unfit: it holds what JSON cannot hold.
    """
    if isinstance(value, list | tuple):
        parts = [within(index, marked, part) for index, part in enumerate(value)]
        return {TUPLE: parts} if isinstance(value, tuple) else parts
    if isinstance(value, Packed):
        return {TENSOR: [value.dtype, [*value.shape], base64.b64encode(value.data).decode()]}
    if not isinstance(value, dict):
        _check_scalar(value)
        return value
    _check_keys(value)
    pairs = [[key, within(key, marked, part)] for key, part in value.items()]
    if isinstance(value, Counter):
        return {COUNTER: pairs}
    if all(isinstance(key, str) for key in value) and _MARKS.isdisjoint(value):
        return dict(pairs)
    return {PAIRS: pairs}


def unmarked(value: Any, form: str = "pairs") -> Any:
    """The value that ``marked`` was given.

    Args:
        value: of JSON.
        form: of ``_FORMS``: which marks are some.

    Raises:
        ValueError: there are no pairs, or is no tensor or list, behind a mark.
    """
    if isinstance(value, list):
        return [unmarked(part, form) for part in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value)) if len(value) == 1 else None
    if mark not in _FORMS[form]:
        return {key: unmarked(part, form) for key, part in value.items()}
    pairs = value[mark]
    if mark == TENSOR:
        return _packed(pairs)
    if mark == TUPLE and isinstance(pairs, list):
        return tuple(unmarked(part, form) for part in pairs)
    if not (isinstance(pairs, list) and all(map(_is_pair, pairs))):
        raise ValueError(f"has {shown(pairs)} behind {mark}, expected pairs of key and value")
    found = {key: unmarked(part, form) for key, part in pairs}
    if len(found) < len(pairs):
        raise ValueError(f"has a key twice behind {mark}: {shown(pairs)}")
    return found if mark == PAIRS else Counter(found)


def _packed(fields: Any) -> Packed:
    try:
        dtype, shape, text = fields
        return Packed(str(dtype), tuple(map(int, shape)), base64.b64decode(text, validate=True))
    except (TypeError, ValueError) as error:
        raise ValueError(f"has {shown(fields)} behind {TENSOR} ({error})") from None


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and _is_key(pair[0])


def _is_key(key: Any) -> bool:
    return key is None or isinstance(key, bool | int | float | str)


def _check_keys(value: Mapping[Any, Any]) -> None:
    for key in value:
        if not _is_key(key):
            raise Unfit(f"has the key {shown(key)}, a {type(key).__name__}")


def _check_scalar(value: Any) -> None:
    if value is not None and not isinstance(value, bool | int | float | str):
        raise Unfit(f"is a {type(value).__name__}")
    if (
        isinstance(value, int) and abs(value) > 2**4096
    ):  # Python may refuse to write that many digits
        try:
            int.__repr__(value)
        except ValueError:
            raise Unfit("is a number of very many digits") from None
