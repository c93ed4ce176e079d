"""Console scripts: what setup.cfg promises is there, and is the command of the same name."""

from __future__ import annotations

import configparser
import sys
from importlib import import_module

import pytest

from tests.helpers.mpirun import ROOT, run_command


def scripts() -> dict[str, str]:
    found = configparser.ConfigParser()
    found.read(ROOT / "setup.cfg", encoding="utf-8")
    lines = found["options.entry_points"]["console_scripts"].strip().splitlines()
    return dict(line.split(" = ") for line in lines)


@pytest.mark.parametrize(("name", "place"), scripts().items(), ids=list(scripts()))
def test_script_is_the_command_of_its_name(name: str, place: str) -> None:
    module, _, function = place.partition(":")
    assert callable(getattr(import_module(module), function))
    code = (
        f"import sys; sys.argv = ['/somewhere/{name}', '--help']; "
        f"from {module} import {function} as command; sys.exit(command())"
    )
    said = run_command([sys.executable, "-c", code], timeout=60).ended()
    own = run_command(
        [sys.executable, "-m", name.replace("hpczero-", "hpczero."), "--help"], timeout=60
    )
    assert f"usage: {name}" in said.stdout
    assert said.stdout.split("\n\n", 1)[1] == own.stdout.split("\n\n", 1)[1]


def test_rules_are_found_from_the_package_alone() -> None:
    code = "import hpczero; print(hpczero.plan.rules.by_class.__name__)"
    said = run_command([sys.executable, "-c", code], timeout=60)
    assert said.stdout == "by_class\n", said
