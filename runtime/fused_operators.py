"""The operators of a fused network (`runtime.fusion`): kernels where there are any, else `functional_ops`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from replayssm.plugins import elementwise, fp8_experts, nvfp4, packed_weights, routing, weight_only
from replayssm.runtime import functional_ops as ops
from replayssm.runtime.divided_product import divided_product, multiprocessors, product_parts

Tensor = torch.Tensor


def _kernels_take(activations: Sequence[Tensor], weights: Sequence[Tensor] = ()) -> bool:
    return (
        activations[0].is_cuda
        and elementwise.supports(*activations)
        and elementwise.supports_scale(*weights)
        and activations[0].shape[0] > 0
    )


def linear(
    x: Tensor,
    weight: Tensor,
    *scales: Tensor,
    output_dtype: torch.dtype,
    format: str,
    activations: str | None,
    emulate: bool = False,
    tiles: list[int] | None = None,
) -> Tensor:
    """As `functional_ops.linear`; the product itself is returned in fp32 where that is asked for."""
    if tiles is not None:
        (held,) = _held([weight, *scales], [{"format": format, "activations": activations, "tiles": tiles}])
        rows = x if elementwise.supports(x) else x.contiguous()
        if x.is_cuda and weight_only.takes(rows):
            return weight_only.linear(rows, held, output_dtype)
        weight, *scales = _checkpoint_tensors(held, scales[-1] if activations is not None else None, x.dtype)
    narrow = x.is_cuda and x.dtype in elementwise.SIXTEEN_BITS and x.dim() == 2 and weight.dtype == x.dtype
    if narrow and output_dtype == torch.float32 and format == "dense":
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return ops.linear(
        x, weight, *scales, output_dtype=output_dtype, format=format, activations=activations, emulate=emulate
    )


def fp8_linear(x: Tensor, weight: Tensor, scale: Tensor, input_scale: Tensor, *, output_dtype: torch.dtype) -> Tensor:
    """x [T, in], rounded to FP8, or in e4m3 already, times the transpose of an FP8 weight."""
    narrow = x.dtype == torch.float8_e4m3fn
    rows = x if narrow or elementwise.supports(x) else x.contiguous()
    sizes = weight.shape[0] % 16 or weight.shape[1] % 16
    if x.is_cuda and x.dim() == 2 and x.shape[0] > 0 and (narrow or elementwise.supports(rows)) and not sizes:
        rows = rows if narrow else elementwise.quantize_fp8(rows, input_scale)
        return torch._scaled_mm(rows, weight.t(), input_scale, scale, out_dtype=output_dtype)
    attributes = {"format": "fp8", "activations": "fp8", "output_dtype": output_dtype, "emulate": not narrow}
    x = (x.float() * input_scale).to(output_dtype) if narrow else x
    return ops.linear(x, weight, scale, input_scale, **attributes)


def _held(tensors: Sequence[Tensor], projections: Sequence[dict[str, Any]]) -> list[packed_weights.Weight]:
    """Projections in tiles as the kernels read them; `tensors` holds tiles, scale and input scale or unit of each."""
    found, at = [], 0
    for projection in projections:
        scaled = projection["format"] != "dense"
        scale = tensors[at + 1] if scaled else None
        unit = tensors[at + 2] if projection["format"] == fp8_experts.FORMAT else None
        found.append(packed_weights.Weight(projection["format"], tensors[at], scale, *projection["tiles"], unit))
        at += 1 + scaled + (projection["activations"] is not None)
    return found


def _checkpoint_tensors(held: packed_weights.Weight, input_scale: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    """What `functional_ops` reads: codes, block scales, scale, input scale, as far as there are; dtype: of 16 bits."""
    found = (fp8_experts if held.format == fp8_experts.FORMAT else packed_weights).unpack(held)
    if held.format == "dense":
        found = [tensor.view(dtype) for tensor in found]
    return found + [scale for scale in (held.scale, input_scale) if scale is not None]


def route_sigmoid(
    logits: Tensor, correction_bias: Tensor, *, top_k: int, scaling: float, normalize: bool, parts: int = 1
) -> tuple[Tensor, Tensor]:
    """As `functional_ops.route_sigmoid`, of the sum of `parts` logits [T, parts * E]."""
    if logits.is_cuda and logits.shape[0] > 0 and routing.supports(logits, top_k, correction_bias):
        return routing.route(logits, correction_bias, top_k, scaling, normalize, parts)
    logits = logits.unflatten(1, (parts, -1)).sum(1) if parts > 1 else logits
    return ops.route_sigmoid(logits, correction_bias, top_k=top_k, scaling=scaling, normalize=normalize)


def route_softmax(logits: Tensor, *, top_k: int) -> tuple[Tensor, Tensor]:
    if logits.is_cuda and logits.shape[0] > 0 and routing.supports(logits, top_k, None):
        return routing.route(logits, None, top_k)
    return ops.route_softmax(logits, top_k=top_k)


def moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    *tensors: Tensor,
    activation: str,
    projections: list[dict[str, Any]],
    emulate: bool = False,
) -> Tensor:
    """As `functional_ops.moe`."""
    tiled = all("tiles" in projection for projection in projections)
    if x.is_cuda and tiled and weights.dtype == torch.float32:
        held, rows = _held(tensors, projections), x if elementwise.supports(x) else x.contiguous()
        if weight_only.takes(rows) and len({weight.format for weight in held}) == 1:
            module = fp8_experts if held[0].format == fp8_experts.FORMAT else weight_only
            return module.moe(rows, ids, weights, held, activation)
    plain, plain_projections, at = [], [], 0
    for projection in projections:
        scaled, rounded = projection["format"] != "dense", projection["activations"] is not None
        count = 1 + (scaled + rounded if "tiles" in projection else ops.scale_count(**projection))
        own, at = tensors[at : at + count], at + count
        if "tiles" in projection:
            (held,) = _held(own, [projection])
            rounded = rounded and held.unit is None
            own = _checkpoint_tensors(held, own[-1] if rounded else None, x.dtype)
        plain += own
        format = "nvfp4" if projection["format"] == fp8_experts.FORMAT else projection["format"]
        plain_projections.append({"format": format, "activations": projection["activations"] if rounded else None})
    return ops.moe(x, ids, weights, *plain, activation=activation, projections=plain_projections, emulate=emulate)


def rms_norm(
    x: Tensor, weight: Tensor, scale: Tensor | None = None, *, eps: float, zero_centered: bool, wide: bool = True
) -> Any:
    """As `functional_ops.rms_norm`. With the scale of an FP8 product, the result is (16 bits or None, e4m3), here and
    below."""
    if x.dim() == 2 and _kernels_take([x], [weight]):
        return elementwise.rms_norm(x, weight, eps, zero_centered, _narrow(scale, wide))
    return _narrowed(ops.rms_norm(x, weight, eps=eps, zero_centered=zero_centered), scale, wide)


def _narrow(scale: Tensor | None, wide: bool) -> elementwise.Narrow | None:
    return None if scale is None else elementwise.Narrow(scale, wide)


def _narrowed(value: Tensor, scale: Tensor | None, wide: bool) -> Any:
    """What the kernels do with an output that an FP8 product reads."""
    if scale is None:
        return value
    small = (value.float() / scale).clamp(-nvfp4.E4M3_MAX, nvfp4.E4M3_MAX).to(torch.float8_e4m3fn)
    return value if wide else None, small


def add_rms_norm(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    *,
    eps: float,
    zero_centered: bool,
    wide: bool = True,
) -> tuple[Tensor, ...]:
    """(x + y, rms_norm(x + y))."""
    if x.dim() == 2 and _kernels_take([x, y], [weight]):
        return elementwise.add_rms_norm(x, y, weight, eps, zero_centered, _narrow(scale, wide))
    total = x + y
    normed = _narrowed(ops.rms_norm(total, weight, eps=eps, zero_centered=zero_centered), scale, wide)
    return (total, normed) if scale is None else (total, *normed)


def linear_add_rms_norm(
    x: Tensor, weight: Tensor, y: Tensor, scale: Tensor, *, output_dtype: torch.dtype, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """add_rms_norm(y, linear(x, weight)). A product of few tiles has its depth divided among multiprocessors, and the
    norm adds up what they give."""
    narrow = x.dtype == weight.dtype == output_dtype and x.dim() == y.dim() == 2 and x.is_contiguous()
    if narrow and weight.is_contiguous() and _kernels_take([x, y], [scale]):
        parts = product_parts(x.shape[0], *weight.shape, multiprocessors(x.device))
        if parts > 1:
            return elementwise.add_rms_norm(y, divided_product(x, weight, parts), scale, eps, zero_centered)
    product = linear(x, weight, output_dtype=output_dtype, format="dense", activations=None)
    return add_rms_norm(y, product, scale, eps=eps, zero_centered=zero_centered)


def gated_rms_norm(
    x: Tensor,
    z: Tensor,
    weight: Tensor,
    scale: Tensor | None = None,
    *,
    eps: float,
    group_size: int,
    gate_first: bool,
    wide: bool = True,
) -> Any:
    if x.dim() == 2 and group_size % elementwise.CHUNK == 0 and _kernels_take([x, z], [weight]):
        return elementwise.gated_rms_norm(x, z, weight, eps, group_size, gate_first, _narrow(scale, wide))
    out = ops.gated_rms_norm(x, z, weight, eps=eps, group_size=group_size, gate_first=gate_first)
    return _narrowed(out, scale, wide)


def norm_rope(
    x: Tensor, weight: Tensor, positions: Tensor, *, eps: float, zero_centered: bool, theta: float, dim: int
) -> Tensor:
    """rope(rms_norm(x)) of heads."""
    if _kernels_take([x], [weight]) and positions.dtype == torch.int32 and positions.is_contiguous():
        return elementwise.norm_rope([x], [weight], positions, eps, zero_centered, theta, dim)[0]
    return ops.rope(ops.rms_norm(x, weight, eps=eps, zero_centered=zero_centered), positions, theta=theta, dim=dim)


def norm_ropes(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, positions: Tensor, **attributes: Any
) -> tuple[Tensor, Tensor]:
    """`norm_rope` of queries and keys."""
    takes = _kernels_take([q, k], [q_weight, k_weight]) and positions.dtype == torch.int32 and positions.is_contiguous()
    if takes and q.shape[2] == k.shape[2]:
        return tuple(elementwise.norm_rope([q, k], [q_weight, k_weight], positions, **attributes))
    return norm_rope(q, q_weight, positions, **attributes), norm_rope(k, k_weight, positions, **attributes)


def silu_multiply(x: Tensor, y: Tensor, scale: Tensor | None = None, *, wide: bool = True) -> Any:
    if _kernels_take([x, y]):
        return elementwise.activate("silu_multiply", x, y, _narrow(scale, wide))
    return _narrowed(F.silu(x) * y, scale, wide)


def multiply_sigmoid(x: Tensor, gate: Tensor, scale: Tensor | None = None, *, wide: bool = True) -> Any:
    if _kernels_take([x, gate]):
        return elementwise.activate("multiply_sigmoid", x, gate, _narrow(scale, wide))
    return _narrowed(x * gate.sigmoid(), scale, wide)


def squared_relu(x: Tensor, scale: Tensor | None = None, *, wide: bool = True) -> Any:
    if _kernels_take([x]):
        return elementwise.activate("squared_relu", x, None, _narrow(scale, wide))
    return _narrowed(ops.squared_relu(x), scale, wide)


FUSED_OPERATORS: dict[str, Callable[..., Any]] = {
    **ops.OPERATORS,
    "fp8_linear": fp8_linear,
    "linear": linear,
    "moe": moe,
    "route_sigmoid": route_sigmoid,
    "route_softmax": route_softmax,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "linear_add_rms_norm": linear_add_rms_norm,
    "gated_rms_norm": gated_rms_norm,
    "norm_rope": norm_rope,
    "norm_ropes": norm_ropes,
    "silu_multiply": silu_multiply,
    "multiply_sigmoid": multiply_sigmoid,
    "squared_relu": squared_relu,
}
"""Operators of a fused network."""
