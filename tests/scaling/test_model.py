"""The model of a step against closed forms, the Plan, and the ZeRO paper."""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from pathlib import Path

import pytest

from hpczero.errors import ConfigError
from hpczero.models.config import PRESETS, GPTConfig, flops_per_token
from hpczero.predict.job import Job
from hpczero.predict.machine import (
    FOLDER,
    Machine,
    Roofline,
    device_peak,
    load_machine,
    machine_names,
)
from hpczero.predict.model import predict
from hpczero.predict.network import Network
from scaling.predict.__main__ import fit_of, largest_micro_batch, needed_nbytes
from scaling.predict.paper import (
    ANCHOR_TFLOPS,
    FIGURE_2,
    FIGURE_3,
    USABLE_RANGE,
    activation_nbytes,
    calibrated,
    compare,
    ideal_activation_numel,
    largest_batch,
    state_nbytes,
)
from tests.files.test_regular import at_once

SMALL = GPTConfig(vocab_size=4096, context=256, layers=4, hidden=512, heads=8)
# Round numbers, so that formulas can be written out: 1 FLOP costs 1e-12 s, a byte 1e-11 s inside a node, 1e-10 between.
ROUND = Machine(
    name="round",
    title="round",
    ranks_per_node=4,
    memory=80e9,
    reserved=0.0,
    peak={"fp32": 1e12, "bf16": 1e12},
    matmul_efficiency=1.0,
    memory_rate=1e12,
    dispatch=0.0,
    node_rate=1e11,
    node_latency=1e-6,
    nics=4,
    nic_rate=1e10,
    nic_latency=1e-5,
)


def job(**changes: object) -> Job:
    values: dict[str, object] = {"model": SMALL, "machine": ROUND, "ranks": 8, "stage": 3}
    values |= {"precision": "fp32", "micro_batch": 4, **changes}
    return Job.plain(**values)  # type: ignore[arg-type]


# --- collectives


@pytest.mark.parametrize(("nodes", "steps"), [(2, 1), (4, 3), (17, 16), (18, 9), (33, 16)])
def test_an_all_gather_is_pairwise_between_nodes_then_one_inside(nodes: int, steps: int) -> None:
    shard = 2**20  # travels longer than a latency, which the next step hides
    inside = 3 * (1e-6 + nodes * shard / 1e11)
    rail = 1e-5 + (nodes - 1) * shard / 1e10
    assert Network(job(ranks=4 * nodes)).gather(shard).seconds == pytest.approx(rail + inside)
    # with two steps under way at a time, and nothing to send, there is a latency for each two steps
    inside = 3 * (1e-6 + nodes * 4 / 1e11)
    rail = -(-steps // 2) * 1e-5
    assert Network(job(ranks=4 * nodes)).gather(4).seconds == pytest.approx(rail + inside, rel=1e-3)


def test_no_collective_beats_the_bound_of_the_network() -> None:
    # (G - 1) L S must enter each node, over all of its NICs
    for nodes, transport in itertools.product((2, 5, 16), ("flat", "hierarchical", "window")):
        network, shard = Network(job(ranks=4 * nodes, transport=transport)), 2**22
        bound = (nodes - 1) * 4 * shard / (4 * 1e10)
        assert network.gather(shard).seconds >= bound
        assert network.reduce(shard // 4).seconds >= bound


def test_one_rank_has_nothing_to_exchange() -> None:
    network = Network(job(ranks=1))
    assert network.gather(2**20).seconds == 0.0
    found = predict(job(ranks=1, stage=0))
    assert found.communication_s < 0.01 * found.step_s


@pytest.mark.parametrize("transport", ["hierarchical", "flat"])
@pytest.mark.parametrize("stage", range(4))
def test_seconds_on_the_wire_are_those_of_the_plans_bytes(stage: int, transport: str) -> None:
    # without latency, and with one rate everywhere, time is bytes over rate
    even = dataclasses.replace(
        ROUND,
        node_latency=0.0,
        nic_latency=0.0,
        nics=4,
        nic_rate=1e10,
        node_rate=1e10,
        memory_rate=1e30,
    )
    case = job(machine=even, stage=stage, transport=transport, overlap=False)
    traffic = case.plan.traffic(footprint=case.footprint)
    assert predict(case).communication_s == pytest.approx(traffic.nbytes / 1e10, rel=1e-6)


def test_stage_3_exchanges_half_as_much_again() -> None:
    cases = {s: predict(job(stage=s, ranks=64, overlap=False, precision="bf16")) for s in (2, 3)}
    # gathers twice instead of once; sums between nodes are fp32 in both
    assert cases[3].communication_s > 1.15 * cases[2].communication_s


def test_overlap_hides_no_more_than_there_is_to_compute() -> None:
    for ranks, batch in itertools.product((4, 8, 64), (1, 32)):
        hidden, plain = (
            predict(job(ranks=ranks, micro_batch=batch, overlap=overlap))
            for overlap in (True, False)
        )
        assert hidden.communication_s <= plain.communication_s * (1 + 1e-9)
        assert hidden.hidden_s <= hidden.forward_s + hidden.backward_s
        assert hidden.communication_s + hidden.hidden_s == pytest.approx(plain.communication_s)
    host = dataclasses.replace(ROUND, shares_memory=True)
    alone = predict(job(machine=host, ranks=4, overlap=True, transport="window"))
    assert alone.hidden_s == 0.0  # one node of a host: nothing goes on in the background


def test_over_flat_nothing_is_hidden_on_any_number_of_nodes() -> None:
    # every call of it is over when it returns
    for ranks in (4, 8, 64):
        hiding, plain = (
            predict(job(ranks=ranks, transport="flat", micro_batch=32, overlap=overlap))
            for overlap in (True, False)
        )
        assert hiding.hidden_s == 0.0
        assert hiding.communication_s == plain.communication_s


# --- compute


def test_large_products_take_the_models_flops_and_no_more() -> None:
    wide = GPTConfig(vocab_size=50257, context=1024, layers=8, hidden=8192, heads=64)
    fast = dataclasses.replace(ROUND, memory_rate=1e30)
    found = predict(job(model=wide, machine=fast, ranks=4, stage=0, micro_batch=8))
    flops = flops_per_token(wide) * 8 * 1024
    assert found.forward_s + found.backward_s == pytest.approx(flops / 1e12, rel=1e-3)
    again = predict(
        job(model=wide, machine=fast, ranks=4, stage=0, micro_batch=8, checkpointing=True)
    )
    assert again.backward_s - found.backward_s == pytest.approx(found.forward_s, rel=0.1)


def test_small_products_are_bound_by_memory() -> None:
    kernels = Roofline(dataclasses.replace(ROUND, memory_rate=1e9), "fp32", 4)
    assert kernels.matmul_s(8, 1024, 1024) == pytest.approx(4 * (1024**2 + 2 * 8 * 1024) / 1e9)
    assert Roofline(ROUND, "fp32", 4).matmul_s(1024, 1024, 1024) == pytest.approx(
        2 * 1024**3 / 1e12
    )


def test_flops_and_efficiency_follow_from_the_step() -> None:
    found = predict(job(ranks=16))
    tokens = 16 * 4 * 256
    assert found.tokens_per_s == pytest.approx(tokens / found.step_s)
    assert found.tflops == pytest.approx(flops_per_token(SMALL) * tokens / found.step_s / 16 / 1e12)
    assert found.mfu == pytest.approx(found.tflops)


def test_the_largest_micro_batch_is_the_plans() -> None:
    machine = dataclasses.replace(load_machine("dgx-a100"), reserved=0.0)
    case = Job.plain(PRESETS["gpt-8b"], machine, 64, 3, "bf16", 1)
    most, checkpointed = largest_micro_batch(case)
    assert not checkpointed
    fits = [
        fit_of(dataclasses.replace(case, micro_batch=batch)).needed_nbytes <= machine.memory
        for batch in (most, most + 1)
    ]
    assert fits[0]
    assert fit_of(case).micro_batch == most  # at most + 1 the plan would checkpoint


def test_a_hundred_thousand_ranks_take_seconds() -> None:
    begin = time.perf_counter()
    machine = load_machine("dgx-h100")
    for ranks in (8_192, 32_768, 100_000):
        case = Job.plain(PRESETS["gpt-170b"], machine, ranks, 3, "bf16", 1)
        assert largest_micro_batch(case)[0] >= 1
        assert 0 < predict(case).mfu < machine.matmul_efficiency
    assert time.perf_counter() - begin < 10


def test_ranks_must_fill_nodes() -> None:
    with pytest.raises(ConfigError, match="multiple of the 4 ranks of a node of round"):
        job(ranks=6)


def test_activations_that_are_checkpointed_by_force_count_as_such() -> None:
    case = Job.plain(PRESETS["gpt-8b"], load_machine("dgx-a100"), 64, 3, "bf16", 1)
    forced = dataclasses.replace(case, checkpointing=True)
    assert needed_nbytes(case) == fit_of(case).needed_nbytes
    assert needed_nbytes(forced) < needed_nbytes(case)


# --- machine files


def test_every_number_of_every_machine_has_a_source() -> None:
    assert set(machine_names()) >= {"dgx-2-v100", "dgx-a100", "dgx-h100", "slingshot-a100"}
    for name in machine_names():
        machine = load_machine(name)
        numbers = {f.name for f in dataclasses.fields(Machine)}
        numbers -= {"name", "title", "peak", "bounds", "sources"}
        hosts = {"round_host", "message_host", "sum_host"}
        assert machine.shares_memory or hosts <= set(machine.sources)
        needed = {f.name for f in dataclasses.fields(Machine) if f.default is dataclasses.MISSING}
        numbers -= numbers - needed - set(machine.sources)  # few sheets know them
        assert numbers | {f"peak.{p}" for p in machine.peak} == set(machine.sources)
        assert all(len(source) > 10 for source in machine.sources.values()), name


def test_peak_is_that_of_a_device_whose_whole_name_is_known() -> None:
    assert device_peak("NVIDIA H100 80GB HBM3", "bf16") == (
        989.4e12,
        "NVIDIA H100 data sheet (SXM), tensor cores, dense",
    )
    assert load_machine("dgx-h100").peak == {"fp32": 67e12, "fp16": 989.4e12, "bf16": 989.4e12}
    of_sxm, of_gcd = (
        device_peak("NVIDIA H100 80GB HBM3", "tf32"),
        device_peak("AMD Instinct MI250X", "fp16"),
    )
    assert of_sxm is not None
    assert of_gcd is not None
    assert (of_sxm[0], of_gcd[0]) == (494.7e12, 191.5e12)
    for unknown in (
        "NVIDIA H100",
        "NVIDIA B300 SXM6 AC",
        "NVIDIA GB200",
        "NVIDIA A100-SXM-64GB",
        "",
    ):
        assert device_peak(unknown, "bf16") is None
    assert device_peak("Tesla V100-SXM2-32GB", "bf16") is None


def test_a_machine_file_with_a_fault_is_named(tmp_path: Path) -> None:
    whole = (FOLDER / "dgx-a100.toml").read_text()
    for broken, message in (
        (whole.replace("memory_rate", "memory_speed"), "memory_speed"),
        (
            whole.replace('{ value = 8, source = "NVIDIA DGX A100 data sheet" }', "8"),
            "a value and its source",
        ),
        (whole.replace("value = 80e9", "value = 0"), "memory: got 0, expected a number above 0"),
        (whole + "]", "is not TOML"),
        ("", r"missing dispatch, .*, ranks_per_node, .*; missing \[peak\]"),
        ("peak = 3", "peak: got 3, expected a table"),
        ("peak = 'h100'", "peak: got 'h100', expected a table .*, or one of v100-sxm, a100, "),
        ("a = " + "[" * 9000, "is not TOML"),
    ):
        path = tmp_path / "mine.toml"
        path.write_text(broken)
        with pytest.raises(ConfigError, match=message):
            load_machine(str(path))
    with pytest.raises(
        ConfigError, match=r"got 'cray-1', expected one of host, cpu-node, dgx-2-v100, .* file$"
    ):
        load_machine("cray-1", others=["host"])
    with pytest.raises(ConfigError, match=r"got './cray-1', .* file: No such file or directory$"):
        load_machine("./cray-1")
    os.mkfifo(tmp_path / "fifo")
    with at_once(), pytest.raises(ConfigError, match=r"fifo.* is a FIFO, expected a regular file"):
        load_machine(str(tmp_path / "fifo"))
    with pytest.raises(ConfigError, match="is a device, expected a regular file"):
        load_machine("/dev/zero")


# --- the paper


def test_memory_explains_the_published_batches_of_figure_3() -> None:
    for usable in (*USABLE_RANGE, sum(USABLE_RANGE) / 2):
        assert [largest_batch(run, usable) for run in FIGURE_3] == [run.batch for run in FIGURE_3]
    # and the range is all there is
    for usable in (USABLE_RANGE[0] - 1e8, USABLE_RANGE[1] + 1e8):
        assert [largest_batch(run, usable) for run in FIGURE_3] != [run.batch for run in FIGURE_3]


def test_states_and_activations_are_the_papers() -> None:
    assert [round(state_nbytes(run) / 1e9, 1) for run in FIGURE_3] == [20.9, 14.3, 10.9, 9.7]
    # sec. 6.1, P_a: 100 B, batch 32, MP 16; 8192 * 32 * 1024 * 125 * 2 B / 16, and a live layer of 12 h b s
    hundred = next(run for run in FIGURE_2 if run.name == "100B")
    live = 12 * 8192 * 32 * 1024 * 2
    assert activation_nbytes(hundred, 32) == pytest.approx(67.1e9 / 16 + live, rel=1e-3)


def test_ideal_activations_of_the_papers_examples() -> None:
    gpt2 = {"hidden": 1600, "layers": 48, "sequence": 1024, "batch": 32}
    plain = ideal_activation_numel(**gpt2, checkpointing=False)
    checkpointed = ideal_activation_numel(**gpt2, checkpointing=True)
    assert 2 * plain / 1e9 == pytest.approx(60.4, abs=0.05)  # "about 60 GB"
    assert 2 * checkpointed / 1e9 == pytest.approx(5.03 + 1.26, abs=0.01)
    large = {"hidden": 8192, "layers": 125, "sequence": 1024, "batch": 32}
    inputs = ideal_activation_numel(**large, checkpointing=True) - 12 * 8192 * 32 * 1024
    assert inputs / 1e9 == pytest.approx(33.55, abs=0.01)


def test_the_speed_up_from_64_to_400_gpus_is_super_linear() -> None:
    found = list(compare(FIGURE_3))
    assert found[-1].prediction.tflops == pytest.approx(ANCHOR_TFLOPS, rel=1e-6)  # calibrated here
    base = found[0]
    for other in found[1:]:
        speed_up = other.prediction.tokens_per_s / base.prediction.tokens_per_s
        assert speed_up > other.run.ranks / base.run.ranks
    assert found[-1].prediction.communication_s / found[-1].prediction.step_s < 0.5 * (
        base.prediction.communication_s / base.prediction.step_s
    )


def test_without_a_larger_batch_the_speed_up_is_not_super_linear() -> None:
    machine, first = calibrated(), FIGURE_3[0]
    speeds = [
        dataclasses.replace(run, batch=first.batch).predicted(machine).tflops for run in FIGURE_3
    ]
    assert speeds == sorted(speeds, reverse=True)


def test_the_calibration_carries_to_the_other_published_runs() -> None:
    for found in compare(FIGURE_2):
        if found.run.tflops is not None:
            assert found.prediction.tflops == pytest.approx(found.run.tflops, rel=0.2), found.run
