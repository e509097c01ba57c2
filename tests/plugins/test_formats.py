"""State formats: the arithmetic that the contract spells out, against independent forms of it."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from replayssm.plugins.nvfp4 import E2M1_VALUES, pack_words, unpack_words
from replayssm.plugins.philox import philox4x32
from replayssm.plugins.reference.formats import (
    decode_float8,
    decode_nvfp4,
    encode_float8,
    encode_nvfp4,
    round_stochastic,
)
from replayssm.plugins.reference.rounding import rounding_bits
from replayssm.plugins.settings import ReplaySettings

SEED = torch.Generator().manual_seed(20261130)


def spread(*shape: int, low: int = -40, high: int = 20) -> torch.Tensor:
    """Random fp32 numbers over many binades, with zeros of both signs among them."""
    exponents = torch.randint(low, high, shape, generator=SEED)
    values = torch.randn(shape, generator=SEED) * torch.exp2(exponents.float())
    values[torch.rand(shape, generator=SEED) < 0.05] = 0.0
    return torch.where(torch.rand(shape, generator=SEED) < 0.5, values, -values)


@pytest.mark.parametrize("shape", [(2, 3, 64), (3, 2, 7), (1, 4, 40)])
def test_rounding_bits_are_where_the_contract_says(shape):
    """Element by element from the contract's formula, also for rows that do not fill a word."""
    seed, layer, position = 7, 12, 2**30 + 5
    bits = rounding_bits(shape, seed, layer, position)
    heads, rows, columns = shape
    groups = 4 * -(-columns // 64)
    for head in range(heads):
        for row in range(rows):
            for column in range(columns):
                group = row * groups + 4 * (column // 64) + column % 16 // 4
                words = philox4x32((group, head, position, layer), (seed, 0), rounds=7)
                octets = b"".join(int(word).to_bytes(4, "little") for word in words)
                i = column // 16 % 4 * 4 + column % 4
                assert bits[head, row, column] == octets[i] + 256 * octets[(i + 1) % 16]


def test_neighbours_round_independently():
    """Elements that share a byte of the random bits round up together as often as independent ones do, within 2^-8 and
    5 standard deviations of the sample (2^18 pairs: 5 * 0.5 / 2^9 is more than the 2^-8 themselves)."""
    r = rounding_bits((4, 64, 1024), 3, 0, 99)
    for fraction in (0.25, 0.5, 0.8):
        up = (r < fraction * 2**16).double() - fraction
        assert up.mean().abs() < 5 * 0.5 / up.numel() ** 0.5
        by_call = up.unflatten(-1, (-1, 4, 4, 4)).transpose(-3, -2).flatten(-2)
        for distance in (1, 2, 15):
            together = (by_call * by_call.roll(-distance, -1)).mean() / (fraction * (1 - fraction))
            assert together.abs() < 2**-8 + 5 / up.numel() ** 0.5, (fraction, distance)


def test_words_unpack_with_the_four_masks():
    """What a kernel does with a word: four masked words are the codes as half2, times 2^-14."""
    codes = torch.randint(0, 16, (3, 96), generator=SEED, dtype=torch.uint8)
    packed = pack_words(codes)
    assert torch.equal(unpack_words(packed), codes)
    mask = 0x8E008E00
    values = torch.tensor((*E2M1_VALUES, *(-value for value in E2M1_VALUES)))[codes.long()]
    for row in range(3):
        for lane in range(4):
            for word in range(3):
                offset = 4 * (3 * lane + word)
                v = int.from_bytes(bytes(packed[row, offset : offset + 4].tolist()), "little")
                rotated = (v >> 3 | v << 29) & 0xFFFFFFFF
                third, fourth = (v & 0x00390039) * (2**6 + 2**15), (v & 0x01C201C2) * (2**3 + 2**14)
                pairs = [v & mask, rotated & mask, third & mask, fourth & mask]
                halves = [half for pair in pairs for half in (pair & 0xFFFF, pair >> 16)]
                as_half = torch.tensor(halves, dtype=torch.int32).to(torch.int16).view(torch.float16)
                first = 32 * word + 4 * lane
                expected = torch.cat((values[row, first : first + 4], values[row, first + 16 : first + 20]))
                assert torch.equal(as_half.float() * 2.0**14, expected)


def test_nvfp4_matches_the_definition():
    """Every code is the nearest of the 16 values to its block's fp16 numbers, ties to even; scales as defined, values
    exact."""
    S = spread(3, 8, 64, low=-12, high=4)
    S[0, 0, :16] = 0
    S[0, 1] = torch.arange(64) / 8.0  # ties in plenty
    packed, block_scale, scale = encode_nvfp4(S)
    T = torch.exp2(scale.float() - 127)[..., None]
    assert torch.equal(torch.exp2(torch.frexp(S.abs().amax(-1, keepdim=True)).exponent - 11.0), T)
    blocks = S.unflatten(-1, (-1, 16)) / T[..., None]
    b = block_scale.float()
    ideal = (blocks.abs().amax(-1).double() / 6).clamp(min=2.0**-6)
    # e4m3 has three mantissa bits: within half a unit in the last place.
    assert ((b - ideal).abs() <= ideal * 2.0**-4).all()
    assert b.min() == 2.0**-6
    assert b.max() <= 352
    codes = unpack_words(packed)
    sign = torch.signbit(S)
    assert torch.equal((codes >> 3).bool(), sign)
    scaled = (blocks * (1 / b)[..., None]).abs().flatten(-2)
    assert scaled.max() <= 6.4
    scaled = (scaled * 2.0**-14).half().float() * 2.0**14
    distance = (scaled[..., None] - torch.tensor(E2M1_VALUES)).abs()
    nearest = distance.amin(-1, keepdim=True)
    chosen = distance.gather(-1, (codes & 7).long()[..., None])
    assert torch.equal(chosen, nearest)
    tied = (distance == nearest).sum(-1) > 1
    assert tied.any()
    assert ((codes & 1)[tied] == 0).all()
    expected = torch.where(sign, -1.0, 1.0) * torch.tensor(E2M1_VALUES)[(codes & 7).long()]
    expected = (expected.unflatten(-1, (-1, 16)).double() * b.double()[..., None] * T.double()[..., None]).flatten(-2)
    assert torch.equal(decode_nvfp4(packed, block_scale, scale).double(), expected)


def test_float8_matches_the_definition():
    """Scales put the largest element of a row at 128 to 256; elements are e4m3's nearest, relative to themselves."""
    S = spread(2, 5, 24, low=-8, high=6)
    codes, scale = encode_float8(S)
    power = torch.exp2(scale.float() - 127)[..., None]
    top = S.abs().amax(-1, keepdim=True) / power
    assert ((top >= 128) & (top < 256)).all()
    error = (decode_float8(codes, scale) - S).abs()
    assert (error <= (S.abs() * 2.0**-4).clamp(min=power * 2.0**-10)).all()
    assert torch.equal(codes.float(), (S / power).to(torch.float8_e4m3fn).float())


# dtype: (quantum of the subnormals, mantissa bits)
GRIDS = {torch.float16: (2.0**-24, 10), torch.bfloat16: (2.0**-133, 7), torch.float8_e4m3fn: (2.0**-9, 3)}


@pytest.mark.parametrize("dtype", GRIDS)
def test_stochastic_rounding_in_rational_numbers(dtype):
    """q floor(|x| / q + (r + 1/2) / 2^16) in exact arithmetic, q being the step of the format at x."""
    smallest, mantissa = GRIDS[dtype]
    low = -20 if dtype is torch.float8_e4m3fn else -30
    x = spread(4000, low=low, high=6)
    r = torch.randint(0, 2**16, (4000,), generator=SEED, dtype=torch.int32)
    # Numbers just at and just below the smallest fraction that the bits still push up.
    dropped = 23 - mantissa
    least = (1 << dropped) - ((2 * r[:2000] + 1) << dropped >> 17)
    x[:2000] = (
        (0x3F800000 | (least - torch.arange(2000) % 2).clamp(0, (1 << dropped) - 1)).to(torch.int32).view(x.dtype)
    )
    r[-4:], x[-4:] = torch.tensor([0, 65535, 0, 65535]), torch.tensor([1.0, 1.0, 2.0**-20, -(2.0**-20)])
    got = round_stochastic(x, r, dtype)
    normal = smallest * 2**mantissa
    for value, bits, result in zip(x.tolist(), r.tolist(), got.float().tolist(), strict=True):
        a, random = Fraction(abs(value)), Fraction(2 * bits + 1, 2**17)
        q = Fraction(smallest)
        if a >= normal:
            q = Fraction(2) ** (math.frexp(abs(value))[1] - 1 - mantissa)
        elif dtype is not torch.bfloat16:
            # The fp32 addition of the smallest normal number keeps multiples of its last place, ties to even.
            a = round(a / (Fraction(normal) / 2**23)) * Fraction(normal) / 2**23
        expected = math.floor(a / q + random) * q
        assert Fraction(abs(result)) == expected, (value, bits, result)
        assert math.copysign(1, result) == math.copysign(1, value)


@pytest.mark.parametrize("dtype", GRIDS)
def test_stochastic_rounding_keeps_what_the_format_holds(dtype):
    """Every finite number of 8 or 16 bits, with the bits that push most and least."""
    width = torch.uint8 if dtype is torch.float8_e4m3fn else torch.int16
    numbers = torch.arange(256 if width is torch.uint8 else 65536).to(width).view(dtype).float()
    numbers = numbers[numbers.isfinite()]
    for bits in (0, 65535):
        kept = round_stochastic(numbers, torch.full(numbers.shape, bits, dtype=torch.int32), dtype)
        assert torch.equal(kept.float(), numbers)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bits", [False, True])
def test_values_that_are_not_finite_stay_visible(bad, bits):
    """A row of a scaled format reads back as NaN, its neighbours as they were; wider formats keep the value."""
    S = spread(1, 4, 32, low=-3, high=3)
    good = S.clone()
    S[0, 1, 3] = bad
    r = rounding_bits((1, 4, 32), 0, 0, 1) if bits else None
    got, clean = decode_float8(*encode_float8(S, r)), decode_float8(*encode_float8(good, r))
    assert got[0, 1].isnan().all()
    assert torch.equal(got[0, [0, 2, 3]], clean[0, [0, 2, 3]])
    (packed, block_scale, scale), whole = encode_nvfp4(S), encode_nvfp4(good)
    read = decode_nvfp4(packed, block_scale, scale)
    assert read[0, 1].isnan().all()
    assert not packed[0, 1].any()
    assert (block_scale[0, 1].float() == 2.0**-6).all()
    assert torch.equal(read[0, [0, 2, 3]], decode_nvfp4(*whole)[0, [0, 2, 3]])
    if bits:
        for dtype in (torch.float16, torch.bfloat16):
            kept = round_stochastic(S, r, dtype)[0, 1, 3].float()
            assert kept.isnan() if bad is torch.nan else kept == bad


def test_seed_reaches_kernels_only_where_it_is_used():
    assert ReplaySettings().rounding_scalars == ()
    settings = ReplaySettings(state_dtype="float16", state_rounding="stochastic", rounding_seed=9)
    assert settings.rounding_scalars == (9,)
