"""Types of options, and the checks of their values."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec, PrimitiveTypeInfo

from hpczero.errors import ConfigError
from hpczero.files.regular import shown
from hpczero.options.values import require

MOST = 2**63 - 1
TEXT_NBYTES = 2**16  # a prompt; less than one argument of a command may have
PATH_NBYTES = 4095  # as Linux has it
NAME_NBYTES = 255

_WHOLE = re.compile(r"[+-]?[0-9]+(_[0-9]+)*")
_FLOAT = re.compile(r"[+-]?([0-9]+(_[0-9]+)*\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[+-]?(inf|nan)")

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
            text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(
                f"expected values that JSON has, got {shown(value)}: {error}"
            ) from error
        return cls(checked_text(text))

    @classmethod
    def parsed(cls, text: str) -> JsonObject:
        """The text in its one form, from what was typed; otherwise raises ValueError."""
        try:
            return cls.of(json.loads(checked_text(text)))
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(
                f'expected a JSON object such as {{"width": 64}}, got {shown(text)}'
            ) from error

    @property
    def value(self) -> dict[str, Any]:
        """The object."""
        found: dict[str, Any] = json.loads(self)
        return found


def checked(value: object) -> object:
    """``value`` of a TOML file, if it can be one of any option.

    Raises:
        ValueError: a number is out of range, or a text is none.
    """
    if isinstance(value, int) and not -MOST <= value <= MOST:
        raise ValueError(f"expected a whole number of at most {MOST}, got {shown(value)}")
    if isinstance(value, str):
        checked_text(value)
    return value


def checked_text(text: str) -> str:
    """``text``, if it can be an argument of a command.

    Raises:
        ValueError: it has a null character or half a character, or is too long.
    """
    try:
        nbytes = len(os.fsencode(text))  # bytes that are no UTF-8 are as they were typed
    except UnicodeEncodeError:
        raise ValueError(f"expected text, got {shown(text)}") from None
    if "\0" in text:
        raise ValueError(f"expected no null character, got {shown(text)}")
    if nbytes > TEXT_NBYTES:
        raise ValueError(f"expected at most {TEXT_NBYTES:,} bytes, got {nbytes:,}")
    return text


def checked_path(text: str) -> str:
    """``text``, if a file can have this name; otherwise raises ValueError."""
    checked_text(text)
    longest = max(len(os.fsencode(name)) for name in text.split("/"))
    if not text or len(os.fsencode(text)) > PATH_NBYTES or longest > NAME_NBYTES:
        raise ValueError(
            f"expected a path of names of at most {NAME_NBYTES} bytes, got {shown(text)}"
        )
    return text


def whole_number(text: str) -> int:
    """``int(text)``, if it is of ASCII digits and not too many of them.

    Raises:
        ValueError: it is not.
    """
    digits = text.strip()
    if _WHOLE.fullmatch(digits) is None or len(digits) > 32 or abs(int(digits)) > MOST:
        raise ValueError(f"expected a whole number of at most {MOST}, got {shown(text)}")
    return int(digits)


def number(text: str) -> float:
    """``float(text)``, if it is of ASCII digits and not too many of them.

    Raises:
        ValueError: it is not.
    """
    digits = text.strip()
    if len(digits) > 400 or _FLOAT.fullmatch(digits) is None:
        raise ValueError(f"expected a number, got {shown(text)}")
    return float(digits)


def registry() -> tyro.constructors.ConstructorRegistry:
    """The rules as tyro takes them."""
    found = tyro.constructors.ConstructorRegistry()
    found.primitive_rule(_bool_rule)
    found.primitive_rule(_rule(int, "INT", whole_number))
    found.primitive_rule(_rule(float, "FLOAT", number))
    found.primitive_rule(_rule(str, "STR", checked_text))
    found.primitive_rule(_rule(JsonObject, "JSON", JsonObject.parsed))
    found.primitive_rule(_rule(Path, "PATH", lambda text: Path(checked_path(text))))
    return found


def _rule(
    kind: type[T], metavar: str, convert: Callable[[str], T]
) -> Callable[[PrimitiveTypeInfo], PrimitiveConstructorSpec[T] | None]:
    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[T] | None:
        if info.type is not kind:
            return None

        def from_str(words: list[str]) -> T:
            return convert(words[0])

        def is_instance(value: Any) -> bool:
            return isinstance(value, int | float if kind is float else kind)

        return PrimitiveConstructorSpec(
            nargs=1,
            metavar=metavar,
            instance_from_str=from_str,
            is_instance=is_instance,
            str_from_instance=lambda value: [str(value)],
        )

    return rule


def _bool_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[bool] | None:
    """``true`` and ``false`` as in TOML, so that every option is ``--section.key value``."""
    if info.type is not bool:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="{true,false}",
        choices=("true", "false"),
        instance_from_str=lambda words: words[0] == "true",
        is_instance=lambda value: isinstance(value, bool),
        str_from_instance=lambda value: [str(value).lower()],
    )


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
