"""Doctor: can this machine, this MPI and this launch line carry a training run? Run ``python -m hpczero.doctor``."""
