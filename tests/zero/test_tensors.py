"""Searches for tensors: what they enter, what they leave alone, and that they run no code of the user's."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpczero.zero.calls import tensors
from hpczero.zero.calls.tensors import MOST_OBJECTS, Attributes, Replacement, TooMany, tensors_in


class Closed(MutableMapping[str, Any]):
    """A file that is read for each entry, after it was closed."""

    def __getitem__(self, key: str) -> Any:
        raise OSError("file is closed")

    def __setitem__(self, key: str, value: Any) -> None:
        raise OSError("file is closed")

    def __delitem__(self, key: str) -> None:
        raise OSError("file is closed")

    def __iter__(self) -> Iterator[str]:
        return iter(["a", "b"])

    def __len__(self) -> int:
        return 2


class ClosedDict(dict[str, Any]):
    """A dict whose own look-up raises; it has its entries all the same."""

    def __iter__(self) -> Iterator[str]:
        raise OSError("file is closed")

    values = items = keys = __iter__  # type: ignore[assignment]


class InMemory(Mapping[str, Any]):
    def __init__(self, **held: Any) -> None:
        self.held = held

    def __getitem__(self, key: str) -> Any:
        return self.held[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class Hidden:
    """Its slot has another name than it is written with."""

    __slots__ = ("__tensor", "unset")

    def __init__(self, tensor: Tensor) -> None:
        self.__tensor = tensor

    def __getattr__(self, name: str) -> Any:
        raise OSError("asked for what is not there")


@dataclass(frozen=True)
class Frozen:
    inner: Any


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "mapping in memory": lambda t: InMemory(a=t),
    "UserDict": lambda t: UserDict(a=t),
    "mapping proxy": lambda t: MappingProxyType({"a": t}),
    "dict that raises": lambda t: ClosedDict(a=t),
    "slots": Hidden,
    "namespace": lambda t: SimpleNamespace(a=[t]),
    "frozen dataclass": lambda t: Frozen((t,)),
    "set": lambda t: {t},
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_containers_and_objects_in_memory_are_entered(holder):
    tensor = torch.ones(1)
    assert [id(found) for found in tensors_in([holder(tensor)])] == [id(tensor)]


class Named(logging.LoggerAdapter):
    pass


LEAVES: dict[str, Callable[[], Any]] = {
    "logger": lambda: logging.getLogger("tests.tensors"),
    "logger adapter of the user's": lambda: Named(logging.getLogger("tests.tensors"), {}),
    "lock": threading.Lock,
    "condition": threading.Condition,
    "thread": threading.Thread,
    "file": lambda: open(__file__),  # noqa: SIM115  (closed by the collector)
    "module": lambda: torch,
    "class": lambda: nn.Linear,
    "function": lambda: torch.relu,
    "weak reference": lambda: weakref.ref(nn.Linear),
    "weak dictionary": weakref.WeakValueDictionary,
    "data set": lambda: torch.utils.data.TensorDataset(torch.ones(1)),
    "closed mapping": Closed,
}


@pytest.mark.filterwarnings("ignore:unclosed file")
@pytest.mark.parametrize("leaf", LEAVES.values(), ids=LEAVES)
def test_what_holds_no_results_is_not_searched(monkeypatch, leaf):
    item = leaf()
    monkeypatch.setattr(tensors, "MOST_OBJECTS", 2)  # the list and one more
    assert not list(tensors_in([item]))
    model = nn.Module()
    model.own = item
    Attributes(model).replace(Replacement(lambda tensor: tensor + 1))
    assert model.own is item


def test_undoing_puts_no_default_in_the_place_of_what_was_taken_out():
    batch = defaultdict(lambda: torch.zeros(1), x=torch.ones(1))
    walk = Replacement(lambda tensor: tensor + 1)
    walk.of(batch)
    del batch["x"]
    walk.undo()
    assert not batch


class Once(InMemory, MutableMapping[str, Any]):
    """Raises an error of its own when it is read after it was closed."""

    closed = False

    def __getitem__(self, key: str) -> Any:
        if self.closed:
            raise OSError("the file is closed")
        return self.held[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.held[key] = value

    def __delitem__(self, key: str) -> None:
        del self.held[key]


def test_a_container_that_the_model_closed_keeps_the_rest_from_nothing():
    closing, batch = Once(a=torch.ones(1)), {"x": torch.ones(1)}
    walk = Replacement(lambda tensor: tensor + 1)
    walk.of([batch, closing])
    assert closing["a"] == 2
    closing.closed = True
    walk.undo()
    assert batch["x"] == 1


def search(tree: Any) -> None:
    list(tensors_in(tree))


def exchange(tree: Any) -> None:
    Replacement(lambda tensor: tensor + 1).of(tree)


@pytest.mark.parametrize("walk", [search, exchange])
def test_searches_and_casts_count_the_same_containers_and_no_tensors(walk):
    walk([[torch.ones(1), torch.ones(1)] for _ in range(MOST_OBJECTS - 1)])
    with pytest.raises(TooMany):
        walk([[torch.ones(1)] for _ in range(MOST_OBJECTS)])


def test_what_is_too_deep_to_be_cast_is_too_many_and_can_be_put_back():
    deepest = {"x": torch.ones(1)}
    tree: list[Any] = [deepest]
    for _ in range(3000):
        tree = [tree]
    batch = {"x": torch.ones(1), "tree": tree}
    walk = Replacement(lambda tensor: tensor + 1)
    with pytest.raises(TooMany):
        walk.of(batch)
    walk.undo()
    assert batch["x"] == 1
    assert len(list(tensors_in(batch))) == 2
