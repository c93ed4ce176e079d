"""Units: groups of parameters that are communicated together, their shards, and what the program sees of them.

A unit knows neither modules, hooks, MPI nor when to act: ``schedule`` tells it. Optimizers see its shards alone.
"""
