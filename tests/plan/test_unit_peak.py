"""What units of modules hold together, against all orders of modules tried one by one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpczero.plan.memory import UnitPeak, largest_together

SIZES = st.integers(0, 9)


@st.composite
def peaks(draw: st.DrawFn) -> UnitPeak:
    wire, plain = draw(SIZES), draw(SIZES)
    return UnitPeak(
        whole=plain + draw(SIZES),
        ahead=plain + wire,
        wire=wire,
        gradients=draw(SIZES),
        stays=draw(st.sampled_from((0, plain))),
    )


def by_hand(modules: list[UnitPeak], *, overlap: bool) -> int:
    """One after the other, in every order: what is there when each is decoded, and when it runs."""
    most = 0
    for order in itertools.permutations(modules):
        chain = [UnitPeak(), *order, UnitPeak()]
        for before, module, after in zip(chain, chain[1:], chain[2:], strict=False):
            left = before.stays + (before.gradients if overlap else 0)
            decoding = module.whole + module.wire + left
            running = module.whole + module.gradients + left + (after.ahead if overlap else 0)
            most = max(most, decoding, running)
    return most


@pytest.mark.parametrize("overlap", [False, True])
@given(modules=st.lists(peaks(), max_size=5))
def test_the_sum_is_the_most_of_any_order(overlap: bool, modules: list[UnitPeak]) -> None:
    assert largest_together(modules, overlap=overlap) == by_hand(modules, overlap=overlap)


def test_of_wires_there_is_one_at_a_time() -> None:
    coded = UnitPeak(whole=100, ahead=30, wire=30, gradients=2)
    assert largest_together([coded] * 3, overlap=False) == 100 + 30
    assert largest_together([coded] * 3, overlap=True) == 100 + 2 + 30 + 2
