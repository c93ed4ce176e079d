"""Micro batches whose gradients make one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from hpczero.errors import ConfigError, StepError
from hpczero.zero.sharding import Sharding
from hpczero.zero.update.gradient_norms import Reading
from hpczero.zero.zeroify import sharding


def read_later(model: nn.Module, tensor: Tensor) -> Reading:
    """The number in ``tensor`` as it is now, to be asked for later. Not collective.

    ``loss.item()`` waits for the device. A step waits for it once anyway, in ``clip_grad_norm_``, or in
    ``optimizer.step()`` where nothing was clipped. A loss that was given here before is read with that.

        loss = model(x, y); loss.backward()
        value = hpczero.read_later(model, loss)
        hpczero.clip_grad_norm_(model, 1.0); optimizer.step(); optimizer.zero_grad()
        print(value())

    It is never late: asked for before the step has read it, it is read at once, with a wait of its own.

    Args:
        model: zeroified.
        tensor: one real element of any dtype; this rank's own. Later changes of it play no part.

    Returns:
        Gives the number as a float when it is called, as ``tensor.item()`` would have given it.

    Raises:
        ConfigError: more or fewer elements than one, or a complex one.
    """
    return sharding(model).step.norms.readings.add(tensor)


@contextmanager
def accumulate(model: nn.Module, part: int, parts: int) -> Iterator[None]:
    """Context for micro batch ``part`` of ``parts``: gradients become the mean over all of them.

    ``for i in range(n): with hpczero.accumulate(model, i, n): loss(model, i).backward()``

    Do not divide the loss by ``parts``. The fp32 sum over micro batches and ranks is multiplied once, by 1 / (parts *
    ranks); a divided loss would round everything in its backward. All parts but the last add to this rank's own whole
    gradients, as in ``no_sync``. The last one reduces, and its backward is collective.

    Args:
        model: zeroified.
        part: 0 to ``parts - 1``, in this order.
        parts: micro batches of the step, the same on every rank. The step checks that.

    Raises:
        ConfigError: the numbers are out of range.
        StepError: the part is not the next one; or gradients were never reduced when the first one begins.
    """
    state = sharding(model)
    rank = state.topology.rank
    if not 0 <= part < parts:
        raise ConfigError(
            f"accumulate: got part {part} of {parts}, expected one of 0 to {parts - 1}"
        )
    if part and state.next_part != (part, parts):
        raise StepError(
            f"rank {rank}: accumulate got part {part} of {parts}, which does not follow the part before. Run all parts "
            "of a step in order; to begin anew, call optimizer.zero_grad() and start with part 0"
        )
    if not part and any(unit.gradients.waiting for unit in state.units if unit.spec.trainable):
        raise StepError(
            f"rank {rank}: accumulate begins, but gradients of no_sync or of parts that were never completed are "
            "waiting, and its factor is not theirs; call optimizer.zero_grad(), or keep to one way for the whole step"
        )
    state.next_part = None
    with counted(state, parts, reduces=part == parts - 1):
        yield
        state.next_part = (part + 1, parts)


@contextmanager
def counted(state: Sharding, parts: int, *, reduces: bool) -> Iterator[None]:
    """Context for one of ``parts`` backwards whose mean is wanted; ``reduces``: gradients are reduced in it.

    Whoever calls it keeps the order. Not collective; a backward inside that reduces is.
    """
    schedule = state.schedule
    assert schedule is not None, "zeroify attaches the schedule"
    before = schedule.backward.sync, state.micro_batches
    schedule.backward.sync, state.micro_batches = reduces, parts
    try:
        yield
    finally:
        schedule.backward.sync, state.micro_batches = before
