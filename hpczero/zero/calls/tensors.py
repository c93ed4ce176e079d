"""Tensors in whatever a module takes and returns.

torch's pytrees see registered classes only. They do not see a dataclass, a subclass of dict or an object that a block
writes its results to. A backward pass may come in by the tensors there.

[Note: Whose code a search runs]
A search runs no code of the user's: a mapping may read a file for each entry, and raise if the file is closed. Entries
are read as the built-in base class has them. Containers of other classes are read through the attributes that hold
their entries. Only casts of arguments and results ask such a container, and skip it if it raises.
"""

from __future__ import annotations

import logging
import re
import threading
import types
from array import array
from collections import deque
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    Set,
)
from dataclasses import dataclass
from enum import Enum, auto
from functools import cache, partial
from io import IOBase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from hpczero.errors import StepError

# Containers and objects that a search enters before it gives up: far more than a model's outputs, less than a data set.
MOST_OBJECTS = 10_000

_NO_TENSORS_INSIDE = (
    str,
    bytes,
    bytearray,
    array,
    np.ndarray,
    int,
    float,
    complex,
    type,
    type(None),
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    partial,
    types.ModuleType,
    Enum,
    IOBase,
    threading.Thread,
    logging.Filterer,  # loggers and handlers: from one of them lead ways to all
    logging.LoggerAdapter,
    Dataset,
    DataLoader,
    torch.dtype,
    torch.device,
    torch.Size,
    torch.Generator,
    torch.optim.Optimizer,
    nn.Module,  # its parameters are units' business, its attributes are looked at by name
)

# Packages whose own classes keep no results of a model. hpczero's would lead to every unit.
_KEEP_NO_RESULTS = re.compile(
    "(asyncio|hpczero|logging|multiprocessing|os|shelve|socket|subprocess|tempfile|threading|weakref|zipfile)([.]|$)"
)
_OF_EVERY_MODULE = frozenset(nn.Module().__dict__)


class TooMany(Exception):
    """A search met more than ``MOST_OBJECTS`` containers and objects, or a ``Replacement`` met them nested too deep."""


class _SearchKind(Enum):
    """How a search goes on at an object of some class."""

    LEAF = auto()  # holds no tensors
    TENSOR = auto()
    SEQUENCE = auto()  # a plain tuple or list, without attributes
    DICT = auto()  # a plain one
    OBJECT = auto()  # everything else: entries, if it has any, and attributes


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Every tensor in ``tree``. Each container is searched once; tensors that lie less deep come first.

    Args:
        tree: a tensor, or a container, dataclass or object, to any depth. Modules, functions and generators are not
            entered.

    Raises:
        TooMany: there is more in it than a search should take time for.
    """
    seen: set[int] = set()
    # In this order: where the search ends too early, the tensors of an ordinary result have been found.
    waiting = deque([tree])
    while waiting:
        item = waiting.popleft()
        kind = _kind_of(item)
        if kind is _SearchKind.LEAF or id(item) in seen:
            continue
        if kind is _SearchKind.TENSOR:
            yield item
            continue
        seen.add(id(item))
        if len(seen) > MOST_OBJECTS:
            raise TooMany
        if kind is _SearchKind.SEQUENCE:
            waiting += item
        elif kind is _SearchKind.DICT:
            waiting += item.values()
        else:
            waiting += (value for _, value in _entries(item))
            waiting += _attributes(item).values()


def _kind_of(item: Any) -> _SearchKind:
    kind: type = type(item)
    return _kind(kind)


@cache
def _kind(kind: type) -> _SearchKind:
    # Asked of every object of every call: one look-up, however many classes there are to tell apart.
    if issubclass(kind, Tensor):
        return _SearchKind.TENSOR
    if issubclass(kind, _NO_TENSORS_INSIDE) or _KEEP_NO_RESULTS.match(str(kind.__module__)):
        return _SearchKind.LEAF
    if kind in (tuple, list):
        return _SearchKind.SEQUENCE
    return _SearchKind.DICT if kind is dict else _SearchKind.OBJECT


def _ask(item: Any) -> Iterable[tuple[Any, Any]]:
    return item.items() if isinstance(item, Mapping) else enumerate(item)


_READERS: dict[type, Callable[[Any], Iterable[tuple[Any, Any]]]] = {
    dict: dict.items,
    list: lambda item: enumerate(list.__iter__(item)),
    tuple: lambda item: enumerate(tuple.__iter__(item)),
    set: lambda item: enumerate(set.__iter__(item)),
    frozenset: lambda item: enumerate(frozenset.__iter__(item)),
    deque: lambda item: enumerate(deque.__iter__(item)),
}


@cache
def _reader(kind: type, *, asks: bool) -> Callable[[Any], Iterable[tuple[Any, Any]]] | None:
    for built_in, reader in _READERS.items():
        if issubclass(kind, built_in):
            return reader
    is_container = issubclass(kind, (Mapping, MutableSequence, Set))
    hides = not kind.__dictoffset__ and not _slots(kind)  # written in C
    return _ask if is_container and (asks or hides) else None


def _entries(item: Any, *, asks: bool = False) -> list[tuple[Any, Any]]:
    """What ``item`` holds by key or by place ([Note: Whose code a search runs]).

    Args:
        item: of any class.
        asks: whether a container of the user's is asked too.
    """
    kind: type = type(item)
    reader = _reader(kind, asks=asks)
    try:
        return [] if reader is None else list(reader(item))
    except RecursionError:  # ours, where much is in each other
        raise
    except Exception:  # of the user's, who did not look anything up
        return []


def _attributes(item: Any) -> dict[str, Any]:
    """What ``item`` holds by name; nothing for classes written in C."""
    kind: type = type(item)
    try:
        found = dict(object.__getattribute__(item, "__dict__"))
    except RecursionError:  # as above
        raise
    except Exception:  # it has none, or is the proxy of an object that is not there
        found = {}
    for name, slot in _slots(kind):
        try:
            found[name] = slot.__get__(item)
        except AttributeError:  # declared and never set
            continue
    return found


@cache
def _slots(kind: type) -> list[tuple[str, Any]]:
    return [
        (name, slot)
        for each in kind.__mro__
        if "__slots__" in vars(each)
        for name, slot in vars(each).items()
        if isinstance(slot, types.MemberDescriptorType)
    ]


class Attributes:
    """What the modules below one module hold as attributes, beside parameters, buffers and submodules."""

    def __init__(self, module: nn.Module) -> None:
        # torch's own modules keep no results.
        modules = (m for m in module.modules() if not type(m).__module__.startswith("torch.nn."))
        self._known: list[tuple[nn.Module, set[str]]] = [(each, set()) for each in modules]
        self._names: list[tuple[nn.Module, str]] = []

    def _look(self) -> None:
        self._known = [(module, set(module.__dict__)) for module, _ in self._known]
        self._names = [
            (module, name)
            for module, names in self._known
            for name in sorted(names - _OF_EVERY_MODULE)
            if not name.startswith("_hpczero") and _may_change_to_tensors(module.__dict__[name])
        ]

    def values(self) -> list[Any]:
        """Values that may be or hold tensors. It is cheap: names are found anew only if attributes came or went."""
        if any(module.__dict__.keys() != names for module, names in self._known):
            self._look()
        return [
            value
            for module, name in self._names
            if (value := module.__dict__.get(name)) is not None
        ]

    def replace(self, walk: Replacement) -> None:
        """Replace every tensor as ``walk`` says."""
        walk.asks = False
        self.values()
        for module, name in self._names:
            if name in module.__dict__:
                walk.write(module, [(name, module.__dict__[name])])


def _may_change_to_tensors(value: Any) -> bool:
    """Whether an attribute with this value may hold a tensor later. Configuration does not."""
    if value is None or isinstance(value, (Tensor, list)):
        return True
    kind: type = type(value)
    if _kind_of(value) is _SearchKind.LEAF:
        # A loss that is 0.0 until it is computed; sizes and switches stay what they are.
        return isinstance(value, (float, complex)) or (isinstance(value, int) and value == 0)
    if isinstance(value, tuple):  # (None, None) may be a state that is still to come
        return not value or any(_may_change_to_tensors(each) for each in value)
    options = getattr(kind, "__dataclass_params__", None)
    if options is None or not options.frozen or issubclass(kind, dict):
        return True
    try:
        return next(tensors_in(value), None) is not None
    except TooMany:
        return True


class Replacement:
    """Replaces tensors in a tree. What is met twice is changed once.

    Containers and objects that can be written to are written to, so they stay the same objects. Tuples, sets and
    mappings that cannot are made anew if something in them changes.
    """

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        """``change`` is called once for each tensor object. It returns that object if nothing is to be done."""
        self.change = change
        self.asks = True  # containers of the user's, for their entries
        self._entered = 0
        self._done: dict[int, Any] = {}
        self._kept: list[Any] = []  # ids are of living objects only
        self._places: list[tuple[Any, Any, Any, Any]] = []

    def of(self, item: Any) -> Any:
        """``item`` with all tensors changed. It is the same object if it can be written to or needs no change.

        Raises:
            TooMany: as ``tensors_in``.
        """
        kind = _kind_of(item)
        if kind is _SearchKind.LEAF:
            return item
        if id(item) in self._done:
            return self._done[id(item)]
        self._kept.append(item)
        self._done[id(item)] = item  # of a circle: the object itself
        new = self.change(item) if kind is _SearchKind.TENSOR else self._of_container(item)
        self._done[id(item)] = self._done[id(new)] = new
        self._kept.append(new)
        return new

    def undo(self) -> None:
        """Put the old tensors back wherever the new ones still are."""
        for item, key, old, new in reversed(self._places):
            if _get(item, key) is new:
                _set(item, key, old)
        self._places.clear()

    def _of_container(self, item: Any) -> Any:
        self._entered += 1
        if self._entered > MOST_OBJECTS:
            raise TooMany
        try:
            return self._of_parts(item, _entries(item, asks=self.asks))
        except RecursionError:
            raise TooMany from None

    def _of_parts(self, item: Any, entries: list[tuple[Any, Any]]) -> Any:
        if entries and isinstance(item, (tuple, Set)):
            parts = [self.of(part) for _, part in entries]
            if all(new is old for new, (_, old) in zip(parts, entries, strict=True)):
                return item
            return _made_of(item, parts)
        if entries and isinstance(item, Mapping) and not isinstance(item, MutableMapping):
            return self._of_frozen(item, entries)
        self.write(item, [(_EntryKey(key), value) for key, value in entries])
        self.write(item, _attributes(item).items())
        return item

    def _of_frozen(self, item: Mapping[Any, Any], entries: list[tuple[Any, Any]]) -> Any:
        """A mapping that cannot be written to, made anew.

        Raises:
            StepError: it holds tensors to be cast, and it is unknown how to make another one of its class.
        """
        new = {key: self.of(value) for key, value in entries}
        if all(new[key] is value for key, value in entries):
            self.write(item, _attributes(item).items())
            return item
        if type(item) is types.MappingProxyType:
            return types.MappingProxyType(new)
        raise StepError(
            f"a {type(item).__name__} is a mapping that cannot be written to, so the floating point tensors in it "
            "cannot be cast where the model trains in half precision; use a dict instead"
        )

    def write(self, item: Any, held: Iterable[tuple[Any, Any]]) -> None:
        """Replace the tensors in ``held``: entries or attributes of ``item`` by key or name."""
        for key, old in held:
            if (new := self.of(old)) is not old:
                _set(item, key, new)
                self._places.append((item, key, old, new))


def _made_of(old: Any, parts: list[Any]) -> Any:
    """A tuple or set of the class of ``old``, with other items."""
    kind: Any = type(old)
    if hasattr(old, "_fields"):
        return kind(*parts)
    if kind is tuple or not isinstance(old, tuple) or "__new__" not in vars(kind):
        return kind(parts)
    try:
        new = tuple.__new__(kind, parts)  # its own constructor may want anything
    except TypeError:  # a struct sequence of torch's
        return kind(parts)
    if hasattr(old, "__dict__"):
        vars(new).update(vars(old))
    return new


@dataclass(frozen=True)
class _EntryKey:
    """Key or index of an entry, where a name would be an attribute."""

    key: Any


def _get(item: Any, key: Any) -> Any:
    try:
        if not isinstance(key, _EntryKey):
            return object.__getattribute__(item, key)
        return dict.get(item, key.key) if isinstance(item, dict) else item[key.key]
    except Exception:  # taken out since, or whatever a container of the user's says to that
        return None


def _set(item: Any, key: Any, value: Any) -> None:
    if isinstance(key, _EntryKey):
        item[key.key] = value
    else:
        object.__setattr__(item, key, value)  # also of a frozen dataclass
