"""ShardLayout: which element of a unit lives on which rank; integers only.

Unit views, checkpoints, memory prediction and resharding all ask here.

    parameters, end to end      [ wte ......... | wpe .. | ln | padding ]      numel, then padded_numel
    shards, equal               [ s = 0 | s = 1 | s = 2 | s = 3         ]      shard_numel each
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import TYPE_CHECKING

from hpczero.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from torch import nn


# Shards start on cache-line and NIC-friendly boundaries: 64 elements are 256 bytes in fp32, 128 in bf16.
DEFAULT_ALIGN = 64


@dataclass(frozen=True)
class Slot:
    """Place of one parameter in the flat buffer; ``offset`` and ``numel`` count elements."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int

    @property
    def stop(self) -> int:
        """First element after the parameter."""
        return self.offset + self.numel


@dataclass(frozen=True)
class ShardLayout:
    """Where each parameter lies in a unit's flat buffer and which shard owns which range.

    ``rank`` counts shards in buffer order everywhere in this class. The topology decides which process holds which
    shard (rail-major ownership).

    Attributes:
        slots: parameters in buffer order, without gaps.
        num_shards: ranks that share the buffer.
        align: every shard is a multiple of this many elements.
    """

    slots: tuple[Slot, ...]
    num_shards: int
    align: int = DEFAULT_ALIGN
    _by_name: dict[str, Slot] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.num_shards < 1 or self.align < 1:
            raise ValueError(
                f"num_shards and align must be at least 1, got {self.num_shards} and {self.align}"
            )
        by_name = {slot.name: slot for slot in self.slots}
        if len(by_name) != len(self.slots):
            raise ValueError("parameter names of one layout must be distinct")
        object.__setattr__(self, "_by_name", by_name)

    @classmethod
    def pack(
        cls,
        shapes: Sequence[tuple[str, tuple[int, ...]]],
        num_shards: int,
        *,
        align: int = DEFAULT_ALIGN,
    ) -> ShardLayout:
        """Lay parameters end to end in the given order.

        Args:
            shapes: (name, shape) of each parameter; empty and zero-size parameters are fine.
            num_shards: ranks that share the buffer.
            align: elements every shard is rounded up to.

        Raises:
            ValueError: a name comes twice, or a count is below 1.
        """
        slots = []
        offset = 0
        for name, shape in shapes:
            slots.append(Slot(name, tuple(shape), offset, prod(shape)))
            offset += slots[-1].numel
        return cls(tuple(slots), num_shards, align)

    @cached_property  # a search over layouts asks millions of times
    def numel(self) -> int:
        """Elements of all parameters, padding excluded."""
        return self.slots[-1].stop if self.slots else 0

    @cached_property
    def shard_numel(self) -> int:
        """Elements of each shard, padding included; equal on every rank."""
        per_shard = -(-self.numel // self.num_shards)
        return -(-per_shard // self.align) * self.align

    @cached_property
    def padded_numel(self) -> int:
        """Elements of the flat buffer, padding included."""
        return self.shard_numel * self.num_shards

    def shard_range(self, rank: int) -> range:
        """Elements that ``rank`` stores, padding excluded; may be empty on the last ranks."""
        start = min(rank * self.shard_numel, self.numel)
        return range(start, min(start + self.shard_numel, self.numel))

    def slot(self, name: str) -> Slot:
        """The slot of parameter ``name``.

        Raises:
            KeyError: the parameter is not in this layout.
        """
        return self._by_name[name]

    def overlap(self, rank: int, name: str) -> range:
        """Elements of parameter ``name``, counted inside that parameter, that ``rank`` stores."""
        slot = self._by_name[name]
        mine = self.shard_range(rank)
        start = max(mine.start - slot.offset, 0)
        return range(start, max(min(mine.stop - slot.offset, slot.numel), start))


# Codec: in which form frozen matrices rest and travel, and gradients travel between nodes; and how many bytes it takes.
#
#     a shard of n elements, n a multiple of 64:   [ codes, n * bits / 8 bytes | scales, n / 64 of fp32 or bf16 ]
#
# Shards begin at multiples of 64 elements of their unit, so a block is the same for every number of ranks.
#
# Source: Dettmers et al., QLoRA, NeurIPS 2023, sec. 3; 8-bit Optimizers via Block-wise Quantization, ICLR 2022, sec.
# 2.1; Wang et al., ZeRO++, arXiv 2306.10209, sec. 3.1 and 3.3.

BITS = {"int8": 8, "nf4": 4, "sent8": 8, "sent4": 4}
SCALE_BYTES = {"int8": 4, "nf4": 4, "sent8": 2, "sent4": 2}
AT_REST = ("int8", "nf4")
SENT = {"int8": "sent8", "int4": "sent4"}  # by the names of options
FP32_BYTES = 4


@dataclass(frozen=True)
class Codec:
    """One form.

    Attributes:
        name: at rest ``int8``: 255 even levels, ``nf4``: the 16 levels of QLoRA's NormalFloat; of what is sent
            ``sent8`` and ``sent4``: 255 and 15 even levels, with short scales.
        block: elements that share a scale.
    """

    name: str
    block: int = DEFAULT_ALIGN

    @classmethod
    def of(cls, name: str | Codec | None) -> Codec | None:
        """The form ``name`` of frozen matrices; None stays None.

        Raises:
            ConfigError: there is no such form.
        """
        if name is None or isinstance(name, Codec):
            return name
        if name not in AT_REST:
            raise ConfigError(f"quantize: got {name!r}, expected {', '.join(AT_REST)} or None")
        return cls(name)

    @property
    def bits(self) -> int:
        """Of one code."""
        return BITS[self.name]

    def nbytes(self, numel: int) -> int:
        """Bytes of ``numel`` elements, a multiple of the block, in whole words.

        1.0625 each in int8, 0.5625 in nf4, 1.03125 in sent8, 0.53125 in sent4.
        """
        scales = numel // self.block * SCALE_BYTES[self.name]
        return numel * self.bits // 8 + -(-scales // FP32_BYTES) * FP32_BYTES

    def words(self, numel: int) -> int:
        """The same in words of 4 bytes."""
        return self.nbytes(numel) // FP32_BYTES


@dataclass(frozen=True)
class Coding:
    """How the gradient or the parameters of one unit travel between nodes: matrices as codes, vectors as they are.

        row of `count` elements of a shard     [ codes | scales | exact blocks, fp32 | nothing ]

    A block that has an element of a vector or a number is exact. Rows of all shards have one length, that of the shard
    with most exact blocks. ``start`` and ``count`` are elements of a shard, multiples of the block.
    """

    layout: ShardLayout
    codec: Codec

    @classmethod
    @lru_cache(maxsize=4096)  # a plan asks again for every prediction
    def of(cls, layout: ShardLayout, name: str) -> Coding | None:
        """The coding ``int8`` or ``int4`` of a unit; None for another name, or where codes save nothing."""
        if name not in SENT or not layout.shard_numel:
            return None
        coding = cls(layout, Codec(SENT[name]))
        return coding if coding.words(0, layout.shard_numel) < layout.shard_numel else None

    @cached_property
    def _words(self) -> dict[tuple[int, int], int]:
        """Known ``words``: every round of a reduction asks, and the answer costs a look at each shard."""
        return {}

    @cached_property
    def _exact(self) -> tuple[list[int], ...]:
        """Exact blocks of each shard, counted from the shard's start, ascending."""
        block = self.codec.block
        small = [slot for slot in self.layout.slots if len(slot.shape) < 2 and slot.numel]
        found = sorted(
            {b for s in small for b in range(s.offset // block, (s.stop - 1) // block + 1)}
        )
        of_shard: tuple[list[int], ...] = tuple([] for _ in range(self.layout.num_shards))
        for number in found:
            shard, place = divmod(number, self.layout.shard_numel // block)
            of_shard[shard].append(place)
        return of_shard

    def exact(self, shard: int, start: int, count: int) -> list[int]:
        """Exact blocks of a row, counted from its start."""
        first, last = start // self.codec.block, (start + count) // self.codec.block
        blocks = self._exact[shard]
        return [b - first for b in blocks[bisect_left(blocks, first) : bisect_left(blocks, last)]]

    def words(self, start: int, count: int) -> int:
        """Words of 4 bytes of a row; the same for every shard."""
        if (start, count) not in self._words:
            shards = range(self.layout.num_shards)
            most = max(len(self.exact(shard, start, count)) for shard in shards)
            self._words[start, count] = self.codec.words(count) + most * self.codec.block
        return self._words[start, count]

    def nbytes(self, chunk: int) -> int:
        """Bytes of a whole shard that travels in rows of ``chunk`` elements."""
        total = self.layout.shard_numel
        rows = range(0, total, chunk)
        return FP32_BYTES * sum(self.words(start, min(chunk, total - start)) for start in rows)


@dataclass(frozen=True)
class UnitSpec:
    """One communicated group of parameters.

    Attributes:
        name: the first module's name, or ``root`` for what belongs to no other unit. `` (frozen)`` marks a frozen part.
        modules: names of the modules whose calls need the parameters; ``""`` is the model itself.
        layout: parameters (qualified names) in registration order, divided over the shard group.
        groups: optimizer group of each slot; -1 for frozen parameters.
        trainable: whether gradients, masters and optimizer state exist.
        uncounted: slots that another rank counts in norms, because it holds the same (``Placement.counted``).
        partial: slots of whose gradients every tensor rank has a part of the sum (``Placement.partial``).
        kept: slots that every tensor rank holds whole, where the model is a part of one.
        codec: form in which the values rest and travel, if that is not their own.
        row: of a table of which only rows that a batch touches travel: elements of a row; else 0. Shards are whole
            rows.
    """

    name: str
    modules: tuple[str, ...]
    layout: ShardLayout
    groups: tuple[int, ...]
    trainable: bool
    uncounted: tuple[int, ...] = ()
    partial: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    codec: Codec | None = None
    row: int = 0

    @property
    def rest_nbytes(self) -> int | None:
        """Bytes of a shard in the form of ``codec``; None without one."""
        return None if self.codec is None else self.codec.nbytes(self.layout.shard_numel)

    @property
    def is_root(self) -> bool:
        """Whether the unit lives from the start of the model's forward to its end."""
        return self.modules == ("",)


def owners(model: nn.Module, rule: Iterable[tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Unit of each parameter, by the parameter's first qualified name. A unit is given by its modules' names."""
    unit_of_module: dict[str, tuple[str, ...]] = {}
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    for modules in rule:
        for module in modules:
            if module not in known or module == "":
                raise PlanError(
                    f"unit rule names module {module!r}, which is not a submodule of the model; "
                    "use names as listed by model.named_modules()"
                )
            if module in unit_of_module:
                raise PlanError(
                    f"unit rule lists module {module!r} twice; each module is in one unit"
                )
            unit_of_module[module] = modules

    def unit_of(parameter_name: str) -> tuple[str, ...]:
        path = parameter_name.split(".")[:-1]
        found = [
            unit_of_module[".".join(path[:depth])]
            for depth in range(1, len(path) + 1)
            if ".".join(path[:depth]) in unit_of_module
        ]
        if len(found) > 1:
            raise PlanError(
                f"unit rule nests units: {parameter_name!r} lies in {found[0][0]!r} and "
                f"{found[1][0]!r}; list the inner or the outer module, not both"
            )
        return found[0] if found else ("",)

    users: dict[int, set[tuple[str, ...]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), set()).add(unit_of(name))
    owner = {}
    for name, parameter in model.named_parameters():
        units = users[id(parameter)]
        owner[name] = next(iter(units)) if len(units) == 1 else ("",)
    return owner
