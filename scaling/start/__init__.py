"""The first seconds of the commands: ``python -m scaling.start``."""
