"""``python -m tests.damaged --cases 1000``: see ``campaign``."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import tyro

from tests.damaged.campaign import BAD, plan, run, serve, table


@dataclass(frozen=True)
class Options:
    """How much to damage.

    Attributes:
        cases: damaged files.
        seed: of harms and places.
        subjects: kinds of files; none: all.
    """

    cases: int = 1000
    seed: int = 0
    subjects: tuple[str, ...] = ()


def main() -> None:
    if sys.argv[1:] == ["serve"]:
        serve()
        return
    options = tyro.cli(Options)
    outcomes = run(plan(options.cases, options.seed, options.subjects or None))
    print(table(outcomes))
    sys.exit(any(outcome.kind in BAD for outcome in outcomes))


if __name__ == "__main__":
    main()
