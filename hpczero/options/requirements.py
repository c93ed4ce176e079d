"""Requirements that options of several sections have in common.

Owns: their limits and texts. Must not know: sections, options, where values come from.
"""

from __future__ import annotations

import sys

from hpczero.errors import ConfigError
from hpczero.options.types import MOST, checked_path
from hpczero.options.values import require


def require_positive(section: str, options: object, *names: str, most: int = MOST) -> None:
    """Refuse options that are set and below 1."""
    for name in names:
        value = getattr(options, name)
        expected = "at least 1" if value is None or value < 1 else f"at most {most}"
        require(value is None or 1 <= value <= most, f"{section}.{name}", value, expected)


def require_path(option: str, value: str | None) -> None:
    """Refuse what cannot be the name of a file, or cannot be written into config.toml."""
    try:
        if value is not None:
            checked_path(value).encode()
    except UnicodeEncodeError:
        require(False, option, value, "a path in UTF-8")
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from error


def require_amount(section: str, options: object, *names: str) -> None:
    """Refuse options that are below 0 or not finite."""
    for name in names:
        value = getattr(options, name)
        most = MOST if isinstance(value, int) else sys.float_info.max
        require(0 <= value <= most, f"{section}.{name}", value, "a finite number, 0 or above")
