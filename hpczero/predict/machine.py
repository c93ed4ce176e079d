"""Machines: what their data sheets say, from TOML, every number with its source; and how fast work runs on them.

Owns: the file format, and kernels as a roofline. Must not know: models, collectives, where a number is used. A machine
that measures itself has another ``Kernels`` (`Kernels`).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hpczero.errors import ConfigError
from hpczero.files.regular import read_text, reason, shown

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

FOLDER = Path(__file__).parent / "machines"
MOST_NBYTES = 2**20

# Memory-bound work: elements read and written for one element, in forward and in backward.
PASSES = {
    "norm": (2, 3),  # layer norm: x, y; x, dy, dx
    "gelu": (2, 3),
    "add": (3, 0),  # the gradient of a sum is its own
    "fork": (0, 3),  # where two gradients meet
    "bias": (0, 1),  # its gradient reads all of dy
    "copy": (2, 2),
    "loss": (4, 4),  # log-softmax, and that once more in backward (fp32 whatever the precision)
}
# Bytes read and written for one element of Adam: gradient, and parameter, momentum, variance both ways, all fp32; and
# one read of the gradient for its norm.
UPDATE_BYTES = 4 + 3 * 8 + 4


@dataclass(frozen=True)
class Machine:
    """Rates are per second and one way; bytes, FLOPs and seconds.

    Attributes:
        name, title: of the file; for tables.
        ranks_per_node: GPUs, one rank each.
        memory: bytes of one rank.
        reserved: bytes of that which are not for the model.
        peak: FLOP/s by precision.
        matmul_efficiency: share of the peak that large products reach.
        memory_rate: of one rank's memory.
        dispatch: seconds that starting one operation takes.
        node_rate, node_latency: between ranks of a node, for one rank.
        nics, nic_rate, nic_latency: between nodes; all ranks of a node share its ``nics``.
        shares_memory: ranks of a node read each other's memory: transport ``window``.
        sources: of every number, by its name.
    """

    name: str
    title: str
    ranks_per_node: int
    memory: float
    reserved: float
    peak: Mapping[str, float]
    matmul_efficiency: float
    memory_rate: float
    dispatch: float
    node_rate: float
    node_latency: float
    nics: int
    nic_rate: float
    nic_latency: float
    shares_memory: bool = False
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def usable(self) -> int:
        """Bytes that one rank may fill."""
        return int(self.memory - self.reserved)

    @property
    def rail_rate(self) -> float:
        """Bytes per second of one rank between nodes, when all ranks of its node send."""
        return self.nics * self.nic_rate / self.ranks_per_node

    def peak_of(self, precision: str) -> float:
        """FLOP/s.

        Raises:
            ConfigError: not a precision of this machine.
        """
        if precision not in self.peak:
            raise ConfigError(
                f"{self.name}: has no peak for {precision}, expected one of {', '.join(self.peak)}"
            )
        return self.peak[precision]


class Kernels(Protocol):
    """How long one rank needs for a piece of work."""

    def matmul_s(self, m: int, k: int, n: int) -> float:
        """Of (m, k) times (k, n)."""

    def attention_s(self, tokens: int, sequence: int, width: int, *, backward: bool) -> float:
        """Of both attention products over the whole sequence, for all heads, ``width`` together."""

    def element_s(self, kind: str, *, backward: bool) -> float:
        """Of one element of memory-bound work; ``kind`` is of PASSES."""

    def update_s(self, numel: int) -> float:
        """Of the gradient's norm and of Adam."""

    def sum_s(self, blocks: int, numel: int) -> float:
        """Of the sum of so many blocks of ``numel`` gradients, in fp32."""

    @property
    def dispatch_s(self) -> float:
        """Of starting one operation."""


@dataclass(frozen=True)
class Roofline:
    """Kernels by data sheet: products at a share of the peak or by the memory's rate, the rest by the memory's rate.

    Attributes:
        machine: of the sheet.
        precision: of parameters and activations.
        itemsize: bytes of one.
    """

    machine: Machine
    precision: str
    itemsize: int

    def matmul_s(self, m: int, k: int, n: int) -> float:
        """At a share of the peak, or as long as memory takes."""
        flops = self.machine.peak_of(self.precision) * self.machine.matmul_efficiency
        moved = (m * k + k * n + m * n) * self.itemsize
        return max(2 * m * k * n / flops, moved / self.machine.memory_rate)

    def attention_s(self, tokens: int, sequence: int, width: int, *, backward: bool) -> float:
        """At the same share of the peak."""
        flops = self.machine.peak_of(self.precision) * self.machine.matmul_efficiency
        return (2 if backward else 1) * 4 * tokens * sequence * width / flops

    def element_s(self, kind: str, *, backward: bool) -> float:
        """As long as memory takes."""
        size = 4 if kind == "loss" else self.itemsize
        return PASSES[kind][backward] * size / self.machine.memory_rate

    def update_s(self, numel: int) -> float:
        """As long as memory takes."""
        return numel * UPDATE_BYTES / self.machine.memory_rate

    def sum_s(self, blocks: int, numel: int) -> float:
        """As long as memory takes."""
        return numel * (blocks * self.itemsize + 4) / self.machine.memory_rate

    @property
    def dispatch_s(self) -> float:
        """By the sheet."""
        return self.machine.dispatch


def load_machine(name: str, *, others: Sequence[str] = ()) -> Machine:
    """By the name of a file in hpczero/predict/machines, or a path to one like them.

    Args:
        name: or path.
        others: what the caller takes besides; for the message.

    Raises:
        ConfigError: no such machine, a number without source, a name that is missing or unknown.
    """
    named = "/" not in name and "." not in name
    path = FOLDER / f"{name}.toml" if named else Path(name)
    try:
        table = tomllib.loads(read_text(path, MOST_NBYTES))
    except OSError as error:
        known = ", ".join([*others, *machine_names()])
        why = "" if named else f": {reason(error)}"
        raise ConfigError(
            f"--machine: got {name!r}, expected one of {known}, or the path of a .toml file{why}"
        ) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, no TOML, or nested too deeply
        raise ConfigError(f"{path}: is not TOML: {error}") from error
    sources: dict[str, str] = {}

    def number(where: str, entry: Any) -> Any:  # Any: what TOML holds
        if not isinstance(entry, dict) or entry.keys() != {"value", "source"}:
            raise ConfigError(
                f"{path}: {where}: got {entry!r}, expected a value and its source, as in "
                '{ value = 1e9, source = "data sheet" }'
            )
        if not isinstance(entry["value"], (int, float)) or not entry["value"] > 0:
            raise ConfigError(f"{path}: {where}: got {entry['value']!r}, expected a number above 0")
        sources[where] = str(entry["source"])
        return entry["value"]

    title, peak = str(table.pop("title", path.stem)), table.pop("peak", {})
    if not isinstance(peak, dict):
        raise ConfigError(
            f"{path}: peak: got {shown(peak)}, expected a table of FLOP/s by precision"
        )
    values = {key: number(key, entry) for key, entry in table.items()}
    fields = dataclasses.fields(Machine)
    needed = {f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING}
    missing = needed - values.keys() - {"name", "title", "peak"}
    unknown = values.keys() - ({f.name for f in fields} - {"name", "title", "peak", "sources"})
    if missing or unknown or not peak:
        said = [f"missing {', '.join(sorted(missing))}"] if missing else []
        said += [f"unknown {', '.join(sorted(unknown))}"] if unknown else []
        said += [] if peak else ["missing [peak], FLOP/s by precision"]
        raise ConfigError(
            f"{path}: {'; '.join(said)}; expected the names of {FOLDER.name}/{machine_names()[0]}.toml"
        )
    return Machine(
        name=path.stem,
        title=title,
        peak={key: number(f"peak.{key}", entry) for key, entry in peak.items()},
        sources=sources,
        **values,
    )


def machine_names() -> list[str]:
    """Of the files that come with hpczero."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))
