"""Scaling studies: ``python -m scaling.sweep``."""
