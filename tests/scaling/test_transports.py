"""The comparison of transports: its arithmetic on rows made by hand, and a real run between fake nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaling.evidence.harness import placement
from scaling.evidence.record import Row
from scaling.transports import draw, text
from tests.scaling.studies import cells, check_drawn, head, measured

SLOWER = (1.0, 3.0, 2.0, 10.0, 1.5, 1.0)


def rows() -> list[Row]:
    found = [
        head(
            ranks=8,
            placement="4x2-block",
            emulated=True,
            link="1 Gbit/s",
            stage=3,
            rounds=len(SLOWER),
            description="a model",
        )
    ]
    for name, seconds in (("window", 0.5), ("flat", 1.0)):
        found.append({"kind": "transport", "transport": name, "description": f"{name}!"})
        for number, slower in enumerate(SLOWER):
            took = slower * seconds
            found.append({"kind": "step", "transport": name, "round": number, "seconds": took})
    return found


def test_text_compares_with_flat_within_rounds(tmp_path: Path) -> None:
    said = text(rows())
    assert said.startswith("emulated nodes on one machine (not scaling): a model, stage 3, 8 ranks")
    assert cells(said, "window")[1:] == [
        "875 [500, 5000]",
        "2.00 [2.00, 2.00]",
    ]
    assert "- flat: flat!" in said
    check_drawn(draw, rows(), tmp_path)


@pytest.mark.tool
def test_all_transports_take_a_step_between_two_nodes_of_two(tmp_path: Path) -> None:
    words, env = "transports --workload tiny --rounds 2", {"HPCZERO_FAKE_NODES": "2x2"}
    found, said = measured(4, words, tmp_path, "transports-tiny-2x2-block", env=env)
    steps = [row["transport"] for row in found if row["kind"] == "step"]
    assert sorted(steps) == sorted(["flat", "hierarchical", "window", "window-inline"] * 2)
    assert "| window" in said


class Nodes:
    """What ``placement`` looks at: a topology that is its own world."""

    def __init__(self, *nodes: tuple[int, ...]) -> None:
        self.world = self
        self.nodes = nodes
        self.size = sum(map(len, nodes))
        self.is_rectangular = len({len(ranks) for ranks in nodes}) == 1


@pytest.mark.parametrize(
    ("nodes", "name"),
    [
        (((0, 1),), "1x2"),
        (((0,), (1,), (2,)), "3x1"),
        (((0, 1), (2, 3)), "2x2-block"),
        (((0, 2), (1, 3)), "2x2-cyclic"),
        (((0, 3), (1, 2)), "2x2-mixed"),
        (((0, 1, 2), (3,)), "3+1"),
    ],
)
def test_placement_has_a_name(nodes: tuple[tuple[int, ...], ...], name: str) -> None:
    assert placement(Nodes(*nodes)) == name  # type: ignore[arg-type]
