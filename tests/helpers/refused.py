"""Options that are refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hpczero.errors import ConfigError


@contextmanager
def refused(*parts: str) -> Iterator[pytest.ExceptionInfo[ConfigError]]:
    """A ConfigError is raised inside, and its text has all these parts."""
    __tracebackhide__ = True
    with pytest.raises(ConfigError) as caught:
        yield caught
    for part in parts:
        assert part in str(caught.value)
