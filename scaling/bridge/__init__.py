"""Collectives of torch.distributed over MPI and over gloo: ``python -m scaling.bridge``."""
