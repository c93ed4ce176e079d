"""Preflight: which nodes of this job would hold a training run up? Run ``python -m hpczero.preflight``."""
