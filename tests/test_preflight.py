"""Preflight: which nodes are called bad, and by what."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from hpczero.preflight.verdict import NodeReport, faults, rounds
from tests.helpers.mpirun import run_ranks


def nodes(**changes: Mapping[str, object]) -> list[NodeReport]:
    """Five good nodes, but for the changes."""
    rates: dict[str, object] = {"write_mbyte_s": 100.0, "read_mbyte_s": 200.0, "pairs": {"x": 10.0}}
    return [
        NodeReport(name, 1, **{"gpus": 4, **rates, **changes.get(name, {})})  # type: ignore[arg-type]
        for name in ("a", "b", "c", "d", "e")
    ]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"gpus": 3}, "3 GPU(s), expected 4"),
        ({"file_error": "No space left"}, "files: No space left"),
        (
            {"pairs": {"a": 7.0, "b": 7.9}},
            "bandwidth to other nodes: 8 MB/s, the typical node has 10",
        ),
        ({"write_mbyte_s": 20.0}, "writing a file: 20 MB/s, the typical node has 100"),
        ({"read_mbyte_s": 20.0}, "reading another node's file: 20 MB/s"),
    ],
)
def test_bad_node_is_named_with_its_figure(change: dict[str, object], what: str) -> None:
    (fault,) = faults(nodes(c=change), gpus=None)
    assert fault.node == "c"
    assert what in fault.what


def test_good_nodes_and_their_slow_partner_are_told_apart() -> None:
    names = "abcde"
    speed = {frozenset(p): 3.0 if "c" in p else 10.0 for p in itertools.combinations(names, 2)}
    measured = {n: {"pairs": {m: speed[frozenset((n, m))] for m in names if m != n}} for n in names}
    assert [fault.node for fault in faults(nodes(**measured), gpus=None)] == ["c"]


def test_no_node_is_bad_where_all_are_alike_or_nothing_can_be_compared() -> None:
    assert faults(nodes(), gpus=4) == []
    alone = [NodeReport("a", 1, 0), NodeReport("b", 1, 0, pairs={"a": 1.0})]
    assert faults(alone, gpus=None) == []
    assert [f.node for f in faults(alone, gpus=1)] == ["a", "b"]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 25])
def test_every_node_meets_every_other_once_and_one_at_a_time(count: int) -> None:
    found = rounds(count, most=1000)
    met = list(itertools.chain.from_iterable(found))
    assert sorted(met) == list(itertools.combinations(range(count), 2))
    for pairs in found:
        busy = list(itertools.chain.from_iterable(pairs))
        assert len(busy) == len(set(busy))


def test_rounds_of_many_nodes_are_limited() -> None:
    assert len(rounds(1000, most=32)) <= 32


def test_command_measures_emulated_nodes_and_leaves_no_file(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    words = f"--directory {tmp_path} --file_mib 2 --pair_mib 1 --gpus 0 --json {report}".split()
    done = run_ranks(2, ["-m", "hpczero.preflight", *words], timeout=60)
    assert done.returncode == 0, done
    assert re.search(r"all 1 node\(s\) are good\s*$", done.stdout), done
    (node,) = json.loads(report.read_text())["nodes"]
    assert node["ranks"] == 2
    assert node["write_mbyte_s"] > 0
    assert node["read_mbyte_s"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]


def test_missing_gpu_ends_the_command_with_1_and_the_option_for_sbatch(tmp_path: Path) -> None:
    words = f"--directory {tmp_path} --file_mib 1 --gpus 9".split()
    done = run_ranks(1, ["-m", "hpczero.preflight", *words], timeout=60)
    assert done.returncode == 1, done
    assert re.fullmatch(r"--exclude=[\w-]+", done.stdout.splitlines()[-1])
