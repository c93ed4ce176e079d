"""Optimizers beside torch's own: of whole matrices, with states in 8 bits; averages of weights.

The optimizers know nothing of shards. What an optimizer says of itself in its class (``zero.update.whole_rules``,
``zero.update.coded``) decides how ``zeroify`` takes its step.
"""

from hpczero.optim.adamw8bit import AdamW8bit
from hpczero.optim.muon import Muon
from hpczero.optim.shampoo import Shampoo
from hpczero.zero.averages import EMA, SWA, publish_changes

__all__ = ["EMA", "SWA", "AdamW8bit", "Muon", "Shampoo", "publish_changes"]
