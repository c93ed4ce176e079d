"""The plan command as a user types it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hpczero.plan.__main__ import PlanOptions, build_report, parse_nbytes
from hpczero.plan.plan import Plan
from hpczero.plan.rules import default_rule
from tests.foreign import llama
from tests.helpers.mpirun import ROOT, Finished, run_command

GPT_60B = ("--model", "gpt-60b", "--ranks", "400", "--ranks-per-node", "16", "--memory", "32GB")


def plan(*args: str) -> Finished:
    return run_command([sys.executable, "-m", "hpczero.plan", *args], timeout=60)


def plan_json(*args: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(plan(*args, "--json").ended().stdout)
    return report


def cells(text: str, label: str) -> list[str]:
    """The four stage cells of the row that starts with ``label``."""
    (line,) = (line for line in text.splitlines() if line.startswith(label))
    return line[len(label) :].split()


def test_table_of_the_papers_60b_run_recommends_stage_3() -> None:
    done = plan(*GPT_60B, "--transport", "hierarchical").ended()
    assert "60,119,623,680 parameters" in done.stdout
    assert "400 ranks on 25 nodes of 16 (512.0 GB per node)" in done.stdout
    assert "stage 3 *" in done.stdout
    assert cells(done.stdout, "fits") == ["no", "no", "no", "yes"]
    # 16 and 16/400 bytes per parameter
    assert cells(done.stdout, "paper's 2+2+12 bytes")[::3] == ["961.91", "2.40"]
    assert "Use stage 3, the smallest that fits" in done.stdout.splitlines()[-1]


def test_json_totals_are_the_sum_of_their_parts() -> None:
    report = plan_json(*GPT_60B, "--transport", "flat")
    assert report["recommended_stage"] == 3
    assert [row["stage"] for row in report["stages"]] == [0, 1, 2, 3]
    for row in report["stages"]:
        memory = row["memory"]
        parts = ("parameters", "master", "gradients", "optimizer", "unsharded", "exchange")
        assert memory["total"] == sum(memory[part] for part in parts) > 0
        assert row["fits"] == (row["needed_nbytes"] <= report["memory_nbytes"])
    ratio = [row["traffic"]["numel"] / report["parameters"] for row in report["stages"]]
    assert ratio == pytest.approx([2 * 399 / 400] * 3 + [3 * 399 / 400], rel=1e-4)


def test_sizes_replace_the_preset_or_stand_alone() -> None:
    sizes = ("--layers", "2", "--hidden", "64", "--heads", "4", "--vocab", "100")
    alone = plan_json(*sizes, "--sequence", "32", "--ranks", "2", "--memory", "1GB")
    # embeddings, positions, two blocks of 12h^2 + 13h, final norm
    assert alone["parameters"] == 100 * 64 + 32 * 64 + 2 * (12 * 64**2 + 13 * 64) + 2 * 64
    beside = plan_json("--model", "gpt2", *sizes, "--ranks", "2", "--memory", "1GB")
    assert beside["parameters"] == alone["parameters"] + (1024 - 32) * 64


def test_longer_sequence_needs_more_memory_for_each_sample() -> None:
    short, long = (
        plan_json("--model", "gpt2", "--ranks", "2", "--memory", "8GB", "--sequence", sequence)
        for sequence in ("512", "2048")
    )
    assert short["stages"][3]["micro_batch"] > 3 * long["stages"][3]["micro_batch"] > 0
    assert long["parameters"] - short["parameters"] == (2048 - 1024) * 768  # the position table


def test_nothing_fits_names_the_ranks_that_would_do() -> None:
    report = build_report(PlanOptions(memory="40GB", ranks=64, model="gpt-170b"))
    assert report.best is None
    words = report.recommendation.split()
    ranks = int(words[words.index("ranks") - 1])
    enough = build_report(PlanOptions(memory="40GB", ranks=ranks, model="gpt-170b"))
    short = build_report(PlanOptions(memory="40GB", ranks=ranks - 1, model="gpt-170b"))
    assert enough.best is not None
    assert enough.best.stage == 3
    assert short.best is None


def test_nothing_fits_at_any_size_says_so() -> None:
    report = build_report(PlanOptions(memory="1GB", ranks=64, model="gpt-170b"))
    assert "no number of ranks helps" in report.recommendation


def test_too_large_a_micro_batch_names_the_largest() -> None:
    report = build_report(PlanOptions(memory="32GB", ranks=400, model="gpt-60b", micro_batch=100))
    assert report.best is None
    largest = report.fits[3].micro_batch_checkpointed
    assert f"use micro-batch {largest} or less" in report.recommendation


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("32GB", 32 * 10**9), ("80GiB", 80 * 2**30), ("1.5 TB", 15 * 10**11), ("512mib", 2**29)],
)
def test_memory_is_read_with_decimal_and_binary_units(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes


GPT2 = "--model gpt2 --memory 1GB"
LAID_OUT = "--model gpt2 --ranks 16 --ranks-per-node 8 --memory 16GB"
ON_DGX = "--model gpt-8b --ranks 64 --machine dgx-h100"


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ("--model gpt-60b --ranks 8 --memory 32G", "80GiB"),
        ("--model gpt-60b --ranks 8 --memory 0GB", "above zero"),
        ("--model llama-8b --ranks 8 --memory 1GB", "did you mean gpt-8b"),
        (f"{GPT2} --ranks 0", "--ranks"),
        (GPT2, "--ranks"),
        (f"{GPT2} --ranks 8 --stage 7", "--stage"),
        (f"{GPT2} --ranks 8 --heads 7", "heads"),
        (f"{GPT2} --ranks 8 --precision int8", "int8"),
        (f"{GPT2} --ranks 10 --ranks-per-node 4", "--ranks 12"),
        ("--ranks 8 --memory 1GB --layers 3", "--hidden"),
        (f"{GPT2} --ranks 8 --transport ipc --device cpu", "got ipc, which is not for"),
        (f"{ON_DGX} --transport window", "--transport: got window, which is not for"),
        (f"{ON_DGX} --optimizer adamw8bit", "--machine: the time of a step with --optimizer"),
        (f"{LAID_OUT} --parallel.tensor 16", "parallel.tensor: got 16"),
        (f"{LAID_OUT} --parallel.pipeline 16 --parallel.tensor 2", "pipeline: got 16"),
        (f"{LAID_OUT} --parallel.schedule gpipe", "without a pipeline"),
        (
            f"{LAID_OUT} --parallel.pipeline 4 --parallel.interleave 2 --accumulation 6",
            "such as train.accumulation 8",
        ),
        (f"{LAID_OUT} --parallel.secondary true --stage 2", "parallel.secondary"),
        (
            "--model gpt2 --ranks 16 --memory 1MB --parallel.tensor 2 --stage 3",
            "--stage 3 in this layout",
        ),
    ],
)
def test_bad_values_end_with_78_and_name_the_option(args: str, named: str) -> None:
    done = plan(*args.split()).ended(78)
    assert named in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == "" or "in this layout" in named  # the table of what it would need


@pytest.mark.parametrize("args", [("--no-such-option",), GPT_60B])
def test_command_loads_neither_torch_nor_mpi(args: tuple[str, ...]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "hpczero.plan", *args]
    done = run_command(command, timeout=60)
    loaded = {line.split("|")[-1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert "hpczero.plan.sizing" in loaded  # the list is that of this command
    assert not {"torch", "mpi4py", "mpi4py.MPI"} & loaded


def test_transport_says_what_nodes_hold_and_send_together() -> None:
    flat, two_level, window, ipc = (
        plan_json(*GPT_60B, "--transport", name)["stages"]
        for name in ("flat", "hierarchical", "window", "ipc")
    )
    psi = 60_119_623_680
    # stage 3 in bf16: three times what each rank must send to other nodes, and nothing inside
    sent = [stages[3]["traffic"]["all_gather_nbytes"] for stages in (flat, two_level, window)]
    assert sent[0] == sent[1] == pytest.approx(2 * 2 * psi * 399 / 400, rel=1e-3)
    assert sent[2] == pytest.approx(2 * 2 * psi * 24 / 400, rel=1e-3)
    # one copy of whole parameters on each node of 16 at stages 1 and 2
    held = [stages[2]["memory"]["parameters"] for stages in (flat, two_level, window)]
    assert held == pytest.approx([2 * psi, 2 * psi, 2 * psi / 16], rel=1e-3)
    # ranks that pull from each other send the same in fewer messages, and hold whole parameters each
    messages = [stages[3]["traffic"].pop("messages") for stages in (flat, two_level, window, ipc)]
    assert messages[0] == 0  # the MPI library's
    assert messages[1] == messages[2] > messages[3] > 0
    assert ipc[3]["traffic"] == window[3]["traffic"]
    assert ipc[2]["memory"]["parameters"] == held[0]


def test_window_without_nodes_means_one_node() -> None:
    sizes = ("--model", "gpt2", "--ranks", "4", "--memory", "8GB", "--transport", "window")
    assert plan_json(*sizes)["stages"][3]["traffic"]["nbytes"] == 0


def test_sharding_that_costs_nothing_is_advised() -> None:
    sizes = ("--model", "gpt2", "--ranks", "4", "--memory", "64GB")
    # Every stage fits. Messages: stage 2 sends what stages 0 and 1 send. Shared memory: nothing is sent at stage 3.
    apart, together = plan_json(*sizes, "--transport", "flat"), plan_json(*sizes)
    assert all(row["fits"] for row in apart["stages"])
    assert apart["recommended_stage"] == 2
    assert together["transport"] == "window"
    assert together["recommended_stage"] == 3


@pytest.mark.parametrize(
    ("args", "transport"),
    [
        (("--ranks", "1"), "flat"),
        (("--ranks", "4"), "window"),
        (("--ranks", "4", "--ranks-per-node", "1"), "hierarchical"),
        (("--ranks", "4", "--ranks-per-node", "2", "--device", "cuda"), "ipc"),
        (("--ranks", "16", "--machine", "dgx-h100"), "ipc"),
    ],
)
def test_transport_is_the_one_that_training_takes(args: tuple[str, ...], transport: str) -> None:
    assert plan_json("--model", "gpt2", "--memory", "60GB", *args)["transport"] == transport


def test_a_described_machine_fills_memory_and_nodes_and_predicts_each_stage() -> None:
    report = plan_json("--model", "gpt-8b", "--ranks", "64", "--machine", "dgx-h100")
    assert (report["memory_nbytes"], report["ranks_per_node"]) == (76 * 10**9, 8)
    fitting = [row for row in report["stages"] if row["fits"]]
    best = report["stages"][report["recommended_stage"]]
    assert best["step_s"] == min(row["step_s"] for row in fitting)
    assert all(row["tokens_per_s"] == pytest.approx(64 * 1024 / row["step_s"]) for row in fitting)
    assert all(0 < row["mfu"] < 0.6 for row in fitting)  # the file's share of the peak


def test_accumulation_needs_room_for_whole_gradients() -> None:
    sizes = ("--model", "gpt2", "--ranks", "4", "--memory", "64GB", "--precision", "fp32")
    once, twice = plan_json(*sizes), plan_json(*sizes, "--accumulation", "2")
    more = twice["stages"][3]["needed_nbytes"] - once["stages"][3]["needed_nbytes"]
    assert more == pytest.approx(4 * once["parameters"], rel=1e-3)
    assert twice["stages"][1]["needed_nbytes"] == once["stages"][1]["needed_nbytes"]


def test_partial_sums_in_bf16_send_fewer_bytes_between_replicas_and_nodes() -> None:
    sizes = ("--model", "gpt2", "--ranks", "8", "--ranks-per-node", "4", "--memory", "32GB")
    layout = (*sizes, "--parallel.shard", "node", "--transport", "hierarchical")
    both = [plan_json(*layout, "--reduce", dtype)["stages"][1] for dtype in ("fp32", "bf16")]
    full, half = (row["pipeline"][0]["sent"]["replicas"]["between"] for row in both)
    assert half * 8 == full * 6  # reduced in 2 bytes instead of 4, gathered in 4
    plain = [plan_json(*sizes, "--reduce", dtype)["stages"][2] for dtype in ("fp32", "bf16")]
    full, half = (row["traffic"]["reduce_scatter_nbytes"] for row in plain)
    assert half * 2 == full  # between nodes; inside they share memory


@pytest.mark.parametrize("degrees", [(), ("--parallel.tensor", "2")])
def test_table_names_the_optimizer_and_counts_its_bytes(degrees: tuple[str, ...]) -> None:
    sizes = ("--model", "gpt2-xl", "--ranks", "8", "--memory", "32GB", "--transport", "flat")
    eight_bits = ("--optimizer", "adamw8bit")
    plain = cells(plan(*sizes, *degrees).stdout, "optimizer (Adam)")
    eight = cells(plan(*sizes, *degrees, *eight_bits).stdout, "optimizer (8 bits)")
    small, large = ([float(cell.replace(",", "")) for cell in row] for row in (eight, plain))
    assert small == pytest.approx([17 / 64 * nbytes for nbytes in large], rel=0.02)  # two digits


def test_model_of_transformers_is_counted_without_its_weights(tmp_path: Path) -> None:
    made = llama.made()
    made.config.architectures = ["LlamaForCausalLM"]
    made.config.save_pretrained(tmp_path)
    of_ranks = ("--ranks", "4", "--memory", "1GB", "--transport", "flat", "--precision", "bf16")
    found = plan_json("--model", str(tmp_path), *of_ranks)
    assert found["parameters"] == sum(p.numel() for p in made.parameters())
    assert found["stages"] == plan_json("--model", f"{tmp_path}/config.json", *of_ranks)["stages"]
    for stage, row in enumerate(found["stages"]):
        given: Any = {"stage": stage, "precision": "bf16", "rule": default_rule}
        expected = Plan.build(made, num_shards=4, **given).memory()
        assert row["memory"]["total"] == expected.total < row["needed_nbytes"]
    text = plan("--model", str(tmp_path), *of_ranks).stdout
    assert "largest micro-batch" in text
    assert "Activations and times are an estimate" in text
    refused = plan("--model", str(tmp_path), *of_ranks, "--layers", "3").ended(78)
    assert "--layers: is not for a model of transformers" in refused.stderr


def test_a_described_decoder_has_times_and_ranges_and_stages_that_are_alike(tmp_path: Path) -> None:
    sizes = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336}
    sizes |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    mixtral = {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**sizes, **mixtral, "max_position_embeddings": 32768}))
    words = ("--model", str(file), "--sequence", "4096", "--ranks", "64", "--machine", "dgx-h100")
    found = plan_json(*words)
    assert found["parameters"] == 46_702_792_704  # Mixtral 8x7B
    for row in found["stages"]:
        assert row["step_fast_s"] < row["step_s"] < row["step_slow_s"]
        assert 0.1 < row["mfu"] < 0.6  # by FLOPs of two experts, not of eight
    said = plan("--model", "gpt-8b", *words[-4:]).stdout
    alike = "The ranges of stage 1, stage 3 overlap with that of the first; 1 of these 2"
    assert alike in said
    two = (*words, "--micro-batch", "2")
    block, less = (
        plan_json(*two, "--checkpointing", kind)["stages"][3] for kind in ("block", "selective")
    )
    assert 0 < less["micro_batch_checkpointed"] < block["micro_batch_checkpointed"]
    assert less["step_s"] < block["step_s"]


# --- layouts


SMALL = tuple(LAID_OUT.split())
GRID = ("--parallel.tensor", "2", "--parallel.pipeline", "4", "--accumulation", "8")


def test_layout_shows_stages_bubble_and_the_map_of_ranks() -> None:
    done = plan(*SMALL, *GRID).ended()
    said = done.stdout
    assert "gpt2: 124,439,808 parameters" in said
    assert "1f1b, 8 micro-batch(es) of 1, bubble 37.5%" in said
    assert "pipeline 4 x shard 2 x tensor 2, slowest first" in said
    rows = [line.split() for line in said.splitlines()]
    assert ["15", "1", "3", "1", "1"] in rows  # the last rank, its node and places
    (fits,) = (row for row in rows if row[:1] == ["fits"])
    assert len(fits) == 5
    stages = [row for row in rows if len(row) > 3 and row[0] in ("0", "1", "3")]
    assert any(row[:3] == ["1", "(x", "2)"] for row in stages)


def test_numbers_for_programs_are_those_of_the_table() -> None:
    report = plan_json(*SMALL, *GRID, "--machine", "dgx-a100")
    assert report["mesh"] == {"pipeline": 4, "replicate": 1, "shard": 2, "sequence": 1, "tensor": 2}
    assert report["bubble"] == 3 / 8
    assert report["global_batch"] == 16
    assert [row["stage"] for row in report["stages"]] == [0, 1, 2, 3]
    for row in report["stages"]:
        assert sum(kind["stages"] for kind in row["pipeline"]) == 4
        assert sum(kind["stages"] * kind["blocks"] for kind in row["pipeline"]) == 12
        assert row["step_s"] > 0
        for kind in row["pipeline"]:
            assert kind["needed_nbytes"] == sum(kind["memory"].values())
    assert report["recommended_stage"] is not None


def test_replicas_and_second_shard_are_shown() -> None:
    node = plan(*SMALL, "--parallel.shard", "node")
    assert "replicas, between" in node.stdout
    assert "replicate 2 x shard 8" in node.stdout
    second = plan(*SMALL, "--parallel.secondary", "true")
    (row,) = (line for line in second.stdout.splitlines() if line.startswith("second shard"))
    assert row.split()[2:5] == ["0.00", "0.00", "0.00"]  # of stage 3 alone
    assert float(row.split()[5]) > 0


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1])
def test_page_of_layouts_shows_what_the_command_prints(place: int) -> None:
    page = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    shown = re.findall(
        r"```bash\npython -m hpczero\.plan ([^\n]*)\n```\n\n```text\n(.*?)```", page, re.DOTALL
    )
    assert len(shown) == 2
    words, expected = shown[place]
    done = run_command([sys.executable, "-m", "hpczero.plan", *words.split()], timeout=240).ended()
    assert done.stdout == expected
