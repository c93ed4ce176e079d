"""Folders of checkpoints without a model: small files that know of which line they are. No torch: it starts at once.

Must not know: what any test looks for.
"""

from __future__ import annotations

from pathlib import Path

from hpczero.checkpoint.disk.folder import LATEST, Folder
from hpczero.checkpoint.disk.format import STATE_FILE, Manifest, Table

OLD = (5, 10, 20, 30)


def commit(folder: Folder, step: int, line: str = "old", *others: Path) -> Path:
    folder.path.mkdir(parents=True, exist_ok=True)
    temporary = folder.begin(step)
    (temporary / STATE_FILE).write_bytes(line.encode())
    meta = {"line": line}
    manifest = Manifest(step, "2026", 1, Table(()), (), len(line.encode()), "", meta)
    return folder.commit(temporary, manifest, others=others)


def steps(path: Path) -> list[int]:
    """Those that count, newest first."""
    return [manifest.step for _, manifest in Folder(path).valid()]


def there(path: Path) -> dict[int, str]:
    """Steps that count, newest first, and their lines."""
    return {m.step: str(m.meta["line"]) for _, m in Folder(path).valid()}


def kept(path: Path) -> dict[int, str]:
    """Steps that were set aside."""
    found: dict[int, str] = {}
    for place in path.glob("aside-*"):
        found |= there(place)
    return found


def latest_is_there(path: Path) -> bool:
    return not (path / LATEST).exists() or (path / (path / LATEST).read_text().strip()).is_dir()


def old_line(path: Path) -> Folder:
    folder = Folder(path)
    for step in OLD:
        commit(folder, step, "old")
    return folder
