"""The command that predicts, kernels by measurement, and the report of prediction against measurement."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest

from hpczero.errors import ConfigError
from hpczero.predict.machine import MeasuredKernels
from scaling.evidence.record import Row
from scaling.predict.check import draw, text
from scaling.predict.host import host_machine, predict_on_host
from scaling.predict.published import PUBLISHED
from tests.helpers.mpirun import Finished, run_command
from tests.scaling.studies import check_drawn, head, probe


def predict(*arguments: str, timeout: float = 60) -> Finished:
    return run_command([sys.executable, "-m", "scaling.predict", *arguments], timeout)


def cells(said: str) -> list[list[str]]:
    lines = [line for line in said.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# --- kernels by measurement


def test_rates_of_products_are_interpolated_by_their_flops() -> None:
    measured = MeasuredKernels.of_ranks([probe(alone=True)])

    def rate(side: int) -> float:
        return 2 * side**3 / measured.matmul_s(side, side, side)

    assert rate(64) == pytest.approx(1e9)
    assert rate(128) == pytest.approx(2e9)  # half way between 64 and 256 on a logarithmic scale
    assert rate(512) == pytest.approx(4e9)
    assert rate(16) == pytest.approx(1e9)
    assert rate(4096) == pytest.approx(4e9)
    # only the number of FLOPs counts, where thin products were not measured
    assert 2 * 64**4 / measured.matmul_s(64, 64, 64 * 64) == pytest.approx(4e9)


def test_products_of_few_tokens_are_as_slow_as_measured() -> None:
    thin = {"few": {"16": 1e8, "64": 2e8}, "inner": {"16": 5e7, "64": 1e8}}
    measured = MeasuredKernels.of_ranks([{**probe(alone=True), **thin}])

    def rate(m: int, k: int, n: int) -> float:
        return 2 * m * k * n / measured.matmul_s(m, k, n)

    assert rate(64, 512, 512) == pytest.approx(2e8)
    assert rate(16, 512, 512) == rate(8, 512, 512) == pytest.approx(1e8)
    assert rate(512, 64, 512) == pytest.approx(1e8)  # the gradient of a weight
    assert rate(512, 512, 512) == pytest.approx(4e9)  # not thin: as square ones


def test_ranks_are_averaged_in_seconds() -> None:
    measured = MeasuredKernels.of_ranks([probe(1.0), probe(3.0)])
    assert measured.products["64"] == pytest.approx(1e9 / 2)
    assert measured.update_s(10) == pytest.approx(6e-8)
    assert measured.sum_s(1, 10) == pytest.approx(2e-8)
    assert measured.sum_s(3, 10) == pytest.approx(2e-8 + 2 * 4e-8)
    assert measured.exchange == pytest.approx(2.5e9)
    assert measured.attention_s(10, 4, 2, backward=True) == pytest.approx(2 * 4 * 80 / 0.5e9)
    host = host_machine(measured, 2)
    assert (host.node_rate, host.node_latency) == (measured.exchange, measured.wait)
    assert host.shares_memory


def test_a_step_of_measured_kernels_scales_with_them() -> None:
    from scaling.contenders.workload import WORKLOADS

    found = [
        predict_on_host(
            WORKLOADS["gpt-8x512"].model,
            MeasuredKernels.of_ranks([probe(slower, alone=True)]),
            ranks=1,
            stage=stage,
            micro_batch=4,
        )
        for slower in (1.0, 2.0)
        for stage in (0, 3)
    ]
    assert found[2].step_s == pytest.approx(2 * found[0].step_s)
    assert found[3].step_s == pytest.approx(2 * found[1].step_s)
    assert all(prediction.hidden_s == 0.0 for prediction in found)


@pytest.mark.tool
@pytest.mark.slow
def test_this_host_is_measured_and_its_prediction_is_of_the_right_size() -> None:
    from scaling.contenders import find_entry
    from scaling.contenders.ranks import Crew
    from scaling.contenders.workload import WORKLOADS
    from scaling.predict.check import take_turn

    workload = WORKLOADS["gpt-8x512-short"]
    with Crew(find_entry("hpczero-3", transport="auto"), workload, size=2) as crew:
        crew.ask("build")
        crew.ask("turn", steps=1)
        row = take_turn(crew, ("gpt-8x512-short", 2, 3), steps=3)
    # Other tests may run meanwhile, so not the 20 % of --check.
    assert 1 / 3 < row["predicted_s"] / row["measured_s"] < 3, row
    assert sum(row["parts_s"].values()) == pytest.approx(row["predicted_s"])


# --- the command


@pytest.mark.tool
def test_a_forecast_says_what_was_asked() -> None:
    done = predict(
        "--machine", "dgx-h100", "--model", "gpt-8b", "--ranks", "8", "64", "1024"
    ).ended()
    assert "A prediction, nothing was run" in done.stdout
    header, _, *lines = cells(done.stdout)
    assert [line[0] for line in lines] == ["8", "64", "1,024"]
    assert lines[0][header.index("efficiency")] == "100%"
    step, tflops = header.index("step, s"), header.index("TFLOP/s/rank")
    assert all(float(line[step]) > 0 and 0 < float(line[tflops]) < 989.4 * 0.6 for line in lines)


@pytest.mark.tool
def test_plots_are_drawn_as_asked(tmp_path: Path) -> None:
    for name, arguments in (("a.svg", ["--paper"]), ("b.png", ["--ranks", "8", "64"])):
        predict(*arguments, "--plot", str(tmp_path / name)).ended()
        assert (tmp_path / name).stat().st_size > 5000


@pytest.mark.tool
def test_strong_scaling_keeps_the_global_batch() -> None:
    done = predict("--global_batch", "512", "--ranks", "8", "64", "512", "--json").ended()
    for line in done.stdout.splitlines():
        found = json.loads(line)
        assert found["ranks"] * found["micro_batch"] * found["accumulation"] == 512
        assert found["micro_batch"] <= found["largest_micro_batch"]
        assert math.isclose(
            found["step_s"],
            found["forward_s"] + found["backward_s"] + found["communication_s"] + found["update_s"],
        )


@pytest.mark.tool
def test_checkpointing_by_force_needs_less_memory() -> None:
    command = ["--machine", "dgx-h100", "--model", "gpt-8b", "--ranks", "64", "--micro_batch", "4"]
    plain, forced = (
        json.loads(predict(*command, *more, "--json").stdout) for more in ([], ["--checkpointing"])
    )
    assert (plain["checkpointing"], forced["checkpointing"]) == (False, True)
    assert forced["needed_nbytes"] < 0.9 * plain["needed_nbytes"]
    shown = predict(*command, "--checkpointing").stdout
    header, _, line = cells(shown)
    assert line[header.index("GB/rank")] == f"{forced['needed_nbytes'] / 1e9:.1f}"


@pytest.mark.tool
def test_sources_are_shown() -> None:
    done = predict("--machine", "slingshot-a100", "--ranks", "16", "--sources")
    assert "- nic_rate: NERSC" in done.stdout, done
    assert "- matmul_efficiency: implied by runs" in done.stdout


@pytest.mark.tool
def test_the_papers_curve_stands_beside_the_published_one() -> None:
    done = predict("--paper").ended()
    lines = {line[0]: line for line in cells(done.stdout)}
    assert [lines[f"{n} GPUs"][1:3] for n in (64, 128, 256, 400)] == [
        ["16", "16"],
        ["48", "48"],
        ["48", "48"],
        ["64", "64"],
    ]
    assert float(lines["400 GPUs"][7]) > float(lines["400 GPUs"][8]) == 6.25
    assert "unverified" in lines["64 GPUs"][9]
    assert "Calibrated" in done.stdout
    assert "Not explained" in done.stdout


@pytest.mark.tool
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "gpt-170b", "--ranks", "8"], "one sequence needs"),
        (["--machine", "cray-1"], "expected one of host, cpu-node, dgx-2-v100"),
        (["--machine", "dgx-2-v100"], "has no peak for bf16, expected one of fp32, fp16"),
        (["--ranks", "12"], "multiple of the 8 ranks of a node of dgx-a100"),
        (["--global_batch", "100", "--ranks", "8"], "--global_batch: got 100, which 8 ranks"),
        (["--micro_batch", "4000", "--ranks", "64"], "--micro_batch: got 4000, at most"),
        (["--machine", "host", "--ranks", "4096"], "this host has"),
        (["--model", "nothing"], "--models: got 'nothing'"),
    ],
)
def test_wrong_use_gets_a_clear_error(arguments: list[str], message: str) -> None:
    done = predict(*arguments).ended(ConfigError.exit_code)
    assert message in done.stderr, done


# --- prediction against measurement


def rows(ratios: tuple[float, ...]) -> list[Row]:
    found = [head(rounds=len(ratios), steps=3, tolerance=0.2)]
    for number, ratio in enumerate(ratios):
        for stage, factor in ((0, 1.0), (3, 1.3)):
            slow = 1.0 + number  # the machine becomes slower, and the probe sees it
            found.append(
                {
                    "kind": "turn",
                    "workload": "w",
                    "ranks": 2,
                    "stage": stage,
                    "measured_s": slow,
                    "predicted_s": slow * ratio * factor,
                    "foreign_share": 0.01 * number,
                }
            )
    return found


def test_ratios_are_formed_within_a_turn_and_judged(tmp_path: Path) -> None:
    said = text(rows((0.9, 1.1, 1.0)))
    good, bad = cells(said)[2:]
    assert good == [
        "w",
        "2",
        "0",
        "2000 [1000, 3000]",
        "2200 [900, 3000]",
        "1.00 [0.90, 1.10]",
        "yes",
        "3",
        "2%",
    ]
    assert bad[5:7] == ["1.30 [1.17, 1.43]", "**no**"]
    assert "1 of 2 points within 20%" in said
    assert "6 of 6 turns were quiet" in said
    disturbed = rows((0.9, 1.1, 1.0, 5.0))
    disturbed[-1]["foreign_share"] = disturbed[-2]["foreign_share"] = 0.4
    assert cells(text(disturbed))[2:] == [good, bad]
    assert "6 of 8 turns were quiet" in text(disturbed)
    for row in disturbed[1:]:
        row["foreign_share"] = 0.4
    assert "Busy machine: 2 points had no quiet turn" in text(disturbed)
    assert "0 of 8 turns were quiet" in text(disturbed)
    check_drawn(draw, rows((0.9, 1.1, 1.0)), tmp_path)


# --- published runs: tests/predict/test_published.py


@pytest.mark.tool
def test_table_says_for_each_run_where_it_is_from() -> None:
    done = predict("--published").ended()
    for run in PUBLISHED:
        assert f"| {run.name} |" in done.stdout
        assert f"- {run.name}: {run.source}" in done.stdout
    assert "nothing fitted" in done.stdout
