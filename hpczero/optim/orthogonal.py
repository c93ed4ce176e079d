"""Orthogonal: the matrix with the singular vectors of another one, and singular values near 1.

Owns: the Newton-Schulz iteration. Must not know: optimizers, shards.
"""

from __future__ import annotations

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalized(
    matrices: Tensor,
    *,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """About ``U V^T`` of each matrix ``U S V^T``, by X <- aX + (b XX^T + c (XX^T)^2) X.

    Args:
        matrices: (..., rows, columns); leading dimensions are a stack.
        coefficients: a, b, c. With those of Muon singular values end between about 0.7 and 1.2.
        steps: of the iteration.
        eps: least norm that a matrix is divided by.
        dtype: of the iteration. torch.optim.Muon has bfloat16.

    Returns:
        (..., rows, columns) in ``dtype``.

    Source: Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024.
    """
    if matrices.dim() > 2:
        # One by one, so that a matrix has the same bits in a stack and by itself, whoever owns it.
        each = [
            orthogonalized(matrix, coefficients=coefficients, steps=steps, eps=eps, dtype=dtype)
            for matrix in matrices
        ]
        return torch.stack(each) if each else matrices.to(dtype)
    a, b, c = coefficients
    x = matrices.to(dtype)
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x
