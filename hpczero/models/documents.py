"""Several documents in one sequence: where each begins, and what attention may look at.

Owns: that, from the tokens alone. Must not know: the network, where tokens come from. A document ends with a separator,
which belongs to it. A sequence may begin and end within one.

Shape suffixes: B batch, T time.
"""

from __future__ import annotations

import torch
from torch import Tensor


def numbers(tokens_BT: Tensor, separator: int) -> Tensor:
    """Which document of its sequence each token is of, counted from 0; int64 (B, T)."""
    ends_BT = tokens_BT == separator
    before_BT = ends_BT.cumsum(1) - ends_BT.long()
    return before_BT


def positions(documents_BT: Tensor) -> Tensor:
    """Place of each token in its document, as far as the sequence shows it; int64 (B, T)."""
    place_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    start_BT = torch.where(begins_BT, place_T, 0).cummax(1).values
    return place_T - start_BT


def mask(documents_BT: Tensor) -> Tensor:
    """Whether a token (row) may look at another (column): of its document, and not after it; bool (B, 1, T, T)."""
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return same_BTT.tril()[:, None]
