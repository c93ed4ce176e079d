"""Emulated clusters; what needs one is skipped where there can be none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.emulated import EmulatedCluster, why_not


@pytest.fixture(scope="module")
def possible() -> None:
    """Skips where there can be no emulated cluster."""
    reason = why_not()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def cluster(possible: None, request: pytest.FixtureRequest) -> Iterator[EmulatedCluster]:
    """Of the module's ``HOSTS`` and ``RATE_MBIT``."""
    module = request.module
    with EmulatedCluster(hosts=module.HOSTS, rate_mbit=module.RATE_MBIT) as cluster:
        yield cluster
