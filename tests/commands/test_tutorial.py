"""docs/tutorial.md, typed line by line in a clone: each command ends well and prints what the page shows after it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.mpirun import ROOT
from tests.helpers.transcripts import BLOCK, Tree, named_variables, without_comment
from tests.slurm.cluster import SlurmCluster, why_not

PAGE = ROOT / "docs" / "tutorial.md"
ONE_MACHINE, _, TWO_NODES = PAGE.read_text().partition("\n## Two nodes\n")
LIMIT_S = 200.0  # of a command, on a machine with other work

pytestmark = [pytest.mark.slow, pytest.mark.limit(1000)]


def pattern(shown: str) -> str:
    """What a page shows as a regular expression: its lines in order; ``...`` is any part of a line, or any lines."""
    lines = [line.strip() for line in shown.splitlines() if line != "..."]
    return "(?ms)" + ".*?".join(
        r"^ *" + r"[^\n]*".join(map(re.escape, line.split("..."))) for line in lines
    )


def follow(text: str, folder: Path, typed: Callable[[str], str]) -> Iterator[tuple[str, str]]:
    """Types the commands of ``text`` one by one, writes its file; what the page shows, and what was printed."""
    said = ""
    for language, block in BLOCK.findall(text):
        if language == "bash":
            lines = filter(None, map(without_comment, block.splitlines()))
            said = "\n".join(typed(line) for line in lines)
        elif language == "toml":
            (folder / "first.toml").write_text(block)
        else:
            yield block, said


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuple[str, str]]]:
    """The clone in which everything up to the two nodes was typed, and what that showed."""
    home = tmp_path_factory.mktemp("tutorial")
    tree = Tree(home / "source")
    for words in ("init --quiet", "add --all", "commit --quiet --message all"):
        by = ["-c", "user.name=a", "-c", "user.email=a@b", *words.split()]
        subprocess.run(["git", *by], cwd=tree.folder, check=True)
    clone = home / "hpczero"

    def typed(line: str) -> str:
        if line.startswith("git clone"):
            line = f"cd {home} && {line.replace('SOURCE', 'source')} && ln -s {tree.folder}/.venv {clone}/.venv"
        elif line != "cd hpczero":
            line = f"cd {clone} && {line}"
        else:
            line = f"cd {home} && {line}"
        done = tree.type(line, env=named_variables(PAGE), limit_s=LIMIT_S).ended()
        return done.stdout

    return clone, list(follow(ONE_MACHINE, clone, typed))


def test_tutorial_on_one_machine_prints_what_it_shows(
    followed: tuple[Path, list[tuple[str, str]]],
) -> None:
    _, shown = followed
    assert len(shown) == 5
    for block, said in shown:
        assert re.search(pattern(block), said), f"shown:\n{block}\nprinted:\n{said}"


@pytest.mark.machine
def test_tutorial_on_two_nodes_goes_on_from_three_ranks(
    followed: tuple[Path, list[tuple[str, str]]],
) -> None:
    """A real SLURM, whose nodes are emulated."""
    clone, _ = followed
    if reason := why_not():
        pytest.skip(reason)
    with SlurmCluster(nodes=2) as slurm:

        def typed(line: str) -> str:
            if line.startswith("tail"):
                slurm.wait_for_state("1", "COMPLETED", "FAILED", limit_s=LIMIT_S)
            return slurm.run(["bash", "-c", line], env={"CPU_BIND": "none"}, cwd=clone).stdout

        shown = list(follow(TWO_NODES, clone, typed))
    assert len(shown) == 2
    for block, said in shown:
        assert re.search(pattern(block), said), f"shown:\n{block}\nprinted:\n{said}"
