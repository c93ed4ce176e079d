"""A file of ``torch.save``, opened so that damage is found and what it should not hold is refused.

Owns: the checksums of its zip archive, and which tensors can be weights. Must not know: models, layouts of names. torch
itself checks no checksum.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hpczero.errors import CheckpointError
from hpczero.files.regular import reason, shown

BLOCK_NBYTES = 2**22
# By torch.save, where torch.serialization.set_crc32_options(False) says so.
NO_CHECKSUM = 0


class TorchFile:
    """One file of a ``state_dict``, mapped into memory as long as this object lives.

    Attributes:
        tensors: tensors by name.
        has_checksums: whether damage to its values can be seen.
    """

    def __init__(self, file: Path) -> None:
        """Open a file. Only the part that says where the values are is checked against its checksums here.

        Raises:
            CheckpointError: it is damaged, not of torch.save, or holds other things than tensors of plain memory.
        """
        self._file = file
        self._values: list[str] = []
        self.has_checksums = True
        self._open()
        try:
            with warnings.catch_warnings():  # of tensors in beta state, which are refused below
                warnings.simplefilter("ignore", UserWarning)
                content = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except (MemoryError, OSError) as error:
            raise _of_the_machine(file, error) from error
        except Exception as error:  # a pickle that is damaged raises anything
            raise CheckpointError(
                f"{file}: torch.load cannot read it with weights_only=True and mmap=True: {_first_line(error)}; write "
                "the state_dict anew with torch.save of a recent torch"
            ) from error
        if not isinstance(content, Mapping):
            raise CheckpointError(
                f"{file}: holds a {type(content).__name__}, expected a state_dict"
            )
        self.tensors: dict[str, Tensor] = {}
        for key, value in content.items():
            if str(key) in self.tensors:
                raise CheckpointError(
                    f"{file}: two of its keys are {str(key)!r} as text, one of them {shown(key)}; give each tensor a "
                    "name of its own"
                )
            self.tensors[str(key)] = self._plain(key, value)

    def check(self, part: int, parts: int) -> None:
        """Check the values against their checksums. Each of ``parts`` readers takes its share.

        Raises:
            CheckpointError: the message names what is damaged.
        """
        if self.has_checksums:
            self._read(self._values[part::parts])

    def _open(self) -> None:
        try:
            with zipfile.ZipFile(self._file) as archive:
                entries = archive.infolist()
        except (MemoryError, OSError) as error:
            raise _of_the_machine(self._file, error) from error
        except Exception as error:  # of a damaged archive, anything
            raise CheckpointError(
                f"{self._file}: no file of torch.save, or damaged: {_first_line(error)}; fetch it again, or write it "
                "anew with torch.save of a recent torch"
            ) from error
        names = [entry.filename for entry in entries]
        if len(set(names)) < len(names) or any(entry.compress_type for entry in entries):
            raise CheckpointError(
                f"{self._file}: no file of torch.save: it is compressed, or has one name twice"
            )
        # The root is named as the file was; the values are <root>/data/<number>.
        self._values = [name for name in names if name.split("/")[-2:-1] == ["data"]]
        self.has_checksums = any(entry.CRC != NO_CHECKSUM for entry in entries)
        if self.has_checksums:
            self._read([name for name in names if name not in set(self._values)])

    def _read(self, names: list[str]) -> None:
        """Read to the end, where zipfile compares the checksum."""
        name = ""
        try:
            with zipfile.ZipFile(self._file) as archive:
                for name in names:
                    with archive.open(name) as entry:
                        while entry.read(BLOCK_NBYTES):
                            pass
        except (MemoryError, OSError) as error:
            raise _of_the_machine(self._file, error) from error
        except Exception as error:  # as in _open
            raise CheckpointError(
                f"{self._file}: damaged at {name!r}: {_first_line(error)}; fetch it again"
            ) from error

    def _plain(self, key: object, value: object) -> Tensor:
        """``value``, if it is a tensor whose elements all exist, each in memory of its own; refuses others."""
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{self._file}: {key!r} is a {type(value).__name__}, expected tensors only; save the state_dict of the "
                "model alone, as torch.save(model.state_dict(), path)"
            )
        kind = None
        if value.layout is not torch.strided or value.is_nested:
            kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        elif value.is_quantized or value.is_meta:
            kind = "quantized" if value.is_quantized else "without values (on the meta device)"
        if kind is not None:
            raise CheckpointError(
                f"{self._file}: {key!r} is {kind}, expected a tensor of plain memory; convert it, as with "
                "to_dense() or dequantize(), and save it again"
            )
        tensor = value.detach()
        held = tensor.untyped_storage().nbytes()
        if tensor.numel() * tensor.itemsize > held:
            raise CheckpointError(
                f"{self._file}: {key!r} has {tensor.numel():,} elements in {held:,} bytes, as expand() makes them; "
                "save it as contiguous()"
            )
        return tensor


def _of_the_machine(file: Path, error: MemoryError | OSError) -> CheckpointError:
    """Whether an error is the machine's: another file would not do better."""
    why = reason(error) if isinstance(error, OSError) else f"out of memory: {_first_line(error)}"
    return CheckpointError(f"{file}: cannot be read: {why}")


def _first_line(error: BaseException) -> str:
    text = str(error)
    return text.splitlines()[0][:300] if text else type(error).__name__
