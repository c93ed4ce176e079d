"""The text of the device's sum, compiled for the host, against the torch twin: every bit."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpczero.kernels.source import MOST_BLOCKS, VECTOR_NBYTES, tree_sum_source
from hpczero.kernels.tree_sum import NAMES, tree_sum

GROUPS = [[[0]], [[0, 1]], [[2, 0, 1]], [[0, 1], [2, 3]], [[0, 2, 4], [1, 3, 5]], [[0], [1], [2]]]
GROUPS += [[[*range(5)], [*range(5, 11)]], [[*range(MOST_BLOCKS)]]]  # narrower loads
NUMELS = [0, 1, 7, 8, 1003]
DTYPES = {name: dtype for dtype, name in NAMES.items()}


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which("g++")
    if found is None:
        pytest.skip("no g++ to compile the device's sum for the host")
    return found


def compiled(compiler: str, source: str, folder: Path) -> ctypes.CDLL:
    (folder / "sum.cpp").write_text(source)
    command = [compiler, "-O2", "-std=c++17", "-ffp-contract=off", "-shared", "-fPIC", "-o"]
    done = subprocess.run(
        [*command, folder / "sum.so", folder / "sum.cpp"], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode()
    return ctypes.CDLL(str(folder / "sum.so"))


def blocks_of(count: int, numel: int, dtype: torch.dtype, *, aligned: bool) -> list[Tensor]:
    """Hard ones: of very different sizes, negative zero, subnormal, infinite and not a number."""
    generator = torch.Generator().manual_seed(count + numel)
    found = []
    for _ in range(count):
        scales = 10.0 ** torch.randint(-6, 5, (numel + 1,), generator=generator)
        values = (torch.randn(numel + 1, generator=generator) * scales).to(dtype)
        values[: numel // 8 * 2 : 2] = -0.0
        if numel > 100:
            values[100:102] = torch.tensor([float("inf"), float("nan")])
            values[102] = torch.finfo(dtype).tiny / 4
        found.append(values[:numel] if aligned else values[1:])
    return found


def addresses(tensors: Sequence[Tensor]) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize(
    ("dtype", "node_dtype"),
    [("fp32", "fp32"), ("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "bf16"), ("bf16", "fp16")],
)
def test_every_bit_is_that_of_the_torch_twin(compiler, tmp_path, dtype, node_dtype, aligned):
    for number, groups in enumerate(GROUPS):
        folder = tmp_path / str(number)
        folder.mkdir()
        source = tree_sum_source(groups, dtype, node_dtype, aligned=aligned, cuda=False)
        library = compiled(compiler, source, folder)
        for numel in NUMELS:
            count = sum(map(len, groups))
            blocks = blocks_of(count, numel, DTYPES[dtype], aligned=aligned)
            pointers = addresses(blocks)
            if aligned:
                assert all((p.value or 0) % VECTOR_NBYTES == 0 for p in pointers)
            for scale, accumulate in ((1.0, False), (0.3, True)):
                expected = torch.full((numel,), 0.7)
                found = expected.clone()
                tree_sum(
                    blocks,
                    expected,
                    groups=groups,
                    scale=scale,
                    accumulate=accumulate,
                    node_dtype=DTYPES[node_dtype],
                )
                library.tree_sum(
                    *pointers,
                    *addresses([found]),
                    *map(ctypes.c_longlong, (1, numel, numel, numel)),
                    ctypes.c_float(scale),
                    ctypes.c_int(accumulate),
                )
                nan = expected.isnan()
                assert torch.equal(nan, found.isnan())
                same = expected.view(torch.int32) == found.view(torch.int32)
                assert bool((same | nan).all()), (groups, numel, scale)


@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_rows_with_gaps_have_the_bits_of_the_torch_twin(compiler, tmp_path, dtype, aligned):
    """What lies between the rows is neither read into a sum nor written."""
    groups, gap = [range(3)], 8 if aligned else 3
    source = tree_sum_source(groups, dtype, "fp32", aligned=aligned, cuda=False, several_rows=True)
    library = compiled(compiler, source, tmp_path)
    for rows, numel in ((1, 16), (3, 16), (5, 13), (2, 0)):
        stride, out_stride = (-(-numel // 8) * 8 + gap, -(-numel // 8) * 8 + 2 * gap)
        whole = blocks_of(3, rows * stride, DTYPES[dtype], aligned=aligned)
        found = torch.full((rows * out_stride,), 0.7)
        expected = found.clone()
        views = [block.as_strided((rows, numel), (stride, 1)) for block in whole]
        into = expected.as_strided((rows, numel), (out_stride, 1))
        tree_sum(views, into, groups=groups, scale=0.3, accumulate=True)
        library.tree_sum(
            *addresses([*whole, found]),
            *map(ctypes.c_longlong, (rows, numel, stride, out_stride)),
            ctypes.c_float(0.3),
            ctypes.c_int(1),
        )
        assert torch.equal(expected.nan_to_num(), found.nan_to_num())
        assert torch.equal(expected.isnan(), found.isnan())


def test_cuda_text_differs_from_the_tested_one_in_loops_and_intrinsics_alone():
    """What is summed, in which order, and what is loaded and stored, is the same text."""
    for aligned in (True, False):
        cuda, host = (
            tree_sum_source([[0, 1], [2, 3]], "bf16", "fp32", aligned=aligned, cuda=kind)
            for kind in (True, False)
        )
        assert body_of(cuda) == body_of(host)
        assert "sum(" in "".join(body_of(cuda))


def body_of(source: str) -> list[str]:
    """From the first function both have, without the lines that say which thread does what."""
    lines = source[source.index("INLINE float from_bf16") :].splitlines()
    marks = ("const long long first", "for (long long i", "for (long long row", 'extern "C"')
    return [line for line in lines if not line.strip().startswith(marks)]
