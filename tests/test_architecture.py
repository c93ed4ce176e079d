"""Reads the package's syntax trees: who may import whom, and what no file may do.

The order of rooms is that of the map in ``docs/architecture.md``. A new room must be given its place in it.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from docs.rooms import HOUSES, HPCZERO, House
from tests.helpers.mpirun import run_command

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = HPCZERO.package
MAX_LINES = 600  # of code
SMALL_LINES = 80
BLANK = "COMMENT NL NEWLINE INDENT DEDENT ENDMARKER"
NO_CODE = [getattr(tokenize, name) for name in BLANK.split()]
MAX_LINES_OF_TESTS = 600

# Who alone may import these, at whatever depth of the code.
GUARDED = {
    "mpi4py": ("bridge", "checkpoint", "comm", "doctor", "job", "preflight"),
    "h5py": ("checkpoint", "data", "doctor"),
    "cupy": ("accelerator", "doctor", "kernels"),
}
TORCH_FREE = (
    "errors",
    "files",
    "job.limits",
    "job.log",
    "job.long_work",
    "options",
    "parallel.pipeline.actions",
    "parallel.pipeline.simulate",
    "plan",
    "predict",
    "run.results.metrics",
    "run.results.metrics_file",
    "run.page",
    "run.view",
    "watch",
)
TORCH_ALLOWED = ("plan.rules",)
# comm.awareness looks for variables of MPI libraries, and comm.trial gives its job the environment.
ENVIRONMENT_READERS = (
    "comm.awareness",
    "comm.trial",
    "options.environment",
    "doctor",
    "errors",
    "preflight",
)
MAX_ENTRIES = 12  # of the package's folder, beside rooms


@dataclass(frozen=True)
class Import:
    """One import statement's target, as a dotted name."""

    target: str
    line: int
    for_types_only: bool


@dataclass(frozen=True)
class Module:
    """One file of the package; ``name`` is dotted, without the package, ``__init__`` for the package itself."""

    name: str
    path: Path
    tree: ast.Module

    def imports(self) -> Iterator[Import]:
        yield from _imports(self.tree, self.name, for_types_only=False)

    def where(self, line: int) -> str:
        return f"{self.path.relative_to(ROOT)}:{line}"

    def is_in(self, names: tuple[str, ...]) -> bool:
        return any(self.name == name or self.name.startswith(f"{name}.") for name in names)


def _imports(node: ast.AST, name: str, *, for_types_only: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, for_types_only)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"{name}:{child.lineno}: relative import; name the package"
            for alias in child.names:  # either a name in the module or a submodule: resolved later
                yield Import(f"{child.module}.{alias.name}", child.lineno, for_types_only)
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            yield from _imports(ast.Module(child.body, []), name, for_types_only=True)
            other = ast.Module(child.orelse, [])
            yield from _imports(other, name, for_types_only=for_types_only)
        else:
            yield from _imports(child, name, for_types_only=for_types_only)


def name_of(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


@cache
def modules(house: str) -> dict[str, Module]:
    found = {}
    for path in next(h for h in HOUSES if h.package == house).files:
        name = name_of(path, ROOT / house)
        found[name] = Module(name, path, ast.parse(path.read_text()))
    assert len(found) > 10, "the package was not found"
    return found


def package() -> dict[str, Module]:
    return modules(PACKAGE)


def resolve(target: str, house: str = PACKAGE) -> str | None:
    """Name of our module that ``target`` means, or None if it is not ours."""
    if target != house and not target.startswith(f"{house}."):
        return None
    name = target.removeprefix(house).removeprefix(".")
    while name and name not in modules(house):
        name = name.rpartition(".")[0]
    return name or "__init__"


def edges(*, types_too: bool, house: str = PACKAGE) -> Iterator[tuple[Module, str, int]]:
    """(importing module, name of the imported module of ours, line)."""
    for module in modules(house).values():
        for imported in module.imports():
            target = resolve(imported.target, house)
            counts = types_too or not imported.for_types_only
            if counts and target is not None and target != module.name:
                yield module, target, imported.line


each_house = pytest.mark.parametrize("house", HOUSES, ids=lambda house: house.package)


@each_house
def test_every_file_is_in_a_room(house: House) -> None:
    assert [str(path) for path in house.files if house.room_of(path) not in house.rooms] == []


@each_house
def test_imports_go_downward_only(house: House) -> None:
    wrong = []
    for module, target, line in edges(types_too=True, house=house.package):
        theirs = house.room_of(modules(house.package)[target].path)
        if house.rooms.index(theirs) < house.rooms.index(house.room_of(module.path)):
            wrong.append(f"{module.where(line)} imports {target}, which lies above it")
    assert wrong == []


@each_house
def test_map_of_the_rooms_is_the_one_in_the_document(house: House) -> None:
    document, text = house.redrawn()
    assert document.read_text(encoding="utf-8") == text, "python docs/rooms.py writes it"


def imports_of(*libraries: str) -> Iterator[tuple[Module, Import]]:
    """Imports of the package that begin with one of these words, and where they are."""
    for module in package().values():
        for imported in module.imports():
            if imported.target.partition(".")[0] in libraries:
                yield module, imported


def test_the_package_knows_neither_its_measurements_nor_its_tests() -> None:
    found = imports_of("scaling", "tests", "docs")
    assert [f"{m.where(one.line)} imports {one.target}" for m, one in found] == []


def test_few_files_lie_beside_the_rooms() -> None:
    here = list(HPCZERO.folder.iterdir())
    assert len([path for path in here if not path.is_dir()]) <= MAX_ENTRIES


@each_house
def test_no_import_cycles_even_inside_functions(house: House) -> None:
    below: dict[str, set[str]] = {name: set() for name in modules(house.package)}
    for module, target, _ in edges(types_too=False, house=house.package):
        below[module.name].add(target)
    assert list(TopologicalSorter(below).static_order()), "raises CycleError, which shows the cycle"


def test_models_import_nothing_of_the_rest() -> None:
    wrong = [
        f"{module.where(line)} imports {target}"
        for module, target, line in edges(types_too=True)
        if module.is_in(("models",)) and target.split(".")[0] != "models"
    ]
    assert wrong == []


@pytest.mark.parametrize("library", GUARDED)
def test_library_is_imported_only_where_it_belongs(library: str) -> None:
    found = imports_of(library)
    assert [m.where(one.line) for m, one in found if not m.is_in(GUARDED[library])] == []


def test_planning_and_the_lowest_rooms_run_without_torch() -> None:
    wrong = [
        module.where(imported.line)
        for module, imported in imports_of("torch")
        if not imported.for_types_only
        and module.is_in(TORCH_FREE)
        and not module.is_in(TORCH_ALLOWED)
    ]
    assert wrong == []


def code_lines(module: Module) -> int:
    """Lines with code on them: no docstring, no comment, nothing blank."""
    documented = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if ast.get_docstring(node, clean=False) is not None and first is not None:
                documented |= set(range(first.lineno, (first.end_lineno or 0) + 1))
    code: set[int] = set()
    with tokenize.open(module.path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type not in NO_CODE:
                code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - documented)


@each_house
def test_no_file_is_longer_than_can_be_read_at_once(house: House) -> None:
    lengths = {module.name: code_lines(module) for module in modules(house.package).values()}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_no_small_file_serves_one_other_alone() -> None:
    """It belongs into that other. Commands stand by themselves, and what a room's entrance offers to users."""
    importers: dict[str, set[str]] = {}
    for module, target, _ in edges(types_too=True):
        if module.name != target.rpartition(".")[0]:
            importers.setdefault(target, set()).add(module.name)
    wrong = [
        f"{name} ({code_lines(module)} lines) <- {next(iter(importers[name]))}"
        for name, module in package().items()
        if module.path.name != "__init__.py"
        and len(importers.get(name, ())) == 1
        and code_lines(module) < SMALL_LINES
    ]
    assert wrong == []


def test_a_class_name_has_one_meaning() -> None:
    homes: dict[str, list[str]] = {}
    for module in package().values():
        for node in module.tree.body:
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.lstrip("_"), []).append(module.name)
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_no_file_of_tests_is_longer_than_600_lines() -> None:
    files = sorted((ROOT / "tests").rglob("*.py"))
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert len(lengths) > 100
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES_OF_TESTS} == {}


def test_nothing_prints() -> None:
    wrong = [
        module.where(node.lineno)
        for module in package().values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]
    assert wrong == []


def reads_environment(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return node.module == "os" and bool({a.name for a in node.names} & {"environ", "getenv"})
    return isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")


def test_environment_is_read_only_where_options_live() -> None:
    wrong = [
        f"{module.name}: {ast.unparse(node)}"
        for module in package().values()
        if not module.is_in(ENVIRONMENT_READERS)
        for node in ast.walk(module.tree)
        if reads_environment(node)
    ]
    assert wrong == []


def test_no_file_names_a_place_on_one_machine() -> None:
    places = "|".join(("work", "opt", "root", "home"))
    pattern = re.compile(rf"(?<![\w.)}}/-])/({places})/\w")
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: no list of the project's files")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert len(paths) > 10
    wrong = []
    for path in paths:
        if not path.is_file():  # deleted, and not yet committed
            continue
        text = path.read_bytes().decode(errors="ignore")
        wrong += [f"{path.relative_to(ROOT)}: {found.group()}" for found in pattern.finditer(text)]
    assert wrong == []


def loads(code: str) -> set[str]:
    """Run ``code`` in a fresh interpreter and return which of the heavy modules it loaded."""
    report = "import sys; print(*(set(sys.modules) & {'torch', 'mpi4py.MPI'}))"
    program = f"import atexit; atexit.register(lambda: exec({report!r}))\n{code}"
    done = run_command([sys.executable, "-c", program], timeout=60, fresh=True).ended()
    return set(done.stdout.splitlines()[-1].split())


def test_load_probe_sees_what_is_loaded() -> None:
    assert loads("import torch") == {"torch"}


def test_importing_the_package_loads_neither_torch_nor_mpi() -> None:
    assert loads("import hpczero") == set()


NAMES = "empty zeros ones full tensor rand randn"
FACTORIES = {f"torch.{name}" for name in NAMES.split()}


def test_tensors_are_made_with_their_dtype_and_device() -> None:
    """A program may have set others by default, by torch.set_default_dtype, set_default_device or torch.device."""
    calls = [
        (module, node)
        for module in package().values()
        if not module.is_in(("models", "adapters"))
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in FACTORIES
    ]
    assert len(calls) > 50
    given = [(m, node, {keyword.arg for keyword in node.keywords}) for m, node in calls]
    wrong = [m.where(node.lineno) for m, node, names in given if not {"dtype", "device"} <= names]
    assert wrong == []
