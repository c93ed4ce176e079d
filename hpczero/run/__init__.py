"""One training run: the loop, its checkpoints, and who holds it up."""
