"""Experts with NVFP4 weights in FP8: emulated on the host and, where there is one, on a Hopper GPU.

The judge is fp64 over operands that are rounded as fp8_experts.py says, here by PyTorch.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replayssm.plugins import fp8_experts, nvfp4, packed_weights, weight_only
from replayssm.plugins.packed_weights import Weight

sys.path.append(str(Path(__file__).parent / "emulation"))
from launches import emulated_launches, emulation  # noqa: F401

DISTANCE = {"cpu": 0.004, "cuda": 0.02}
"""Relative, in the Euclidean norm: results and their weighted sum are rounded to bf16 (2^-9 each, 0.002), and a GPU's
sums of some 14 bits turn the rounding of hidden values to e4m3 here and there, by 2^-4 of them each."""

hopper = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(
            not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
        ),
    ],
)


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """What launches write to holds NaN before (integers: -1)."""
    empty = torch.empty

    def poisoned(*args, **options) -> torch.Tensor:
        out = empty(*args, **options)
        if out.dtype == torch.float8_e4m3fn:
            out.view(torch.uint8).fill_(127)
            return out
        return out.fill_(torch.nan if out.is_floating_point() else -1)

    monkeypatch.setattr(weight_only.torch, "empty", poisoned)


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    largest = nvfp4.E4M3_MAX
    return values.float().clamp(-largest, largest).to(torch.float8_e4m3fn).double()


def weight(shape: tuple[int, int, int], device: str) -> tuple[Weight, torch.Tensor, torch.Tensor]:
    """Random experts, their fp64 values as products in FP8 have them, and as they are."""
    codes = torch.randint(0, 256, (*shape[:2], shape[2] // 2), dtype=torch.uint8, device=device)
    scale = (torch.rand(*shape[:2], shape[2] // 16, device=device) * 447.75 + 0.25).to(torch.float8_e4m3fn)
    scale_2 = (0.5 + torch.rand(shape[0], device=device)) / shape[2] ** 0.5 / 1000
    held = Weight(fp8_experts.FORMAT, fp8_experts.pack(codes, scale), scale_2, *shape[1:])
    values = (nvfp4.decode_packed(codes).double().unflatten(-1, (-1, 16)) * scale.double().unsqueeze(-1)).flatten(-2)
    scale_2 = scale_2.double().view(-1, 1, 1)
    return held, to_e4m3(values / 8) * 8 * scale_2, values * scale_2


def test_tiles_unpack_to_the_weight(monkeypatch) -> None:
    monkeypatch.setattr(packed_weights, "PACKED_BYTES", 2 * 40 * 128)
    codes = torch.randint(0, 256, (5, 40, 128), dtype=torch.uint8)
    scales = torch.randint(fp8_experts.LEAST_CODE, 127, (5, 40, 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
    back = fp8_experts.unpack(Weight(fp8_experts.FORMAT, fp8_experts.pack(codes, scales), None, 40, 256))
    assert torch.equal(back[0], codes)
    assert torch.equal(back[1].view(torch.uint8), scales.view(torch.uint8))


def test_blocks_of_small_scales_get_the_nearest_numbers() -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(2).view(1, 32, 16)
    scales = torch.arange(64, dtype=torch.uint8).view(1, 32, 2).view(torch.float8_e4m3fn)
    codes = codes[..., :16].repeat(1, 1, 4)
    scales = scales.repeat(1, 1, 4)
    back = fp8_experts.unpack(Weight(fp8_experts.FORMAT, fp8_experts.pack(codes, scales), None, 32, 128))
    one = torch.ones(())
    before, after = (nvfp4.dequantize(*pair, one).double().unflatten(-1, (-1, 16)) for pair in ((codes, scales), back))
    small = scales.float() < fp8_experts.LEAST_SCALE
    assert small.any()
    assert torch.equal(before[~small], after[~small])
    numbers = torch.tensor(nvfp4.E2M1_VALUES).double() * fp8_experts.LEAST_SCALE
    nearest = (before[small].abs().unsqueeze(-1) - numbers).abs().amin(-1)
    assert torch.equal((after[small] - before[small]).abs(), nearest)
    assert (after[small] * before[small] >= 0).all()


@pytest.mark.parametrize("device", [emulation, hopper])
def test_every_code_times_every_scale_is_rounded_to_e4m3(device: str) -> None:
    scales = torch.arange(fp8_experts.LEAST_CODE, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = nvfp4.pack_nibbles(torch.arange(16, dtype=torch.uint8)).repeat(len(scales), 8).unsqueeze(0)
    tiles = fp8_experts.pack(codes, scales.view(-1, 1).repeat(1, 8).unsqueeze(0)).to(device)
    one = torch.ones(1, device=device)
    held = Weight(fp8_experts.FORMAT, tiles, one, len(scales), 128, one)
    x, narrow = torch.eye(128, device=device).bfloat16()[32:48], torch.empty(16, 128, dtype=torch.float8_e4m3fn)
    narrow = narrow.to(device)
    fp8_experts.plan_quantize(x, one, narrow).run(x.device)
    # Rows of results come in eights.
    held = replace(held, out_features=len(scales) // 8 * 8)
    out = torch.full((16, held.out_features), torch.nan, dtype=torch.bfloat16, device=device)
    weight_only.plan_gemm(narrow, held, out, tile_tokens=16).run(x.device)
    numbers = torch.tensor(nvfp4.E2M1_VALUES).double()
    wanted = to_e4m3(torch.cat([numbers, -numbers]).unsqueeze(1) * scales.double() / 8) * 8
    assert torch.equal(out.double().cpu(), wanted[:, : held.out_features])
    exact = torch.cat([numbers, -numbers]).unsqueeze(1) * scales.double()
    assert ((wanted - exact).abs() <= exact.abs() / 21).all()


CASES = {
    "cpu": [(3, 5, 2, 128, 128)],
    "cuda": [(1, 64, 6, 1024, 384), (17, 16, 4, 256, 512), (257, 32, 5, 512, 384), (300, 3, 3, 256, 128)],
}
"""Tokens, experts, choices, width, hidden width: tiles of 16 to 128 tokens."""


@pytest.mark.parametrize(
    ("device", "case", "activation"),
    [
        pytest.param(*param.values, case, activation, marks=param.marks)
        for param in (emulation, hopper)
        for case in CASES[param.values[0]]
        for activation in ("squared_relu", "swiglu")[: 1 if param is emulation else 2]
    ],
)
def test_moe(device: str, case: tuple[int, ...], activation: str) -> None:
    tokens, experts, top_k, width, hidden = case
    inner = [weight((experts, hidden, width), device) for _ in range(2 if activation == "swiglu" else 1)]
    down = weight((experts, width, hidden), device)
    unit, units = torch.tensor([6 / 448], device=device), (0.5 + torch.rand(experts, device=device)) / 50
    held = [replace(matrix[0], unit=unit) for matrix in inner] + [replace(down[0], unit=units)]
    x = torch.randn(tokens, width, device=device).bfloat16()
    ids = torch.rand(tokens, experts, device=device).topk(top_k).indices
    weights = torch.rand(tokens, top_k, device=device)
    got = fp8_experts.moe(x, ids, weights, held, activation)

    wanted, exact = torch.zeros_like(x, dtype=torch.float64), torch.zeros_like(x, dtype=torch.float64)
    for expert in range(experts):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        factor = weights[token, choice, None].double()
        for out, at in ((wanted, 1), (exact, 2)):
            source = to_e4m3(x[token] / unit) * unit.double() if at == 1 else x[token].double()
            sums = [source @ matrix[at][expert].T for matrix in inner]
            wide = sums[0].relu() ** 2 if activation == "squared_relu" else sums[0] * sums[0].sigmoid() * sums[1]
            scale = units[expert].double()
            narrow = to_e4m3(wide / scale) * scale if at == 1 else wide
            out.index_add_(0, token, factor * (narrow @ down[at][expert].T))
    assert (got.double() - wanted).norm() < DISTANCE[device] * wanted.norm()
    assert (got.double() - exact).norm() > 0.03 * exact.norm(), "operands are rounded"
    assert torch.equal(got[:1], fp8_experts.moe(x[:1], ids[:1], weights[:1], held, activation))
    x[-1] = torch.nan
    bad = fp8_experts.moe(x, ids, weights, held, activation)
    assert torch.equal(bad[:-1], got[:-1])
    assert bad[-1].isnan().all()


def test_no_token_is_no_launch() -> None:
    (held, *_), unit = weight((2, 128, 128), "cpu"), torch.ones(1)
    held, nothing = replace(held, unit=unit), torch.empty(0, 2)
    ids = nothing.long()
    assert fp8_experts.moe(torch.empty(0, 128).bfloat16(), ids, nothing, [held, held], "squared_relu").shape == (0, 128)


def test_what_the_kernels_take() -> None:
    assert fp8_experts.takes_weight(2688, 1024)
    assert fp8_experts.takes_weight(1024, 2688)
    assert not fp8_experts.takes_weight(1024, 1344), "whole tiles of columns"
    assert not fp8_experts.takes_weight(1344, 1024), "which the next projection reads as columns"


def test_a_form_asks_for_no_more_blocks_than_registers_allow() -> None:
    """128 sums of a thread, 56 registers beside them, 256 threads: two blocks need more than a multiprocessor has."""
    held = Weight("fp8", torch.empty(2, 2, 2048, dtype=torch.uint8), torch.ones(1), 64, 128)
    x = torch.empty(8, 128, dtype=torch.bfloat16)
    for tile_tokens, blocks in ((64, 2), (128, 1)):
        plan = weight_only.plan_gemm(x, held, x, tile_tokens=tile_tokens, form=weight_only.Form(True, 8, 2, 3))
        assert dict(plan.config.defines)["MIN_CTAS"] == blocks


@pytest.mark.parametrize("activation", ["squared_relu", "swiglu"])
def test_fp8_is_nearer_to_16_bit_activations_than_the_recipe(activation: str) -> None:
    """An expert with weights quantized from normal ones: what rounding to NVFP4 (W4A4) changes, and what FP8 does."""
    width, hidden = 256, 384

    def quantized(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns) / columns**0.5
        blocks, scale_2 = values.unflatten(-1, (-1, 16)), values.abs().amax() / (nvfp4.E2M1_MAX * nvfp4.E4M3_MAX)
        scale = nvfp4.block_scales(blocks, scale_2)
        codes = nvfp4.encode(blocks / (scale.float() * scale_2).unsqueeze(-1))
        return (nvfp4.decode(codes).double() * scale.double().unsqueeze(-1)).flatten(-2) * scale_2.double()

    inner = [quantized(hidden, width) for _ in range(2 if activation == "swiglu" else 1)]
    down, x = quantized(width, hidden), torch.randn(64, width).double()

    def expert(round_input, round_weight) -> torch.Tensor:
        sums = [round_input(x) @ round_weight(matrix).T for matrix in inner]
        wide = sums[0].relu() ** 2 if activation == "squared_relu" else sums[0] * sums[0].sigmoid() * sums[1]
        return round_input(wide) @ round_weight(down).T

    def in_fp8(values: torch.Tensor) -> torch.Tensor:
        unit = values.abs().amax() / nvfp4.E4M3_MAX
        return to_e4m3(values / unit) * unit

    def in_nvfp4(values: torch.Tensor) -> torch.Tensor:
        scale = values.abs().amax().float() / (nvfp4.E2M1_MAX * nvfp4.E4M3_MAX)
        return nvfp4.round_to_nvfp4(values.float(), scale).double()

    def as_is(values: torch.Tensor) -> torch.Tensor:
        return values

    exact = expert(as_is, as_is)
    fp8, recipe = expert(in_fp8, in_fp8), expert(in_nvfp4, as_is)
    assert (fp8 - exact).norm() < 0.08 * exact.norm()
    assert (fp8 - exact).norm() < 0.5 * (recipe - exact).norm()
