"""How long a training step will take on a machine that is only described. Nothing here needs torch or MPI."""
