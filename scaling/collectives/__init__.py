"""The measurement of collectives: ``python -m scaling.collectives``."""
