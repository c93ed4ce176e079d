"""Recipes for Spack, conda and Apptainer ask for what setup.cfg asks for. None of these tools is needed here."""

from __future__ import annotations

import configparser
import re

from tests.helpers.mpirun import ROOT

SPACK = (
    ROOT / "install" / "spack" / "spack_repo" / "hpczero" / "packages" / "py_hpczero" / "package.py"
)
CONDA = ROOT / "install" / "conda" / "recipe.yaml"
APPTAINER = ROOT / "install" / "apptainer.def"
ON_CONDA = {"matplotlib": "matplotlib-base", "torch": "pytorch", "xxhash": "python-xxhash"}


def setup() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def wanted() -> dict[str, str]:
    """The oldest version of each package by its name; Python and setuptools too."""
    config = setup()
    found = re.findall(
        r"^([\w-]+) >= ([\d.]+)", config["options"]["install_requires"], re.MULTILINE
    )
    (builds_with,) = re.findall(r"setuptools >= (\d+)", (ROOT / "pyproject.toml").read_text())
    python = config["options"]["python_requires"].removeprefix(">=")
    return {**dict(found), "python": python, "setuptools": builds_with}


def test_spack_asks_for_each_package_from_the_same_version_on() -> None:
    text = SPACK.read_text()
    asked = dict(re.findall(r'depends_on\("(?:py-)?([\w-]+)@([\d.]+):"', text))
    assert asked == {name.replace("_", "-"): oldest for name, oldest in wanted().items()}
    assert f'version("{setup()["metadata"]["version"]}")' in text


def test_conda_asks_for_each_package_and_makes_each_command() -> None:
    text = CONDA.read_text()
    asked = dict(re.findall(r"^    - ([\w-]+) >=([\d.]+)$", text, re.MULTILINE))
    assert asked == {ON_CONDA.get(name, name): oldest for name, oldest in wanted().items()}
    config = setup()
    scripts = config["options.entry_points"]["console_scripts"].split("\n")
    assert re.findall(r"^      - (hpczero-\w+ = .*)$", text, re.MULTILINE) == scripts[1:]
    assert f"version: {config['metadata']['version']}\n" in text


def test_image_takes_its_packages_from_the_wheel_and_no_mpi() -> None:
    text = APPTAINER.read_text()
    assert "/made/hpczero-*.whl" in text
    assert "install/constraints.txt" in text
    assert not re.search(r"openmpi-bin|libopenmpi|mpich\b", text)
