"""What makes two measurements of one point different before either has run."""

from __future__ import annotations

import pytest

from hpczero.errors import ConfigError
from scaling.evidence.record import machine_name
from scaling.sweep import jobs as setting


def test_a_partition_is_a_setting_and_a_time_limit_is_none() -> None:
    settings = [
        setting.slurm_setting(words, {})
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
    assert setting.slurm_setting([], {"SBATCH_PARTITION": "a100"}) == settings[0]


def test_gpus_and_cores_of_a_rank_are_settings() -> None:
    found = setting.slurm_setting(["--gpus-per-node=4", "-c", "8", "--gres=gpu:4", "-C", "ib"], {})
    wanted = {"gpus_per_node": "4", "cpus_per_task": "8", "gres": "gpu:4", "constraint": "ib"}
    assert wanted.items() <= found.items()


def test_our_variables_are_settings_unless_they_change_no_time() -> None:
    plain = setting.local_setting({})
    assert (
        setting.local_setting({"HPCZERO_TIMEOUT": "9", "HPCZERO_SERIES": "3", "HOME": "x"}) == plain
    )
    assert setting.local_setting({"HPCZERO_TRANSPORT": "flat"}) == {
        **plain,
        "HPCZERO_TRANSPORT": "flat",
    }
    assert plain["machine"] == machine_name()
    assert {"torch", "mpi4py"} <= plain.keys()


def test_an_option_without_its_value_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--partition.*expected one argument"):
        setting.slurm_setting(["--partition"], {})
