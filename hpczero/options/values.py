"""What options and environment variables have in common: the values they may take, and how wrong ones are refused.

A program that only calls ``zeroify`` needs this file and never loads the command line's library.
"""

from __future__ import annotations

import re
from typing import Literal

from hpczero.errors import ConfigError
from hpczero.files.regular import shown

Exactness = Literal["require", "prefer", "off"]
Transport = Literal["auto", "flat", "hierarchical", "window", "ipc"]
# Of comm.algorithms, which needs torch; a test holds them against its classes.
ALGORITHMS = {
    "all_gather": ("library", "ring", "doubling", "pairwise"),
    "reduce_scatter": ("library", "pairwise"),
}


def digits(text: str) -> int | None:
    """The number that ``text`` is, if it is at most 18 ASCII digits; else None. ``isdigit`` would accept ²."""
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def require(satisfied: bool, option: str, got: object, expected: str) -> None:
    """Refuse the value of an option unless the condition holds.

    Raises:
        ConfigError: the message names the option, what was got and what is expected.
    """
    if not satisfied:
        raise ConfigError(f"{option}: got {shown(got)}, expected {expected}")


def check_algorithms(text: str) -> None:
    """Refuse a text that does not choose algorithms between nodes.

    Raises:
        ConfigError: the message has what can be chosen.
    """
    if text not in ("auto", "measure", "default"):
        named_algorithms(text)


def named_algorithms(text: str) -> dict[str, str]:
    """Algorithm by operation, from ``all_gather=ring,reduce_scatter=pairwise``; either may be left out.

    Raises:
        ConfigError: an operation or an algorithm does not exist.
    """
    named = {}
    for part in text.replace(",", " ").split():
        operation, _, algorithm = part.partition("=")
        if algorithm not in ALGORITHMS.get(operation, ()):
            known = "; ".join(f"{op}={'|'.join(names)}" for op, names in ALGORITHMS.items())
            raise ConfigError(
                f"algorithms: got {part!r}, expected auto, measure, default, or some of {known}"
            )
        named[operation] = algorithm
    return named


def parse_nodes(text: str, world_size: int) -> list[int]:
    """Node of each rank if ``GxL`` nodes of ranks are filled one after the other: 2x2 gives [0, 0, 1, 1].

    Raises:
        ConfigError: the text does not have this form, or ``world_size`` is another number of ranks.
    """
    num_nodes, local_size = node_shape(text, "nodes")
    if num_nodes * local_size != world_size:
        raise ConfigError(
            f"nodes {text}: {num_nodes} x {local_size} = {num_nodes * local_size} ranks, but the job has {world_size}; "
            "start that many or change parallel.nodes (or HPCZERO_FAKE_NODES)"
        )
    return [rank // local_size for rank in range(world_size)]


def node_shape(text: str, option: str) -> tuple[int, int]:
    """(nodes, ranks per node) from ``GxL``.

    Raises:
        ConfigError: the text has another form; the message names ``option``.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})", text)
    if match is None:
        raise ConfigError(
            f"{option}: got {shown(text)}, expected nodes x ranks per node, such as 2x2"
        )
    return int(match[1]), int(match[2])
