"""What the documentation says is so: its code runs, and what it names exists."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import hpczero
from docs.rooms import without_map
from hpczero import errors
from hpczero.models.config import PRESETS
from hpczero.options.config import RunConfig
from hpczero.run.results.metrics import StepMetrics
from tests.helpers.mpirun import ROOT, run_command, run_ranks

README = ROOT / "README.md"
RUNNING = ROOT / "docs" / "running.md"
ZERO = ROOT / "docs" / "zero.md"
ADDING = ROOT / "docs" / "adding.md"  # files and tests of its own, which test_adding.py runs
GUIDES = [
    README,
    *(ROOT / folder / "README.md" for folder in ("examples", "scaling", "slurm")),
    *sorted((ROOT / "docs").glob("*.md")),
]
DOCUMENTS = [*GUIDES, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs" / "decisions").glob("*.md"))]
NAMES = "train replay sample checkpoint plan doctor doctor.record preflight data watch"
COMMANDS = {f"hpczero.{name}" for name in NAMES.split()}
OF_OTHERS = [  # name options of pip, of launchers and of SLURM
    ROOT / "docs" / "install.md",
    ROOT / "docs" / "running-on-slurm.md",
    ROOT / "slurm" / "README.md",
    ADDING,
]
STUDIES = "peers collectives transports checkpoint gpu sweep report predict"
MEASURING = {f"scaling.{name}" for name in STUDIES.split()}
NOT_OURS = {
    *("--oversubscribe", "--allow-run-as-root", "--map-by"),  # of a launcher
    *("--signal", "--exclude", "--distribution", "--partition", "--time"),  # of SLURM
    *("--section.key", "--since", "--extra-index-url"),  # a placeholder, of make quick, of pip
}
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MB = 1e6


def ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def each_document(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("document", paths, ids=ids(paths))


def named(pattern: str, paths: list[Path]) -> set[str]:
    """Everything that ``pattern`` finds in the documents; never nothing, or a test would show nothing."""
    found = {match for path in paths for match in re.findall(pattern, path.read_text())}
    assert found, f"{pattern} finds nothing"
    return found


def rows(document: Path, beginning: str) -> Iterator[list[str]]:
    """Cells of the rows of the table whose heading begins so."""
    lines = document.read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(beginning))
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


# --- the code of the first screen


def first_example() -> str:
    block = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert block is not None
    return block[1]


def test_readme_is_short_and_its_first_example_fits_a_screen() -> None:
    assert len(README.read_text().splitlines()) <= 150
    assert len(first_example().splitlines()) <= 15


@pytest.mark.slow
def test_readmes_first_example_trains_on_two_ranks(tmp_path: Path) -> None:
    watched = """\
        import sys, torch
        losses, backward = [], torch.Tensor.backward
        def recorded(loss):
            losses.append(loss.item())
            backward(loss)
        torch.Tensor.backward = recorded
        exec(open(sys.argv[1]).read())
        ranks = hpczero.sharding(model).topology.size
        print(f"ranks {ranks} first {sum(losses[:10])} last {sum(losses[-10:])}\\n", end="", flush=True)
        """
    program, block = tmp_path / "watched.py", tmp_path / "block.py"
    program.write_text(textwrap.dedent(watched))
    block.write_text(first_example())
    finished = run_ranks(2, [program, block], timeout=90).ended()
    found = re.findall(r"ranks 2 first ([\d.]+) last ([\d.]+)", finished.stdout)
    assert len(found) == 2, finished
    assert all(float(last) < 0.3 * float(first) for first, last in found), finished


def test_table_of_measured_bytes_is_what_the_plan_predicts() -> None:
    import torch

    from hpczero import Plan
    from hpczero.models import GPT
    from hpczero.plan.rules import default_rule

    with torch.device("meta"):
        model = GPT(PRESETS["gpt-nano"])
    found = list(rows(ZERO, "| stage | sharded |"))
    assert len(found) == 4
    for stage, cells in enumerate(found):
        plans = [
            Plan.build(model, num_shards=ranks, stage=stage, rule=default_rule) for ranks in (2, 4)
        ]
        expected = [
            *(plan.memory().states for plan in plans),
            *(plan.memory().total for plan in plans),
            *(plan.traffic().nbytes for plan in plans),
        ]
        assert cells[0] == str(stage)
        assert cells[2:] == [f"{nbytes / MB:.1f}" for nbytes in expected]
        assert f"Ψ = {plans[0].numel:,}" in ZERO.read_text()


# --- names of files


def anchors(document: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_document(DOCUMENTS)
def test_every_link_leads_somewhere(document: Path) -> None:
    broken = []
    for target in LINK.findall(CODE.sub("code", document.read_text())):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        page = (document.parent / path).resolve() if path else document
        if not page.exists() or (anchor and anchor not in anchors(page)):
            broken.append(target)
    assert broken == []


@each_document([guide for guide in GUIDES if guide != ADDING])
def test_every_file_that_is_named_exists(document: Path) -> None:
    text = LINK.sub(r" \1 ", document.read_text())
    names = re.findall(r"(?<![\w./-])[\w./-]+\.(?:py|md|sh|cfg|txt)\b", text)
    # The reader's own
    names = [name for name in names if name not in ("first.py", "my.txt", "mine.py")]
    homes = (ROOT, document.parent, ROOT / "hpczero", ROOT / "slurm")
    assert names
    assert [name for name in names if not any((home / name).is_file() for home in homes)] == []


def test_every_test_that_is_named_exists() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    tests = named(r"\b(test_\w+)\b(?!\.py)", [guide for guide in GUIDES if guide != ADDING])
    assert [name for name in tests if f"def {name}(" not in sources] == []


def test_every_public_name_exists() -> None:
    def exists(name: str) -> bool:
        return name in hpczero.__all__ or importlib.util.find_spec(f"hpczero.{name}") is not None

    names = named(r"\bhpczero\.([a-zA-Z_]\w*)(?![\w/.-]*\.(?:git|org))", GUIDES)
    assert [name for name in sorted(names) if not exists(name)] == []


# --- commands and their options


@cache
def help_of(*args: str) -> str:
    finished = run_command([sys.executable, *args, "--help"], timeout=60).ended()
    assert finished.stdout.startswith("usage: "), finished
    return finished.stdout


def test_every_command_that_is_named_answers_help() -> None:
    commands = named(r"python -m ([\w.]+)", [README, RUNNING])
    assert commands == COMMANDS | MEASURING
    for command in commands:
        assert f"python -m {command}" in help_of("-m", command)


MORE_HELP = (
    "-m hpczero.data prepare",
    "-m hpczero.plan --auto",
    *(f"-m hpczero.checkpoint {verb}" for verb in ("verify", "export", "import")),
    "examples/resume_later.py",
    "examples/adapters.py",
)


def has_option(text: str, option: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(option)}(?![\w.-])", text) is not None


@each_document([guide for guide in GUIDES if guide not in OF_OTHERS])
def test_every_option_that_is_named_exists(document: Path) -> None:
    unknown = []
    for line in without_map(document.read_text()).splitlines():
        commands = re.findall(r" -m ((?:hpczero|scaling|tests)[\w.]*)", line) or sorted(COMMANDS)
        helps = [help_of("-m", command) for command in commands]
        helps += [help_of(*words.split()) for words in MORE_HELP]
        for option in re.findall(r"(?<![\w-])--[a-z][\w.-]*", line):
            name = option.replace("-", "_").replace("__", "--", 1)
            spellings = {option, name}  # argparse has hyphens
            known = any(has_option(text, spelling) for text in helps for spelling in spellings)
            if not known and option not in NOT_OURS:
                unknown.append(option)
    assert unknown == []


def test_options_of_train_are_listed_with_their_defaults() -> None:
    table = {cells[0].strip("`"): cells[1] for cells in rows(RUNNING, "| Option | Default |")}
    defaults: dict[str, object] = {}
    for section in dataclasses.fields(RunConfig):
        options = getattr(RunConfig(), section.name)
        for option in dataclasses.fields(options):
            name = f"--{section.name}.{option.name.removesuffix('_')}"
            defaults[name] = getattr(options, option.name)
    assert list(table) == list(defaults)
    for name, default in defaults.items():
        if default is None:
            assert "`" not in table[name], name
            continue
        shown = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
        assert table[name] == f"`{shown.lower() if isinstance(default, bool) else shown}`", name


def test_presets_are_listed() -> None:
    row = next(r for r in rows(RUNNING, "| Option | Default |") if r[0] == "`--model.preset`")
    assert set(re.findall(r"`([\w-]+)`", row[2])) == set(PRESETS)


def test_fields_of_the_metrics_file_are_listed() -> None:
    cells = " ".join(row[0] for row in rows(RUNNING, "| Field |"))
    listed = re.findall(r"`(\w+)`", cells)
    assert listed == [field.name for field in dataclasses.fields(StepMetrics)]


def test_exit_codes_are_listed() -> None:
    listed = {int(cells[0]) for cells in rows(RUNNING, "| Code |")}
    ours = {value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    assert ours - {errors.EXIT_REQUEUE} <= listed  # nothing asks to be requeued yet


def test_environment_variables_that_are_named_are_those_that_are_read() -> None:
    sources = [
        *(ROOT / "hpczero").rglob("*.py"),
        *(path for path in (ROOT / "install").iterdir() if path.is_file()),
        ROOT / "tests/run.py",
        ROOT / "tests/helpers/cases.py",
        ROOT / "tests/helpers/forkserver.py",
    ]
    pattern = r"\bHPCZERO_[A-Z0-9_]+\b"
    assert named(pattern, [RUNNING]) == named(pattern, sources)
    assert named(pattern, GUIDES) == named(pattern, sources)


def test_make_targets_that_are_named_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"train", "test"} <= named(r"[`\n]make (\w+)", [README]) <= targets
    assert named(r"[`\n]make (\w+)", GUIDES) <= targets
