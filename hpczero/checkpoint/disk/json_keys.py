"""Values of a program in JSON and back: tuples, dictionaries whose keys are not texts, bytes of tensors (``Packed``).

[Note: Pairs]
JSON makes ``{"3": 1}`` of ``{3: 1}``, and a scheduler's milestones would never be met again. Such a dictionary is
therefore written as ``{"__pairs__": [[3, 1]]}``, and a Counter as ``{"__counter__": [[3, 1]]}``. A dictionary that
holds such a mark itself is written so too. Bytes of a tensor are ``{"__tensor__": [dtype, shape, base64]}``, and a
tuple is ``{"__tuple__": [part, ...]}``. Older files know no such marks, so a mark counts only where the form has it.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
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
    """A value that JSON cannot hold. Its text says where, and what it is: ``["a"][1] is a set``."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.where = ""

    def __str__(self) -> str:
        return f"{self.where} {self.what}"

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
    """Fields of ``meta`` that hold ``extra``. Raises Unfit: JSON cannot hold a part of it."""
    forms: set[str] = set()
    fields = {"extra": marked(dict(extra), forms)}
    return {**fields, FORM: max(forms)} if forms else fields


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


def is_mark(value: Mapping[Any, Any]) -> bool:
    """Whether a dictionary of ``marked`` stands for something else."""
    return len(value) == 1 and not _MARKS.isdisjoint(value)


def marked(value: Any, forms: set[str] | None = None) -> Any:
    """The value with marks ([Note: Pairs]), whose forms are added to ``forms``.

    Raises:
        Unfit: it holds what JSON cannot hold.
    """
    forms = set() if forms is None else forms
    part = partial(marked, forms=forms)
    if isinstance(value, list | tuple):
        parts = [within(index, part, each) for index, each in enumerate(value)]
        if isinstance(value, list):
            return parts
        forms.add("tuples")
        return {TUPLE: parts}
    if isinstance(value, Packed):
        forms.add("tensors")
        return {TENSOR: [value.dtype, [*value.shape], base64.b64encode(value.data).decode()]}
    if not isinstance(value, dict):
        _check_scalar(value)
        return value
    for key in value:
        if not _is_key(key):
            raise Unfit(f"has the key {shown(key)}, a {type(key).__name__}")
    pairs = [[key, within(key, part, each)] for key, each in value.items()]
    plain = all(isinstance(key, str) for key in value) and _MARKS.isdisjoint(value)
    if plain and not isinstance(value, Counter):
        return dict(pairs)
    forms.add("pairs")
    return {COUNTER if isinstance(value, Counter) else PAIRS: pairs}


def unmarked(value: Any, form: str = "pairs") -> Any:
    """The value that ``marked`` was given; ``form`` says which marks are some.

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


def _check_scalar(value: Any) -> None:
    if value is not None and not isinstance(value, bool | int | float | str):
        raise Unfit(f"is a {type(value).__name__}")
    # Python may refuse to write that many digits
    if isinstance(value, int) and abs(value) > 2**4096:
        try:
            int.__repr__(value)
        except ValueError:
            raise Unfit("is a number of very many digits") from None
