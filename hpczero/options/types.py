"""Types of options, and the checks of their values."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec, PrimitiveTypeInfo

from hpczero.files.regular import shown
from hpczero.options.values import require

MOST = 2**63 - 1

T = TypeVar("T")


class JsonObject(str):
    """A JSON object as text in one form: sorted names, no spaces. So equal objects are equal texts."""

    __slots__ = ()

    @classmethod
    def of(cls, value: object) -> JsonObject:
        """The text of ``value``.

        Raises:
            ValueError: it is no object, or has what JSON does not: dates, infinity.
        """
        if not isinstance(value, dict):
            raise ValueError(f'expected a JSON object such as {{"width": 64}}, got {shown(value)}')
        try:
            return cls(json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"expected values that JSON has, got {shown(value)}: {error}"
            ) from error

    @classmethod
    def parsed(cls, text: str) -> JsonObject:
        """The text in its one form, from what was typed; otherwise raises ValueError."""
        try:
            return cls.of(json.loads(text))
        except (json.JSONDecodeError, RecursionError):
            return cls.of(text)

    @property
    def value(self) -> dict[str, Any]:
        """The object."""
        found: dict[str, Any] = json.loads(self)
        return found


def registry() -> tyro.constructors.ConstructorRegistry:
    """How tyro reads our types, and ``true`` and ``false`` as in TOML: every option is ``--section.key value``."""
    found = tyro.constructors.ConstructorRegistry()
    true_or_false = ("true", "false")
    found.primitive_rule(_rule(bool, "{true,false}", lambda word: word == "true", true_or_false))
    found.primitive_rule(_rule(JsonObject, "JSON", JsonObject.parsed))
    return found


def _rule(
    kind: type[T], metavar: str, read: Callable[[str], T], choices: tuple[str, ...] | None = None
) -> Callable[[PrimitiveTypeInfo], PrimitiveConstructorSpec[T] | None]:
    spec = PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        choices=choices,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [str(value) if choices is None else str(value).lower()],
    )
    return lambda info: spec if info.type is kind else None


def require_positive(section: str, options: object, *names: str, most: int = MOST) -> None:
    """Refuse options that are set and below 1."""
    for name in names:
        value = getattr(options, name)
        expected = "at least 1" if value is None or value < 1 else f"at most {most}"
        require(value is None or 1 <= value <= most, f"{section}.{name}", value, expected)


def require_path(option: str, value: str | None) -> None:
    """Refuse an empty path, and one that cannot be written into config.toml."""
    try:
        usable = value is None or bool(value.encode())
    except UnicodeEncodeError:  # bytes on the command line that are no UTF-8
        usable = False
    require(usable, option, value, "a path in UTF-8")


def require_amount(section: str, options: object, *names: str) -> None:
    """Refuse options that are below 0 or not finite."""
    for name in names:
        value = getattr(options, name)
        most = MOST if isinstance(value, int) else sys.float_info.max
        require(0 <= value <= most, f"{section}.{name}", value, "a finite number, 0 or above")
