"""Between nodes: ranks with the same place on every node, and which algorithm serves which size."""
