"""Free room of a flat space: it is taken again, lowest first, and never twice."""

from __future__ import annotations

from concurrent.futures import Future

from hypothesis import given, settings
from hypothesis import strategies as st

from hpczero.tier.lanes import Transfer
from hpczero.tier.staged import FreeRoom


def reserve(room: FreeRoom, nbytes: int, end: int) -> tuple[int, int, frozenset[Transfer]]:
    """As a tier does: begin, the new end of the space, what has to end before."""
    begin, before = room.find(nbytes, end)
    end = max(end, begin + nbytes)
    room.take(begin, begin + nbytes)
    return begin, end, before


def test_what_comes_back_in_reverse_order_leaves_no_gap():
    room, end, held = FreeRoom(), 0, []
    for nbytes in (3, 5, 2, 7):
        begin, end, _ = reserve(room, nbytes, end)
        held.append((begin, begin + nbytes))
    assert end == 17
    for begin, stop in reversed(held):
        room.put(begin, stop, ())
    assert room.nbytes == 17
    assert reserve(room, 17, end)[:2] == (0, 17)
    assert room.nbytes == 0


def test_the_last_stretch_grows_where_it_is_too_short():
    room = FreeRoom()
    room.put(10, 14, ())
    assert reserve(room, 9, 14)[:2] == (10, 19)
    assert room.nbytes == 0


def test_what_is_still_under_way_goes_with_the_room_and_what_has_ended_does_not() -> None:
    room, ended, under_way = FreeRoom(), Transfer("ended"), Transfer("under way", [Future()])
    room.put(0, 4, [ended])
    room.put(4, 8, [under_way])
    begin, _, before = reserve(room, 6, 8)
    assert (begin, before) == (0, frozenset([under_way]))
    assert reserve(room, 2, 8)[2] == frozenset([under_way])


@given(
    actions=st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=60),
)
@settings(max_examples=200)
def test_no_byte_is_given_twice_and_none_is_lost(actions):
    room, end, held = FreeRoom(), 0, list[tuple[int, int]]()
    for takes, number in actions:
        if takes or not held:
            begin, end, _ = reserve(room, number, end)
            held.append((begin, begin + number))
        else:
            begin, stop = held.pop(number % len(held))
            room.put(begin, stop, ())
        used = sorted(byte for begin, stop in held for byte in range(begin, stop))
        assert len(used) == len(set(used))
        assert len(used) + room.nbytes == end
