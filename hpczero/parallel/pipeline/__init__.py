"""Pipeline: blocks of one model on several ranks, and the micro-batches that pass through them."""
