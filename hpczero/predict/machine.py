"""Machines: what their data sheets say, from TOML, every number with its source; and how fast work runs on them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from hpczero.errors import ConfigError
from hpczero.files.regular import parse_toml, read_text, reason, shown

FOLDER = Path(__file__).parent / "machines"
DEVICES = FOLDER.with_name("devices.toml")
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
TIMES = ("latency", "host", "dispatch")  # how numbers end that are seconds
TIER_RATES = ("disk_read", "disk_write", "host_read", "host_write")


@dataclass(frozen=True)
class Machine:
    """A machine by its data sheet. Rates are per second and one way, in bytes or FLOPs; times are in seconds.

    Ranks of a node use its NICs evenly. Where ``nics_of_rank`` is given, a rank uses so many, those next to it, and the
    NIC with most ranks binds. Switches are a tree: of nodes that one leaf connects, then of as many leaves, and so on.

    Attributes:
        name, title: name of the file; name in tables.
        ranks_per_node: GPUs, one rank each.
        memory: bytes of memory of one rank.
        reserved: bytes of it that are not for the model.
        peak: FLOP/s by precision.
        matmul_efficiency: share of the peak that large products reach.
        memory_rate: rate of one rank's memory.
        dispatch: seconds that it takes to start one operation.
        node_rate, node_latency: between ranks of a node, for one rank.
        nics, nic_rate, nic_latency: between nodes; all ranks of a node share its ``nics``. The latency is through one
            switch.
        nics_of_rank: NICs that one rank uses; 0: all of its node's.
        hop_latency, leaf_nodes: of each switch beyond the first; nodes that share a leaf. 0: all is within one latency.
        overlap: share of what could hide behind computing that does.
        round_host, message_host: seconds of the host for one round of messages between nodes, and for each message sent
            and received in it; 0: not charged, as where a measured rate between nodes holds them already.
        sum_host: seconds of the host for one launch of a device's kernel for sums; 0: not charged.
        disk_read, disk_write: rates of one rank's disk tier, while all ranks of its node use theirs; 0: no disk known.
        host_read, host_write: the same of a tier in memory of the host; 0: not known.
        host_update: elements per second that the host updates for one rank, while a device computes; 0: not known.
        host_memory: bytes of memory of the host for one rank's tier; 0: not known.
        fresh_rate: bytes per second of memory that the kernel hands out anew; 0: no time is counted for that.
        imbalance: share of forward and backward that ranks wait for each other beside what links take; 0: not charged.
        update_rate: rate of memory in an update; 0: as in everything else.
        step_host: seconds of the host for a step beside its parts, such as reading a batch; 0: not charged.
        shares_memory: whether ranks of a node read each other's memory: transport ``window``.
        bounds: of numbers that sources disagree about: the lowest and the highest of them.
        sources: source of every number, by its name.
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
    round_host: float = 0.0
    message_host: float = 0.0
    sum_host: float = 0.0
    disk_read: float = 0.0
    disk_write: float = 0.0
    host_read: float = 0.0
    host_write: float = 0.0
    host_update: float = 0.0
    host_memory: float = 0.0
    fresh_rate: float = 0.0
    nics_of_rank: int = 0
    hop_latency: float = 0.0
    leaf_nodes: int = 0
    overlap: float = 1.0
    imbalance: float = 0.0
    update_rate: float = 0.0
    step_host: float = 0.0
    shares_memory: bool = False
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def usable(self) -> int:
        """Bytes that one rank may fill."""
        return int(self.memory - self.reserved)

    @property
    def rail_rate(self) -> float:
        """Bytes per second of one rank between nodes, when all ranks of its node send."""
        if self.nics_of_rank:
            ranks_of_nic = -(-self.ranks_per_node * self.nics_of_rank // self.nics)
            return self.nics_of_rank * self.nic_rate / ranks_of_nic
        return self.nics * self.nic_rate / self.ranks_per_node

    def reaching(self, nodes: int) -> Machine:
        """The machine whose latency between nodes is that between the farthest two of so many."""
        if not self.hop_latency or nodes <= self.leaf_nodes:
            return self
        levels = math.ceil(math.log(nodes, max(self.leaf_nodes, 2)) - 1e-9)
        more = 2 * (levels - 1) * self.hop_latency
        bounds = {name: (low, high) for name, (low, high) in self.bounds.items()}
        if (near := bounds.get("nic_latency")) is not None:
            bounds["nic_latency"] = near[0] + more, near[1] + more
        longer = self.nic_latency + more
        return dataclasses.replace(self, nic_latency=longer, hop_latency=0.0, bounds=bounds)

    def at_end(self, *, slow: bool) -> Machine:
        """The machine at the slow or the fast end of all its bounds; times are slow where they are high."""
        ends = {
            name: high if slow == name.endswith(TIMES) else low
            for name, (low, high) in self.bounds.items()
        }
        return dataclasses.replace(self, **ends)  # type: ignore[arg-type]  # numbers all

    def tier_rates(self, medium: str) -> tuple[float, float]:
        """Bytes per second that one rank reads from a tier on ``medium`` and writes to it; 0 where not known."""
        known = {
            "disk": (self.disk_read, self.disk_write),
            "host": (self.host_read, self.host_write),
        }
        return known.get(medium, (0.0, 0.0))

    def peak_of(self, precision: str) -> float:
        """Peak in FLOP/s of a precision.

        Raises:
            ConfigError: the machine does not have this precision.
        """
        if precision not in self.peak:
            raise ConfigError(
                f"{self.name}: has no peak for {precision}, expected one of {', '.join(self.peak)}"
            )
        return self.peak[precision]


class Kernels(Protocol):
    """How long one rank needs for a piece of work, in seconds."""

    def matmul_s(self, m: int, k: int, n: int) -> float:
        """Seconds of the product of (m, k) and (k, n)."""

    def attention_s(self, tokens: int, sequence: int, width: int, *, backward: bool) -> float:
        """Seconds of both attention products over the whole sequence, for all heads, ``width`` together."""

    def element_s(self, kind: str, *, backward: bool) -> float:
        """Seconds of one element of memory-bound work; ``kind`` is one of PASSES."""

    def update_s(self, numel: int) -> float:
        """Seconds of the gradient's norm and of Adam."""

    def sum_s(self, blocks: int, numel: int) -> float:
        """Seconds of the fp32 sum of so many blocks of ``numel`` gradients."""

    @property
    def dispatch_s(self) -> float:
        """Seconds to start one operation."""


@dataclass(frozen=True)
class Roofline:
    """Kernels by data sheet.

    Products run at a share of the peak or at the memory's rate, the rest at the memory's rate.

    Attributes:
        machine: the machine of the sheet.
        precision: precision of parameters and activations.
        itemsize: bytes of one of them.
    """

    machine: Machine
    precision: str
    itemsize: int

    def matmul_s(self, m: int, k: int, n: int) -> float:
        """Seconds at a share of the peak, or at the memory's rate if that takes longer."""
        flops = self.machine.peak_of(self.precision) * self.machine.matmul_efficiency
        moved = (m * k + k * n + m * n) * self.itemsize
        return max(2 * m * k * n / flops, moved / self.machine.memory_rate)

    def attention_s(self, tokens: int, sequence: int, width: int, *, backward: bool) -> float:
        """Seconds at the same share of the peak."""
        flops = self.machine.peak_of(self.precision) * self.machine.matmul_efficiency
        return (2 if backward else 1) * 4 * tokens * sequence * width / flops

    def element_s(self, kind: str, *, backward: bool) -> float:
        """Seconds at the memory's rate."""
        size = 4 if kind == "loss" else self.itemsize
        return PASSES[kind][backward] * size / self.machine.memory_rate

    def update_s(self, numel: int) -> float:
        """Seconds at the memory's rate."""
        return numel * UPDATE_BYTES / (self.machine.update_rate or self.machine.memory_rate)

    def sum_s(self, blocks: int, numel: int) -> float:
        """Seconds at the memory's rate."""
        return numel * (blocks * self.itemsize + 4) / self.machine.memory_rate

    @property
    def dispatch_s(self) -> float:
        """Seconds by the sheet."""
        return self.machine.dispatch


def load_machine(name: str, *, others: Sequence[str] = ()) -> Machine:
    """A machine by the name of a file in hpczero/predict/machines, or by a path to one like them.

    Args:
        name: name or path.
        others: other values that the caller takes, for the message.

    Raises:
        ConfigError: there is no such machine, a number has no source, or a name is missing or unknown.
    """
    named = "/" not in name and "." not in name
    path = FOLDER / f"{name}.toml" if named else Path(name)
    try:
        table = parse_toml(read_text(path, MOST_NBYTES))
    except OSError as error:
        known = ", ".join([*others, *machine_names()])
        why = "" if named else f": {reason(error)}"
        raise ConfigError(
            f"--machine: got {name!r}, expected one of {known}, or the path of a .toml file{why}"
        ) from error
    except ValueError as error:  # not UTF-8, or no TOML
        raise ConfigError(f"{path}: is not TOML: {error}") from error
    sources: dict[str, str] = {}
    bounds: dict[str, tuple[float, float]] = {}

    def number(where: str, entry: Any) -> Any:  # Any: what TOML holds
        known = ({"value", "source"}, {"low", "value", "high", "source"})
        if not isinstance(entry, dict) or entry.keys() not in known:
            raise ConfigError(
                f"{path}: {where}: got {entry!r}, expected a value and its source, as in "
                '{ value = 1e9, source = "data sheet" }, perhaps with low and high'
            )
        numbers = [entry[name] for name in ("low", "value", "high") if name in entry]
        for each in numbers:
            if not isinstance(each, (int, float)) or not each > 0:
                raise ConfigError(f"{path}: {where}: got {each!r}, expected a number above 0")
        if numbers != sorted(numbers):
            raise ConfigError(f"{path}: {where}: got {numbers}, expected low <= value <= high")
        sources[where] = str(entry["source"])
        if len(numbers) > 1:
            bounds[where] = float(entry["low"]), float(entry["high"])
        return entry["value"]

    title, given = str(table.pop("title", path.stem)), table.pop("peak", {})
    peak = _devices().get(given) if isinstance(given, str) else given
    if not isinstance(peak, dict):
        raise ConfigError(
            f"{path}: peak: got {shown(given)}, expected a table of FLOP/s by precision, or one of "
            f"{', '.join(_devices())}"
        )
    peak = {key: entry for key, entry in peak.items() if key not in ("names", "tf32")}
    values = {key: number(key, entry) for key, entry in table.items()}
    fields = dataclasses.fields(Machine)
    needed = {f.name for f in fields if f.default is f.default_factory is dataclasses.MISSING}
    missing = needed - values.keys() - {"name", "title", "peak"}
    beside = {"name", "title", "peak", "bounds", "sources"}
    unknown = values.keys() - ({f.name for f in fields} - beside)
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
        bounds=bounds,
        sources=sources,
        **values,
    )


def _devices() -> dict[str, Any]:
    return dict(parse_toml(read_text(DEVICES, MOST_NBYTES)))


def device_peak(name: str, precision: str) -> tuple[float, str] | None:
    """Dense peak of a device in FLOP/s, and its source; None if it is not known, and then it is not guessed.

    Args:
        name: as ``torch.cuda.get_device_name`` gives it.
        precision: fp32, tf32, fp16 or bf16.
    """
    for device in _devices().values():
        if name in device["names"] and precision in device:
            return device[precision]["value"], device[precision]["source"]
    return None


def machine_names() -> list[str]:
    """Names of the files that come with hpczero."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


@dataclass(frozen=True)
class MeasuredKernels:
    """Seconds; ``Kernels`` of one rank.

    Attributes:
        products: FLOP/s of square products, by side.
        fresh: bytes per second of host memory that the kernel hands out anew; None: not measured.
        few: FLOP/s of products of so many tokens with square weights; empty where it was not measured.
        inner: FLOP/s of gradients of such weights, whose inner side is the tokens.
        elements: of one element, by kind and pass, as in ``norm/forward``.
        attention: FLOP/s of both products, whole square counted: forward, backward.
        update: of one element.
        sums: of one element of the sum of one block, and of each further block.
        memory_rate: bytes per second of a copy.
        dispatch: of one small operation.
        exchange: bytes per second from rank to rank, by messages; None for one rank.
        wait: of a barrier of the ranks of a node, after equal work of all; None for one rank.
        wait_between: the same of ranks on different nodes; None for one node.
        between: bytes per second from a rank to one on another node, while all ranks send; None for one node.
        disk_read, disk_write: bytes per second of one rank's disk tier, while all ranks do the same; None: no folder.
        host_read, host_write: the same of a tier in memory of the host; None where that is the device.
        host_update: of one element on the host beside a device; None where that is the device.
    """

    products: Mapping[str, float]
    elements: Mapping[str, float]
    attention: Sequence[float]
    update: float
    sums: Sequence[float]
    memory_rate: float
    dispatch: float
    exchange: float | None = None
    wait: float | None = None
    between: float | None = None
    wait_between: float | None = None
    disk_read: float | None = None
    disk_write: float | None = None
    host_read: float | None = None
    host_write: float | None = None
    host_update: float | None = None
    fresh: float | None = None
    few: Mapping[str, float] = field(default_factory=dict)
    inner: Mapping[str, float] = field(default_factory=dict)

    def matmul_s(self, m: int, k: int, n: int) -> float:
        """By the rate of a square product of the same FLOPs, or of one as thin where that is slower."""
        flops, least = 2 * m * k * n, min(m, k, n)
        rates = [_at(self.products, (m * k * n) ** (1 / 3))]
        thin = self.inner if least == k else self.few
        if thin and least <= max(map(int, thin)):
            rates.append(_at(thin, least))
        return flops / min(rates)

    def attention_s(self, tokens: int, sequence: int, width: int, *, backward: bool) -> float:
        """By the rate of both products."""
        return (2 if backward else 1) * 4 * tokens * sequence * width / self.attention[backward]

    def element_s(self, kind: str, *, backward: bool) -> float:
        """As measured."""
        return self.elements[f"{kind}/{'backward' if backward else 'forward'}"]

    def update_s(self, numel: int) -> float:
        """As measured, for each element."""
        return numel * self.update

    def sum_s(self, blocks: int, numel: int) -> float:
        """One block, and each further one."""
        return numel * (self.sums[0] + (blocks - 1) * self.sums[1])

    @property
    def dispatch_s(self) -> float:
        """As measured."""
        return self.dispatch

    @classmethod
    def of_ranks(cls, found: Sequence[Mapping[str, Any]]) -> MeasuredKernels:
        """What the ranks of one job say together: the mean of their times."""

        def seconds(values: Sequence[float]) -> float:
            return math.fsum(values) / len(values)

        def rate(values: Sequence[float]) -> float:
            return 1 / seconds([1 / value for value in values])

        def each(name: str, key: Any) -> list[float]:
            return [rank[name][key] for rank in found]

        def all_of(name: str) -> list[float]:
            return [rank[name] for rank in found]

        def if_any(name: str, mean: Callable[[Sequence[float]], float]) -> float | None:
            values = [rank[name] for rank in found if rank.get(name)]
            return mean(values) if values else None

        def table(name: str) -> dict[str, float]:
            return {key: rate(each(name, key)) for key in found[0].get(name, {})}

        first = found[0]
        return cls(
            products=table("products"),
            fresh=if_any("fresh", rate),
            few=table("few"),
            inner=table("inner"),
            elements={kind: seconds(each("elements", kind)) for kind in first["elements"]},
            attention=[rate(each("attention", way)) for way in (0, 1)],
            update=seconds(all_of("update")),
            sums=[seconds(each("sums", term)) for term in (0, 1)],
            memory_rate=rate(all_of("memory_rate")),
            dispatch=seconds(all_of("dispatch")),
            exchange=if_any("exchange", rate),
            wait=if_any("wait", seconds),
            between=if_any("between", rate),
            wait_between=if_any("wait_between", seconds),
            host_update=if_any("host_update", max),  # a step waits for the slowest
            **{name: if_any(name, min) for name in TIER_RATES},
        )


def _at(rates: Mapping[str, float], size: float) -> float:
    """The rate at ``size``, interpolated between those measured."""
    place = math.log(size)
    known = sorted((math.log(int(s)), math.log(rate)) for s, rate in rates.items())
    low, high = known[0], known[-1]
    for left, right in itertools.pairwise(known):
        if left[0] <= place <= right[0]:
            low, high = left, right
    if place <= low[0] or low[0] == high[0]:
        return math.exp(low[1])
    share = min((place - low[0]) / (high[0] - low[0]), 1.0)
    return math.exp(low[1] + share * (high[1] - low[1]))


RESERVED_NBYTES = 0.3e9  # Python, torch and MPI: 265 MiB (docs/performance.md)


def machine_of(
    measured: MeasuredKernels, *, ranks_per_node: int, memory_nbytes: float, title: str
) -> Machine:
    """The measured host as a machine of so many ranks on each node.

    Args:
        measured: by as many ranks at once as will train.
        ranks_per_node: ranks of a node.
        memory_nbytes: bytes of one rank.
        title: for reports.
    """
    between = measured.between or measured.exchange or measured.memory_rate
    tiers: dict[str, Any] = {name: getattr(measured, name) or 0.0 for name in TIER_RATES}
    return Machine(
        name="host",
        title=title,
        ranks_per_node=ranks_per_node,
        memory=memory_nbytes,
        reserved=RESERVED_NBYTES,
        peak=dict.fromkeys(("fp32", "bf16", "fp16"), max(measured.products.values())),
        matmul_efficiency=1.0,
        memory_rate=measured.memory_rate,
        dispatch=measured.dispatch,
        node_rate=measured.exchange or measured.memory_rate,
        node_latency=measured.wait or 0.0,
        nics=ranks_per_node,  # the rate between nodes is that of one rank while all send
        nic_rate=between,
        nic_latency=measured.wait_between or measured.wait or 0.0,
        host_update=1 / measured.host_update if measured.host_update else 0.0,
        fresh_rate=measured.fresh or 0.0,
        shares_memory=True,
        sources={"all": "measured by hpczero.probe"},
        **tiers,
    )
