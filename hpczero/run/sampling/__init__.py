"""Text from trained weights: which weights a path means, and how they are sharded again."""
