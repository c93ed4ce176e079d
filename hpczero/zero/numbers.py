"""read_later: a number of a step, read without a wait of its own.

Owns: the public call. Must not know: when a step reads, what else it reads.
"""

from __future__ import annotations

from torch import Tensor, nn

from hpczero.zero.update.readings import Reading
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
