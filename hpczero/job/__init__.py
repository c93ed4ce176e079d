"""The job: this process among its ranks, small agreements between them, and how the job ends if one is stuck.

Knows nothing of models, tensors or shards.
"""
