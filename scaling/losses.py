"""Held-out losses of runs beside those of others: ``python -m scaling.losses runs/exact-1 runs/int8-1 ...``.

A run is named WAY-SEED, or WAY-SEED-gN for group N of local steps. The first way is what the others are compared with,
seed by seed. Prints a table of last losses, and draws the mean over seeds step by step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import tyro

from hpczero.errors import ConfigError, run
from hpczero.files.regular import parse_json, read_text
from scaling.evidence.harness import options_of
from scaling.evidence.plot import Line, lines_figure
from scaling.evidence.spread import table as markdown

NAME = re.compile(r"(?P<way>.+?)-(?P<seed>\d+)(-g\d+)?")

Losses = dict[int, float]  # held out, by step


@dataclass(frozen=True)
class Options:
    """What to compare.

    Attributes:
        runs: folders of runs, each with metrics.jsonl.
        picture: where to draw the losses (PNG or SVG).
    """

    runs: tyro.conf.Positional[tuple[str, ...]] = ()
    picture: str | None = None


def main() -> int:
    """Print the table; draw the picture, if one is asked for."""
    options = options_of(Options, "losses")
    found: dict[str, dict[int, Losses]] = defaultdict(dict)
    for path in map(Path, options.runs):
        parts = NAME.fullmatch(path.name)
        if parts is None:
            raise ConfigError(
                f"runs: got {path}, expected a folder named WAY-SEED, such as exact-1"
            )
        found[parts["way"]][int(parts["seed"])] = losses_of(path)
    if not found:
        raise ConfigError("runs: got none, expected folders of runs")
    print(compared(found))
    if options.picture is not None:
        draw(found, Path(options.picture))
    return 0


def losses_of(folder: Path) -> Losses:
    """Held-out losses of a run.

    Raises:
        ConfigError: there are none.
    """
    steps = [parse_json(line) for line in read_text(folder / "metrics.jsonl").splitlines()]
    found = {each["step"]: each["held_out_loss"] for each in steps if each.get("held_out_loss")}
    if not found:
        raise ConfigError(f"{folder}: metrics.jsonl has no held-out loss")
    return found


def compared(found: dict[str, dict[int, Losses]]) -> str:
    """Last losses, by way and seed, with the difference from the first way; markdown."""
    reference = next(iter(found.values()))
    seeds = sorted(reference)

    def cell(by_seed: dict[int, Losses], seed: int) -> str:
        if seed not in by_seed:
            return ""
        loss, exact = last(by_seed[seed]), last(reference[seed])
        beside = "" if by_seed is reference else f" ({100 * (loss / exact - 1):+.2f} %)"
        return f"{loss:.4f}{beside}"

    def average(by_seed: dict[int, Losses]) -> str:
        ratios = [last(by_seed[s]) / last(reference[s]) for s in by_seed if s in reference]
        return "" if by_seed is reference else f"{100 * (mean(ratios) - 1):+.2f} %"

    titles = ["", *(f"Seed {seed}" for seed in seeds), "Mean difference"]
    rows = [
        [way, *(cell(by_seed, seed) for seed in seeds), average(by_seed)]
        for way, by_seed in found.items()
    ]
    return markdown(titles, rows)


def last(losses: Losses) -> float:
    """The loss after the last step."""
    return losses[max(losses)]


def draw(found: dict[str, dict[int, Losses]], path: Path) -> None:
    """Losses by step, each the mean over the seeds, from the second one on: the first dwarfs the rest."""
    lines = []
    for way, by_seed in found.items():
        steps = sorted(set.intersection(*(set(losses) for losses in by_seed.values())))[1:]
        points = {step: mean(losses[step] for losses in by_seed.values()) for step in steps}
        lines.append(Line(way, points))
    seeds = len(next(iter(found.values())))
    title = f"held-out loss, mean of {seeds} seed(s)"
    figure = lines_figure({"": lines}, title=title, x="step", y="nats per token", log_x=False)
    figure.savefig(path)


if __name__ == "__main__":
    run(main)
