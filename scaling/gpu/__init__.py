"""Checks and measurements on a GPU: ``python -m scaling.gpu``."""
