"""The tests of what has changed, with lint and architecture, in under two minutes. ``make quick`` calls it.

``python tests/quick.py [--since COMMIT] [--files N]``. Changed is what differs from the commit: the last one, or the
one before it where nothing differs. The tests of a module are those whose text names it; those that name few others
come first. Slow tests are left out, MPI tests run on 2 ranks, and what was left out is said.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULE = re.compile(r"\b(?:hpczero|scaling|tests)(?:\.\w+)+")
ALWAYS = "tests/test_architecture.py"


def git(*words: str) -> list[str]:
    """Lines of what git says in the checkout."""
    command = ["git", *words]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()


def changed(since: str | None) -> list[str]:
    """Python files that are not as at ``since``, and still there."""
    new = git("ls-files", "--others", "--exclude-standard", "*.py")
    found = git("diff", "--name-only", since or "HEAD", "--", "*.py") + new
    if not found and since is None:
        found = git("diff", "--name-only", "HEAD~1", "--", "*.py")
    return [name for name in sorted(set(found)) if (ROOT / name).is_file()]


def dotted(name: str) -> str:
    """What a file is called in an import."""
    return re.sub(r"\.(__init__|__main__)$", "", name.removesuffix(".py").replace("/", "."))


def tests_of(files: list[str]) -> list[str]:
    """Test files for these, nearest first: changed ones, then those that name few modules beside a changed one."""
    own = [name for name in files if Path(name).name.startswith("test_")]
    modules = {dotted(name) for name in files} - {"tests"}
    near: list[tuple[int, str]] = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT).as_posix()
        named = set(MODULE.findall(path.read_text(encoding="utf-8")))
        if name not in own and any(n == m or n.startswith(f"{m}.") for n in named for m in modules):
            near.append((len(named), name))
    return own + [name for _, name in sorted(near)]


def main() -> int:
    """Lint, types, architecture, the nearest tests; the first thing that fails ends it."""
    parser = argparse.ArgumentParser(description="Lint, and the tests of what has changed.")
    parser.add_argument("--since", help="commit to compare with")
    parser.add_argument("--files", type=int, default=6, help="at most so many files of tests")
    options = parser.parse_args()
    files = changed(options.since)
    found = [name for name in tests_of(files) if name != ALWAYS]
    chosen, left = found[: options.files], found[options.files :]
    python = [sys.executable, "-m"]
    steps = [
        [*python, "ruff", "check", "-q", "."],
        [*python, "ruff", "format", "-q", "--check", "."],
        *([[*python, "mypy", *files]] if files else []),
        [sys.executable, "tests/run.py", "--core", ALWAYS, *chosen],
    ]
    for step in steps:
        environment = {**os.environ, "HPCZERO_TEST_RANKS": "0 2"}
        code = subprocess.run(step, cwd=ROOT, env=environment, check=False).returncode
        if code:
            return code
    print(f"changed: {' '.join(files) or 'nothing'}")
    print(
        f"left out: tests that are not in the core, other numbers of ranks, and {len(left)} file(s) {' '.join(left)}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
