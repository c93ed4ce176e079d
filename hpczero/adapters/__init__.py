"""Adapters: models of other programs, one file each. What they call their parameters, and how these lie."""
