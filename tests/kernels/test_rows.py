"""What one launch can read as rows, and what is left to torch's operations."""

from __future__ import annotations

import torch

from hpczero.kernels.tree_sum import rows_of


def test_blocks_without_gaps_are_one_row() -> None:
    blocks = [torch.ones(3, 4), torch.ones(3, 4)]
    form = rows_of(blocks, torch.empty(3, 4))
    assert form is not None
    assert [tuple(each.shape) for each in (*form[0], form[1])] == [(12,)] * 3


def test_rows_equally_far_apart_stay_rows() -> None:
    blocks = [torch.ones(40).as_strided((3, 4), (13, 1)) for _ in range(2)]
    form = rows_of(blocks, torch.empty(3, 4))
    assert form is not None
    assert form[0][0].stride() == (13, 1)
    assert form[1].shape == (3, 4)


def test_rows_of_several_distances_or_with_gaps_inside_are_no_form() -> None:
    one = torch.ones(40).as_strided((3, 4), (13, 1))
    other = torch.ones(40).as_strided((3, 4), (12, 1))
    inside = torch.ones(40).as_strided((3, 4), (13, 2))
    assert rows_of([one, other], torch.empty(3, 4)) is None
    assert rows_of([inside, inside], torch.empty(3, 4)) is None
    assert rows_of([one, one], torch.empty(4, 3).t()) is None
    assert rows_of([torch.ones(8)[::2]], torch.empty(4)) is None
