"""Deviates are the ones that the generator's paper and the normal distribution say, on every processor."""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from statistics import NormalDist

import numpy as np
import pytest
import torch
from numpy._core._multiarray_umath import (  # type: ignore[import-not-found]
    __cpu_dispatch__,
)

from hpczero.models import initial
from hpczero.models.initial import BLOCK, CHUNK, Deviates
from tests.helpers.mpirun import ROOT

MASK = 2**64 - 1


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x64-10 in Python's own numbers, from the paper's figure 3 and table 2."""
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        low, high = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b, c, d = (high >> 64) ^ b ^ k0, high & MASK, (low >> 64) ^ d ^ k1, low & MASK
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & MASK, (k1 + 0xBB67AE8584CAA73B) & MASK
    return [a, b, c, d]


def word(key: str, number: int) -> int:
    """The signed word of 32 bits behind a deviate."""
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    keys = [int.from_bytes(digest[at : at + 8], "little") for at in (0, 8)]
    block, place = divmod(number, BLOCK)
    made = philox([(block + 1) & MASK, 0, 0, 0], keys)  # NumPy counts from 1
    found = made[place // 2] >> (32 * (place % 2)) & 0xFFFFFFFF
    return found - 2**32 if found >= 2**31 else found


def drawn(start: int, count: int, key: str = "k") -> torch.Tensor:
    out = torch.full((count,), torch.nan)
    Deviates(key).fill(out, start, 1.0)
    return out


def test_the_reference_gives_the_numbers_of_its_authors() -> None:
    expected = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    assert philox([0] * 4, [0] * 2) == expected  # known answers of Random123


@pytest.mark.parametrize("start", [0, 5, 8 * 1000 + 3, 2**33 + 1])
def test_a_deviate_is_the_inverse_of_the_normal_distribution_at_its_word(start: int) -> None:
    for number, value in enumerate(drawn(start, 21).tolist(), start):
        g = word("k", number) + 0.5
        expected = math.copysign(-NormalDist().inv_cdf(abs(g) / 2**32), g)
        assert value == pytest.approx(expected, abs=2e-6)


def test_any_range_has_the_deviates_of_the_whole() -> None:
    whole = drawn(0, 2 * CHUNK + 77)
    one = Deviates("k")
    generator = np.random.default_rng(3)
    for _ in range(50):
        start = int(generator.integers(0, len(whole)))
        count = int(generator.integers(0, min(len(whole) - start, CHUNK + 9) + 1))
        part = torch.full((count,), torch.nan)
        one.fill(part, start, 1.0)  # back and forth by one object
        assert torch.equal(part, whole[start : start + count])


def test_keys_give_other_deviates() -> None:
    assert not (drawn(0, 999, "1/a") == drawn(0, 999, "1/b")).any()


def test_deviates_are_normal_and_independent_of_their_neighbours() -> None:
    count = 1 << 18
    values = drawn(0, count).double()
    noise = 1 / math.sqrt(count)
    assert abs(values.mean()) < 4 * noise
    assert abs(values.var() - 1) < 4 * math.sqrt(2) * noise
    assert abs((values**3).mean()) < 4 * math.sqrt(15) * noise
    assert abs((values**4).mean() - 3) < 4 * math.sqrt(96) * noise
    for apart in (1, 2, 7, 8, 4096):
        assert abs((values[apart:] * values[:-apart]).mean()) < 4 * noise, apart
    ordered = torch.special.ndtr(values.sort().values)
    places = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    assert (
        ordered - places
    ).abs().max() < 1.95 * noise  # Kolmogorov and Smirnov: one in a thousand is above


def test_no_processor_can_round_a_knot_the_other_way() -> None:
    # Of a library's log the last bits differ. A knot is rounded to a multiple, and none is that near to the middle.
    knots = 2.0 ** np.arange(-1, 32)[:, None] * (1 + np.arange(2**initial.BITS) / 2**initial.BITS)
    knots = knots[knots <= 2**31]
    scaled = initial.quantiles(knots) * initial._ROUNDED
    from_the_middle = np.abs(scaled - np.floor(scaled) - 0.5)
    assert from_the_middle.min() > 16 * np.spacing(scaled.max())


@pytest.mark.slow
@pytest.mark.parametrize(
    "narrow",
    [{"NPY_DISABLE_CPU_FEATURES": " ".join(__cpu_dispatch__)}, {"ATEN_CPU_CAPABILITY": "default"}],
    ids=["numpy", "torch"],
)
def test_bits_are_those_of_narrower_vectors(narrow: dict[str, str]) -> None:
    program = (
        "import hashlib, torch; from hpczero.models.initial import Deviates\n"
        "from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__\n"
        "print(torch.backends.cpu.get_cpu_capability(), sum(__cpu_features__[n] for n in __cpu_dispatch__))\n"
        "out = torch.empty(50_021); Deviates('k').fill(out, 3, 0.02)\n"
        "print(hashlib.sha256(out.numpy().tobytes()).hexdigest())"
    )

    def said(environment: dict[str, str]) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            env={**os.environ, **environment},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.splitlines()

    wide, wide_digest = said({})
    other, digest = said(narrow)
    if wide == other:
        pytest.skip(f"this processor has no wider vectors: {wide}")
    assert digest == wide_digest


def test_the_bits_are_those_on_file() -> None:
    # Initial weights of a run are these: whoever changes them changes every training that begins anew.
    out = torch.empty(100_003)
    Deviates("0/wte.weight").fill(out, 0, 0.02)
    found = hashlib.sha256(out.numpy().astype("<f4").tobytes()).hexdigest()
    assert found == "f0dc7a9d973912976c36f64ba052c2b19a852e8573a3cf9f1fb7a2cf0891ef48"
