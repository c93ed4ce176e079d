"""Block-wise codes: what they round to, and that encoding what was decoded changes no bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hpczero.kernels.codes import NF4, SHORT_SCALES, decode, encode, key_of
from hpczero.plan.layout import Codec
from tests.kernels.reference import drawn_and_decoded

BLOCK = 64
AT_REST = pytest.mark.parametrize("codec", [*map(Codec, ("int8", "nf4"))], ids=lambda c: c.name)
CODECS = pytest.mark.parametrize(
    "codec", [*map(Codec, ("int8", "nf4", "sent8", "sent4"))], ids=lambda c: c.name
)


def coded(values: Tensor, codec: Codec) -> Tensor:
    words = torch.full((codec.words(values.numel()),), torch.nan)
    encode(values, words, codec.name)
    return words


def decoded(words: Tensor, codec: Codec, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((1, numel), torch.nan, dtype=dtype)
    decode(words.view(1, -1), out, codec.name)
    return out[0]


def odd_values() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    normal = torch.randn(300 * BLOCK, generator=generator)
    magnitudes = torch.logspace(-44, 37, 300).repeat_interleave(BLOCK)
    one = torch.zeros(BLOCK)
    one[3] = -7.5
    few = torch.randint(-200, 200, (300 * BLOCK,), generator=generator) * 2.0**-149
    return {
        "normal": normal,
        "all magnitudes": normal * magnitudes,
        "zeros": torch.zeros(2 * BLOCK),
        "minus zeros": -torch.zeros(BLOCK),
        "one that is negative": one,
        "subnormal": few,
        "largest": torch.full((BLOCK,), torch.finfo(torch.float32).max),
        "several chunks": torch.randn(2**18 + 3 * BLOCK, generator=generator),
        "nothing": torch.empty(0),
    }


@AT_REST
@pytest.mark.parametrize("name", odd_values())
def test_encoding_what_was_decoded_changes_no_bit(codec, name):
    values = odd_values()[name]
    words = coded(values, codec)
    found = decoded(words, codec, values.numel())
    assert found.isfinite().all()
    assert torch.equal(coded(found, codec).view(torch.int32), words.view(torch.int32))


@CODECS
def test_a_value_becomes_the_nearest_level_of_its_block(codec):
    values = odd_values()["normal"]
    found = decoded(coded(values, codec), codec, values.numel())
    levels = {
        "int8": torch.arange(-127, 128) / 127,
        "sent8": torch.arange(-127, 128) / 127,
        "sent4": torch.arange(-7, 8) / 7,
        "nf4": torch.tensor(NF4),
    }[codec.name]
    scale = values.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK)
    if codec.name in SHORT_SCALES:
        scale = ((scale.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    nearest = (levels[None] * scale[:, None] - values[:, None]).abs().amin(1)
    torch.testing.assert_close((found - values).abs(), nearest, atol=2e-6, rtol=0)
    assert len(torch.unique((found / scale * 1e4).round())) <= len(levels)


@AT_REST
def test_the_largest_of_a_block_stays_exactly(codec):
    values = odd_values()["normal"].abs()
    found = decoded(coded(values, codec), codec, values.numel())
    assert torch.equal(found.view(-1, BLOCK).amax(1), values.view(-1, BLOCK).amax(1))


@CODECS
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_a_block_with_a_value_that_is_not_finite_is_nan_and_no_other(codec, odd):
    values = odd_values()["normal"][: 3 * BLOCK].clone()
    values[BLOCK + 5] = odd
    found = decoded(coded(values, codec), codec, values.numel()).view(3, BLOCK)
    assert found[1].isnan().all()
    assert found[0].isfinite().all()
    assert found[2].isfinite().all()


@CODECS
@pytest.mark.parametrize("numel", [BLOCK, 5 * BLOCK, 2**18 + BLOCK])
def test_shards_are_decoded_as_each_alone_and_rounded_once(codec, numel):
    generator = torch.Generator().manual_seed(6)
    shards = [torch.randn(numel, generator=generator) for _ in range(3)]
    words = torch.stack([coded(shard, codec) for shard in shards])
    out = torch.empty(3, numel, dtype=torch.bfloat16)
    decode(words, out, codec.name)
    for row, mine in zip(out, words, strict=True):
        assert torch.equal(row, decoded(mine, codec, numel).bfloat16())


EVEN = pytest.mark.parametrize(("name", "most"), [("sent8", 127), ("sent4", 7)])


@EVEN
def test_drawn_codes_have_the_bits_that_are_written_out_in_numpy(name, most):
    codec = Codec(name)
    for title, values in odd_values().items():
        words = torch.full((codec.words(values.numel()),), torch.nan)
        encode(values, words, name, key=key_of(title), first=7 * BLOCK)
        found = decoded(words, codec, values.numel()).numpy()
        expected = drawn_and_decoded(values.numpy(), most, title, 7 * BLOCK)
        equal = (found.view("u4") == expected.view("u4")) | (np.isnan(found) & np.isnan(expected))
        assert equal.all(), title


@EVEN
def test_the_mean_of_drawn_codes_is_the_value(name, most):
    codec, times = Codec(name), 4000
    values = odd_values()["normal"][: 20 * BLOCK]
    scale = values.view(-1, BLOCK).abs().amax(1).repeat_interleave(BLOCK) / most
    words, total = torch.empty(codec.words(len(values))), torch.zeros(len(values)).double()
    for time in range(times):
        encode(values, words, name, key=key_of(f"step {time}"))
        found = decoded(words, codec, len(values))
        assert ((found - values).abs() <= scale * 1.008).all()
        total += (found - values).double() / scale
    up = ((scale * most).view(torch.int32) + 0xFFFF) & -0x10000  # to the next bf16
    scale = up.view(torch.float32) / most
    share = (values / scale).double().frac().abs()
    spread = (share * (1 - share) * times).sqrt()
    z = (total / spread)[spread > 8]
    assert z.pow(2).mean().sqrt() < 1.1
    assert z.abs().max() < 5


def test_bytes_per_element():
    assert Codec("int8").nbytes(6400) == 6400 * 1.0625
    assert Codec("nf4").nbytes(6400) == 6400 * 0.5625
    assert coded(torch.zeros(6400), Codec("nf4")).nbytes == Codec("nf4").nbytes(6400)
