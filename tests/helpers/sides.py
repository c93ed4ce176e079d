"""Sides: which tensors are a pretended device's and which the host's, and what may be done with both of them.

Owns: the two sides, the rules, and what was seen. Must not know: accelerators, lanes, MPI. ``pretended`` is the device.

[Note: Whose a tensor is]
Sides belong to storages, so all views of one agree. What an operation makes is the device's if anything it was given
is. Everything else is the host's: what was there before, and what NumPy, a file or a list of numbers gave. Torch itself
knows nothing of this. ``tensor.device``, moves and factories are replaced meanwhile, and call torch with the CPU for
the device. That is of a type which torch knows by name and this build cannot run: what was not replaced raises where it
is asked for memory there. Autograd does not know copies from side to side.

[Note: Threads]
Torch keeps its modes by thread. A thread that works on a device makes it its own first (``Accelerator.enter_thread``),
and is watched from then on. Of one that does not, new tensors seem to be the host's, and what meets them is told.
"""

from __future__ import annotations

import functools
import linecache
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _push_mode
from torch.utils._pytree import tree_leaves

import hpczero

DEVICE, HOST = torch.device("xpu", 0), torch.device("cpu")
PACKAGE = Path(hpczero.__file__).parent
HERE = [__file__, str(Path(__file__).with_name("pretended.py"))]

# From side to side.
COPIES = ("copy_", "_foreach_copy_")
# Their indices may be the host's.
INDEXED = ("index", "index_put", "index_put_", "_index_put_impl_")
# A number that they put may be the host's: ``value`` or ``values``.
PUTTING = (*INDEXED, "masked_fill", "masked_fill_", "fill", "fill_", "index_fill", "index_fill_")
# The host cannot go on before it has the answer, or knows how large it is. ``item()`` and ``float()`` are the first.
ANSWERS = ("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2")
# What makes tensors on a device that is named.
FACTORIES = [
    *("empty", "zeros", "ones", "full", "arange", "linspace", "eye", "empty_strided"),
    *("rand", "randn", "randint", "randperm"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
]
METHODS = ("new_empty", "new_zeros", "new_ones", "new_full")


class Storages:
    """A set of storages. One that was put in keeps its number, which no other can then have."""

    def __init__(self) -> None:
        self._held: dict[int, StorageWeakRef] = {}
        self._most = 256  # before those that are gone are taken out

    def __contains__(self, tensor: Tensor) -> bool:
        return number_of(tensor) in self._held

    def put(self, tensor: Tensor) -> None:
        """Its storage belongs here from now on."""
        number = number_of(tensor)
        if number is None or number in self._held:
            return
        if len(self._held) >= self._most:
            self._held = {n: held for n, held in self._held.items() if not held.expired()}
            self._most = 256 + 2 * len(self._held)
        with torch._C.DisableTorchFunctionSubclass():
            self._held[number] = StorageWeakRef(tensor.untyped_storage())

    def take(self, tensor: Tensor) -> None:
        """Its storage does not belong here."""
        self._held.pop(number_of(tensor) or 0, None)

    def have_address(self, address: int, nbytes: int) -> bool:
        """Whether any of these bytes is theirs."""
        for held in list(self._held.values()):
            storage = torch.UntypedStorage._new_with_weak_ptr(held.cdata)
            if storage is not None and storage.nbytes():
                begin = storage.data_ptr()
                if begin < address + nbytes and address < begin + storage.nbytes():
                    return True
        return False


def number_of(tensor: Tensor) -> int | None:
    """Of its storage; None where it has none."""
    try:
        with torch._C.DisableTorchFunctionSubclass():  # parameters that are sharded do not show it
            return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):
        return None


class Sides:
    """The sides of one pretended device, and what was seen of it.

    Attributes:
        faults: what a real device would not have done, each with the line that asked for it, once.
        waits: of the host for the device, by what made it wait.
        device: storages of the device.
        pinned: storages of the host from and to which a device copies by itself.
    """

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.waits: Counter[str] = Counter()
        self.device, self.pinned = Storages(), Storages()
        self.over = False
        self._thread = threading.local()

    def tell(self, fault: str, line: str | None = None) -> None:
        """Note a fault, of here or of another line."""
        told = f"{fault}, at {line or line_now()}"
        if told not in self.faults:
            self.faults.append(told)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the calling thread inside."""
        self._thread.is_watched = True
        with Operations(self):
            yield
        self.over = True  # for threads that go on

    def watch_thread(self) -> None:
        """Watch the calling thread until it ends, or all is over. See [Note: Threads]."""
        if not getattr(self._thread, "is_watched", False):
            self._thread.is_watched = True
            _push_mode(Operations(self))  # entered, a mode would have to be left again

    def put(self, tensor: Tensor, *, on_device: bool) -> None:
        """The tensor is there from now on, with all that shares its storage."""
        (self.device.put if on_device else self.device.take)(tensor)

    def moved(self, made: Tensor, source: Tensor, *, on_device: bool) -> Tensor:
        """What was made of ``source``, there; it has memory of its own where ``source`` is elsewhere."""
        if on_device != (source in self.device) and number_of(made) == number_of(source):
            made = made.clone()
        self.put(made, on_device=on_device)
        return made

    def note_copy(self, *, to_device: bool) -> None:
        """From side to side, not by a lane, so the host waits."""
        self.waits["copy to the device" if to_device else "copy to the host"] += 1


class Operations(TorchDispatchMode):
    """Looks at every operation of a thread."""

    def __init__(self, sides: Sides) -> None:
        super().__init__()
        self._sides = sides

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # it would be loaded, in seconds, to be told that it has nothing to do

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:  # Any: as torch calls it
        """Look at what ``func`` is given, run it, and see whose its results are."""
        kwargs = kwargs or {}
        device = self._sides.device
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if self._sides.over or not any(tensor in device for tensor in given):
            return func(*args, **kwargs)
        # Arguments at their defaults are left out.
        names = (argument.name for argument in func._schema.arguments)
        self._look(func, {**dict(zip(names, args, strict=False)), **kwargs})
        found = func(*args, **kwargs)
        before = set(map(number_of, given))
        for made in tree_leaves(found):
            if isinstance(made, Tensor) and number_of(made) not in before:
                device.put(made)
        return found

    def _look(self, func: Any, given: Mapping[str, Any]) -> None:
        sides, name = self._sides, func.overloadpacket.__name__
        if name in COPIES:
            into, source = (
                tree_leaves(value)[0] in sides.device for value in [*given.values()][:2]
            )
            if into != source:
                sides.note_copy(to_device=into)
            return
        masks = given["indices"] if name in INDEXED else ()
        if name in ANSWERS or any(m is not None and m.dtype is torch.bool for m in masks):
            sides.waits[name] += 1
        if given.get("generator") is not None:
            sides.tell(f"{func} is given a generator of the host")
        strangers = [tuple(each.shape) for each in out_of_place(func, given, sides.device)]
        if strangers:
            sides.tell(f"{func} is given tensors of the device, and of the host {strangers}")


def out_of_place(func: Any, given: Mapping[str, Any], device: Storages) -> Iterator[Tensor]:
    """Tensors of the host that ``func`` may not have beside those of the device.

    Numbers, tensors without a dimension, may be the host's where they are read only and ``func`` works element by
    element: they go to a kernel as numbers of Python do.
    """
    name = func.overloadpacket.__name__
    elementwise = torch.Tag.pointwise in func.tags or name.startswith("_foreach_")
    written = {each.name for each in func._schema.arguments if each.is_write}
    for argument, value in given.items():
        if name in INDEXED and argument == "indices":
            continue
        puts = name in PUTTING and argument in ("value", "values")
        takes_number = (
            isinstance(value, Tensor) and argument not in written and (elementwise or puts)
        )
        for tensor in tree_leaves(value):
            strange = isinstance(tensor, Tensor) and tensor not in device and not tensor.is_meta
            if strange and not (takes_number and tensor.dim() == 0):
                yield tensor


def line_now() -> str:
    """The innermost line of the package that runs now; of whoever called torch, where there is none."""
    frame: FrameType | None = sys._getframe(1)
    found = ""
    while frame is not None:
        path, line = frame.f_code.co_filename, frame.f_lineno
        of_package = PACKAGE in Path(path).parents
        if of_package or not (found or path in HERE or "/torch/" in path):
            found = f"{path}:{line}: {linecache.getline(path, line).strip()}"
        if of_package:
            break
        frame = frame.f_back
    return found


# --- what is replaced in torch meanwhile


def is_the_device(device: Any) -> bool:
    """Whether a device, or the name of one, is the pretended one."""
    return torch.device(device).type == DEVICE.type


def replaced_methods(sides: Sides) -> dict[str, Any]:
    """Of tensors: what says where one is, takes it elsewhere, or shows it to others."""
    device = sides.device
    own = {
        name: getattr(Tensor, name) for name in ("device", "to", "numpy", "__dlpack__", "tolist")
    }

    def where(tensor: Tensor) -> torch.device:
        with torch._C.DisableTorchFunctionSubclass():
            real: torch.device = own["device"].__get__(tensor)
        return DEVICE if real == HOST and tensor in device else real

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Of ``to(dtype)``, ``to(device)`` and ``to(other)``, with what else they take."""
        asked = [kwargs.get("device"), *(a for a in args if isinstance(a, str | torch.device))]
        asked += [
            other.device for other in (*args, kwargs.get("other")) if isinstance(other, Tensor)
        ]
        target = next((torch.device(each) for each in asked if each is not None), where(tensor))
        on_device = is_the_device(target)

        def for_torch(value: Any) -> Any:
            return HOST if isinstance(value, str | torch.device) and on_device else value

        made: Tensor = own["to"](
            tensor, *map(for_torch, args), **{k: for_torch(value) for k, value in kwargs.items()}
        )
        if made.is_meta or tensor.is_meta:
            return made
        if on_device != (tensor in device):
            sides.note_copy(to_device=on_device)
        return sides.moved(made, tensor, on_device=on_device)

    def shown(name: str, fault: str) -> Any:
        def show(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if tensor in device:
                sides.tell(fault)
            return own[name](tensor, *args, **kwargs)

        return show

    def tolist(tensor: Tensor) -> Any:  # no operation of torch's
        if tensor in device:
            sides.waits["tolist"] += 1
        return own["tolist"](tensor)

    return {
        "device": property(where),
        "is_cpu": property(lambda tensor: where(tensor) == HOST),
        "to": to,
        "cpu": lambda tensor, **kwargs: to(tensor, HOST, **kwargs),
        "numpy": shown("numpy", "NumPy is shown memory of the device"),
        "__dlpack__": shown("__dlpack__", "somebody is shown memory of the device"),
        "tolist": tolist,
        **{name: replaced_factory(sides, getattr(Tensor, name)) for name in METHODS},
    }


def replaced_functions(sides: Sides) -> dict[str, Any]:
    """Of torch: what makes tensors on a device that is named."""

    def of_numbers(make: Any) -> Any:
        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Tensor:
            if kwargs.get("device") is None or not is_the_device(kwargs["device"]):
                return make(*args, **kwargs)
            return make(*args, **{**kwargs, "device": HOST}).to(DEVICE)

        return made

    found = {name: replaced_factory(sides, getattr(torch, name)) for name in FACTORIES}
    return found | {name: of_numbers(getattr(torch, name)) for name in ("tensor", "as_tensor")}


def replaced_factory(sides: Sides, make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``make``, which may be asked for a tensor of the device."""

    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("device") is None:
            return make(*args, **kwargs)
        on_device = is_the_device(kwargs["device"])
        if on_device and kwargs.get("generator") is not None:
            sides.tell(f"{make.__name__} is given a generator of the host")
        found = make(*args, **{**kwargs, "device": HOST if on_device else kwargs["device"]})
        sides.put(found, on_device=on_device)
        return found

    return made
