"""Reading options: TOML file and command line into frozen dataclasses, and back into TOML.

Unknown names and wrong types are errors that name the place. The TOML file overrides defaults, and the command line
overrides the file. Every rank reads the same input before MPI starts and finds the same error, so every rank ends by
itself with exit 78.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import io
import json
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

import tyro

from hpczero.errors import ConfigError, launcher_rank
from hpczero.files.regular import parse_toml, read_text, reason, shown
from hpczero.options.config import RunConfig
from hpczero.options.types import JsonObject, registry

T = TypeVar("T")

TOML_NBYTES = 2**20
SCRIPTS = frozenset(
    f"hpczero-{name}"
    for name in (
        *("train", "replay", "sample", "checkpoint", "plan", "data", "doctor", "preflight"),
        "watch",
    )
)
SAID = 800  # characters of a complaint


def read_run_config(args: Sequence[str]) -> RunConfig:
    """Options of the training command: defaults, then ``[run.toml]`` in front, then ``--section.key value``.

    Raises:
        ConfigError: a file or an option cannot be used.
        SystemExit: after ``--help``, with 0.
    """
    default = RunConfig()
    if args and not args[0].startswith("-"):
        default = load_toml(Path(args[0]), RunConfig)
        args = args[1:]
    return parse_command_line(
        RunConfig,
        args,
        prog="python -m hpczero.train [run.toml]",
        description="Train a GPT, or any model of a factory, with ZeRO over MPI. Options of the command line "
        "override those of the TOML file.",
        default=default,
    )


def _called(prog: str) -> str:
    """``prog``, or the console script that the user typed."""
    name = Path(sys.argv[0]).name
    return (
        name + prog.partition(name.replace("hpczero-", "hpczero."))[2] if name in SCRIPTS else prog
    )


def parse_command_line(
    cls: type[T], args: Sequence[str], *, prog: str, description: str, default: T | None = None
) -> T:
    """Parse ``args`` into a ``cls`` by tyro. The first rank alone prints help.

    Args:
        cls: dataclass whose docstring documents its fields.
        args: without the program's name.
        prog: name of the command, for the help text.
        description: the first lines of the help text.
        default: values of options that are not in ``args``; None takes the defaults of ``cls``.

    Raises:
        ConfigError: an option is unknown, has a wrong type, or a value that ``cls`` refuses.
        SystemExit: after ``--help``, with 0.
    """
    # Without a terminal tyro uses no colours, which a launcher's pseudo-terminal would otherwise bring into log files.
    help_text = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stdout(help_text), contextlib.redirect_stderr(complaint):
            return tyro.cli(
                cls,
                args=args,
                prog=_called(prog),
                description=description,
                default=tyro.MISSING_NONPROP if default is None else default,
                use_underscores=True,
                registry=registry(),
                config=(tyro.conf.FlagConversionOff,),
            )
    except SystemExit as end:
        if end.code not in (0, None):
            text = _plain(complaint.getvalue())
            raise ConfigError(f"command line: {text}{_near(text, cls)}") from None
    if launcher_rank() == 0:
        help_text.seek(0)
        sys.stdout.write(help_text.read())
    raise SystemExit(0)


def _near(complaint: str, cls: type) -> str:
    """Options of ``cls`` that share a word with an unknown one that tyro finds nothing alike for; may be empty."""
    unknown = re.search(r"Unrecognized options: --([\w.-]+)", complaint)
    if unknown is None or "Perhaps" in complaint:
        return ""
    words = set(re.split(r"[._-]", unknown[1].rpartition(".")[2]))
    # Subcommands are a union of dataclasses, of which nothing is looked up here.
    hints = typing.get_type_hints(cls) if dataclasses.is_dataclass(cls) else {}
    sections = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    names = [name for name in hints if name not in sections]
    names += [
        f"{name}.{f.name}" for name, hint in sections.items() for f in dataclasses.fields(hint)
    ]
    near = [name for name in names if words & set(name.rpartition(".")[2].split("_"))]
    return f". Near it: {', '.join(f'--{name}' for name in near[:6])}" if near else ""


def load_toml(path: Path, cls: type[T]) -> T:
    """The dataclass ``cls`` from a TOML file. What the file leaves out keeps its default.

    Raises:
        ConfigError: the file cannot be read, or has an unknown name, a wrong type, or a value that ``cls`` refuses.
    """
    try:
        tables = parse_toml(read_text(path, TOML_NBYTES))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read as options: {reason(error)}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not TOML: {error}") from error
    try:
        return _from_table(cls, tables, prefix="")
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def to_toml(options: object) -> str:
    """A dataclass of sections as TOML without options that are None. ``load_toml`` of it gives an equal object."""
    lines: list[str] = []
    for section in dataclasses.fields(options):  # type: ignore[arg-type]  # a dataclass by contract
        lines.append(f"[{section.name}]")
        values = getattr(options, section.name)
        for option in dataclasses.fields(values):
            value = getattr(values, option.name)
            if value is not None:
                # A name that Python keeps to itself ends with an underscore there.
                lines.append(f"{option.name.removesuffix('_')} = {_toml_value(value)}")
        lines.append("")
    return "\n".join(lines)


def _from_table(cls: type[T], table: Mapping[str, object], prefix: str) -> T:
    fields = typing.get_type_hints(cls)
    hints = {name.removesuffix("_"): hint for name, hint in fields.items()}
    for name in table:
        if name not in hints:
            close = difflib.get_close_matches(name, hints, n=3) or sorted(hints)
            kind = "option" if prefix else "section"
            raise ConfigError(
                f"unknown {kind} {prefix}{name}; did you mean {', '.join(prefix + c for c in close)}?"
            )
    values = {
        name: _convert(value, hints[name], f"{prefix}{name}") for name, value in table.items()
    }
    return cls(**{name if name in fields else f"{name}_": value for name, value in values.items()})


def _convert(value: object, hint: Any, name: str) -> object:  # Any: a type form has no common type
    """``value``, if it has the type that the annotation ``hint`` says; otherwise an error."""
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ConfigError(f"{name}: got {shown(value)}, expected a section [{name}]")
        return _from_table(typing.cast("type[object]", hint), value, prefix=f"{name}.")
    choices = typing.get_args(hint)
    if typing.get_origin(hint) in (Union, types.UnionType):
        hint = next(choice for choice in choices if choice is not type(None))
        return _convert(value, hint, name)
    if typing.get_origin(hint) is Literal:
        # not only ==: True would pass for 1
        if not any(type(value) is type(choice) and value == choice for choice in choices):
            raise ConfigError(
                f"{name}: got {shown(value)}, expected one of {', '.join(map(str, choices))}"
            )
        return value
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list) or len(value) != len(choices):
            raise ConfigError(f"{name}: got {shown(value)}, expected a list of {len(choices)}")
        return tuple(
            _convert(item, choice, name) for item, choice in zip(value, choices, strict=True)
        )
    if hint is float and type(value) is int:
        return float(value)
    if hint is JsonObject and isinstance(value, (dict, str)):
        try:
            return JsonObject.of(value) if isinstance(value, dict) else JsonObject.parsed(value)
        except ValueError as error:
            raise ConfigError(f"{name}: {error}") from error
    if type(value) is not hint:
        raise ConfigError(
            f"{name}: got {shown(value)} ({type(value).__name__}), expected {hint.__name__}"
        )
    return value


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    return repr(value)


def _plain(box: str) -> str:
    """The sentences inside tyro's box on one line, because a log interleaves the lines of ranks."""
    rows = (row.strip("│ ") for row in box.splitlines() if row.startswith("│"))
    words = " ".join(";" if row.startswith("─") else row for row in rows)
    said = re.sub(r"\s+", " ", words).replace(" ;", ";") or box.strip()
    # What was typed is in it; in a form that any terminal and log file takes.
    said = said.encode(errors="backslashreplace").decode()
    return said if len(said) <= SAID else f"{said[: SAID // 2]} ... {said[-SAID // 2 :]}"
