"""The loss curve of a run as a picture.

Owns: what the curve looks like. Must not know: torch, MPI, how a run works. Rank 0 alone imports it: matplotlib
takes half a second and 40 MB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from hpczero.run.results.metrics import StepMetrics

SPANS = 40  # a curve is smoothed over one part in so many
TOKEN_TICKS = 5  # at most so many: 1,000,000,000 is wide
LEAST_SPAN = 0.01  # nats on the vertical axis
TRAINING, HELD_OUT = "tab:blue", "tab:red"


def plot_losses(
    steps: Sequence[StepMetrics], path: Path, *, title: str, unit: str = "nats per token"
) -> None:
    """Write training and held-out loss over the steps to ``path`` (PNG), tokens on a second axis.

    Args:
        steps: in order.
        path: where the picture is written.
        title: text above the curves: what ran, where and when.
        unit: of the loss; empty where nobody knows. Without it samples are counted, not tokens.
    """
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    axes = figure.add_subplot()
    numbers, losses = [m.step for m in steps], [m.loss for m in steps]
    span = max(1, len(steps) // SPANS)
    if span == 1:
        axes.plot(numbers, losses, color=TRAINING, linewidth=1.5, label="training")
    else:
        axes.plot(numbers, losses, color=TRAINING, alpha=0.3, linewidth=0.8)
        said = f"training, mean over about {span:,} steps"
        axes.plot(numbers, smoothed(losses, span), color=TRAINING, linewidth=1.5, label=said)
    held_out = [(m.step, m.held_out_loss) for m in steps if m.held_out_loss is not None]
    if held_out:
        axes.plot(
            *zip(*held_out, strict=True),
            "o-",
            color=HELD_OUT,
            label=f"held out ({held_out[-1][1]:.3f} at the end)",
        )
    axes.set_title(title, fontsize="medium")
    axes.set(xlabel="step", ylabel=f"loss ({unit})" if unit else "loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.grid(alpha=0.3)
    axes.legend()
    low, high = axes.get_ylim()
    if high - low < LEAST_SPAN:  # rounding is not worth a curve
        axes.set_ylim((low + high - LEAST_SPAN) / 2, (low + high + LEAST_SPAN) / 2)
    if steps:
        per_step = steps[-1].tokens / steps[-1].step
        to_tokens, to_steps = partial(np.multiply, per_step), partial(np.multiply, 1 / per_step)
        above = axes.secondary_xaxis("top", functions=(to_tokens, to_steps))
        above.set_xlabel("tokens" if unit else "samples")
        above.xaxis.set_major_locator(MaxNLocator(nbins=TOKEN_TICKS, integer=True))
        above.xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    unfinished = path.with_name(
        f".{path.name}"
    )  # whoever looks at a run that goes on sees a whole picture
    figure.savefig(unfinished, format="png")
    unfinished.replace(path)


def smoothed(values: Sequence[float], span: int) -> list[float]:
    """Exponential mean of the values so far. The centre of its weights is ``span`` / 2 values back.

    The first values have their proper weight (Kingma and Ba, Adam, 2015, sec. 3). A value that is not finite is left
    out; the mean before it stands in its place.
    """
    keep = (span - 1) / (span + 1)
    mean, weight, found = 0.0, 0.0, []
    for value in values:
        if math.isfinite(value):
            mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        found.append(mean / weight if weight else math.nan)
    return found
