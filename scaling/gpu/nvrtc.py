"""CUDA's run-time compiler without a GPU: what a kernel takes on a device is known from its machine code.

The wheels ``nvidia-cuda-nvrtc-cu12`` and torch's own CUDA wheels bring the library.

Source: NVRTC user guide, sec. 3; ELF-64 object file format, version 1.5. The attributes of ``.nv.info`` are as in
``cuobjdump -elf``: each is a format, a number, a size and its values.
"""

from __future__ import annotations

import ctypes
import importlib.util
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Ours, and what CuPy adds to every kernel (cupy/cuda/compiler.py).
OPTIONS = ("--std=c++17", "-ftz=true")
REGISTERS, FRAME_SIZE = 0x2F, 0x11  # attributes of .nv.info: (symbol, figure)
SIZED = 4  # format of an attribute whose values follow it


class CompileError(Exception):
    """The compiler refused the source; its log is the message."""


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes."""

    registers: int  # of a thread; of the largest function
    local_nbytes: int  # memory of a thread for what found no register
    code_nbytes: int  # of the machine code, as an ELF file
    flushes: bool  # whether an instruction of it takes subnormal numbers for zero


class Nvrtc:
    """The compiler in one library."""

    def __init__(self, library: Path) -> None:
        """Load it. Raises OSError: it cannot be loaded."""
        # CUDA 13 opens it by its name alone.
        for part in library.parent.glob("libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(part))
        self._library = ctypes.CDLL(str(library))

    def compile(self, source: str, architecture: str) -> Compiled:
        """Compile for a device, as CuPy would.

        Args:
            source: CUDA C++.
            architecture: such as sm_90.

        Raises:
            CompileError: with the compiler's log.
        """
        program, given = ctypes.c_void_p(), (source.encode(), b"sum.cu", 0, None, None)
        self._call("CreateProgram", ctypes.byref(program), *given)
        try:
            words = [word.encode() for word in (f"--gpu-architecture={architecture}", *OPTIONS)]
            options = (ctypes.c_char_p * len(words))(*words)
            refused = self._library.nvrtcCompileProgram(program, len(words), options)
            if refused:
                log = self._bytes("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
                raise CompileError(log.strip() or f"NVRTC refuses {architecture}: code {refused}")
            code = self._bytes("CUBIN", program)
            instructions = self._bytes("PTX", program)
        finally:
            self._call("DestroyProgram", ctypes.byref(program))
        found = list(_attributes(code))
        return Compiled(
            max(value for number, value in found if number == REGISTERS),
            max(value for number, value in found if number == FRAME_SIZE),
            len(code),
            b".ftz" in instructions,
        )

    def _bytes(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, buffer)
        return buffer.raw

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, f"nvrtc{name}")(*arguments)
        if code:
            raise CompileError(f"nvrtc{name} failed with code {code}")


def find_nvrtc() -> Nvrtc | None:
    """The compiler of this Python's packages; None where there is none."""
    try:
        found = importlib.util.find_spec("nvidia")
    except (ImportError, ValueError):
        return None
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        for library in sorted(Path(folder).glob("*/lib/libnvrtc.so.*")):
            return Nvrtc(library)
    return None


def _attributes(code: bytes) -> Iterator[tuple[int, int]]:
    """Number and figure of each attribute of a function in the ``.nv.info`` sections of an ELF file."""
    (first,) = struct.unpack_from("<Q", code, 40)
    size, count, names_index = struct.unpack_from("<HHH", code, 58)
    # name, type, flags, address, offset, size, ...
    sections = [struct.unpack_from("<IIQQQQ", code, first + i * size) for i in range(count)]
    names = sections[names_index][4]
    for name, _, _, _, offset, nbytes in sections:
        if not code.startswith(b".nv.info", names + name):
            continue
        at = offset
        while at < offset + nbytes:
            form, number, value = struct.unpack_from("<BBH", code, at)
            at += 4
            if form == SIZED:
                if number in (REGISTERS, FRAME_SIZE):
                    yield number, struct.unpack_from("<II", code, at)[1]
                at += value
