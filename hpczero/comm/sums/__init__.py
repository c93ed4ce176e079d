"""Sums: what ranks that share each layer's products do with activations. `sums` has the verbs."""

from hpczero.comm.sums.path import give_values
from hpczero.comm.sums.sums import Sums, sums_over

__all__ = ["Sums", "give_values", "sums_over"]
