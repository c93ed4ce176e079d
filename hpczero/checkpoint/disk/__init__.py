"""On disk: the format of a checkpoint, its folder, its lock, and the ways to read and write its bytes."""
