"""The checkpoint measurement: ``python -m scaling.checkpoint``."""
