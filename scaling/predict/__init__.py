"""Predictions compared with measurements: ``python -m scaling.predict``."""
