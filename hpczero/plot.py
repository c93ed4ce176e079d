"""The loss curve of a run as a picture.

Owns: what the curve looks like. Must not know: torch, MPI, how a run works. Nobody imports it before the end of a run:
matplotlib takes half a second and 40 MB, which only rank 0 should pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hpczero.metrics import StepMetrics


def plot_losses(steps: Sequence[StepMetrics], path: Path, *, title: str) -> None:
    """Write training and held-out loss over the steps to ``path`` (PNG), tokens on a second axis."""
    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a display
    axes = figure.add_subplot()
    axes.plot([m.step for m in steps], [m.loss for m in steps], linewidth=1, label="training")
    held_out = [(m.step, m.held_out_loss) for m in steps if m.held_out_loss is not None]
    if held_out:
        axes.plot(
            *zip(*held_out, strict=True), "o-", label=f"held out ({held_out[-1][1]:.3f} at the end)"
        )
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    if steps:
        per_step = steps[-1].tokens / steps[-1].step
        to_tokens, to_steps = partial(np.multiply, per_step), partial(np.multiply, 1 / per_step)
        above = axes.secondary_xaxis("top", functions=(to_tokens, to_steps))
        above.set_xlabel("tokens")
    figure.savefig(path)
