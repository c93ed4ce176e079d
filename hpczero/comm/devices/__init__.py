"""Devices: how MPI gets at device memory, and how long a device stood still for that."""
