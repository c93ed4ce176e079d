"""The update: what happens around ``optimizer.step()``. Norms, agreement of ranks, the optimizer pointed at shards."""
