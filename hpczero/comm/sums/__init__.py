"""Sums: what ranks that share each layer's products do with activations. `sums` has the verbs."""

from hpczero.comm.sums.choice import sums_over
from hpczero.comm.sums.given import give_values
from hpczero.comm.sums.sums import Sums

__all__ = ["Sums", "give_values", "sums_over"]
