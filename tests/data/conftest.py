"""Texts that are prepared in many small parts."""

from __future__ import annotations

import sys

import pytest

from hpczero.data import corpus, token_writer


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks, units and slabs so small that a few KB have hundreds of each, with their ends at odd places."""
    monkeypatch.setattr(corpus, "BLOCK_NBYTES", 700)
    monkeypatch.setattr(corpus, "REST_NBYTES", 300)
    monkeypatch.setattr(sys.modules["hpczero.data.prepare"], "UNIT_NBYTES", 1100)
    monkeypatch.setattr(token_writer, "SLAB_NUMEL", 333)
