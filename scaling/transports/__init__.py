"""A training step over each transport: ``python -m scaling.transports``."""
