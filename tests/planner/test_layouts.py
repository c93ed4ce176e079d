"""The search over layouts: what it finds can be typed, fits, trains the same batch, and is the fastest."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from typing import Any

import pytest

from hpczero.job.mesh import Mesh
from hpczero.models.config import GPTConfig
from hpczero.options.reading import read_run_config
from hpczero.plan.degrees import mesh_of
from hpczero.plan.sizing import Batch
from hpczero.planner.search import FoundLayout, layout_candidates, options_of_layout, search_layouts
from hpczero.predict.machine import Machine, load_machine
from tests.helpers.mpirun import run_command

MODEL = GPTConfig(vocab_size=512, context=64, layers=6, hidden=128, heads=4)
MACHINE = dataclasses.replace(load_machine("dgx-a100"), ranks_per_node=4)


def searched(machine: Machine = MACHINE, **options: Any) -> list[FoundLayout]:
    return search_layouts(MODEL, machine, ranks=8, precision="bf16", global_batch=16, **options)


def test_what_is_found_fits_and_can_be_typed() -> None:
    found = searched()
    assert len(found) > 20
    for one in found:
        spread = one.spread
        assert one.spread.needed_nbytes <= MACHINE.usable
        assert spread.global_batch == 16
        config = read_run_config(shlex.split(options_of_layout(one)))
        options = config.parallel
        options.check(stage=options.stage)
        assert mesh_of(options, 8, 4) == spread.mesh
        assert (options.stage, options.order) == (spread.stage, spread.schedule)
        batch = Batch.resolve(config.train, spread.mesh.replicate * spread.mesh.shard)
        assert batch == Batch(16, spread.micro_batch, spread.accumulation)


def test_first_is_within_one_percent_of_the_fastest_and_the_others_are_in_order() -> None:
    found = searched()
    seconds = [one.step.step_s for one in found]
    assert seconds[1:] == sorted(seconds[1:])
    assert seconds[0] <= 1.01 * min(seconds)


def test_every_kind_of_layout_is_tried() -> None:
    meshes = {spread.mesh for _, spread in layout_candidates(MODEL, MACHINE, 8, "bf16", 16)}
    # Tensor degrees 1, 2, 4 of a node of 4; pipelines 1, 2, 4 of at most 6 blocks; shards of the world or the node.
    expected = {
        Mesh(shard=8),
        Mesh(replicate=2, shard=4),
        Mesh(shard=4, tensor=2),
        Mesh(replicate=2, shard=2, tensor=2),
        Mesh(shard=2, tensor=4),
        Mesh(pipeline=2, shard=4),
        Mesh(pipeline=2, shard=2, tensor=2),
        Mesh(pipeline=2, tensor=4),
        Mesh(pipeline=4, shard=2),
        Mesh(pipeline=4, tensor=2),
    }
    assert meshes == expected


def test_little_memory_leaves_layouts_that_share_more() -> None:
    roomy = searched()
    least = min(one.spread.needed_nbytes for one in roomy)
    small = dataclasses.replace(MACHINE, memory=MACHINE.reserved + 1.2 * least)
    tight = searched(small)
    assert 0 < len(tight) < len(roomy)
    assert all(one.spread.needed_nbytes <= 1.2 * least for one in tight)
    nothing = dataclasses.replace(MACHINE, memory=MACHINE.reserved + 0.5 * least)
    assert searched(nothing) == []


@pytest.mark.parametrize("how", ["text", "json"])
def test_command_compares_layouts_of_a_described_machine(how: str) -> None:
    words = ["--auto", "--layouts", "--model", "gpt2", "--machine", "dgx-a100", "--ranks", "16"]
    words += ["--global-batch", "16", "--precision", "bf16"]
    words += ["--json"] * (how == "json")
    done = run_command([sys.executable, "-m", "hpczero.plan", *words], timeout=120).ended()
    if how == "json":
        found = json.loads(done.stdout)["fitting"]
        assert found[0]["mesh"]["shard"] >= 1
        assert "--parallel.stage" in found[0]["options"]
    else:
        assert "predicted, nothing was run" in done.stdout
        assert "pin the first: --parallel.stage" in done.stdout


def test_layouts_without_a_machine_are_refused() -> None:
    words = ["--auto", "--layouts", "--model", "gpt2"]
    done = run_command([sys.executable, "-m", "hpczero.plan", *words], timeout=60).ended(78)
    assert "--layouts: got no --machine" in done.stderr


def test_partial_sums_of_half_the_bytes_can_be_asked_for() -> None:
    """They change the result, so they are never chosen by the search itself."""
    # On a fast network the rounding of so small a model costs more than the bytes.
    machine = dataclasses.replace(MACHINE, nic_rate=MACHINE.nic_rate / 100)
    exact, half = (searched(machine, reduce=reduce) for reduce in ("fp32", "bf16"))
    assert not any("reduce" in options_of_layout(one) for one in exact)
    assert all("--parallel.reduce bf16" in options_of_layout(one) for one in half)
    by_layout = {options_of_layout(one): one.step.step_s for one in exact}
    pairs = [
        (one.step.step_s, by_layout[options_of_layout(one).replace("--parallel.reduce bf16 ", "")])
        for one in half
    ]
    assert all(less <= more for less, more in pairs)
    assert any(less < more for less, more in pairs)
    for one in half[:3]:
        config = read_run_config(shlex.split(options_of_layout(one)))
        assert config.parallel.reduce == "bf16"
