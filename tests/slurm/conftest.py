"""The one SLURM of the session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import SlurmCluster, why_not
from tests.slurm.jobs import Submitter


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """Three compute nodes and a login host; skips where there can be none."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with SlurmCluster(nodes=3) as cluster:
        yield cluster


@pytest.fixture
def submit(slurm: SlurmCluster, tmp_path: Path) -> Submitter:
    """Submits jobs whose files lie in the test's own folder."""
    return Submitter(slurm, tmp_path)
