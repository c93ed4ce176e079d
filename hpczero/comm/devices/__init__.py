"""Devices: how MPI gets at device memory, and how long a device waits for collectives."""
