"""The tests, laid out as the package is; ``tests/run.py`` runs them all."""
