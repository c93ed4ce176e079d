"""The device's sum as CUDA's own compiler makes it, on any machine: little code, in registers alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest

from hpczero.kernels.source import MOST_BLOCKS, MOST_BLOCKS_OF_ROWS, tree_sum_source
from hpczero.kernels.tree_sum import NAMES
from scaling.gpu.nvrtc import CompileError, Nvrtc, find_nvrtc
from tests.helpers.cases import EVERYTHING

ARCHITECTURES = ("sm_75", "sm_80", "sm_90")
MOST_REGISTERS = 64  # of a thread: four blocks of 256 then fit an SM
MOST_CODE_NBYTES = 2**16  # the compiler's time grows with it: a fifth of a second for half as much
# The most of each width of loads, those that took most registers or local memory at some time, and one.
COUNTS = (1, 2, 6, 8, 15, 16, 27, MOST_BLOCKS)


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    found = find_nvrtc()
    if found is None:
        pytest.skip("no CUDA compiler: the package nvidia-cuda-nvrtc-cu12 is not installed")
    return found


Variant = tuple[int, list[Sequence[int]], str, bool, bool]
"""Number of blocks, groups of them, dtype on a node, aligned, several rows."""


def variants() -> list[Variant]:
    """Every kind of sum that the device is asked for."""
    found: list[Variant] = []
    for count in COUNTS:
        for groups in ([range(count)], [[block] for block in range(count)]):
            for node_dtype in NAMES.values() if len(groups) > 1 else ("fp32",):
                for aligned, rows in product((True, False), (True, False)):
                    if not rows or count <= MOST_BLOCKS_OF_ROWS:
                        found.append((count, [*groups], node_dtype, aligned, rows))
    return found


@pytest.mark.limit(180)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", sorted(NAMES.values()))
def test_every_sum_compiles_into_little_code_and_registers_alone(nvrtc, architecture, dtype):
    """In the core each for one architecture, all of them in turn; a thousand take minutes."""
    every = variants()
    mine = every if EVERYTHING else every[ARCHITECTURES.index(architecture) :: len(ARCHITECTURES)]
    for count, groups, node_dtype, aligned, rows in mine:
        source = tree_sum_source(
            groups, dtype, node_dtype, aligned=aligned, cuda=True, several_rows=rows
        )
        found = nvrtc.compile(source, architecture)
        which = (count, len(groups), node_dtype, aligned, rows)
        assert 0 < found.registers <= MOST_REGISTERS, (which, found)
        assert found.local_nbytes == 0, (which, found)
        assert found.code_nbytes < MOST_CODE_NBYTES, (which, found)
        assert not found.flushes, which  # the host keeps subnormal numbers


SPILLS = """
extern "C" __global__ void keeps(float* out, int at) {
    float kept[300];
    for (int i = 0; i < 300; ++i) kept[i] = out[i];
    out[0] = kept[at];
}
"""


def test_local_memory_of_a_kernel_that_has_some_is_seen(nvrtc):
    assert nvrtc.compile(SPILLS, "sm_80").local_nbytes >= 1200


def test_an_addition_that_flushes_is_seen(nvrtc):
    plain = 'extern "C" __global__ void adds(float* out) { out[0] = out[1] + out[2]; }'
    assert nvrtc.compile(plain, "sm_90").flushes


def test_what_does_not_compile_is_told_with_the_compilers_words(nvrtc):
    with pytest.raises(CompileError, match="broken"):
        nvrtc.compile('extern "C" __global__ void f() { broken; }', "sm_80")
