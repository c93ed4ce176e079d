"""The weight files of a Hugging Face folder: one file, or several with an index.

Owns: which files there are and which has which tensor. Must not know: MPI, models, names of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from hpczero.errors import CheckpointError, ConfigError
from hpczero.files.regular import parse_json, read_text, reason
from hpczero.hf.range_file import Entry, RangeFile

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG = "adapter_config.json"
HIDDEN = ".weights"  # in a folder into which a new save is brought, until all of it is there


class WeightFolder:
    """Tensors of a folder, by their keys in the files. Not collective: each rank opens the files itself.

    Attributes:
        path: of the folder.
        entries: dtype and shape by key.
    """

    def __init__(self, path: Path) -> None:
        """Open the files; no values are read.

        Raises:
            ConfigError: there are no safetensors files, or those of an adapter.
            CheckpointError: a file is missing, damaged or torn; two files have one key.
        """
        self.path = path
        self._files = [RangeFile(path / name) for name in self._names()]
        self._homes: dict[str, RangeFile] = {}
        for file in self._files:
            for key in file.entries:
                if key in self._homes:
                    raise CheckpointError(
                        f"{file.path}: has {key!r}, and so has {self._homes[key].path.name}; expected once"
                    )
                self._homes[key] = file
        lost = [key for key in self._expected if key not in self._homes]
        if lost:
            more = f" and {len(lost) - 1} more" if lost[1:] else ""
            raise CheckpointError(
                f"{path / INDEX}: {lost[0]!r}{more} in the index and in no file; fetch all files of the set again"
            )
        self.entries: dict[str, Entry] = {
            key: file.entries[key] for key, file in self._homes.items()
        }

    def pieces(self, key: str, start: int, stop: int) -> Iterator[Tensor]:
        """Elements [start, stop) of a tensor, flat, in the dtype of the file; each piece is valid until the next."""
        return self._homes[key].pieces(key, start, stop)

    def whole(self, key: str) -> Tensor:
        """A tensor in its shape and dtype."""
        return self._homes[key].whole(key)

    def label(self, key: str) -> str:
        """File and key, for messages."""
        return f"{self._homes[key].path}: {key!r}"

    @property
    def nbytes_read(self) -> int:
        """Bytes of values that this rank has read so far, samples left out."""
        return sum(file.nbytes_read for file in self._files)

    def fingerprint(self) -> list[str]:
        """One line for each file, equal where the files are."""
        return [file.fingerprint() for file in self._files]

    def check(self, part: int, parts: int) -> None:
        """Check all values against digests, in files that state them. Each of ``parts`` readers takes its share.

        Raises:
            CheckpointError: the message names what is damaged.
        """
        for file in self._files:
            file.check(part, parts)

    def _names(self) -> list[str]:
        self._expected: list[str] = []
        if (self.path / ADAPTER_CONFIG).exists():
            raise ConfigError(
                f"{self.path}: has {ADAPTER_CONFIG}, by which from_pretrained loads the base model that it names and "
                "puts the adapter on it; load the base, and the adapter by peft, or take that file away"
            )
        if (self.path / SINGLE).exists():
            return [SINGLE]
        if not (self.path / INDEX).exists():
            if (self.path / HIDDEN).is_dir():
                raise CheckpointError(
                    f"{self.path}: a save into it was cut short; save again, or move all files of "
                    f"{self.path / HIDDEN} into it"
                )
            others = sorted(p.name for p in self.path.glob("*.bin"))
            found = (
                f"; it has {others[0]}, which transformers itself converts: from_pretrained, save_pretrained"
                if others
                else ""
            )
            raise ConfigError(f"{self.path}: has neither {SINGLE} nor {INDEX}{found}")
        places = self._index().get("weight_map")
        if not isinstance(places, dict) or not places:
            raise CheckpointError(f"{self.path / INDEX}: has no 'weight_map'; fetch it again")
        names = sorted(set(map(str, places.values())))
        foreign = [name for name in names if Path(name).name != name]
        if foreign:
            raise CheckpointError(
                f"{self.path / INDEX}: names {foreign[0]!r}, expected files in its own folder"
            )
        lost = [name for name in names if not (self.path / name).exists()]
        if lost:
            raise CheckpointError(
                f"{self.path / INDEX}: {len(lost)} of its {len(names)} files are not there, the first is {lost[0]}; "
                "fetch all of them"
            )
        self._expected = list(places)
        return names

    def _index(self) -> dict[str, Any]:
        try:
            content = parse_json(read_text(self.path / INDEX))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.path / INDEX}: cannot be read: {reason(error)}"
            ) from error
        if not isinstance(content, dict):
            raise CheckpointError(f"{self.path / INDEX}: is no object; fetch it again")
        return content
