"""Foreign weights: what other programs wrote or want to read, to and from a checkpoint or a model."""
