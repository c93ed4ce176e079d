"""The contenders: ways to train the same model on several ranks.

``ENTRIES`` says what they are called and how their ranks are started; it is read by the command, which loads none of
the frameworks. `base` holds the interface.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

from hpczero.errors import ConfigError
from hpczero.options.values import Transport


@dataclass(frozen=True)
class Entry:
    """One contender.

    Attributes:
        name: on the command line and in results.
        title: in tables.
        module: in this package.
        start: "mpi" by install/launch.sh; "gloo" as plain processes that meet through a file.
        python: "main" runs in our own environment, "peers" in the one of install/peers.sh.
        arguments: of the class.
        tree: folder of the checkout whose code runs; None: this one.
        named: runs only where it is named: what it does is not what the others do.
        kind: the class in ``module``.
    """

    name: str
    title: str
    module: str
    start: Literal["mpi", "gloo"]
    python: Literal["main", "peers"] = "main"
    arguments: Mapping[str, int | str] = field(default_factory=dict)
    tree: Path | None = None
    named: bool = False
    kind: str = "Contender"


def _hpczero(name: str, title: str, *, named: bool = False, **arguments: int) -> Entry:
    return Entry(name, title, "hpczero_stage", "mpi", arguments=arguments, named=named)


def _compiled(stage: int) -> Entry:
    name, title = f"hpczero-{stage}{COMPILED}", f"hpczero stage {stage}, compiled blocks"
    return _hpczero(name, title, named=True, stage=stage, compiled=1)


def _torch(name: str, title: str, kind: str) -> Entry:
    return Entry(name, title, "torch_data", "gloo", kind=kind)


def _deepspeed(name: str, title: str, *, named: bool = False, **arguments: int) -> Entry:
    return Entry(name, title, "deepspeed_stage", "gloo", "peers", arguments, named=named)


RANK_PROGRAM = "scaling.contenders.rank"
FLOOR = "independent"
COMPILED = "-compiled"  # ends the name of a contender whose blocks torch.compile compiles
BEFORE = "before:"  # begins the name of a contender that runs another checkout's code
ENTRIES = {
    entry.name: entry
    for entry in (
        _torch(FLOOR, "independent processes", "Independent"),
        *(_hpczero(f"hpczero-{n}", f"hpczero stage {n}", stage=n) for n in range(4)),
        *(_compiled(n) for n in (0, 3)),
        _torch("ddp", "torch DDP", "DDP"),
        _torch("zero-redundancy", "torch ZeroRedundancyOptimizer", "ZeroRedundancy"),
        _torch("fsdp2", "torch FSDP2", "FSDP2"),
        *(_deepspeed(f"deepspeed-{n}", f"DeepSpeed stage {n}", stage=n) for n in (1, 2, 3)),
        _hpczero("hpczero-disk", "hpczero stage 3, all on disk", named=True, stage=3, disk=1),
        _deepspeed("deepspeed-disk", "DeepSpeed stage 3, all on disk", named=True, stage=3, disk=1),
    )
}


def find_entry(name: str, *, transport: str) -> Entry:
    """The contender called ``name``; ``hpczero-3@flat`` is hpczero stage 3 over the transport ``flat``.

    Args:
        name: a key of ENTRIES, for hpczero with or without a transport.
        transport: of hpczero where the name has none.

    Raises:
        ConfigError: no such contender.
    """
    base, _, chosen = name.partition("@")
    entry = ENTRIES.get(base)
    transports = get_args(Transport) if base.startswith("hpczero-") else ()
    if entry is None or (chosen and chosen not in transports):
        raise ConfigError(
            f"contenders: got {name!r}, expected some of {', '.join(ENTRIES)}; hpczero may be followed by one of "
            f"{', '.join(get_args(Transport))}, as in hpczero-3@flat"
        )
    if not entry.module.startswith("hpczero_"):
        return entry
    return replace(
        entry,
        name=name,
        title=f"{entry.title} ({chosen})" if chosen else entry.title,
        arguments={**entry.arguments, "transport": chosen or transport},
    )


def from_tree(entry: Entry, tree: Path) -> Entry:
    """The same contender with the code of the checkout in ``tree``. Raises ConfigError: no checkout is there."""
    if not (tree / f"{RANK_PROGRAM.replace('.', '/')}.py").is_file():
        raise ConfigError(
            f"--against: got {tree}, expected the folder of a checkout of hpczero; type: "
            "git worktree add --detach ../before COMMIT"
        )
    return replace(entry, name=f"{BEFORE}{entry.name}", title=f"{entry.title}, before", tree=tree)
