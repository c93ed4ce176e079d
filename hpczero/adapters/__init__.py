"""Adapters: models of other programs, one file each, with the names and layouts of their parameters."""
