"""The contenders: ways to train the same model on several ranks, one file each.

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
        module: in this package; it has a class ``Contender``.
        start: "mpi" by install/launch.sh; "gloo" as plain processes that meet through a file.
        python: "main" runs in our own environment, "peers" in the one of install/peers.sh.
        arguments: of the class.
        tree: folder of the checkout whose code runs; None: this one.
        named: runs only where it is named: what it does is not what the others do.
    """

    name: str
    title: str
    module: str
    start: Literal["mpi", "gloo"]
    python: Literal["main", "peers"] = "main"
    arguments: Mapping[str, int | str] = field(default_factory=dict)
    tree: Path | None = None
    named: bool = False


def _hpczero(stage: int) -> Entry:
    name = f"hpczero-{stage}"
    return Entry(name, f"hpczero stage {stage}", "hpczero_stage", "mpi", arguments={"stage": stage})


def _compiled(stage: int) -> Entry:
    name, title = f"hpczero-{stage}{COMPILED}", f"hpczero stage {stage}, compiled blocks"
    arguments = {"stage": stage, "compiled": True}
    return Entry(name, title, "hpczero_stage", "mpi", arguments=arguments, named=True)


def _deepspeed(stage: int) -> Entry:
    name, title = f"deepspeed-{stage}", f"DeepSpeed stage {stage}"
    return Entry(name, title, "deepspeed_stage", "gloo", "peers", arguments={"stage": stage})


RANK_PROGRAM = "scaling.contenders.rank"
FLOOR = "independent"
COMPILED = "-compiled"  # ends the name of a contender whose blocks torch.compile compiles
BEFORE = "before:"  # begins the name of a contender that runs another checkout's code
ENTRIES = {
    entry.name: entry
    for entry in (
        Entry(FLOOR, "independent processes", "independent", "gloo"),
        *(_hpczero(stage) for stage in range(4)),
        *(_compiled(stage) for stage in (0, 3)),
        Entry("ddp", "torch DDP", "ddp", "gloo"),
        Entry("zero-redundancy", "torch ZeroRedundancyOptimizer", "zero_redundancy", "gloo"),
        Entry("fsdp2", "torch FSDP2", "fsdp2", "gloo"),
        *(_deepspeed(stage) for stage in (1, 2, 3)),
        Entry(
            "hpczero-disk",
            "hpczero stage 3, all on disk",
            "hpczero_offload",
            "mpi",
            arguments={"stage": 3},
            named=True,
        ),
        Entry(
            "deepspeed-disk",
            "DeepSpeed stage 3, all on disk",
            "deepspeed_offload",
            "gloo",
            "peers",
            arguments={"stage": 3},
            named=True,
        ),
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
    return Entry(
        name,
        f"{entry.title} ({chosen})" if chosen else entry.title,
        entry.module,
        entry.start,
        arguments={**entry.arguments, "transport": chosen or transport},
    )


def rank_program(tree: Path) -> str | None:
    """The module that is a rank of a contender in the checkout at ``tree``; None where no checkout is there."""
    names = (RANK_PROGRAM, "scaling.rank")  # newest first
    return next((n for n in names if (tree / f"{n.replace('.', '/')}.py").is_file()), None)


def from_tree(entry: Entry, tree: Path) -> Entry:
    """The same contender with the code of the checkout in ``tree``.

    Raises:
        ConfigError: no checkout is there.
    """
    if rank_program(tree) is None:
        raise ConfigError(
            f"--against: got {tree}, expected the folder of a checkout of hpczero; type: "
            "git worktree add --detach ../before COMMIT"
        )
    return replace(entry, name=f"{BEFORE}{entry.name}", title=f"{entry.title}, before", tree=tree)
