"""What is said of a disk that all ranks have tried together, and what a step would cost on it.

Owns: the findings. Must not know: how a disk is tried (`hpczero.probe.tiers`), models, plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from hpczero.doctor.finding import Finding, Status
from hpczero.probe.tiers import Speed

# Bytes of a step per parameter, read and written. Everything: fp32 weights for forward and for backward, gradients out;
# then in come weight, gradient and two states, and all but the gradient go out. The second: weight and states alone.
EVERYTHING, OPTIMIZER = (4 + 4 + 16, 4 + 12), (12, 12)


def check_disk(speeds: Sequence[Speed], folder: Path) -> Iterator[Finding]:
    """What the ranks have seen, and seconds of a step for each billion parameters."""
    title, errors = "disk tier", [speed.error for speed in speeds if speed.error]
    if errors:
        yield Finding(
            title,
            errors[0],
            Status.FAIL,
            "name a folder on a disk of the node that has room and may be written to: --disk FOLDER",
        )
        return
    read, write = (min(getattr(speed, way) for speed in speeds) for way in ("read", "write"))
    value = (
        f"{folder}: {sum(s.read for s in speeds) / 1e9:.2f} GB/s read, {sum(s.write for s in speeds) / 1e9:.2f} GB/s "
        f"written by {len(speeds)} rank(s) at once (slowest rank: {read / 1e9:.2f}, {write / 1e9:.2f}); {speeds[0].how}"
    )
    caveat = next((speed.caveat for speed in speeds if speed.caveat), "")
    if caveat:
        yield Finding(
            title, value, Status.WARN, f"{caveat}; a local disk with ext4 or xfs has them"
        )
    else:
        yield Finding(title, value)
    everything, optimizer = (
        1e9 / len(speeds) * (into / read + out / write) for into, out in (EVERYTHING, OPTIMIZER)
    )
    yield Finding(
        "step from disk",
        f"for each billion fp32 parameters over these {len(speeds)} rank(s), with Adam and one micro-batch: "
        f"{everything:.1f} s of disk with everything there ({sum(EVERYTHING)} bytes per parameter), {optimizer:.1f} s "
        f"with the optimizer's part alone ({sum(OPTIMIZER)}), less what computing hides",
    )
