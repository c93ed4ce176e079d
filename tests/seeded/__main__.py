"""How many of the seeded faults (``faults.toml``) the tests find: run it before tests are cut, and after.

    python -m tests.seeded map [ARGUMENTS OF tests/run.py]     which tests enter the functions that the faults change
    python -m tests.seeded run [--again] [FAULT ...]           for each fault: does one of these tests fail?
    python -m tests.seeded show                                what was found

Each works in a copy of the tree, ``build/seeded/tree``. ``map`` puts a probe into the functions, runs the tests once
and writes ``build/seeded/map.json``. ``run`` puts in one fault at a time, runs the tests that enter its function, the
nearest and cheapest first, until one fails, and writes ``build/seeded/found.jsonl``, from which it goes on where it
was ended.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.quick import tests_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "seeded"
TREE = BUILD / "tree"
NEAR_FILES = 8  # of tests that name the changed module
FIRST = 40  # tests of a try; the others follow if none of these fails
LIMIT_S = 30  # of a test: a fault may make it hang
PROBE = '''"""Notes which test enters a function, in the copy of the tree in which ``tests.seeded`` makes its map."""
import os

seen = set()


def entered(name):
    path, test = os.environ.get("SEEDED_MAP"), os.environ.get("PYTEST_CURRENT_TEST")
    if path and test and (name, test) not in seen:
        seen.add((name, test))
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{name}\\t{test}\\n".encode())
        os.close(file)
'''


@dataclass(frozen=True)
class Fault:
    """One entry of ``faults.toml``.

    Attributes:
        name: says what is wrong.
        kind: of mistake.
        file: that it is in.
        function: whose body it changes; its name within the file.
        old: text that occurs once in the file.
        new: text that takes its place.
        effect: what a user would see.
    """

    name: str
    kind: str
    file: str
    function: str
    old: str
    new: str
    effect: str

    def put_into(self, tree: Path) -> None:
        """Change the file. Raises ValueError where the code is not what the fault was written for."""
        path = tree / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name}: its text occurs {text.count(self.old)} times in {self.file}"
            )
        path.write_text(text.replace(self.old, self.new))


def faults() -> list[Fault]:
    """All of them, in the order of the file."""
    entries = tomllib.loads(Path(__file__).with_name("faults.toml").read_text())["fault"]
    return [Fault(**entry) for entry in entries]


def fresh_tree() -> None:
    """A copy of what git knows of the working tree, with the same .venv."""
    shutil.rmtree(TREE, ignore_errors=True)
    TREE.mkdir(parents=True)
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).exists():
            (TREE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, TREE / name)
    (TREE / ".venv").symlink_to(ROOT / ".venv")


def put_probes(tree: Path, of: list[Fault]) -> None:
    """Let the functions that the faults change say which test enters them."""
    (tree / "hpczero" / "seeded_probe.py").write_text(PROBE)
    lines: dict[Path, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for fault in of:
        path = tree / fault.file
        function = dict(functions(ast.parse(path.read_text())))[fault.function]
        first = function.body[0]
        told = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        if told and len(function.body) == 1:
            raise ValueError(f"{fault.name}: {fault.function} has no body")
        at = (function.body[1] if told else first).lineno
        decorators = getattr(function.body[1] if told else first, "decorator_list", [])
        lines[path][min([at, *(d.lineno for d in decorators)])].append(fault.name)
    for path, at_lines in lines.items():
        text = path.read_text().splitlines(keepends=True)
        for line in sorted(at_lines, reverse=True):
            indent = re.match(r"\s*", text[line - 1]).group()  # type: ignore[union-attr]
            text[line - 1 : line - 1] = [
                f'{indent}__import__("hpczero.seeded_probe", fromlist=["entered"]).entered("{name}")\n'
                for name in at_lines[line]
            ]
        path.write_text("".join(text))
        ast.parse(path.read_text())


def functions(tree: ast.AST, within: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function with its name in the file."""
    for node in ast.iter_child_nodes(tree):
        name = within
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{within}.{node.name}".lstrip(".")
        if isinstance(node, ast.FunctionDef):
            yield name, node
        yield from functions(node, name)


def make_map(arguments: list[str]) -> int:
    """Run the tests with probes; what they entered, and what each costs."""
    fresh_tree()
    put_probes(TREE, faults())
    notes = BUILD / "entered.tsv"
    notes.unlink(missing_ok=True)
    environment = {**os.environ, "SEEDED_MAP": os.fspath(notes)}
    subprocess.run(
        [ROOT / ".venv/bin/python", "tests/run.py", *arguments],
        cwd=TREE,
        env=environment,
        check=False,
    )
    join(notes, TREE / "build" / "tests.jsonl")
    return 0


def join(notes: Path, records: Path) -> None:
    """Write the map from what probes have noted and what the tests have cost."""
    phases: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for line in records.read_text().splitlines():
        record = json.loads(line)
        if record["outcome"] == "passed":
            phases[record["test"]].append((record["phase"], record["seconds"]))
    entered: dict[str, set[str]] = defaultdict(set)
    for line in notes.read_text().splitlines():
        name, _, test = line.partition("\t")
        entered[name].add(test.rpartition(" (")[0])
    found = {
        fault.name: sorted(
            (seconds, test, phase)
            for test in entered[fault.name]
            for phase, seconds in phases[test]
        )
        for fault in faults()
    }
    (BUILD / "map.json").write_text(json.dumps(found, indent=0))
    for name, tests in found.items():
        print(f"{len(tests):5} test(s), {sum(t[0] for t in tests):7.1f} s: {name}")


def run(names: list[str], again: bool) -> int:
    """Put in each fault and run the tests that enter its function, until one fails."""
    known = json.loads((BUILD / "map.json").read_text())
    path = BUILD / "found.jsonl"
    if again:
        path.unlink(missing_ok=True)
    done = (
        {json.loads(line)["fault"] for line in path.read_text().splitlines()}
        if path.exists()
        else set()
    )
    fresh_tree()
    for fault in faults():
        if (names and fault.name not in names) or (not names and fault.name in done):
            continue
        file = TREE / fault.file
        before = file.read_text()
        start = time.monotonic()
        try:
            fault.put_into(TREE)
            by = first_failure(fault, known[fault.name])
        finally:
            file.write_text(before)
        line = {"fault": fault.name, "by": by, "tests": len(known[fault.name])}
        with path.open("a") as found:
            found.write(json.dumps({**line, "seconds": round(time.monotonic() - start, 1)}) + "\n")
        print(f"{fault.name}: {by or 'NOT FOUND'} ({time.monotonic() - start:.0f} s)", flush=True)
    return show()


def first_failure(fault: Fault, tests: list[tuple[float, str, str]]) -> str:
    """The first of these tests that fails, with its phase; empty if none does.

    First come tests whose names share most words with the fault and those of files that name the changed module.
    """
    said = f"{fault.name} {fault.file} {fault.function} {fault.effect}".lower()
    words = set(re.findall(r"[a-z]{4,}", said))
    files = tests_of([fault.file])[:NEAR_FILES]
    seen: dict[str, int] = defaultdict(int)
    ordered = []
    for seconds, test, phase in sorted(tests):
        file = test.partition("::")[0]
        function = test.partition("[")[0]
        seen[function] += 1
        shared = len(words & set(re.findall(r"[a-z]{4,}", function.lower())))
        ordered.append((seen[function], -shared - 2 * (file in files), seconds, test, phase))
    ordered.sort()  # the cheapest case of every function first
    for batch in (ordered[:FIRST], ordered[FIRST : 4 * FIRST], ordered[4 * FIRST :]):
        by_phase: dict[str, list[str]] = defaultdict(list)
        for *_, test, phase in batch:
            by_phase[phase].append(test)
        for phase, of_phase in sorted(by_phase.items(), key=lambda one: -len(one[1])):
            failed = run_tests(of_phase, phase)
            if failed:
                return failed
    return ""


def run_tests(tests: list[str], phase: str) -> str:
    """Run them in the copy until one fails; which one."""
    ranks = phase.partition(" ")[0].replace("one", "0")
    command = [
        str(ROOT / ".venv/bin/python"),
        "tests/run.py",
        "-x",
        f"--test-limit={LIMIT_S}",
        *tests,
    ]
    environment = {**os.environ, "HPCZERO_TEST_RANKS": ranks}
    done = subprocess.run(
        command, cwd=TREE, env=environment, capture_output=True, text=True, check=False
    )
    lines = done.stdout.splitlines()
    failed = [line.removeprefix("FAILED ") for line in lines if line.startswith("FAILED ")]
    if not failed and done.returncode:
        failed = [f"tests/run.py ended with exit code {done.returncode}: {done.stdout[-400:]}"]
    return failed[0][:300] if failed else ""


def show() -> int:
    """Counts by folder, and the faults that no test found."""
    found = {}
    for line in (BUILD / "found.jsonl").read_text().splitlines():
        entry = json.loads(line)
        found[entry["fault"]] = entry
    rooms: dict[str, list[bool]] = defaultdict(list)
    for fault in faults():
        if fault.name in found:
            rooms[fault.file.split("/")[1]].append(bool(found[fault.name]["by"]))
    for room, each in sorted(rooms.items()):
        print(f"{room:12} {sum(each)} of {len(each)}")
    every = [one for each in rooms.values() for one in each]
    for fault in faults():
        if fault.name in found and not found[fault.name]["by"]:
            print(
                f"not found: {fault.name} ({fault.kind}; {found[fault.name]['tests']} tests enter it)"
            )
    print(f"{sum(every)} of {len(every)} faults found")
    return 0


def main() -> int:
    """One of the three commands."""
    parser = argparse.ArgumentParser(prog="python -m tests.seeded", description="Seeded faults.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("map", help="which tests enter the functions").set_defaults(names=[])
    runs = commands.add_parser("run", help="which faults tests find")
    runs.add_argument("--again", action="store_true", help="forget what was found before")
    runs.add_argument("names", nargs="*", metavar="FAULT")
    commands.add_parser("show", help="what was found")
    options, rest = parser.parse_known_args()
    if options.command == "map":
        return make_map(rest)
    return run(options.names, options.again) if options.command == "run" else show()


if __name__ == "__main__":
    sys.exit(main())
