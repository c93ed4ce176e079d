"""Whether two ways to train the same model have the same losses: else their times cannot be compared.

Owns: the comparison and its tolerance. Must not know: who trains, which steps are comparable.
"""

from __future__ import annotations

from collections.abc import Sequence

from hpczero.errors import HpcZeroError

# Order of fp32 sums; a wrong gradient moves the loss by 1e-2 within a few steps.
LOSS_TOLERANCE = 1e-4


def check_same_losses(
    name: str,
    values: Sequence[float],
    reference: str,
    expected: Sequence[float],
    tolerance: float = LOSS_TOLERANCE,
) -> None:
    """Compare losses step by step, as far as both go. Not collective.

    Args:
        name: whose losses ``values`` are.
        values: of each step.
        reference: whose losses ``expected`` are.
        expected: of each step.
        tolerance: how far two losses of a step may be apart.

    Raises:
        HpcZeroError: they are farther apart, or one is NaN; it names the step and both losses.
    """
    for step, (mine, other) in enumerate(zip(values, expected, strict=False)):
        if not abs(mine - other) <= tolerance:
            raise HpcZeroError(
                f"{name}: loss {mine:.6f} at step {step}, {reference} has {other:.6f}, expected the same within "
                f"{tolerance:g}: they do not train the same, so their times cannot be compared"
            )
