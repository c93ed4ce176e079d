"""Pages of the public interface, made from its docstrings by pdoc: ``python docs/api.py FOLDER``, or ``make docs``.

Owns: which modules are public, and that a warning is an error. Must not know: how a page looks.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType

import pdoc
import pdoc.render

MODULES = (
    "hpczero",
    "hpczero.activations",
    "hpczero.checkpoint",
    "hpczero.plan",
    "hpczero.plan.rules",
    "hpczero.trackers",
    "hpczero.errors",
)


def loaded(name: str) -> ModuleType:
    """The module with its public names in place; hpczero's own come on first use, which pdoc does not wait for."""
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", ()):
        setattr(module, public, getattr(module, public))
    return module


def write(folder: Path) -> None:
    """One page for each public module, an index and a search.

    Raises:
        UserWarning: pdoc cannot make sense of a docstring, an annotation or a name.
    """
    for name in MODULES:
        loaded(name)
    # Attributes are told by their class, under "Attributes"; without texts of their own they would only be names.
    pdoc.render.configure(docformat="google", footer_text="hpczero", include_undocumented=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pdoc.pdoc(*MODULES, output_directory=folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
    print(f"{sys.argv[1]}/index.html")
