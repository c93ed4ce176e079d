"""Optimizers beside torch's own: of whole matrices, each for plain torch models and for zeroified ones.

They know nothing of shards. What an optimizer says of itself in its class (``zero.update.whole_rules``) decides how
``zeroify`` takes its step.
"""

from hpczero.optim.muon import Muon

__all__ = ["Muon"]
