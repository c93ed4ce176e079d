"""Every command that the pages show does what it is typed for.

Each is typed as it stands, by bash, in a copy of the tree, and must end with 0, unless TABLE says otherwise: then with
the smallest honest work, or asked of a real SLURM, or of the program's own parser, or not at all, for a reason that the
page itself states. So a new command on a page is run from its first day.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest
import tyro

from hpczero.options.reading import parse_command_line
from tests import test_examples as examples
from tests.helpers.cases import EVERYTHING
from tests.helpers.mpirun import ROOT
from tests.helpers.short_probe import write_launcher
from tests.helpers.transcripts import Shown, Tree, blocks, commands_of, named_variables, scripts_of
from tests.slurm.cluster import SlurmCluster, why_not

README = ROOT / "README.md"
RUNNING = ROOT / "docs" / "running.md"
ON_SLURM = ROOT / "docs" / "running-on-slurm.md"
PAGES = [
    README,
    RUNNING,
    ON_SLURM,
    *(ROOT / folder / "README.md" for folder in ("examples", "scaling", "slurm")),
]
LIMIT_S = 240.0  # seconds on an idle machine

PLACEHOLDERS = {  # of the pages, and what is there
    "[run.toml] [--section.key value ...]": "run.toml --train.clip 0.5",
    "[run.toml] [OPTIONS]": "run.toml",
    " [OPTIONS]": "",
    " ARGUMENTS": " run.toml",
    "sample RUN": "sample runs/given",
    "ls PATH": "ls runs/given",
    "verify PATH": "verify runs/given",
    "export PATH OUT": "export runs/given runs/exported",
    "CHECKPOINT OUT": "runs/given/checkpoints/step-000000001 runs/exported",
    "WEIGHTS OUT": "runs/given/model.safetensors runs/imported",
    "record FILE": "record runs/record.json",
    "--disk FOLDER": "--disk runs",
    "TEXT...": "README.md docs",
    " COMMAND...": " hostname",
    "N COMMAND": "2 hostname",
    " COMMAND": " hostname",
    "runs/<name>": "runs/given",
    "runs/NAME": "runs/given",
    "runs/mine": "runs/given",
    "mpirun -n 8": "mpirun -n 2",
    "ACCOUNT=...": "ACCOUNT=project",
    "N SCRIPT ...": "2 slurm/train.sh",
    "[sbatch's options]": "--nodes=2",
}


@dataclass(frozen=True)
class Verdict:
    """How a command is tried.

    Attributes:
        how: ``type`` in the copy; ``ask`` a real SLURM whether it would take it (its partition has 25 nodes of 16 fake
            GPUs); ``parse`` by the program itself, where it would measure for minutes and has tests of its own;
        ``elsewhere`` by a test of its own, with the same words; ``no``.
        needs: a pattern that every page with this command must have: what it takes to run it as it stands.
        before, after: what is typed around it; options after it ask for less work, never for other work.
        instead: (text on the page, text that is typed).
        code: that it must end with.
        shows: what it must print, a pattern.
    """

    how: str = "type"
    needs: str = ""
    before: str = ""
    after: str = ""
    instead: tuple[str, str] = ("", "")
    code: int = 0
    shows: str = ""

    def typed(self, text: str) -> str:
        """The line for bash."""
        for old, new in [*([self.instead] if self.instead[0] else []), *PLACEHOLDERS.items()]:
            text = text.replace(old, new)
        return f"{self.before}{text} {self.after}".strip()


SMALL = "--train.steps 1 --model.layers 1 --model.context 32 --evaluation.batches 1"
MAKE = f'ARGS="{SMALL}"'
ONE_LAYOUT = "--only 0 --layers 1 --rounds 1 --steps 1 --warm_up 1"
STUDY = "--models tiny --stages 0 --batches 2 --steps 2 --warm_up 1"
CLUSTER = "cluster|SLURM"
BY_SBATCH = (
    "python -m scaling.sweep weak --by sbatch --ranks_per_node 8 --ranks 8 16 32 64 --jobs 3 "
    "-- --partition=gpu --time=30:00"
)
MADE = r"everything into \.venv|on a login node|After `make setup`"
TRAINS = Verdict(after=SMALL, shows="done: python -m hpczero.sample")
WATCH = Verdict(after="--once", shows="finished: all steps are done")
DRY = Verdict(
    before="DRY_RUN=1 ", shows="nothing is submitted|scaling.sweep .* --by sbatch", needs=CLUSTER
)
# Slurm/README.md names its neighbours
BESIDE = Verdict(before="DRY_RUN=1 slurm/", shows=DRY.shows, needs="Job script")

TABLE = {
    "install/launch.sh 2 .venv/bin/python -m hpczero.train --run.name mine --data.path my.txt "
    "--data.tokenizer bpe": Verdict(
        before="cp CHANGELOG.md my.txt && ", after=SMALL, shows="done: python -m hpczero.sample"
    ),
    '.venv/bin/python -m hpczero.sample runs/mine --prompt "Once "': Verdict(after="--tokens 5"),
    "make setup": Verdict("no", needs=MADE),
    "HPCZERO_MPI=mpich make setup": Verdict("no", needs="from PyPI"),
    "make test": Verdict("no", needs="core of the tests"),  # this one too
    "make test-all": Verdict("no", needs="every case of every test"),
    'make test ARGS="-k layout"': Verdict(
        after="-n", shows=r"tests/run.py -k layout\n"
    ),  # tests that run tests: whoever runs this file has typed it
    "make lint": Verdict(after="-n", shows="ruff check .*\n.*\n.*mypy", needs="ruff and mypy"),
    "make quick": Verdict(after="-n", shows="tests/quick.py", needs="have changed"),
    "make train": Verdict(after=MAKE, shows="done: "),
    "make picture": Verdict(after=MAKE, shows="docs/loss.png"),
    # What make would type is typed for `make train` itself.
    'make train RANKS=4 ARGS="--train.steps 50"': Verdict(
        after="-n", shows=r"launch.sh 4 \S+ -m hpczero.train --train.steps 50\n"
    ),
    'make train RUN=runs/mine ARGS="--run.name mine"': Verdict(
        after="-n", shows=r"hpczero.train --run.name mine\n.*hpczero.sample runs/given"
    ),
    "make docs": Verdict(after="-n", shows="-m sphinx .* build/docs"),  # tests/test_site.py
    'pip install ".[hf]"': Verdict(after="--no-deps --no-build-isolation --quiet --dry-run"),
    'pip install ".[trackers]"': Verdict(after="--no-deps --no-build-isolation --quiet --dry-run"),
    "make examples": Verdict(shows="graphsage")
    if EVERYTHING
    else Verdict(after="-n", shows=r"examples/adapters.py --ranks"),  # --only gcn is typed
    "pip install .": Verdict(after="--no-deps --no-build-isolation --quiet"),
    "pip install . --extra-index-url https://download.pytorch.org/whl/cpu": Verdict(
        after="--no-index --no-deps --no-build-isolation --quiet"
    ),
    "install/launch.sh 2 .venv/bin/python first.py": Verdict(
        shows=r"step 0: loss \d.*step 100: loss 0\.\d"
    ),
    "mpirun -n 4 .venv/bin/python -m hpczero.train": TRAINS,
    ".venv/bin/python -m hpczero.train --train.steps 20": TRAINS,
    "python -m hpczero.train [run.toml] [--section.key value ...]": TRAINS,
    "srun -n 64 .venv/bin/python -m hpczero.train run.toml": Verdict(
        instead=("srun -n 64 ", ""), after=SMALL, needs="inside a SLURM allocation", shows="done: "
    ),
    "python -m hpczero.watch RUN [RUN ...]": Verdict(
        instead=("RUN [RUN ...]", "runs/given --once"), shows="finished: all steps are done"
    ),
    "python -m hpczero.watch RUN": Verdict(instead=("RUN", "runs/given"), after="--once"),
    "python -m hpczero.watch runs/mine": WATCH,
    ".venv/bin/python -m hpczero.watch runs/mine": WATCH,
    "python -m hpczero.watch runs/mine --page": WATCH,
    # In running text these name the command.
    "python -m hpczero.plan": Verdict(
        after="--model gpt2 --ranks 2 --memory 8GB", shows="Use stage"
    ),
    "python -m hpczero.plan --model FOLDER": Verdict("elsewhere"),  # tests/plan/test_command.py
    "mpirun -n 2 python -m hpczero.checkpoint export": Verdict(after="runs/given runs/by-two"),
    "mpirun -n 2 python -m hpczero.checkpoint import": Verdict(
        after="runs/given/model.safetensors runs/imported-by-two"
    ),
    # tests/runs/test_exact_runs.py
    "python -m hpczero.replay RUN --step 500": Verdict("elsewhere"),
    "python -m hpczero.plan --auto": Verdict(
        after="--model gpt2 --ranks 8 --machine dgx-h100", shows="to pin it"
    ),
    # tests/predict/test_calibrated.py: the runs are a reader's
    "python -m hpczero.plan --calibrate runs/x runs/y --machine dgx-h100 --out here.toml": Verdict(
        "elsewhere"
    ),
    "python -m hpczero.plan --machine": Verdict(
        after="dgx-h100 --model gpt2 --ranks 8", shows="predicted step"
    ),
    # SLURM
    "NODES=2 slurm/train_60b.sh": Verdict(code=78, shows="from 60 ranks on it fits"),
    "NODES=4 slurm/preflight.sh --directory runs": DRY,
    "NODES=25 GPUS_PER_NODE=16 slurm/preflight.sh --directory runs": DRY,
    "NODES=4 RANKS_PER_NODE=8 GPUS_PER_NODE=8 CPUS_PER_RANK=12 slurm/train.sh run.toml": DRY,
    "NODES=4-8 RANKS_PER_NODE=8 GPUS_PER_NODE=8 slurm/train.sh run.toml --run.exact require "
    "--train.global_batch 64": DRY,
    "NODES=8 ELASTIC_NODES=6 RANKS_PER_NODE=8 slurm/train.sh run.toml --run.exact require "
    "--train.global_batch 64": DRY,
    "ELASTIC_NODES=4 sbatch --no-kill --nodes=4-8 --ntasks-per-node=8 slurm/train.sh run.toml": (
        Verdict("ask", needs=CLUSTER)
    ),
    "scontrol update JobId=JOB NumTasks=N": Verdict("no", needs="A requeued job waits"),
    "ACCOUNT=... slurm/weak_scaling.sh": DRY,
    "NODES=4 RANKS_PER_NODE=8 slurm/chain.sh 5 slurm/train.sh run.toml": DRY,
    "slurm/train.sh ARGUMENTS": DRY,
    "train_60b.sh [OPTIONS]": BESIDE,
    "train.sh [run.toml] [OPTIONS]": BESIDE,
    "preflight.sh [OPTIONS]": BESIDE,
    "point.sh COMMAND...": BESIDE,
    "chain.sh N SCRIPT ...": BESIDE,
    "bind.sh COMMAND...": Verdict(before="mpirun -n 2 slurm/", needs="not a job"),
    "sbatch slurm/train_60b.sh": Verdict("ask", needs="25 nodes"),
    # tests/slurm packs, sends and starts from there
    "slurm/pack.sh": Verdict("no", needs="on a login node"),
    "pack.sh [ARCHIVE]": Verdict("no", needs="packs environment"),
    "on_node.sh VERB ...": Verdict("no", needs="not a job"),
    "ENV_ARCHIVE=env.tar NODES=50 slurm/train.sh run.toml": Verdict("no", needs="sbcast"),
    "lfs setstripe -c 25 -S 16M runs": Verdict("no", needs="Lustre"),
    "sbatch --exclude=n3,n17 slurm/train_60b.sh": Verdict(
        "ask", needs=CLUSTER, instead=("n3,n17", "host2,host3")
    ),
    "sbatch --array=1-5%1 --nodes=4 --ntasks-per-node=8 slurm/train.sh run.toml": Verdict(
        "ask", needs=CLUSTER
    ),
    "sbatch [sbatch's options] slurm/train.sh ARGUMENTS": Verdict("ask", needs="sbatch"),
    "sbatch $(cat logs/exclude-4711) slurm/train_60b.sh": Verdict(
        "ask", needs="file of its\nown", instead=("$(cat logs/exclude-4711)", "--exclude=host3")
    ),
    "sbatch --signal=USR1@300": Verdict("ask", needs="batch systems", after="slurm/train.sh"),
    "sbatch --test-only": Verdict("ask", needs="real SLURM", after="slurm/train_60b.sh"),
    "srun --mpi=list": Verdict("ask", needs=CLUSTER),
    "srun --overlap": Verdict("no", needs="in batch jobs"),  # tests/slurm: elastic jobs
    "scancel JOB": Verdict("no", needs="scancel with and without a signal"),  # tests/slurm does
    "scancel --signal=USR1 JOB": Verdict("no", needs="scancel with and without a signal"),
    "scontrol requeue": Verdict("no", needs="What the job does"),  # by itself
    # measurements
    "mpirun -n 2 python -m scaling.bridge": Verdict(after="--mib 1 --rounds 1 --warm_up 1"),
    "mpirun -n 2 python -m scaling.collectives": Verdict(after="--sizes 65536 --rounds 1"),
    "mpirun -n 2 python -m scaling.planner": Verdict("elsewhere"),  # tests/scaling/test_planner.py
    "mpirun -n 2 python -m scaling.tiers": Verdict(after="--workload tiny --rounds 1 --fio_mib 0"),
    "mpirun -n 2 python -m scaling.transports": Verdict(after="--workload tiny --rounds 1"),
    "mpirun -n 8 python -m scaling.layouts": Verdict(after=ONE_LAYOUT),
    "python -m tests.cluster --hosts 4 --ranks-per-host 2 --rate 250 -- -m scaling.layouts --rate_mbit 250 "
    "--emulated": Verdict(
        instead=("--hosts 4 --ranks-per-host 2", "--hosts 2 --ranks-per-host 1"),
        after=ONE_LAYOUT,
        needs="root",
    ),
    "mpirun -n 8 python -m scaling.simulate.check": Verdict(
        code=78, shows="expected several: links between nodes", needs="on emulated hosts"
    ),
    "python -m scaling.simulate": Verdict(after="--model gpt2 --ranks 16 --ranks_per_node 8"),
    "python -m scaling.hostcost": Verdict(after="--model gpt2 --ranks 64 --ranks_per_node 8"),
    "python -m scaling.sweep layouts": Verdict("parse", after="--layouts plain"),
    "python -m scaling.gpu": Verdict(after="--twin --checks kernels", needs="GPU"),
    "python -m scaling.sweep": Verdict("parse", after="weak"),
    "python -m scaling.sweep strong --models gpt-8x512 --stages 0 3 --ranks 1 2 --batches 8": Verdict(
        before="HPCZERO_LAUNCH=$PWD/short-probe ", after=STUDY
    ),
    "python -m scaling.sweep weak --models gpt-8x512 --stages 0 3 --ranks 1 2 --batches 4": Verdict(
        "parse"
    ),
    BY_SBATCH: Verdict("parse", needs=CLUSTER),
    "python -m scaling.report runs/sweep --page report.html": Verdict(
        # The study that another command of the pages has left, or a smaller one.
        before=f"ls runs/sweep/sweep-*.jsonl || python -m scaling.sweep weak --ranks 1 {STUDY} && ",
        shows="page in report.html",
    ),
    "python -m scaling.predict --layouts 400": Verdict(
        "type", instead=("--layouts 400", "--layouts 16"), shows="dgx-h100"
    ),
    "python -m scaling.losses runs/exact-1 runs/int8-1 ...": Verdict(
        before="cp -r runs/given runs/exact-1 && ",
        instead=("runs/exact-1 runs/int8-1 ...", "runs/exact-1"),
    ),
    "python -m scaling.predict --scale": Verdict(shows="host / compute"),
}

TABLE.update(dict.fromkeys(examples.COMMANDS, Verdict("elsewhere")))
PARSED = [
    "layouts",
    "overhead",
    "parallel",
    "peers",
    "start",
    "checkpoint",
    "sweep weak",
    "predict --check",
]
TABLE.update({f"python -m scaling.{words}": Verdict("parse") for words in PARSED})

SHOWN = [shown for page in PAGES for shown in commands_of(page)]
ONCE = list({shown.text: shown for shown in SHOWN}.values())


def verdict(shown: Shown) -> Verdict:
    """Of TABLE; without an entry a command is typed as it stands."""
    return TABLE.get(shown.text, Verdict())


def of(how: str) -> pytest.MarkDecorator:
    """All commands with such a verdict, each once whatever the number of its pages."""
    found = [shown for shown in ONCE if verdict(shown).how == how]
    return pytest.mark.parametrize("shown", found, ids=[shown.text for shown in found])


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """The copy, with what the pages take for granted: ``first.py``, ``run.toml``, token files, a small run."""
    made = Tree(tmp_path_factory.mktemp("tree"))
    (made.folder / "first.py").write_text(blocks(README, "python")[0])
    (made.folder / "run.toml").write_text(blocks(RUNNING, "toml")[0])
    write_launcher(made.folder / "short-probe")
    given = f"""
        python -m hpczero.data prepare README.md docs --out tokens.h5 &&
        python -m hpczero.train --run.name given --data.path tokens.h5 {SMALL}
    """
    made.type(given, env={}, limit_s=LIMIT_S).ended()
    return made


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    """A SLURM of our own; skips where there can be none."""
    if reason := why_not():
        pytest.skip(reason)
    with SlurmCluster(nodes=3) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.limit(LIMIT_S + 60)
@of("type")
def test_command_does_what_the_page_says(shown: Shown, tree: Tree) -> None:
    asked = verdict(shown)
    page = ROOT / shown.page
    variables = named_variables(page) or named_variables(RUNNING)
    done = tree.type(asked.typed(shown.text), env=variables, limit_s=LIMIT_S).ended(asked.code)
    assert re.search(asked.shows, done.stdout + done.stderr, re.DOTALL), done


@pytest.mark.slow
@of("ask")
def test_slurm_takes_the_command(shown: Shown, slurm: SlurmCluster, tree: Tree) -> None:
    line = verdict(shown).typed(shown.text).replace("sbatch ", "sbatch --test-only -p dgx2 ")
    done = slurm.run(["bash", "-c", line], cwd=tree.folder)
    assert "srun" in line or "to start at" in done.stderr, done


@pytest.mark.slow
def test_slurm_takes_the_job_script_that_a_page_shows(slurm: SlurmCluster, tree: Tree) -> None:
    scripts = [script for page in PAGES for script in scripts_of(page)]
    assert scripts
    for script in scripts:
        path = tree.folder / "own.sh"
        path.write_text(f"#!/bin/bash\n{script}")
        slurm.run(["bash", "-n", path])
        slurm.run(["sbatch", "--test-only", path], cwd=tree.folder)


@of("parse")
def test_program_knows_the_options(shown: Shown) -> None:
    words = shlex.split(verdict(shown).typed(shown.text))
    words = words[: words.index("--")] if "--" in words else words
    assert words[:2] == ["python", "-m"]
    package = import_module(words[2])
    command = import_module(f"{words[2]}.__main__") if hasattr(package, "__path__") else package
    options = command.Options
    default = options(kind=tyro.MISSING) if "kind" in options.__annotations__ else options()
    assert parse_command_line(options, words[3:], prog="", description="", default=default)


def test_page_says_what_a_command_needs_that_is_not_run_as_it_stands() -> None:
    silent = [
        f"{shown} needs {verdict(shown).needs}"
        for shown in SHOWN
        if not re.search(verdict(shown).needs, (ROOT / shown.page).read_text())
    ]
    assert silent == []


def test_pages_say_which_python_is_meant() -> None:
    pages = {shown.page for shown in SHOWN if re.search(r"(?<![/\w])python ", shown.text)}
    assert [page for page in pages if ".venv/bin/activate" not in (ROOT / page).read_text()] == []


def test_pages_with_mpirun_name_what_root_and_full_machines_want() -> None:
    wanted = {  # the README starts its ranks by install/launch.sh
        "OMPI_ALLOW_RUN_AS_ROOT",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM",
        "OMPI_MCA_rmaps_base_oversubscribe",
        "PRTE_MCA_rmaps_default_mapping_policy",
    }
    assert wanted <= named_variables(RUNNING).keys()
    pages = {shown.page for shown in SHOWN if shown.text.startswith("mpirun")}
    assert [page for page in pages if "install/launch.sh" not in (ROOT / page).read_text()] == []


@pytest.mark.tool
def test_nothing_that_is_typed_changes_the_environment(tree: Tree) -> None:
    environment = Path(sys.prefix)
    scripts = sorted(path.name for path in (environment / "bin").iterdir())
    asked = "make setup && pip install --quiet --no-index --no-deps --no-build-isolation . && readlink -f .venv"
    done = tree.type(asked, env={}, limit_s=LIMIT_S).ended()
    assert "setup: nothing to do" in done.stdout
    assert sorted(path.name for path in (environment / "bin").iterdir()) == scripts
    assert (tree.folder / "installed" / "hpczero" / "py.typed").is_file()


def test_table_has_no_command_that_no_page_shows() -> None:
    assert sorted(TABLE.keys() - {shown.text for shown in SHOWN}) == []
