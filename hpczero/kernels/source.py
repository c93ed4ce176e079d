"""Source text of the k-way sum, for CUDA's run-time compiler and for the host's, so that it is tested on any machine.

The order and the rounding places are those of ``tree_sum``. Every addition is written out, because a library's sum
fixes no order. On a device additions and products are instructions. A compiler may fuse plain ones into multiply-adds,
and with ``-ftz=true``, which CuPy adds for all kernels, plain ones and intrinsics take subnormal numbers for zero.
"""

from __future__ import annotations

from collections.abc import Sequence

VECTOR_NBYTES = 16  # the widest load of a thread
# Of one launch. With 256 a compiler took 9.5 s and kept 4 KiB of each thread in local memory; larger sums
# are several launches.
MOST_BLOCKS = 32
MOST_BLOCKS_OF_ROWS = 16
# What a thread loads before it adds. All loads of a turn are under way together, in registers: 128 bytes are 32 of
# them. With 16 bytes of each of 32 blocks a compiler takes 168 registers, with 4 it takes at most 64.
LOADED_NBYTES = 128
THREADS = 256  # of a block
# Blocks of threads that an SM must have registers for: 65,536 of them are 64 for each thread.
BLOCKS_OF_REGISTERS = 4

_ELEMENTS = {
    "fp32": ("float", "{}"),
    "bf16": ("uint16_t", "from_bf16({})"),
    "fp16": ("uint16_t", "from_fp16({})"),
}
_ROUNDED = {"fp32": "{}", "bf16": "from_bf16(to_bf16({}))", "fp16": "from_fp16(to_fp16({}))"}

_SHARED = """
INLINE float from_bf16(uint16_t bits) { return from_bits((uint32_t)bits << 16); }
INLINE uint16_t to_bf16(float value) {
    const uint32_t bits = to_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;  // no number; a comparison of floats may flush them
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
template <typename T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack { T at[N]; };
"""

# No header: CuPy finds CUDA's only where a toolkit or its wheels are installed (cupy#9295).
_CUDA = """
typedef unsigned short uint16_t; typedef unsigned int uint32_t;
#define INLINE __device__ __forceinline__
INLINE float ADD(float a, float b) { float c; asm("add.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c; }
INLINE float MUL(float a, float b) { float c; asm("mul.rn.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b)); return c; }
INLINE float from_bits(uint32_t bits) { return __uint_as_float(bits); }
INLINE uint32_t to_bits(float value) { return __float_as_uint(value); }
INLINE float from_fp16(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
INLINE uint16_t to_fp16(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
"""

# For a compiler of the host with -ffp-contract=off.
_HOST = """
#include <cstdint>
#include <cstring>
#define INLINE static inline
#define ADD(a, b) ((a) + (b))
#define MUL(a, b) ((a) * (b))
INLINE float from_bits(uint32_t bits) { float value; memcpy(&value, &bits, 4); return value; }
INLINE uint32_t to_bits(float value) { uint32_t bits; memcpy(&bits, &value, 4); return bits; }
INLINE float from_fp16(uint16_t bits) { _Float16 half; memcpy(&half, &bits, 2); return (float)half; }
INLINE uint16_t to_fp16(float value) {
    const _Float16 half = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &half, 2);
    return bits;
}
"""

_BODY = """
INLINE float sum({arguments}) {{ return {expression}; }}

extern "C" {entry} void tree_sum({pointers}, float* out, long long rows, long long numel, long long stride,
        long long out_stride, float scale, int accumulate) {{
    {loop_rows} {{
    const long long from = {of_row}stride, to = {of_row}out_stride;
    {loop_vectors} {{
{loads}
        Pack<float, {width}> into = accumulate ? ((const Pack<float, {width}>*)out)[to / {width} + i] :
            Pack<float, {width}>();
        #pragma unroll
        for (int j = 0; j < {width}; ++j) {{  // unrolled, or what was loaded goes to local memory to be indexed
            const float scaled = MUL(sum({elements}), scale);
            into.at[j] = accumulate ? ADD(into.at[j], scaled) : scaled;
        }}
        ((Pack<float, {width}>*)out)[to / {width} + i] = into;
    }}
    #pragma unroll 1
    {loop_rest} {{  // at most one turn of a thread where loads are wide
        const float scaled = MUL(sum({scalars}), scale);
        out[to + i] = accumulate ? ADD(out[to + i], scaled) : scaled;
    }}
    }}
}}
"""

_LOOPS = {
    True: (
        "\n    #pragma unroll 1\n    for (long long row = blockIdx.y; row < rows; row += gridDim.y)",
        "const long long first = blockIdx.x * (long long)blockDim.x + threadIdx.x, step = (long long)gridDim.x * "
        "blockDim.x;\n    {turns}for (long long i = first; i < numel / {width}; i += step)",
        "for (long long i = numel / {width} * {width} + first; i < numel; i += step)",
    ),
    False: (
        "\n    #pragma unroll 1\n    for (long long row = 0; row < rows; ++row)",
        "{turns}for (long long i = 0; i < numel / {width}; ++i)",
        "for (long long i = numel / {width} * {width}; i < numel; ++i)",
    ),
}


def tree_sum_source(
    groups: Sequence[Sequence[int]],
    dtype: str,
    node_dtype: str,
    *,
    aligned: bool,
    cuda: bool,
    several_rows: bool = False,
) -> str:
    """C++ with one function ``tree_sum(block pointers, out, rows, numel, stride, out_stride, scale, accumulate)``.

    It sums ``rows`` rows of ``numel`` elements, which begin ``stride`` elements apart in every block and ``out_stride``
    in ``out``.

    Args:
        groups: as in ``tree_sum``; of at most ``MOST_BLOCKS`` blocks.
        dtype: of the blocks: fp32, bf16, fp16.
        node_dtype: as in ``tree_sum``.
        aligned: whether every pointer, and the bytes of every stride, are multiples of ``VECTOR_NBYTES``.
        cuda: text for CUDA's compiler; False gives that for the host's.
        several_rows: False takes one row alone, whatever is said of rows. Places of rows take registers: with them at
            most ``MOST_BLOCKS_OF_ROWS`` blocks.
    """
    element, load = _ELEMENTS[dtype]
    blocks = range(sum(map(len, groups)))
    width = vector_width(dtype, len(blocks)) if aligned else 1
    several, pack = len(groups) > 1, f"Pack<{element}, {width}>"
    terms = [_tree([f"a{i}" for i in group]) for group in groups]
    rounded = [_ROUNDED[node_dtype].format(term) if several else term for term in terms]
    # Of few blocks a compiler lets several turns load at once, which is good; of many there are loads enough.
    turns = "\n    #pragma unroll 1\n    " if len(blocks) * VECTOR_NBYTES > LOADED_NBYTES else ""
    loop_rows, vectors, rest = (loop.format(width=width, turns=turns) for loop in _LOOPS[cuda])
    body = _BODY.format(
        arguments=", ".join(f"float a{i}" for i in blocks),
        expression=_tree(rounded),
        entry=f"__global__ __launch_bounds__({THREADS}, {BLOCKS_OF_REGISTERS})" if cuda else "",
        pointers=", ".join(f"const {element}* b{i}" for i in blocks),
        width=width,
        loop_rows=loop_rows if several_rows else "",
        of_row="row * " if several_rows else "0 * ",
        loop_vectors=vectors,
        loop_rest=rest,
        loads="\n".join(
            f"        const {pack} p{i} = ((const {pack}*)b{i})[from / {width} + i];"
            for i in blocks
        ),
        elements=", ".join(load.format(f"p{i}.at[j]") for i in blocks),
        scalars=", ".join(load.format(f"b{i}[from + i]") for i in blocks),
    )
    return (_CUDA if cuda else _HOST) + _SHARED + body


def vector_width(dtype: str, count: int) -> int:
    """Elements of one load from each of ``count`` blocks: 16 bytes up to 8 blocks, 8 up to 16, else 4."""
    nbytes = max(min(VECTOR_NBYTES, LOADED_NBYTES // (1 << (count - 1).bit_length())), 4)
    return nbytes // (4 if dtype == "fp32" else 2)


def _tree(terms: Sequence[str]) -> str:
    if len(terms) == 1:
        return terms[0]
    middle = (len(terms) + 1) // 2
    return f"ADD({_tree(terms[:middle])}, {_tree(terms[middle:])})"
