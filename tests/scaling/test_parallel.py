"""Own tensor and pipeline parallelism beside torch's: the pairs, the report, and a real run of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpczero.errors import ConfigError, HpcZeroError
from scaling.evidence.record import Row, of_kind
from scaling.parallel import Options, apart, draw, matches_of, text
from tests.helpers.cases import EVERYTHING
from tests.scaling.studies import cells, check_drawn, head, measured


def rows() -> list[Row]:
    found: list[Row] = [
        head(ranks=4, rounds=2, precision="fp32", tolerance=1e-5, description="a model"),
        {
            "kind": "match",
            "match": "tensor-4",
            "title": "torch DTensor",
            "own": "mine",
            "other": "theirs",
            "goal": 0.8,
            "apart": 2e-7,
        },
    ]
    for number, slower in enumerate((1.0, 3.0)):
        for name, seconds in (("mine", 0.7), ("theirs", 1.0)):
            found.append(
                {
                    "kind": "turn",
                    "match": "tensor-4",
                    "contender": name,
                    "round": number,
                    "steps": 2,
                    "seconds": [seconds * slower, 2 * seconds * slower],
                    "window_s": 2.0,
                    "foreign_cpu_s": 0.0,
                }
            )
    return found


def test_ratio_is_formed_within_rounds_of_the_slowest_rank(tmp_path: Path) -> None:
    said = text(rows())
    assert cells(said, "tensor-4")[1:] == [
        "1400.0 [700.0, 2100.0]",
        "2000.0 [1000.0, 3000.0]",
        "0.70 [0.70, 0.70]",
        "0.8",
        "yes",
        "2.0e-07",
    ]
    assert "more ranks than cores" in said
    assert "Busy machine" not in said
    check_drawn(draw, rows(), tmp_path)


def test_both_sides_of_a_match_have_the_same_degrees_and_a_pipeline_a_sample_for_each_micro_batch() -> (
    None
):
    found = matches_of(Options())
    assert [match.name for match in found] == [
        "tensor-4",
        "tensor-4-sequence",
        "tensor-2",
        "tensor-2-sequence",
        "pipeline-4",
        "pipeline-2",
    ]
    for match in found:
        own = dict(match.own.arguments)
        assert own.pop("stage") == 1
        assert own == match.other.arguments
    assert found[0].workload.sequences == 4
    assert found[-1].workload.sequences == 8
    half = matches_of(Options(workload="tiny", ranks=2, stage=0, precision="bf16"))
    assert [match.name for match in half] == ["tensor-2", "tensor-2-sequence"]


def test_unknown_matches_and_other_losses_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--matches: got 'tensor-3', expected some of tensor-4"):
        _ = Options(matches=("tensor-3",)).chosen
    assert apart({"a": [9.0, 8.0], "b": [9.0, 8.000001]}, 1e-5) == pytest.approx(1e-6)
    with pytest.raises(HpcZeroError, match=r"a: loss 8\.0000000 at step 1, b has 8\.0001"):
        apart({"a": [9.0, 8.0], "b": [9.0, 8.0001]}, 1e-5)
    with pytest.raises(HpcZeroError, match="a: loss nan at step 0"):
        apart({"a": [float("nan")], "b": [9.0]}, 1e-5)


@pytest.mark.tool
@pytest.mark.slow
@pytest.mark.limit(600)
def test_quick_run_trains_the_same_on_both_sides(tmp_path: Path) -> None:
    names = ["tensor-4-sequence", "pipeline-2", *(["tensor-2"] if EVERYTHING else [])]
    words = f"parallel --quick --ranks 4 --matches {' '.join(names)}"
    found, said = measured(0, words, tmp_path, "parallel-tiny-4-fp32", timeout=580)
    for match in of_kind(found, "match"):
        own, other = match["losses"].values()
        assert own == pytest.approx(other, rel=0, abs=1e-5)
        assert own[0] - own[-1] > 0.05  # they learn, so a wrong gradient would show
    turns = [(row["match"], row["round"], row["contender"]) for row in of_kind(found, "turn")]
    assert len(set(turns)) == len(turns) == len(names) * 2 * 2
    assert "| tensor-4-sequence (torch DTensor" in said
