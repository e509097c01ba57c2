"""The fused kernels between matrix products, emulated on the host and, where there is one, on a GPU.

The judge is the PyTorch form on fp64 inputs, which does not round. A result may then differ by the roundings that the
16-bit formats allow: half a unit of the output, and half a unit for each intermediate that is an activation itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from replayssm.plugins import elementwise, nvrtc
from replayssm.runtime import functional_ops as F

sys.path.append(str(Path(__file__).parent / "emulation"))
from launches import devices, emulated_launches  # noqa: F401

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half a unit in the last place, relative to the number."""


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """What launches write to holds NaN before."""
    empty = torch.empty_like
    poisoned = lambda *args, **options: empty(*args, **options).fill_(torch.nan)  # noqa: E731
    monkeypatch.setattr(torch, "empty_like", poisoned)


def randn(dtype: torch.dtype, device: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device).to(dtype)


def sliced(dtype: torch.dtype, device: str, tokens: int, *shape: int) -> torch.Tensor:
    """[tokens, *shape] inside a wider projection output."""
    width = torch.Size(shape).numel()
    return randn(dtype, device, tokens, width + 24)[:, 8 : 8 + width].unflatten(1, shape)


def assert_close(got: torch.Tensor, wanted: torch.Tensor, roundings: float) -> None:
    """`roundings`: how many half units the result may lie away; fp32 arithmetic in between adds a hundredth."""
    assert got.is_contiguous()
    assert got.shape == wanted.shape
    unit = UNIT[got.dtype]
    allowed = 1.01 * roundings * unit * wanted.abs() + 2.0**-20
    worst = ((got.double() - wanted).abs() - allowed).max()
    assert worst <= 0, f"{float(worst)} beyond {roundings} roundings"


def wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.double() for tensor in tensors]


@devices
@pytest.mark.parametrize(
    ("columns", "zero_centered", "dtype"),
    [(64, True, torch.float16), (3136, False, torch.bfloat16), (2560, True, torch.bfloat16)],
)
def test_rms_norm(columns: int, zero_centered: bool, dtype: torch.dtype, device: str) -> None:
    x, weight = sliced(dtype, device, 3, columns), torch.randn(columns, device=device)
    got = elementwise.rms_norm(x, weight, 1e-5, zero_centered)
    assert_close(got, F.rms_norm(*wide(x, weight), eps=1e-5, zero_centered=zero_centered), 1)


@devices
def test_add_rms_norm_norms_the_rounded_sum(device: str) -> None:
    dtype = torch.bfloat16
    x, y, weight = sliced(dtype, device, 4, 320), randn(dtype, device, 4, 320), torch.randn(320, device=device)
    total, normed = elementwise.add_rms_norm(x, y, weight, 1e-6, True)
    assert torch.equal(total, x + y)
    assert_close(normed, F.rms_norm(*wide(total, weight), eps=1e-6, zero_centered=True), 1)


@devices
@pytest.mark.parametrize("parts", [2, 3])
def test_add_rms_norm_adds_up_the_parts_of_a_product(parts: int, device: str) -> None:
    dtype = torch.bfloat16
    x, y, weight = (
        randn(dtype, device, 4, 320),
        torch.randn(parts, 4, 320, device=device),
        torch.ones(320, device=device),
    )
    total, normed = elementwise.add_rms_norm(x, y, weight, 1e-6, False)
    summed = y[0]
    for part in y[1:]:
        summed = summed + part
    assert torch.equal(total, x + summed.to(dtype))
    assert_close(normed, F.rms_norm(*wide(total, weight), eps=1e-6, zero_centered=False), 1)


@devices
@pytest.mark.parametrize(
    ("columns", "group_size", "shared_weight", "gate_first", "dtype"),
    [
        (7680, 960, False, True, torch.bfloat16),
        (512, 128, True, False, torch.bfloat16),
        (64, 16, False, True, torch.float16),
        (1024, 1024, False, False, torch.float16),
    ],
)
def test_gated_rms_norm(columns, group_size, shared_weight, gate_first, dtype: torch.dtype, device: str) -> None:
    x, z = randn(dtype, device, 2, columns), sliced(dtype, device, 2, columns)
    weight = torch.randn(group_size if shared_weight else columns, device=device)
    options = {"eps": 1e-5, "group_size": group_size, "gate_first": gate_first}
    got = elementwise.gated_rms_norm(x, z, weight, **options)
    assert_close(got, F.gated_rms_norm(*wide(x, z, weight), **options), 1)


@devices
@pytest.mark.parametrize(
    ("heads", "head_dim", "dim", "dtype"),
    [(16, 256, 64, torch.bfloat16), (3, 32, 32, torch.float16), (5, 128, 8, torch.bfloat16)],
)
def test_norm_rope(heads: int, head_dim: int, dim: int, dtype: torch.dtype, device: str) -> None:
    """Rotation mixes two rounded entries, so the error is measured against the larger of the pair."""
    x = sliced(dtype, device, 4, heads, 2 * head_dim)[..., :head_dim]
    weight = torch.randn(head_dim, device=device)
    positions = torch.tensor([0, 1, 777, 262143], dtype=torch.int32, device=device)
    got = elementwise.norm_rope([x], [weight], positions, 1e-6, True, 1e7, dim)[0]
    normed = F.rms_norm(x.float(), weight, eps=1e-6, zero_centered=True).to(dtype)
    wanted = F.rope(normed, positions, theta=1e7, dim=dim).double()
    size = normed.double().abs()
    first, second = size[..., : dim // 2], size[..., dim // 2 : dim]
    pair = torch.cat([first + second, first + second, size[..., dim:]], -1)
    # Both sides round the norm and the rotation; where the norms round apart that is a whole unit of the pair.
    assert ((got.double() - wanted).abs() <= 4 * UNIT[dtype] * pair + 2.0**-20).all()
    assert (got != wanted.to(dtype)).double().mean() < 0.02, "roundings fall differently only where fp32 sums do"


@devices
def test_norm_rope_of_queries_and_keys_is_that_of_each(device: str) -> None:
    dtype, positions = torch.bfloat16, torch.tensor([3, 0, 900], dtype=torch.int32, device=device)
    tensors = [sliced(dtype, device, 3, heads, 64) for heads in (6, 3)]
    weights = [torch.randn(64, device=device) for _ in tensors]
    options = (positions, 1e-6, True, 1e7, 32)
    alone = [elementwise.norm_rope([x], [w], *options)[0] for x, w in zip(tensors, weights, strict=True)]
    for got, wanted in zip(elementwise.norm_rope(tensors, weights, *options), alone, strict=True):
        assert torch.isfinite(got).all()
        assert torch.equal(got, wanted)


@devices
@pytest.mark.parametrize("name", elementwise.ACTIVATIONS)
@pytest.mark.parametrize(("shape", "dtype"), [((640,), torch.bfloat16), ((3, 40), torch.float16)])
def test_activation(shape: tuple[int, ...], dtype: torch.dtype, name: str, device: str) -> None:
    x, y = sliced(dtype, device, 5, *shape), None if name == "squared_relu" else sliced(dtype, device, 5, *shape)
    x[0, ..., :2], x[1, ..., 0] = torch.tensor([30.0, -30.0]), torch.nan
    got = elementwise.activate(name, x, y)
    forms = {
        "silu_multiply": lambda a, b: torch.nn.functional.silu(a) * b,
        "multiply_sigmoid": lambda a, b: a * b.sigmoid(),
        "squared_relu": lambda a, _: F.squared_relu(a),
    }
    wanted = forms[name](x.double(), None if y is None else y.double())
    assert torch.equal(got.isnan(), wanted.isnan())
    # The gate is an activation of its own and rounded before the product. 2^-14 and below are subnormal in fp16.
    good = ~wanted.isnan() & (wanted.abs() > 1e-3)
    assert ((got.double() - wanted).abs()[good] <= 2.02 * UNIT[dtype] * wanted.abs()[good]).all()


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sigmoid_of_every_number(dtype: torch.dtype, device: str) -> None:
    """Rounded once, far out too; numbers below the least normal one may be off by half of the least there is."""
    every = torch.arange(2**16, dtype=torch.int32, device=device).to(torch.int16).view(dtype).view(64, -1)
    one = torch.ones_like(every)
    least = 2.0**-133 if dtype == torch.bfloat16 else 2.0**-24
    x = every.double()
    for got, wanted in (
        (elementwise.activate("multiply_sigmoid", one, every), x.sigmoid()),
        (elementwise.activate("silu_multiply", every, one), torch.nn.functional.silu(x)),
    ):
        assert torch.equal(got.isnan(), wanted.isnan())
        good = wanted.isfinite()
        assert ((got.double() - wanted).abs()[good] <= 1.01 * (UNIT[dtype] * wanted.abs()[good] + least / 2)).all()


@devices
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_quantize_fp8_rounds_as_pytorch(dtype: torch.dtype, device: str) -> None:
    x = sliced(dtype, device, 3, 2080)
    x[1, :3] = torch.tensor([torch.nan, 30000.0, -30000.0])
    x[2] *= 2.0**-7
    scale = torch.tensor(0.0103, device=device)
    got = elementwise.quantize_fp8(x, scale)
    wanted = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    nan = x.isnan()
    assert torch.equal(got.float().isnan(), nan)
    assert torch.equal(got.view(torch.uint8)[~nan], wanted.view(torch.uint8)[~nan])


@devices
@pytest.mark.parametrize(
    ("name", "wide"),
    [
        ("rms_norm", True),
        ("add_rms_norm", False),
        ("gated_rms_norm", False),
        ("silu_multiply", True),
        ("multiply_sigmoid", False),
        ("squared_relu", False),
    ],
)
def test_narrow_outputs_are_the_quantized_wide_ones(name: str, wide: bool, device: str) -> None:
    dtype, scale = torch.bfloat16, torch.tensor(0.0071, device=device)
    x, y, weight = sliced(dtype, device, 3, 160), randn(dtype, device, 3, 160), torch.randn(160, device=device)
    x[0, :2] = torch.tensor([2000.0, torch.nan])
    arguments = {
        "rms_norm": (x, weight, 1e-6, True),
        "add_rms_norm": (x, y, weight, 1e-6, True),
        "gated_rms_norm": (x, y, weight, 1e-6, 40, False),
    }
    if name in elementwise.ACTIVATIONS:
        function, given = elementwise.activate, (name, x, None if name == "squared_relu" else y)
    else:
        function, given = getattr(elementwise, name), arguments[name]
    expected = function(*given)
    *_, out, small = function(*given, narrow=elementwise.Narrow(scale, wide))
    expected = expected[-1] if name == "add_rms_norm" else expected
    assert torch.equal(out.nan_to_num(), expected.nan_to_num()) if wide else out is None
    quantized = elementwise.quantize_fp8(expected, scale)
    assert torch.equal(small.view(torch.uint8), quantized.view(torch.uint8))
    assert quantized.float().isfinite().any()


def test_what_the_kernels_take() -> None:
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    assert elementwise.supports(x, x[:, 8:16])
    for bad in (x.float(), x[:, 4:12], x[:, :12], x.T, x[None, None]):
        assert not elementwise.supports(bad)
    assert not elementwise.supports(x, x.half())


@devices
@pytest.mark.parametrize("columns", [12, 8200])
def test_argmax(columns: int, device: str) -> None:
    """The first of equal ones, at the end of a row too; NaN before everything; rows of nothing but -infinity."""
    x = torch.randn(7, columns, device=device)
    x[1, [columns - 1, 5]] = 9.0
    x[2, columns - 2] = 9.0
    x[3, [3, 7]] = torch.nan
    x[4] = -torch.inf
    x[5, 2], x[5, columns - 3] = torch.inf, torch.nan
    values, places = elementwise.argmax(x)
    assert places.tolist() == [int(x[0].argmax()), 5, columns - 2, 3, 0, columns - 3, int(x[6].argmax())]
    assert torch.equal(values.nan_to_num(nan=77.0), x.max(dim=1).values.nan_to_num(nan=77.0))


@pytest.mark.parametrize("arch", [80, 90])
def test_compiles_without_spills(arch: int, tmp_path: Path) -> None:
    x, heads = torch.zeros(1, 3136, dtype=torch.bfloat16), torch.zeros(1, 4, 256, dtype=torch.bfloat16)
    weight, positions = torch.zeros(3136), torch.zeros(1, dtype=torch.int32)
    plans = [
        elementwise.plan_rms_norm(x, x, weight, 1e-5, True, x, x),
        elementwise.plan_rms_norm(x, torch.zeros(3, 1, 3136), weight, 1e-5, True, x, x),
        elementwise.plan_gated_rms_norm(x, x, weight, 1e-5, 784, True, x),
        elementwise.plan_activation("silu_multiply", x, x, x),
        elementwise.plan_argmax(torch.zeros(1, 248320), weight, torch.zeros(1, dtype=torch.int64)),
    ]
    for plan in plans:
        compiled = nvrtc.compile_kernel(plan.config.kernel, dict(plan.config.defines), arch, cache=tmp_path)
        assert "0 bytes spill stores, 0 bytes spill loads" in compiled.log
    plan = elementwise.plan_norm_rope([heads] * 2, [weight] * 2, weight[:32], positions, 1e-5, True, [heads] * 2)
    # sin and cos of large angles reduce them through local memory, which is no spill.
    nvrtc.compile_kernel(plan.config.kernel, dict(plan.config.defines), arch, cache=tmp_path)
