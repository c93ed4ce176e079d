"""ZeRO: one plain torch model whose parameters, gradients and optimizer state are sharded.

``zeroify`` joins the rooms. ``units`` hold the shards, ``calls`` follow the model's own forward and backward, and
``update`` is what happens around ``optimizer.step()``. It knows nothing of files, runs or commands.
"""
