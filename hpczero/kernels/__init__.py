"""Kernels: each a pure function on flat buffers, with a torch twin for every device kernel."""
