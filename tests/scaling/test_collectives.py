"""The collectives benchmark: its arithmetic on rows made by hand, and a real run between fake nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaling.collectives.__main__ import draw, groups, text
from scaling.evidence.record import Row
from tests.helpers.mpirun import run_alone
from tests.scaling.studies import cells, check_drawn, head, measured

MIB = 2**20
SLOWER = (1.0, 3.0, 2.0, 10.0, 1.5, 1.0, 4.0)  # how much the machine was slowed down in each round
TIMES = {"MPI library": 0.4, "flat, ring": 0.2, "window, auto": 0.11, "window, ring": 0.1}


def rows() -> list[Row]:
    first = head(
        ranks=8,
        nodes=4,
        placement="4x2-block",
        emulated=True,
        nic_gbit=1.0,
        rounds=len(SLOWER),
        mpi="An MPI",
        selection={"description": "all-gather ring"},
    )
    calls = [
        {
            "kind": "call",
            "operation": operation,
            "mover": name,
            "shard_nbytes": MIB,
            "round": number,
            "seconds": slower * seconds,
        }
        for operation in ("reduce_scatter", "all_gather")
        for number, slower in enumerate(SLOWER)
        for name, seconds in TIMES.items()
    ]
    return [first, *calls]


def test_ratios_are_formed_within_rounds_and_the_bound_is_what_must_enter_a_node() -> None:
    gathers, reductions = groups(rows())
    assert (gathers.operation, reductions.operation) == ("all_gather", "reduce_scatter")
    assert gathers.bound_s == pytest.approx(3 * 2 * MIB * 8 / 1e9)
    ratio = gathers.ratio("MPI library", "window, auto")
    assert ratio is not None
    assert [ratio.median, ratio.low, ratio.high] == pytest.approx([0.4 / 0.11] * 3)
    assert gathers.best("window") == "window, ring"


def test_text_says_what_was_measured_and_that_it_is_emulated(tmp_path: Path) -> None:
    said = text(rows())
    assert said.startswith("emulated nodes on one machine (not scaling): 8 ranks as 4x2-block")
    assert "All-gather, 1 MiB of each rank; bound 50.3 ms" in said
    # 8 MiB in a median of 2 x 0.1 s; 7/8 of it over the bus; a bound of 50.3 ms
    assert cells(said, "window, ring")[1:6] == [
        "200.0 [100.0, 1000.0]",
        "42",
        "37",
        "25%",
        "4.00 [4.00, 4.00]",
    ]
    assert "All-gather of 1 MiB, automatic: 1.10 [1.10, 1.10] x the best two-level one" in said
    assert "0.55 [0.55, 0.55] x the best flat one (flat, ring)" in said
    check_drawn(draw, rows(), tmp_path)


@pytest.mark.tool
def test_every_algorithm_runs_between_two_nodes_of_two(tmp_path: Path) -> None:
    env = {"HPCZERO_FAKE_NODES": "2x2", "XDG_CACHE_HOME": str(tmp_path)}
    words = "collectives --sizes 4096 --rounds 1"
    found, said = measured(4, words, tmp_path, "collectives-2x2-block", env=env)
    names = {row["mover"] for row in found if row["kind"] == "call"}
    flat = {"flat, library", "flat, ring", "flat, doubling", "flat, pairwise"}
    window = {"window, auto", "window, ring", "window, pairwise/256 KiB", "window, library/2 MiB"}
    assert flat | window | {"MPI library", "hierarchical"} <= names
    assert all(row["seconds"] > 0 for row in found if row["kind"] == "call")
    assert "| MPI library" in said
    assert list(tmp_path.rglob("collectives-2x2-block.png"))


@pytest.mark.tool
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sizes", "6"], "expected bytes of fp32 shards"),
        (["--rounds", "0"], "expected at least 1"),
        (["--nic_gbit", "0"], "expected a rate above 0"),
        ([], "one rank has nobody to exchange with"),
    ],
)
def test_bad_options_are_refused(options: list[str], said: str) -> None:
    done = run_alone(["-m", "scaling.collectives", *options], timeout=60)
    assert done.returncode == 78
    assert said in done.stderr
