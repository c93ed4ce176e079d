"""The rooms of the package, and the map of them in docs/architecture.md: ``python docs/rooms.py`` writes it anew.

Owns: the order of rooms, which tests/test_architecture.py holds the imports against, and the form of the map. What the
map says of a room or a file is the first line of that room or file.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "hpczero"
DOCUMENT = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- rooms: begin -->", "<!-- rooms: end -->"

# Top first. A room is a folder; it imports from itself and from rooms below it. Three rooms are no folders: the
# commands, the public names (of the package and of checkpoint, which are loaded on first use), and the errors.
COMMANDS, NAMES, ERRORS = "commands", "names", "errors"
ROOMS = (
    COMMANDS,
    "preflight",
    "doctor",
    "run",
    "run.sampling",
    "run.starting",
    "run.stopping",
    "run.results",
    "predict",
    "data",
    NAMES,
    "checkpoint.foreign",
    "checkpoint",
    "adapters",
    "checkpoint.disk",
    "zero",
    "zero.update",
    "zero.calls",
    "zero.units",
    "comm",
    "comm.between",
    "comm.inside",
    "comm.devices",
    "comm.algorithms",
    "plan",
    "memory",
    "job",
    "accelerator",
    "options",
    "models",
    "kernels",
    "files",
    ERRORS,
)
LINES = {
    COMMANDS: "The commands: options, then one call below.",
    NAMES: "The public names, loaded on first use: `import hpczero` starts neither MPI nor torch.",
    ERRORS: "The errors: their tree, exit codes, and the one way a command ends.",
}


def name_of(path: Path) -> str:
    """Dotted name of a file of the package, without the package; ``__init__`` for the package itself."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def room_of(path: Path) -> str:
    """Room of a file of the package; it may be none of ``ROOMS``."""
    parts = path.relative_to(ROOT / PACKAGE).with_suffix("").parts
    if parts[-1] == "__main__" or parts[0] in ("train", "sample", "commands"):
        return COMMANDS
    if parts in (("__init__",), ("checkpoint", "__init__")):
        return NAMES
    return ERRORS if parts == (ERRORS,) else ".".join(parts[:-1])


def first_line(path: Path) -> str:
    """Of the file's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def files() -> list[Path]:
    """Of the package."""
    return sorted((ROOT / PACKAGE).rglob("*.py"))


def drawn() -> str:
    """The map."""
    lines = []
    for room in ROOMS:
        own = [path for path in files() if room_of(path) == room]
        if room in LINES:
            title, shown = LINES[room], own
        else:
            entrance = ROOT / PACKAGE / Path(*room.split(".")) / "__init__.py"
            title, shown = first_line(entrance), [path for path in own if path != entrance]
        folder = room if room in LINES else f"{room.replace('.', '/')}/"
        lines += ["", f"**{folder}** {title}", ""]
        lines += [f"- `{path.relative_to(ROOT / PACKAGE)}` {first_line(path)}" for path in shown]
    return "\n".join([BEGIN, *lines, "", END])


def with_map(text: str) -> str:
    """``text`` with the map of today between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{drawn()}{after}"


if __name__ == "__main__":
    DOCUMENT.write_text(with_map(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
