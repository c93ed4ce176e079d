"""Several pytests side by side: each runs the files that it comes to first.

Owns: claims on files, which are files in a folder that all lanes know. Must not know: MPI, jobs, how lanes are started.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest

ALONE = "alone"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("hpczero")
    group.addoption(
        "--lane", help="run what no other lane has claimed; 'alone': what must be alone"
    )
    group.addoption("--claims", type=Path, help="folder in which lanes claim files")


def pytest_configure(config: pytest.Config) -> None:
    lane = config.getoption("--lane")
    if lane is not None:
        config.pluginmanager.register(Lane(lane, config.getoption("--claims")), "hpczero-lane")


class Lane:
    """This pytest's part of the tests."""

    def __init__(self, name: str, claims: Path) -> None:
        self.name = name
        self.claims = claims

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out what is for the lane that is alone, or in it all else."""
        alone = self.name == ALONE
        kept = [item for item in items if (item.get_closest_marker(ALONE) is not None) == alone]
        left_out = [item for item in items if item not in set(kept)]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            (self.claims / ALONE).touch()  # there is something to run after the lanes
        items[:] = kept

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """As pytest's own, over what can be claimed. A file is claimed when the last test of the one before begins."""
        if session.testsfailed or session.config.option.collectonly:
            return None  # of errors of collecting: pytest's own loop says so
        items = self._claimed(session.items)
        item = next(items, None)
        while item is not None:
            following = next(items, None)
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
            item = following
        return True

    def _claimed(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        for path, found in groupby(items, key=lambda item: item.nodeid.partition("::")[0]):
            of_file = list(found)
            machine = any(item.get_closest_marker("machine") for item in of_file)
            if self.name == ALONE or self._claim("machine" if machine else path.replace("/", "+")):
                yield from of_file

    def _claim(self, key: str) -> bool:
        path = self.claims / key
        try:
            with path.open("x") as file:
                file.write(self.name)
        except FileExistsError:
            return path.read_text() == self.name  # in an earlier launch, which a test took down
        return True
