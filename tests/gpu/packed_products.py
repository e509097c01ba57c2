"""Random packed weights and mixtures of experts, and what they should give in fp64.

Codes times block scales are exact in the kernels and sums are fp32, so an output errs by its own rounding (half a unit)
and by fp32 sums; a mixture rounds each expert's hidden values, its result and the output, each half a unit of values
that add up like the result's own terms.
"""

import torch

from replayssm.plugins import fp8_experts, nvfp4, packed_weights, weight_only
from replayssm.plugins.packed_weights import Weight
from replayssm.runtime import functional_ops as F

UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half a unit in the last place, relative to the number."""


def weight(format: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Weight, torch.Tensor]:
    """A random projection and its fp64 values. Every code occurs, and block scales over their whole range."""
    sizes = shape[-2:]
    if format == "dense":
        values = (torch.randn(shape, device=device) / shape[-1] ** 0.5).to(dtype)
        return Weight(format, packed_weights.pack(format, values), None, *sizes), values.double()
    scale_2 = (0.5 + torch.rand(shape[:-2], device=device)) / shape[-1] ** 0.5
    if format == "fp8":
        codes = torch.randn(shape, device=device).to(torch.float8_e4m3fn)
        held = Weight(format, packed_weights.pack(format, codes), scale_2, *sizes)
        return held, codes.double() * scale_2.double().view(*shape[:-2], 1, 1)
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), dtype=torch.uint8, device=device)
    scale = torch.rand(*shape[:-1], shape[-1] // 16, device=device).to(torch.float8_e4m3fn)
    scale.view(torch.uint8)[..., 0, :2] = torch.tensor([1, 126], dtype=torch.uint8)  # 2^-9 and 448
    scale_2 = scale_2 / 8
    held = Weight(format, packed_weights.pack(format, codes, scale), scale_2, *sizes)
    blocks = nvfp4.decode_packed(codes).double().unflatten(-1, (-1, 16)) * scale.double().unsqueeze(-1)
    return held, blocks.flatten(-2) * scale_2.double().view(*shape[:-2], 1, 1)


def assert_close(got: torch.Tensor, wanted: torch.Tensor, size: torch.Tensor, roundings: float) -> None:
    """`size`: what an element's terms add up to in magnitude; fp32 sums of thousands of them err by 2^-18 of it."""
    allowed = roundings * UNIT[got.dtype] * wanted.abs() + (2.0**-18 + (roundings - 1) * UNIT[got.dtype]) * size
    worst = ((got.double() - wanted).abs() - allowed - 2.0**-24).max() if wanted.numel() else 0.0
    assert worst <= 0, f"{float(worst)} beyond {roundings} roundings"


def experts_of(format: str, activation: str, case: tuple[int, ...], device: str):
    tokens, experts, top_k, width, hidden = case
    dtype = torch.bfloat16
    inner = [weight(format, (experts, hidden, width), dtype, device) for _ in range(2 if activation == "swiglu" else 1)]
    held, wide = zip(*inner, weight(format, (experts, width, hidden), dtype, device), strict=True)
    x = torch.randn(tokens, width, device=device).to(dtype)
    ids = torch.rand(tokens, experts, device=device).topk(top_k).indices
    return x, ids, torch.rand(tokens, top_k, device=device), list(held), list(wide)


def wide_moe(x, ids, weights, wide, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(result, what its terms add up to in magnitude) in fp64."""
    out, size = torch.zeros_like(x, dtype=torch.float64), torch.zeros_like(x, dtype=torch.float64)
    for expert in range(wide[0].shape[0]):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        hidden = [x[token].double() @ matrix[expert].T for matrix in wide[:-1]]
        hidden = F.squared_relu(hidden[0]) if activation == "squared_relu" else F.F.silu(hidden[0]) * hidden[1]
        factor = weights[token, choice, None].double()
        out.index_add_(0, token, factor * (hidden @ wide[-1][expert].T))
        size.index_add_(0, token, factor * (hidden.abs() @ wide[-1][expert].abs().T))
    return out, size


def check_everything(device: str) -> None:
    """One small call of every kernel, compared."""
    allowed = weight_only.ROUTED_PAIRS
    for format in ("nvfp4", "fp8"):
        held, wide = weight(format, (136, 1088), torch.bfloat16, device)
        x = torch.randn(5, 1088, device=device).bfloat16()
        got = weight_only.linear(x, held, x.dtype)
        assert_close(got, x.double() @ wide.T, x.double().abs() @ wide.abs().T, 1.01)
        assert_close(weight_only.dequantize(held, x.dtype), wide, wide.abs(), 1.01)
        for tokens in (29, 61, 125):  # the forms for more tokens
            x = torch.randn(tokens, 1088, device=device).bfloat16()
            out = torch.full((tokens, 136), torch.nan, dtype=x.dtype, device=device)
            weight_only.plan_gemm(x, held, out, tile_tokens=tokens + 3).run(x.device)
            assert_close(out, x.double() @ wide.T, x.double().abs() @ wide.abs().T, 1.01)
    for format, activation in (
        ("nvfp4", "squared_relu"),
        ("nvfp4", "swiglu"),
        ("fp8", "swiglu"),
        ("dense", "squared_relu"),
    ):
        for pairs_of_a_block in (allowed, 0):  # sorted by one kernel or by two
            weight_only.ROUTED_PAIRS = pairs_of_a_block
            x, ids, weights, held, wide = experts_of(format, activation, (19, 6, 2, 192, 64), device)
            got = weight_only.moe(x, ids, weights, held, activation)
            assert_close(got, *wide_moe(x, ids, weights, wide, activation), 6)
        weight_only.ROUTED_PAIRS = allowed
    if torch.cuda.get_device_capability(device)[0] == 9:
        for activation in ("squared_relu", "swiglu"):
            check_fp8_experts(activation, device)


def check_fp8_experts(activation: str, device: str) -> None:
    """Both projections in FP8, tokens of one tile and of several, beside 16-bit activations: rounding operands to e4m3
    changes results by some 0.06 in the Euclidean norm."""
    experts, width, hidden = 6, 256, 384
    shapes = [(hidden, width)] * (2 if activation == "swiglu" else 1) + [(width, hidden)]
    narrow, held = [], []
    for rows, columns in shapes:
        codes = torch.randint(0, 256, (experts, rows, columns // 2), dtype=torch.uint8, device=device)
        scale = (1 + torch.rand(experts, rows, columns // 16, device=device)).to(torch.float8_e4m3fn)
        scale_2 = torch.full((experts,), 0.3 / columns**0.5, device=device)
        held.append(Weight("nvfp4", packed_weights.pack("nvfp4", codes, scale), scale_2, rows, columns))
        count, largest = (experts, 40) if len(narrow) + 1 == len(shapes) else (1, 6)
        unit = torch.full((count,), largest / nvfp4.E4M3_MAX, device=device)
        narrow.append(Weight(fp8_experts.FORMAT, fp8_experts.pack(codes, scale), scale_2, rows, columns, unit))
    for tokens in (5, 150):
        x = torch.randn(tokens, width, device=device).bfloat16()
        ids, weights = torch.rand(tokens, experts, device=device).topk(2).indices, torch.rand(tokens, 2, device=device)
        got = fp8_experts.moe(x, ids, weights, narrow, activation).double()
        wanted = weight_only.moe(x, ids, weights, held, activation).double()
        assert (got - wanted).norm() < 0.12 * wanted.norm()
