"""What is told before torch and MPI are imported: the same as after that, by one rank, and no rank is left waiting."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from hpczero.models import PRESETS
from hpczero.options.config import RunConfig
from hpczero.options.environment import Environment
from hpczero.options.reading import read_run_config
from hpczero.run.starting.precheck import mistake_of
from tests.helpers.mpirun import ROOT, Finished, run_alone, run_command, run_ranks
from tests.helpers.runs import options, train

LIMIT_S = 90
# Of a command line with {folder}; which of them need a run folder called "old" is said by their --run.name.
MISTAKES = {
    "no text": "--data.path {folder}/missing",
    "no token file": "--data.path {folder}/missing.h5",
    "empty text": "--data.path {folder}/empty.txt",
    "text is a device": "--data.path /dev/null",
    "token file is text": "--data.path {folder}/text.h5",
    "context": "--data.path {folder}/tokens.h5 --model.context 4096",
    "batch": "--train.global_batch 9 --train.micro_batch 2",
    "nodes": "--parallel.nodes 2x2",
    "degrees": "--parallel.tensor 2",
    "algorithms": "--parallel.algorithms all_gather=fastest",
    "nothing rests there": "--activations.rest disk --activations.folder {folder}",
    "the same memory": "--activations.checkpointing block --activations.rest host --parallel.device cpu",
    "no folder": "--activations.checkpointing block --activations.rest disk",
    "twice": "--activations.checkpointing selective --model.checkpoint_activations true",
    "resume": "--resume.from {folder}/missing",
    "folder": "--run.name file",
    "finished": "--run.name old",
    "other options": "--run.name old --run.seed 1",
    "not replaced": "--run.name old --resume.from never",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run called old, and files that are not what their names say."""
    folder = tmp_path_factory.mktemp("precheck")
    (folder / "empty.txt").touch()
    (folder / "text.h5").write_text("text, and no HDF5")
    (folder / "file").touch()
    (folder / "text.txt").write_text("the rank owns its shard\n" * 100)
    made = f"-m hpczero.data prepare {folder}/text.txt --out {folder}/tokens.h5".split()
    run_command([sys.executable, *made], LIMIT_S).ended()
    train(folder, ranks=1, run__name="old", train__steps=1).ended()
    return folder


EARLY_AND_LATE = """
import json, shlex, sys
from hpczero.options.environment import Environment
from hpczero.errors import HpcZeroError
from hpczero.options.reading import read_run_config
from hpczero.run.starting.precheck import mistake_of
from hpczero.run.starting.precheck import model_config

configs = {name: read_run_config(shlex.split(line)) for name, line in json.loads(sys.argv[1]).items()}
told = {}
for name, config in configs.items():
    mistake = mistake_of(config, model_config(config.model), Environment.read())
    told[name] = [type(mistake).__name__, str(mistake)]
started = sorted({"torch", "mpi4py.MPI"} & set(sys.modules))

from hpczero.accelerator import choose_accelerator
from hpczero.adapters.gpt import GPTAdapter
from hpczero.run.loop import train
from hpczero.job.signals import Signals

for name, config in configs.items():
    try:
        adapter = GPTAdapter(model_config(config.model))
        train(config, adapter, choose_accelerator("cpu"), Signals())
    except HpcZeroError as error:
        told[name] += [type(error).__name__, str(error)]
print(json.dumps({"told": told, "started": started}))
"""


@pytest.mark.worth("mistakes are told before torch is imported, in the same words")
@pytest.mark.fresh
def test_every_mistake_is_told_as_it_is_later_without_torch_and_mpi(folder: Path) -> None:
    common = " ".join(options(folder, run__name="new", train__steps=1)[2:])
    lines = {name: f"{common} {line.format(folder=folder)}" for name, line in MISTAKES.items()}
    done = run_command([sys.executable, "-c", EARLY_AND_LATE, json.dumps(lines)], LIMIT_S).ended()
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["started"] == []
    for name, told in found["told"].items():
        assert told[:2] == told[2:], name


# --- how the job ends

COUNTS = """
import runpy, sys
from hpczero.run.starting import precheck as start

def report(error, report=start.report):
    print("imported:", *sorted({"torch", "mpi4py.MPI"} & set(sys.modules)), flush=True)
    return report(error)

start.report = report
sys.argv[0] = "train"
runpy.run_module("hpczero.train", run_name="__main__")
"""


def errors_of(job: Finished) -> list[str]:
    return [line for line in job.stderr.splitlines() if line.startswith("[rank ")]


def wrong(folder: Path) -> list[str]:
    return options(folder, run__name="wrong", data__path=folder / "missing")[2:]


@pytest.mark.fresh
@pytest.mark.parametrize("ranks", [0, 1, 2, 4])
def test_rank_0_tells_it_once_before_it_imports_and_the_job_ends_with_78(
    folder: Path, ranks: int
) -> None:
    program = ["-c", COUNTS, *wrong(folder)]
    done = run_ranks(ranks, program, LIMIT_S) if ranks else run_alone(program, LIMIT_S)
    (error,) = errors_of(done.ended(78))
    assert error.startswith(f"[rank 0] DataError: {folder / 'missing'}: no such file or folder")
    if ranks:  # without a launcher MPI has to say how many there are
        assert "imported:\n" in done.stdout
    assert not (folder / "wrong").exists()


def test_launcher_that_lets_the_others_wait_does_not_make_the_job_hang(folder: Path) -> None:
    lenient = {"OMPI_MCA_orte_abort_on_non_zero_status": "0", "HPCZERO_TIMEOUT": "60"}
    done = run_ranks(2, ["-m", "hpczero.train", *wrong(folder)], LIMIT_S, env=lenient).ended(78)
    assert len(errors_of(done)) == 1, done
    assert "Timeout" not in done.stderr


def test_shell_that_hides_the_exit_code_of_a_rank_does_not_make_it_hang(folder: Path) -> None:
    script = shlex.join([sys.executable, "-m", "hpczero.train", *wrong(folder)]) + " 2>&1 | cat"
    launch = os.fspath(ROOT / "install" / "launch.sh")
    done = run_command(
        [launch, "2", "bash", "-c", script], LIMIT_S, env={"HPCZERO_TIMEOUT": "60"}
    ).ended(78)
    assert done.stdout.count("no such file or folder") == 1
    assert "Timeout" not in done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_wrong_number_of_ranks_in_the_environment_is_told_beside_the_mistake_that_rests_on_it(
    folder: Path, ranks: int
) -> None:
    batch = options(folder, run__name="wrong", train__global_batch=4)[2:]
    program = ["env", "OMPI_COMM_WORLD_SIZE=3", sys.executable, "-m", "hpczero.train", *batch]
    launch = os.fspath(ROOT / "install" / "launch.sh")
    done = run_command([launch, str(ranks), *program], LIMIT_S).ended(78)
    batch_error, ranks_error = errors_of(done)[:2]
    assert "expected a multiple of 3" in batch_error
    assert f"MPI sees {ranks} rank(s), but OMPI_COMM_WORLD_SIZE=3" in ranks_error


ELSEWHERE = """
import os, runpy, sys
if int(os.environ["OMPI_COMM_WORLD_RANK"]):
    os.chdir(sys.argv.pop())
else:
    sys.argv.pop()
if sys.argv.pop() == "unknown":
    from hpczero import errors
    from hpczero.options import environment
    environment.SIZE_VARIABLES = ()  # a launcher that sets others
    errors.launcher_rank = lambda: 0
sys.argv[0] = "train"
runpy.run_module("hpczero.train", run_name="__main__")
"""


@pytest.mark.parametrize("launcher", ["known", "unknown"])
def test_rank_that_has_not_the_text_goes_on_where_rank_0_has_it(
    folder: Path, tmp_path: Path, launcher: str
) -> None:
    (tmp_path / "empty").mkdir()
    cache = tmp_path / "tokens"
    args = options(tmp_path, data__path="text.txt", data__cache=cache, train__steps=1)[2:]
    program = ["-c", ELSEWHERE, *args, launcher, str(tmp_path / "empty")]
    run_ranks(2, program, LIMIT_S, cwd=folder).ended()


def test_ranks_that_no_launcher_has_told_of_find_out_together(folder: Path, tmp_path: Path) -> None:
    program = ["-c", ELSEWHERE, *wrong(folder), "unknown", str(tmp_path)]
    done = run_ranks(2, program, LIMIT_S).ended(78)
    assert all("could not prepare the token file" in line for line in errors_of(done)), done


# --- what is not refused


def config_of(folder: Path, **changes: str) -> RunConfig:
    return read_run_config(options(folder, **changes)[2:])


def said(config: RunConfig, environment: Environment | None = None) -> str:
    return str(mistake_of(config, PRESETS["gpt-micro"], environment or Environment()) or "")


def test_folder_in_which_somebody_is_at_work_is_left_to_the_lock(folder: Path) -> None:
    config = config_of(folder, run__name="old", train__steps="1")
    assert "holds a finished run" in said(config)
    lock = folder / "old" / "checkpoints" / ".lock-0123456789abcdef"
    lock.touch()
    try:
        assert said(config) == ""
    finally:
        lock.unlink()


def test_series_with_nothing_left_to_do_is_not_refused_for_its_batch(tmp_path: Path) -> None:
    series = Environment(series="7")
    config = config_of(tmp_path, train__global_batch="9", train__micro_batch="2")
    assert "expected a multiple of" in said(config, series)
    record = {"event": "end", "series": "7", "step": config.train.steps, "code": 0}
    config.run.path.mkdir(parents=True)
    (config.run.path / "attempts.jsonl").write_text(json.dumps(record) + "\n")
    assert said(config, series) == ""


@pytest.mark.parametrize(
    ("variables", "rank"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3"}, 3),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "4"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "SLURM_PROCID": "0"}, None),
        ({"PMI_SIZE": "2", "PMI_RANK": "1", "SLURM_PROCID": "0"}, 1),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "PMIX_RANK": "1"}, 1),
        ({"SLURM_PROCID": "0"}, None),
        ({}, None),
    ],
)
def test_rank_is_that_of_the_launcher_that_says_how_many_there_are(
    variables: dict[str, str], rank: int | None
) -> None:
    assert Environment.read(variables).launched_rank == rank


def test_number_of_ranks_is_the_launchers_and_a_new_run_leaves_nothing(tmp_path: Path) -> None:
    config = config_of(tmp_path, train__global_batch="8")
    assert said(config) == ""
    three = Environment(launched_by="PMI_SIZE", launched_ranks=3, launched_rank=0)
    assert "3 rank" in said(config, three)
    assert os.listdir(tmp_path) == []


def test_exact_run_goes_on_whatever_its_micro_batch_was_by_default(folder: Path) -> None:
    words = {"run__name": "leaves", "run__exact": "require", "train__global_batch": "3"}
    train(folder, ranks=1, train__steps=1, **words).ended()
    assert said(config_of(folder, train__steps="2", **words)) == ""


def test_ranks_that_share_layers_have_one_batch_between_them(tmp_path: Path) -> None:
    """Of four ranks two have samples of their own, so an even batch will do, and an odd one will not."""
    four = Environment(launched_ranks=4)
    even, odd = (
        config_of(tmp_path, train__global_batch=batch, parallel__tensor="2") for batch in "65"
    )
    assert said(even, four) == ""
    assert "train.global_batch" in said(odd, four)
