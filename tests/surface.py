"""What users hold on to: public names, commands with their options, environment variables, exit codes, files of a run.

``python -m tests.surface`` writes tests/surface.json anew: what is new must be added there, what is gone must be meant.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = Path(__file__).with_name("surface.json")
MODULES = (
    "hpczero",
    "hpczero.activations",
    "hpczero.checkpoint",
    "hpczero.comm",
    "hpczero.data",
    "hpczero.finetune",
    "hpczero.hf",
    "hpczero.models",
    "hpczero.plan",
    "hpczero.trackers",
)
COMMANDS = {
    "hpczero.checkpoint": ("ls", "verify", "export", "import"),
    "hpczero.data": ("prepare", "show", "verify"),
    "hpczero.doctor": (),
    "hpczero.plan": (),
    "hpczero.preflight": (),
    "hpczero.sample": (),
    "hpczero.train": (),
    "scaling.checkpoint": (),
    "scaling.collectives": (),
    "scaling.gpu": (),
    "scaling.peers": (),
    "scaling.predict": (),
    "scaling.report": (),
    "scaling.start": (),
    "scaling.sweep": (),
    "scaling.transports": (),
}
OPTION = re.compile(r"(?<![\w-])--[a-z][\w.-]*")
VARIABLE = re.compile(r"\bHPCZERO_[A-Z_]+\b")


def surface() -> dict[str, dict[str, list[str]]]:
    """As it is now; each list sorted."""
    from hpczero import errors
    from hpczero.run.results.folder import RunFolder
    from hpczero.run.results.metrics import StepMetrics

    names = {}
    for module in MODULES:
        found = importlib.import_module(module)
        names[module] = sorted(found.__all__)
        for name in found.__all__:
            getattr(found, name)
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    raised = [kind for kind in kinds if issubclass(kind, errors.HpcZeroError)]
    text = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "hpczero").rglob("*.py"))
    scripts = (ROOT / "setup.cfg").read_text(encoding="utf-8")
    folder = RunFolder(Path("runs/x"))
    files = [name for name in vars(folder) if name != "path"]
    return {
        "names": names,
        "options": options(),
        "scripts": {
            "setup.cfg": sorted(re.findall(r"^    (hpczero-\w+) =", scripts, re.MULTILINE))
        },
        "variables": {"hpczero": sorted(set(VARIABLE.findall(text)))},
        "exit codes": {"errors": sorted(f"{kind.__name__} {kind.exit_code}" for kind in raised)},
        "files": {
            "run folder": sorted(
                f"{getattr(folder, name).relative_to(folder.path)}" for name in files
            ),
            "metrics.jsonl": [field.name for field in dataclasses.fields(StepMetrics)],
        },
    }


def options() -> dict[str, list[str]]:
    """What each command and subcommand offers, by its own ``--help``."""
    calls = [
        [name, *word] for name, words in COMMANDS.items() for word in [[], *([w] for w in words)]
    ]
    with ThreadPoolExecutor(2) as pool:
        texts = list(pool.map(_help, calls))
    return {
        " ".join(call): sorted(set(OPTION.findall(text)))
        for call, text in zip(calls, texts, strict=True)
    }


def _help(call: list[str]) -> str:
    command = [sys.executable, "-m", *call, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


if __name__ == "__main__":
    FILE.write_text(json.dumps(surface(), indent=1) + "\n", encoding="utf-8")
