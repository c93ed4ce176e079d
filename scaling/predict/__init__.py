"""Predictions held against measurements: ``python -m scaling.predict``."""
