"""Options of every kind with values that nobody can mean: a ConfigError that names the option, short, never another."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpczero.checkpoint.__main__ as checkpoint_command
import hpczero.data.__main__ as data_command
import hpczero.plan.__main__ as plan_command
from hpczero.errors import ConfigError, HpcZeroError, launcher_rank
from hpczero.options.config import RunConfig
from hpczero.options.environment import Environment, misspelt
from hpczero.options.reading import load_toml, read_run_config, to_toml
from hpczero.plan.sizing import Batch
from hpczero.run.starting.precheck import model_config
from tests.files.test_regular import at_once

TYPED = ("9" * 5001, "-1", "1e400", "nan", "", "\udcff", "many")
WRITTEN = ("9" * 5001, "-1", "1e400", "nan", "[" * 3000, "[[]]")


def options() -> Iterator[tuple[str, str]]:
    for section in dataclasses.fields(RunConfig):
        for option in dataclasses.fields(type(getattr(RunConfig(), section.name))):
            yield section.name, option.name.removesuffix("_")


@pytest.mark.parametrize(("section", "name"), [*options()])
def test_any_value_of_any_option_is_taken_or_refused_by_name(
    tmp_path: Path, section: str, name: str
) -> None:
    file = tmp_path / "run.toml"
    refused = []
    for typed, value in [*((True, v) for v in TYPED), *((False, v) for v in WRITTEN)]:
        try:
            if typed:
                twice = [value] * (2 if name == "betas" else 1)
                config = read_run_config([f"--{section}.{name}", *twice])
            else:
                file.write_text(f"[{section}]\n{name} = {value}\n")
                config = load_toml(file, RunConfig)
            model_config(config.model)
            Batch.resolve(config.train, 1)
            to_toml(config).encode()  # as it goes into config.toml
        except ConfigError as error:
            refused.append(str(error))
    assert len(refused) >= 7
    assert max(map(len, refused)) < 1000
    assert [said for said in refused if name not in said and "is not TOML" not in said] == []


@pytest.mark.parametrize(
    ("command", "args"),
    [
        (plan_command, "--memory {} --ranks 2"),
        (plan_command, "--memory 9GB --ranks {}"),
        (plan_command, "--memory 9GB --ranks 2 --layers {} --hidden 8 --heads 2"),
        (plan_command, "--memory 9GB --ranks 2 --model gpt-nano --micro-batch {}"),
        (plan_command, "--memory 9GB --ranks 2 --model {}"),
        (data_command, "prepare {}"),
        (data_command, "prepare hpczero --out {}"),
        (data_command, "prepare hpczero --out no/no.h5 --tokenizer bpe --vocab-size {}"),
        (data_command, "prepare hpczero --out no/no.h5 --validation-fraction {}"),
        (data_command, "show {}"),
        (checkpoint_command, "ls {}"),
        (checkpoint_command, "export {} out"),
        (checkpoint_command, "import {} out"),
        (checkpoint_command, "import x out --step {}"),
        (checkpoint_command, "import x out --tied {}"),
    ],
)
def test_other_commands_refuse_them_too(
    command: object, args: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hpczero").write_text("text")
    refused: list[HpcZeroError] = []
    for value in ("9" * 5001, "many", "9" * 30, str(2**62), "1e400", "-1"):
        monkeypatch.setattr(sys, "argv", ["x", *args.format(value).split(" ")])
        try:
            with at_once():
                command.main()  # type: ignore[attr-defined]
        except HpcZeroError as error:
            refused.append(error)
        # else it can be meant, as a number of ranks where nothing is allocated
    assert len(refused) >= 4
    assert {error.exit_code for error in refused} == {78}
    assert max(len(str(error)) for error in refused) < 6000  # of which a path is 5,000


@pytest.mark.parametrize("value", ["²", "٣", "9" * 5001, "-1", "1e3", ""])
def test_digits_of_other_scripts_in_the_environment_are_none(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"):
        monkeypatch.setenv(name, value)
    assert launcher_rank() == 0
    names = ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_JOB_END_TIME")
    found = Environment.read(dict.fromkeys(names, value))
    assert (found.launched_ranks, found.local_rank, found.job_end) == (None, None, None)
    with pytest.raises(ConfigError, match="HPCZERO_FAKE_NODES"):
        Environment.read({"HPCZERO_FAKE_NODES": f"2x{value or 'y'}"})


def test_variable_that_is_nearly_one_of_ours_is_told_with_the_one_that_is_meant() -> None:
    given = {"HPCZERO_TIMOUT": "9", "HPCZERO_TRANSPRT": "flat", "HPCZEROSTRICT": "1"}
    meant = {"HPCZERO_TIMEOUT", "HPCZERO_TRANSPORT", "HPCZERO_STRICT"}
    assert {known for _, known in misspelt(given)} == meant


@pytest.mark.parametrize("name", ["HPCZERO_HOME", "HPCZERO_TEST_RANKS", "HPCZERO_MPI", "OVERLAP"])
def test_variables_of_others_are_not_told(name: str) -> None:
    assert misspelt({name: "1", "HPCZERO_TIMEOUT": "9"}) == []
