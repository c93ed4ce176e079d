"""Owners: which stage each parameter and persistent buffer of a whole model belongs to.

Owns: the walk through names, and what is said of a tensor that no stage or several stages would hold. Must not know:
ranks' communication, schedules, how a model is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from hpczero.errors import PlanError


@dataclass(frozen=True)
class Owners:
    """Of one model.

    Attributes:
        stage_of_block: by the block's name in its container.
        aliases: further names of parameters, each with the first one.
        tied: parameters that the first and the last stage both hold, by their first name in the whole model: the first
            name of each on either stage, by stage.
    """

    stage_of_block: Mapping[str, int]
    aliases: Mapping[str, str]
    tied: Mapping[str, Mapping[int, str]]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        blocks: str,
        before: Sequence[str],
        after: Sequence[str],
        counts: Sequence[int],
        stages: int,
    ) -> Owners:
        """Find the owner of everything.

        Args:
            model: whole.
            blocks: name of the container, which is one.
            before: names on the first stage.
            after: names on the last stage.
            counts: blocks of each piece.
            stages: their number.

        Raises:
            PlanError: a name that is none, or is listed twice; a parameter or persistent buffer that no stage or
                several stages would hold.
        """
        _check_names(model, blocks, before, after)
        keys = list(model.get_submodule(blocks)._modules)
        pieces = [piece for piece, count in enumerate(counts) for _ in range(count)]
        stage_of_block = {key: piece % stages for key, piece in zip(keys, pieces, strict=True)}
        places = {f"{blocks}.{key}": stage for key, stage in stage_of_block.items()}
        places |= dict.fromkeys(before, 0) | dict.fromkeys(after, stages - 1)
        aliases: dict[str, str] = {}
        tied: dict[str, dict[int, str]] = {}
        for names in _names_of(model.named_parameters(remove_duplicate=False)):
            aliases |= dict.fromkeys(names[1:], names[0])
            found = _stages_of(names, places, "parameter")
            if len(found) > 1:
                if set(found) != {0, stages - 1}:
                    raise PlanError(
                        f"cut: parameter {names[0]!r} is shared by the stages {sorted(found)}, as "
                        f"{', '.join(map(repr, found.values()))}; only the first and the last stage can share one. "
                        "Choose another balance, or give each its own parameter"
                    )
                tied[names[0]] = found
        for names in _names_of(persistent_buffers(model, duplicates=True).items()):
            found = _stages_of(names, places, "persistent buffer")
            if len(found) > 1:
                raise PlanError(
                    f"cut: persistent buffer {names[0]!r} is shared by the stages {sorted(found)}, each of which would "
                    "change its own; give each stage its own buffer, or register it with persistent=False"
                )
        return cls(stage_of_block, aliases, tied)


def persistent_buffers(model: nn.Module, *, duplicates: bool = False) -> dict[str, Tensor]:
    """Buffers that state_dict would save, by name; each once unless ``duplicates``."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, module in model.named_modules(remove_duplicate=not duplicates):
        for name, buffer in module._buffers.items():
            known = id(buffer) in seen and not duplicates
            if buffer is None or known or name in module._non_persistent_buffers_set:
                continue
            seen.add(id(buffer))
            found[f"{path}.{name}" if path else name] = buffer
    return found


def _names_of(named: object) -> Iterator[list[str]]:
    """All names of each tensor, in the order of first names."""
    names: dict[int, list[str]] = {}
    for name, tensor in named:  # type: ignore[attr-defined]
        names.setdefault(id(tensor), []).append(name)
    yield from names.values()


def _stages_of(names: Sequence[str], places: Mapping[str, int], what: str) -> dict[int, str]:
    """The stages that hold a tensor, each with the first of its names there."""
    found: dict[int, str] = {}
    for name in names:
        parts = name.split(".")
        paths = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
        stage = next((places[path] for path in paths if path in places), None)
        if stage is None:
            raise PlanError(
                f"cut: {what} {name!r} is neither in the blocks nor before nor after them, so no stage would hold it; "
                "name it, or the module that has it, in Stages(before=...) or Stages(after=...)"
            )
        found.setdefault(stage, name)
    return found


def _check_names(
    model: nn.Module, blocks: str, before: Sequence[str], after: Sequence[str]
) -> None:
    known = {name for name, _ in model.named_modules(remove_duplicate=False)}
    known |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    seen: set[str] = set()
    for where, names in (("before", before), ("after", after)):
        for name in names:
            if name not in known or not name:
                raise PlanError(
                    f"stages: {where} names {name!r}, which is no module, parameter or buffer of the model; use names "
                    "as model.named_modules() lists them"
                )
            inside = (
                blocks == name or blocks.startswith(f"{name}.") or name.startswith(f"{blocks}.")
            )
            if inside:
                raise PlanError(
                    f"stages: {where} names {name!r}, and the blocks are in {blocks!r}; name what lies beside the "
                    "blocks, not what they are in or what is in them"
                )
            nested = next(
                (n for n in seen if f"{name}.".startswith(f"{n}.") or n.startswith(f"{name}.")),
                None,
            )
            if nested is not None:
                raise PlanError(
                    f"stages: {nested!r} and {name!r} in before and after are the same or one in the other; name each "
                    "module once, and give each of two that share a weight a name of its own"
                )
            seen.add(name)
