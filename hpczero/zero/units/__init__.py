"""Units: groups of parameters that are communicated together, their shards, and what the program sees of them."""
