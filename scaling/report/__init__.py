"""All results as text and figures: ``python -m scaling.report``."""
