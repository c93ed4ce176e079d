"""Preflight: which nodes of this job would slow a training run down? Run ``python -m hpczero.preflight``."""
