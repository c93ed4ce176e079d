"""Activations: blocks that are computed again in backward, and where their inputs rest until then."""

from hpczero.activations.checkpointing import Checkpointing, keep_products

__all__ = ["Checkpointing", "keep_products"]
