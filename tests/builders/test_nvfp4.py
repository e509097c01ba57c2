"""NVFP4 and FP8 number formats: exact by definition, and bit for bit modelopt's."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm.builders import nvfp4

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def test_all_16_codes_round_trip():
    codes = torch.arange(16, dtype=torch.uint8)
    values = nvfp4.decode(codes)
    assert values.tolist() == VALUES + [-value for value in VALUES]
    # -0.0 is the one value with two codes; modelopt writes the positive one.
    expected = codes.clone()
    expected[8] = 0
    assert torch.equal(nvfp4.encode(values), expected)


def test_ties_go_to_the_even_mantissa():
    """Between neighbours a < b the tie goes to the one whose mantissa bit is 0: 0, 1, 2 or 4."""
    for low, high in itertools.pairwise(VALUES):
        even = low if VALUES.index(low) % 2 == 0 else high
        for sign in (1.0, -1.0):
            middle = torch.tensor(sign * (low + high) / 2)
            assert nvfp4.decode(nvfp4.encode(middle)).item() == sign * even
            for direction, nearest in ((float("-inf"), low), (float("inf"), high)):
                beside = sign * torch.nextafter(middle.abs(), torch.tensor(direction))
                assert nvfp4.decode(nvfp4.encode(beside)).item() == sign * nearest


def test_values_beyond_the_range_are_clamped_and_tiny_ones_keep_their_sign():
    codes = nvfp4.encode(torch.tensor([7.0, 1e30, -1e30, 0.1, -0.1]))
    assert codes.tolist() == [7, 7, 15, 0, 8]


@given(st.floats(-6, 6, width=32))
def test_encode_is_nearest(value):
    decoded = nvfp4.decode(nvfp4.encode(torch.tensor(value))).item()
    distances = [abs(value - candidate) for candidate in (*VALUES, *(-item for item in VALUES))]
    assert abs(value - decoded) == min(distances)


def test_pack_puts_the_even_column_in_the_low_nibble():
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert nvfp4.pack(codes).tolist() == [[0x21, 0x0F]]
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(nvfp4.pack(nvfp4.unpack(every)), every)
    with pytest.raises(ValueError, match="must be even, got shape"):
        nvfp4.pack(torch.zeros(3, dtype=torch.uint8))


def modelopt_nvfp4(weight: torch.Tensor, largest: torch.Tensor | None = None):
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    scale_2 = None if largest is None else largest.float() / (6.0 * 448.0)
    packed, scale, scale_2 = NVFP4QTensor.quantize(weight.clone(), 16, None, scale_2)
    restored = packed.dequantize(dtype=torch.float32, scale=scale, double_scale=scale_2, block_sizes={-1: 16})
    return packed._quantized_data, scale, scale_2, restored


def assert_equals_modelopt(weight: torch.Tensor, largest: torch.Tensor | None = None) -> None:
    packed, scale, scale_2, restored = modelopt_nvfp4(weight, largest)
    ours = nvfp4.quantize(weight, largest)
    assert torch.equal(ours.weight, packed)
    assert torch.equal(ours.weight_scale.view(torch.uint8), scale.view(torch.uint8))
    assert torch.equal(ours.weight_scale_2, scale_2)
    assert torch.equal(nvfp4.dequantize(*ours), restored)


def random_weight(seed: int, spread: float, dtype: torch.dtype) -> torch.Tensor:
    """Rows whose blocks differ in magnitude by up to e^spread, with zeros, zero blocks and exact ties among them."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(8, 4, 16, generator=generator) * torch.exp(spread * torch.randn(8, 4, 1, generator=generator))
    weight[0, 0] = 0
    weight[1, 1, ::3] = 0
    weight[2, 2] = torch.tensor(VALUES + [-value for value in VALUES]) * 0.25
    return weight.flatten(1).to(dtype)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 2**31),
    st.sampled_from([0.0, 1.0, 3.0, 10.0]),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
)
def test_equals_modelopt_bit_for_bit(seed, spread, dtype):
    weight = random_weight(seed, spread if dtype != torch.float16 else min(spread, 1.0), dtype)
    assert_equals_modelopt(weight)
    assert_equals_modelopt(weight, 3 * weight.abs().max())


@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-40, 1.0, 2.0**100])
def test_scale_extremes_equal_modelopt(scale):
    weight = random_weight(0, 1.0, torch.float32) * scale
    assert_equals_modelopt(weight)
    # Blocks far below the largest value: their scale stops at the smallest e4m3 number.
    weight[:, 16:] *= 2.0**-30
    assert_equals_modelopt(weight)
    assert nvfp4.quantize(weight).weight_scale.float().min() == 2.0**-9


def test_large_weights_are_converted_in_pieces(monkeypatch):
    weight = random_weight(1, 1.0, torch.bfloat16)
    whole = nvfp4.quantize(weight)
    monkeypatch.setattr(nvfp4, "_CHUNK_ELEMENTS", 3 * 64)
    for part, expected in zip(nvfp4.quantize(weight), whole, strict=True):
        assert torch.equal(part.float(), expected.float())
    stacked = nvfp4.quantize(torch.stack([weight, weight]))
    assert stacked.weight.shape == (2, 8, 32)
    assert torch.equal(stacked.weight[1], whole.weight)


@given(st.integers(0, 2**31))
@settings(deadline=None, max_examples=20)
def test_error_is_bounded(seed):
    """Half a step of e2m1 at most (1 of 6 in the top octave), plus the rounding of the block scale (2^-4)."""
    weight = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    restored = nvfp4.dequantize(*nvfp4.quantize(weight))
    block_max = weight.unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True).expand(-1, -1, 16).flatten(1)
    assert ((weight - restored).abs() <= block_max * (1 / 6 + 2**-4)).all()


def test_zero_weights_get_harmless_scales():
    for weight in (torch.zeros(2, 32), torch.zeros(2, 32, dtype=torch.bfloat16)):
        result = nvfp4.quantize(weight)
        assert result.weight_scale_2 == 1
        assert (nvfp4.dequantize(*result) == 0).all()
        assert (nvfp4.dequantize_fp8(*nvfp4.quantize_fp8(weight)) == 0).all()
    assert nvfp4.amax(torch.empty(0, 16)) == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_refused(bad):
    weight = torch.ones(2, 32)
    weight[1, 7] = bad
    for quantize in (nvfp4.quantize, nvfp4.quantize_fp8):
        with pytest.raises(ValueError, match="NaN or infinity"):
            quantize(weight)
        # also where the range is given from outside
        with pytest.raises(ValueError, match="NaN or infinity"):
            quantize(weight, torch.tensor(1.0))


@pytest.mark.parametrize("shape", [(4, 8), (4, 17), (4, 40), ()])
def test_other_widths_are_refused(shape):
    with pytest.raises(ValueError, match="blocks of 16, got shape"):
        nvfp4.quantize(torch.ones(shape))


def test_scales_must_fit_the_weight():
    weight, scale, scale_2 = nvfp4.quantize(torch.ones(2, 32))
    with pytest.raises(ValueError, match=r"needs block scales of shape \[2, 2\], got \[2, 1\]"):
        nvfp4.dequantize(weight, scale[:, :1], scale_2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_equals_modelopt(dtype):
    """The exporter's arithmetic: the quotient is rounded to the weight's dtype, then to e4m3."""
    from modelopt.torch.export.quant_utils import to_quantized_weight

    weight = random_weight(3, 2.0, dtype)
    for largest in (weight.abs().max(), 2 * weight.abs().max()):
        scale = torch.tensor(largest.float().item() / 448.0)
        expected = to_quantized_weight(weight, scale, "fp8")
        ours = nvfp4.quantize_fp8(weight, largest)
        assert torch.equal(ours.weight_scale, scale)
        assert torch.equal(ours.weight.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(nvfp4.dequantize_fp8(*ours), expected.float() * scale)


def test_activation_scales():
    assert nvfp4.nvfp4_scale(torch.tensor(26.88)) == torch.tensor(26.88) / (6 * 448)
    assert nvfp4.fp8_scale(torch.tensor(3.0, dtype=torch.bfloat16)) == torch.tensor(3.0) / 448
    assert nvfp4.nvfp4_scale(torch.zeros(())) == 1
