"""Policies: what selective recomputation keeps beside the inputs of blocks.

Owns: which of torch's operations these are. Must not know: where anything rests.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198, sec. 5; the
choice of operations is that of torch's own examples.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

# bmm is not among them: where attention is computed in parts, it gives scores, the largest tensors of a block.
_PRODUCTS = ("mm", "addmm")
_ATTENTION = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
KEPT = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (*_PRODUCTS, *_ATTENTION)
    if hasattr(torch.ops.aten, name)
)


def keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what linear layers and attention give; compute norms, activation functions, dropout and sums again.

    A policy of ``torch.utils.checkpoint.create_selective_checkpoint_contexts``.
    """
    kept = operation in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
