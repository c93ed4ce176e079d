"""What a study consists of: its points, what makes two of them the same, and what cannot be; settings."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hpczero.errors import ConfigError
from scaling.evidence.record import machine_name
from scaling.sweep.jobs import local_setting, slurm_setting
from scaling.sweep.study import Grid, Point, parse_layout

WEAK = Grid("weak", False, ["tiny"], [0, 3], [2, 1, 4], [3])
STRONG = dataclasses.replace(WEAK, kind="strong", batches=[8])


def test_strong_keeps_the_global_batch_and_weak_that_of_a_rank() -> None:
    assert [(p.ranks, p.batch, p.global_batch) for p in STRONG.points() if p.stage == 3] == [
        (1, 8, 8),
        (2, 4, 8),
        (4, 2, 8),
    ]
    assert [(p.ranks, p.batch, p.global_batch) for p in WEAK.points() if p.stage == 0] == [
        (1, 3, 3),
        (2, 3, 6),
        (4, 3, 12),
    ]


def test_a_growing_model_has_one_size_for_each_number_of_ranks() -> None:
    grid = dataclasses.replace(WEAK, grow=True, models=["tiny", "gpt-micro", "gpt-nano"])
    found = [(p.ranks, p.model, p.config.layers) for p in grid.points() if p.stage == 0]
    assert found == [(1, "tiny", 2), (2, "gpt-micro", 2), (4, "gpt-nano", 4)]
    with pytest.raises(ConfigError, match="2 models for 3 numbers of ranks"):
        dataclasses.replace(grid, models=["tiny", "gpt-micro"]).points()


def test_ranks_fill_whole_nodes() -> None:
    grid = dataclasses.replace(WEAK, ranks_per_node=[2])
    assert {p.ranks: (p.nodes, p.ranks_per_node) for p in grid.points()} == {
        1: (1, 1),
        2: (1, 2),
        4: (2, 2),
    }
    with pytest.raises(ConfigError, match="--ranks: got 3, expected a multiple"):
        dataclasses.replace(grid, ranks=[3]).points()


def test_micro_batches_divide_the_batch() -> None:
    grid = dataclasses.replace(STRONG, micro_batch=2)
    assert {p.ranks: p.batch // p.micro_batch for p in grid.points()} == {1: 4, 2: 2, 4: 1}
    with pytest.raises(ConfigError, match="--micro_batch: got 3, which does not divide the 8"):
        dataclasses.replace(STRONG, micro_batch=3).points()


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (dataclasses.replace(STRONG, batches=[6]), "a global batch of 6, which 4 ranks do not"),
        (dataclasses.replace(WEAK, models=["gpt-9b"]), "--models: got 'gpt-9b', expected some of"),
    ],
)
def test_what_cannot_be_is_named(grid: Grid, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        grid.points()


def test_equal_measurements_have_one_key_and_others_do_not() -> None:
    points = dataclasses.replace(WEAK, jobs=2).points()
    keys = [point.key("abc") for point in points]
    assert len(set(keys)) == len(points) == 12
    assert keys == [Point.of_json(json.loads(json.dumps(p.as_json()))).key("abc") for p in points]
    assert points[0].key("abc") != points[0].key("abd")
    assert points[0].key("abc") != dataclasses.replace(points[0], steps=31).key("abc")
    # at N0 a strong and a weak study may share a point
    base = dataclasses.replace(STRONG, batches=[3], ranks=[1]).points()[0]
    assert base.key("abc") == WEAK.points()[0].key("abc")


def test_what_is_no_point_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a point of a sweep"):
        Point.of_json({"model": "tiny"})


def test_the_default_batch_of_a_strong_study_serves_all_its_ranks() -> None:
    for ranks in ([1, 2], [16, 32, 64, 128, 256, 400], [3], [1]):
        grid = dataclasses.replace(STRONG, batches=None, ranks=ranks)
        points = grid.points()
        assert {p.global_batch for p in points} == {grid.default_batch}
        assert min(p.batch for p in points) >= 2
        assert all(p.micro_batch <= 8 and p.batch % p.micro_batch == 0 for p in points)
    assert dataclasses.replace(STRONG, batches=None, ranks=[1, 2]).default_batch == 4
    weak = dataclasses.replace(WEAK, batches=None, ranks=[16, 400]).points()
    assert {p.batch for p in weak} == {4}


def test_a_refused_batch_is_told_one_that_would_do() -> None:
    grid = dataclasses.replace(STRONG, batches=[10], ranks=[2, 3, 4])
    with pytest.raises(
        ConfigError, match=r"which 3 ranks do not.*: 12 would do, as would any other"
    ):
        grid.points()
    assert dataclasses.replace(grid, batches=[12]).points()


def test_nodes_vary_at_the_same_ranks_and_no_point_is_measured_twice() -> None:
    grid = dataclasses.replace(WEAK, stages=[3], ranks_per_node=[1, 2, 4])
    found = [(p.ranks, p.nodes) for p in grid.points()]
    assert found == [(1, 1), (2, 2), (2, 1), (4, 4), (4, 2), (4, 1)]


def test_the_device_and_the_setting_make_another_key() -> None:
    point = WEAK.points()[0]
    keys = [point.key("abc"), point.key("abc", {"partition": "a100"})]
    keys += [point.key("abc", {"partition": "h100"})]
    keys += [dataclasses.replace(point, device=device).key("abc") for device in ("auto", "cuda")]
    assert len(set(keys)) == 5


LAYOUTS = dataclasses.replace(
    WEAK,
    kind="layouts",
    ranks=[4],
    stages=[1],
    batches=[16],
    layouts=[parse_layout(t) for t in ("plain", "tensor=2,sequence=true", "pipeline=2")],
)


def test_layouts_keep_the_global_batch_and_pipelines_have_several_micro_batches() -> None:
    points = LAYOUTS.points()
    assert [(p.shared, p.data, p.batch, p.global_batch, p.micro_batch) for p in points] == [
        ("", 4, 4, 16, 4),
        (", tensor 2, sequence True", 2, 8, 16, 8),
        (", pipeline 2", 2, 8, 16, 2),
    ]


def test_layouts_are_part_of_a_point_and_the_plain_one_is_not_written() -> None:
    plain, tensor, _ = LAYOUTS.points()
    assert Point.of_json(json.loads(json.dumps(tensor.as_json()))) == tensor
    assert "layout" not in plain.as_json()
    assert len({point.key("abc") for point in LAYOUTS.points()}) == 3


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("tensr=2", "got 'tensr=2'.*expected plain, or name=value with a name of tensor"),
        ("tensor=x", "got 'tensor=x', expected .*invalid literal for int"),
        ("sequence=1", "--sequence'. Expected one of .'true', 'false'"),
        ("schedule=best", "--schedule'. Expected one of .*1f1b"),
        ("tensor=3", "tensor"),
        ("pipeline=4", "pipeline: got 4 stages for a model of 2 block"),
        ("secondary=true", "secondary: got true at stage 1"),
    ],
)
def test_layouts_that_cannot_be_are_refused_before_a_job_is_started(
    layout: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(LAYOUTS, layouts=[parse_layout(layout)]).points()


def test_layouts_are_compared_on_one_number_of_ranks() -> None:
    with pytest.raises(ConfigError, match=r"--ranks: got .*expected one number"):
        dataclasses.replace(LAYOUTS, ranks=[2, 4]).points()


# --- settings


def test_a_partition_is_a_setting_and_a_time_limit_is_none() -> None:
    settings = [
        slurm_setting(words, {})
        for words in (
            ["--partition=a100", "--time=30:00"],
            ["-p", "a100", "--time", "1:00:00", "--account=x"],
            ["-pa100"],
            ["--partition", "h100", "--time=30:00"],
            [],
        )
    ]
    assert settings[0] == settings[1] == settings[2]
    assert settings[0]["partition"] == "a100"
    assert settings[3]["partition"] == "h100"
    assert "partition" not in settings[4]
    assert slurm_setting([], {"SBATCH_PARTITION": "a100"}) == settings[0]


def test_gpus_and_cores_of_a_rank_are_settings() -> None:
    found = slurm_setting(["--gpus-per-node=4", "-c", "8", "--gres=gpu:4", "-C", "ib"], {})
    wanted = {"gpus_per_node": "4", "cpus_per_task": "8", "gres": "gpu:4", "constraint": "ib"}
    assert wanted.items() <= found.items()


def test_our_variables_are_settings_unless_they_change_no_time() -> None:
    plain = local_setting({})
    assert local_setting({"HPCZERO_TIMEOUT": "9", "HPCZERO_SERIES": "3", "HOME": "x"}) == plain
    assert local_setting({"HPCZERO_TRANSPORT": "flat"}) == {
        **plain,
        "HPCZERO_TRANSPORT": "flat",
    }
    assert plain["machine"] == machine_name()
    assert {"torch", "mpi4py"} <= plain.keys()


def test_an_option_without_its_value_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--partition.*expected one argument"):
        slurm_setting(["--partition"], {})
