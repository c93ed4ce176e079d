"""What users hold on to stays: names, options, variables, exit codes, files."""

from __future__ import annotations

import json

import pytest

from tests.surface import FILE, surface


@pytest.mark.usefixtures("forks")
def test_nothing_that_users_hold_on_to_is_gone_or_new_by_accident() -> None:
    noted, now = json.loads(FILE.read_text(encoding="utf-8")), surface()
    assert noted.keys() == now.keys()
    for part, rooms in noted.items():
        assert rooms.keys() == now[part].keys(), part
        for room, entries in rooms.items():
            assert entries == now[part][room], (
                f"{part} of {room}; python -m tests.surface if it is meant"
            )
