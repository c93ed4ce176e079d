"""The rooms of the packages, and the maps of them in the documents: ``python docs/rooms.py`` writes these anew.

Owns: the order of rooms, which tests/test_architecture.py holds the imports against, and the form of a map. What a map
says of a room or a file is the first line of that room or file.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- rooms: begin -->", "<!-- rooms: end -->"


@dataclass(frozen=True)
class House:
    """A package as rooms. A room is a folder; it imports from itself and from the rooms after it.

    Attributes:
        package: its name.
        document: which has its map between two marks, below the repository.
        rooms: in their order, top first; dotted, without the package.
        apart: files that are in a room of another name than their folder's, by their path without ``.py``.
        titles: what the map says of rooms that are no folders.
    """

    package: str
    document: str
    rooms: tuple[str, ...]
    apart: dict[str, str]
    titles: dict[str, str]

    @property
    def folder(self) -> Path:
        """Of the package."""
        return ROOT / self.package

    @property
    def files(self) -> list[Path]:
        """All files of the package."""
        return sorted(self.folder.rglob("*.py"))

    def room_of(self, path: Path) -> str:
        """Room of a file of the package; it may be none of ``rooms``."""
        place = path.relative_to(self.folder).with_suffix("").as_posix()
        if path.name in self.apart and path.parent != self.folder:
            return self.apart[path.name]
        return self.apart.get(place, place.rpartition("/")[0].replace("/", "."))

    def drawn(self) -> str:
        """The map."""
        lines = []
        for room in self.rooms:
            shown = [path for path in self.files if self.room_of(path) == room]
            title, name = self.titles.get(room, ""), room
            if not title:
                entrance = self.folder / Path(*room.split(".")) / "__init__.py"
                title, name = first_line(entrance), f"{room.replace('.', '/')}/"
                shown = [path for path in shown if path != entrance]
            lines += ["", f"**{name}** {title}", ""]
            lines += [f"- `{path.relative_to(self.folder)}` {first_line(path)}" for path in shown]
        return "\n".join([BEGIN, *lines, "", END])

    def redrawn(self) -> tuple[Path, str]:
        """The document, and its text with the map of today between the marks."""
        path = ROOT / self.document
        before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        return path, before + self.drawn() + rest.partition(END)[2]


HPCZERO = House(
    "hpczero",
    "docs/architecture.md",
    (
        "commands",
        "preflight",
        "doctor",
        "run",
        "run.starting",
        "run.results",
        "planner",
        "probe",
        "predict",
        "fabric",
        "hf.trainer",
        "names",
        "hf",
        "finetune",
        "optim",
        "checkpoint.foreign",
        "checkpoint",
        "trackers",
        "data",
        "adapters",
        "checkpoint.disk",
        "parallel",
        "parallel.tensor",
        "activations",
        "parallel",
        "parallel.pipeline",
        "zero",
        "zero.update",
        "zero.calls",
        "zero.units",
        "bridge",
        "comm",
        "plan",
        "tier",
        "memory",
        "job",
        "accelerator",
        "options",
        "models",
        "kernels",
        "files",
        "lazy",
        "errors",
    ),
    {
        "__main__.py": "commands",
        "train": "commands",
        "sample": "commands",
        "replay": "commands",
        "watch": "commands",
        "commands": "commands",
        "plan/auto": "commands",
        "plan/calibrate": "commands",
        "__init__": "names",
        "checkpoint/__init__": "names",
        "hf/__init__": "names",
        "trackers": "trackers",
        "lazy": "lazy",
        "errors": "errors",
    },
    {
        "commands": "The commands: options, then one call below.",
        "names": "The public names, loaded on first use: `import hpczero` starts neither MPI nor torch.",
        "trackers": "Where the figures of a run go beside its folder.",
        "lazy": "How the public packages load their names.",
        "errors": "The errors: their tree, exit codes, and the one way a command ends.",
    },
)
SCALING = House(
    "scaling",
    "scaling/README.md",
    (
        "report",
        "gpu",
        "measurements",
        "simulate",
        "hostcost",
        "planner",
        "layouts",
        "tiers",
        "overhead",
        "collectives",
        "checkpoint",
        "sweep",
        "predict",
        "contenders",
        "evidence",
        "package",
    ),
    {
        "__init__": "package",
        "bridge": "measurements",
        "parallel": "measurements",
        "peers": "measurements",
        "report": "report",
        "start": "measurements",
        "transports": "measurements",
        "balance": "measurements",
        "exact": "measurements",
        "losses": "measurements",
        "codes": "measurements",
    },
    {
        "measurements": "Measurements that are one file each.",
        "report": "All results as text and figures.",
        "package": "The package itself, which is empty.",
    },
)
HOUSES = (HPCZERO, SCALING)


def first_line(path: Path) -> str:
    """Of the file's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def without_map(text: str) -> str:
    """A document's text without its map, which people look things up in and type nothing from."""
    before, mark, rest = text.partition(BEGIN)
    return before + (rest.partition(END)[2] if mark else "")


if __name__ == "__main__":
    for house in HOUSES:
        document, text = house.redrawn()
        document.write_text(text, encoding="utf-8")
    sys.exit(0)
