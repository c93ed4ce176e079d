"""Digests in a safetensors file: one of each tensor with its dtype and shape, one of the other metadata.

Owns: the entry of the file's metadata that holds them, and the comparison. Must not know: torch, how files are read.
The format itself has no digests; other readers ignore the entry.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from hpczero.files.regular import parse_json

KEY = "hpczero.digests"
HAS = "hpczero.has-digests"  # a second entry, or damage to the name of the first would leave a file without digests
UNKNOWN = "0" * 16  # as long as any other

Array = npt.NDArray[Any]


def tensor_digest(dtype: str, shape: Iterable[int], pieces: Iterable[Array]) -> str:
    """Digest of one tensor, 16 hexadecimal digits.

    Args:
        dtype: name of the dtype in the file, such as ``F32``.
        shape: shape in the file.
        pieces: its bytes from first to last, contiguous.
    """
    state = xxhash.xxh3_64(f"{dtype} {list(shape)} ".encode())
    for piece in pieces:
        state.update(np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data)
    return str(state.hexdigest())


def with_digests(metadata: Mapping[str, str], tensors: Mapping[str, str]) -> dict[str, str]:
    """``metadata`` with the entries for the digests; ``tensors`` has the digest of each tensor."""
    entry = {"metadata": _of_texts(metadata), "tensors": dict(tensors)}
    return {**metadata, HAS: "true", KEY: json.dumps(entry, separators=(",", ":"))}


@dataclass(frozen=True)
class Digests:
    """What a file states that its tensors are.

    Attributes:
        tensors: digest of each.
    """

    tensors: dict[str, str]

    @classmethod
    def of(cls, metadata: Mapping[str, str], names: Iterable[str]) -> Digests | None:
        """Digests of a file with these ``metadata`` and tensors; None if it has none.

        Raises:
            ValueError: the metadata are not what was written, or the file has other tensors.
        """
        if KEY not in metadata and HAS not in metadata:
            return None
        if KEY not in metadata or metadata.get(HAS) != "true":
            raise ValueError("its digests are lost")
        entry = parse_json(metadata[KEY])
        fields = entry if isinstance(entry, dict) else {}
        others = {name: text for name, text in metadata.items() if name not in (KEY, HAS)}
        if fields.get("metadata") != _of_texts(others):
            raise ValueError("what it says beside its tensors does not have the digest it states")
        tensors = fields.get("tensors")
        if not isinstance(tensors, dict) or tensors.keys() != set(names):
            raise ValueError("its tensors are not those it has digests of")
        return cls(tensors)

    def check(self, name: str, found: str) -> None:
        """Compare the digest of a tensor with the one that the file states.

        Raises:
            ValueError: they differ.
        """
        if self.tensors[name] != found:
            raise ValueError(f"{name!r} does not have the digest it was written with")


def _of_texts(metadata: Mapping[str, str]) -> str:
    text = json.dumps(sorted(metadata.items()))
    return str(xxhash.xxh3_64(text.encode()).hexdigest())
