"""Options: what a user may set, in TOML, on the command line and in the environment, and how wrong ones are refused.

Knows neither MPI nor torch, nor what an option is good for.
"""
