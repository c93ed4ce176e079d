"""Units: groups of parameters that are communicated together; what of them is on this rank, and what the program sees of it."""
