"""One training run: the loop, its checkpoints, and which rank is slow."""
