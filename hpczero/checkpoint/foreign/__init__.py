"""Foreign weights: what other programs wrote or read, to and from a checkpoint or a model."""
