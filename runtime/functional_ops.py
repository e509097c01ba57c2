"""Execution of functional operators with PyTorch.

One function per operator of `plugins.network.Network`, with the operator's inputs as positional arguments and its
attributes as keyword arguments. What each computes is said once, where networks are traced: `builders.functional`.
Shapes were checked there and are not checked again. Norms, routers and softmax compute in the dtype of their fp32
weights (fp64 where activations are fp64) and round once. No function waits for the device, except the expert loop,
which runs on the CPU only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from replayssm.plugins import nvfp4
from replayssm.plugins.state import torch_dtype

Tensor = torch.Tensor

GATHERED_EXPERT_BYTES = 1 << 30
"""Memory for the expert weights that are gathered at a time where the device must not be waited for."""

UNPACKED_AT_A_TIME = 1 << 18
"""Stored bytes of a quantized weight that `unpack` converts at a time."""


def scale_count(format: str, activations: str | None) -> int:
    """Scales that follow a weight of this format among an operator's inputs."""
    return {"dense": 0, "nvfp4": 2, "fp8": 1}[format] + (activations is not None)


def dequantize(weight: Tensor, scales: Sequence[Tensor], format: str, dtype: torch.dtype) -> Tensor:
    """A weight as a dense one in `dtype`; dense weights pass through."""
    if format == "nvfp4":
        return nvfp4.dequantize(weight, scales[0], scales[1], dtype)
    return nvfp4.dequantize_fp8(weight, scales[0], dtype) if format == "fp8" else weight


def unpack(weight: Tensor, scales: Sequence[Tensor], format: str, dtype: torch.dtype) -> Tensor:
    """`dequantize` in pieces that stay in the processor's cache: four times faster, and with small temporaries."""
    columns = weight.shape[-1] * (2 if format == "nvfp4" else 1)
    out = torch.empty(*weight.shape[:-1], columns, dtype=dtype, device=weight.device)
    rows = max(1, UNPACKED_AT_A_TIME // weight.shape[-1])
    for index in range(len(weight)) if weight.dim() == 3 else [slice(None)]:
        matrix, target = weight[index], out[index]
        own_scales = [scale if scale.dim() == 0 else scale[index] for scale in scales]
        for start in range(0, len(matrix), rows):
            part = slice(start, start + rows)
            part_scales = [scale[part] if scale.dim() == 2 else scale for scale in own_scales]
            target[part] = dequantize(matrix[part], part_scales, format, dtype)
    return out


def _quantize_activations(x: Tensor, scales: Sequence[Tensor], activations: str | None, emulate: bool) -> Tensor:
    """x as the checkpoint's recipe would round it; the last scale is the input scale."""
    if not emulate or activations is None:
        return x
    return nvfp4.round_to_nvfp4(x, scales[-1]) if activations == "nvfp4" else nvfp4.round_to_fp8(x, scales[-1])


def embedding(
    ids: Tensor,
    weight: Tensor,
    *scales: Tensor,
    format: str,
    activations: str | None,
    dtype: torch.dtype,
    start: int | None = None,
) -> Tensor:
    """A quantized table is dequantized row by row. With `start`, the table holds the rows of the tokens from there on,
    and other tokens give zeros (`parallel_layout`)."""
    if start is not None:
        own = ids - start
        outside = (own < 0) | (own >= weight.shape[0])
        attributes = {"format": format, "activations": activations, "dtype": dtype}
        rows = embedding(own.masked_fill(outside, 0), weight, *scales, **attributes)
        return rows.masked_fill_(outside.unsqueeze(-1), 0)
    if format == "dense":
        return F.embedding(ids, weight)
    return nvfp4.dequantize(weight.index_select(0, ids), scales[0].index_select(0, ids), scales[1], dtype)


def linear(
    x: Tensor,
    weight: Tensor,
    *scales: Tensor,
    format: str,
    activations: str | None,
    output_dtype: torch.dtype,
    emulate: bool = False,
) -> Tensor:
    x = _quantize_activations(x, scales, activations, emulate)
    weight = dequantize(weight, scales, format, x.dtype)
    return F.linear(x.to(weight.dtype), weight).to(output_dtype)


def rms_norm(x: Tensor, weight: Tensor, *, eps: float, zero_centered: bool) -> Tensor:
    wide = x.to(weight.dtype)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * (1 + weight if zero_centered else weight)).to(x.dtype)


def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, *, eps: float, group_size: int, gate_first: bool) -> Tensor:
    gate = F.silu(z.to(weight.dtype))
    wide = x.to(weight.dtype)
    if gate_first:
        wide = wide * gate
    groups = wide.unflatten(-1, (-1, group_size))
    groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)
    wide = (groups * weight.view(-1, group_size)).flatten(-2)
    return (wide if gate_first else wide * gate).to(x.dtype)


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def split(x: Tensor, *, sizes: list[int]) -> tuple[Tensor, ...]:
    return x.split(sizes, dim=-1)


def concat(*values: Tensor) -> Tensor:
    return torch.cat(values, dim=-1)


def reshape(x: Tensor, *, shape: list[int | str]) -> Tensor:
    return x.reshape(x.shape[0], *shape[1:])


def rope(x: Tensor, positions: Tensor, *, theta: float, dim: int) -> Tensor:
    """Frequencies are fp32, as Hugging Face computes them; angles are fp32 too, unless x is fp64."""
    frequency = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=x.device) / dim)
    wide = x.narrow(-1, 0, dim).to(torch.promote_types(x.dtype, torch.float32))
    angle = positions.to(wide.dtype).view(-1, 1, 1) * frequency
    cos, sin = angle.cos(), angle.sin()
    first, second = wide.chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(x.dtype), x.narrow(-1, dim, x.shape[-1] - dim)], dim=-1)


def gather(x: Tensor, indices: Tensor | None) -> Tensor:
    """Rows of x; all of them without indices."""
    return x if indices is None else x.index_select(0, indices)


def route_sigmoid(
    logits: Tensor, correction_bias: Tensor, *, top_k: int, scaling: float, normalize: bool
) -> tuple[Tensor, Tensor]:
    scores = logits.to(correction_bias.dtype).sigmoid()
    ids = (scores + correction_bias).topk(top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scaling


def route_softmax(logits: Tensor, *, top_k: int) -> tuple[Tensor, Tensor]:
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)
    weights, ids = scores.topk(top_k, dim=-1)
    return ids, weights / weights.sum(-1, keepdim=True)


class _Experts:
    """Stacked expert projections of one `moe` call, and what one expert computes."""

    def __init__(self, tensors: Sequence[Tensor], projections: list[dict[str, Any]], activation: str, emulate: bool):
        self.activation = activation
        self.emulate = emulate
        self.projections = []
        tensors = list(tensors)
        for attributes in projections:
            count = 1 + scale_count(**attributes)
            self.projections.append((tensors[:count], attributes))
            tensors = tensors[count:]

    @property
    def dense_bytes(self) -> int:
        """Bytes of one expert's dequantized weights, 4 an element."""
        elements = 0
        for (weight, *_), attributes in self.projections:
            elements += weight.shape[1:].numel() * (2 if attributes["format"] == "nvfp4" else 1)
        return 4 * elements

    def __call__(self, x: Tensor, experts: int | Tensor) -> Tensor:
        """x [n, in] through one expert, or x [n, 1, in] each row through its own of `experts` [n]."""
        *inner, down = self.projections
        hidden = [self._project(x, projection, experts) for projection in inner]
        hidden = squared_relu(hidden[0]) if self.activation == "squared_relu" else F.silu(hidden[0]) * hidden[1]
        return self._project(hidden, down, experts)

    def _project(self, x: Tensor, projection: tuple[list[Tensor], dict[str, Any]], experts: int | Tensor) -> Tensor:
        tensors, attributes = projection
        select = torch.select if isinstance(experts, int) else torch.index_select
        weight, *scales = (select(tensor, 0, experts) for tensor in tensors)
        if attributes["activations"] is not None and x.dim() == 3:
            scales[-1] = scales[-1].view(-1, 1, 1)
        x = _quantize_activations(x, scales, attributes["activations"], self.emulate)
        weight = dequantize(weight, scales, attributes["format"], x.dtype)
        return F.linear(x, weight) if x.dim() == 2 else torch.matmul(x, weight.transpose(-1, -2))


def moe(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    *tensors: Tensor,
    activation: str,
    projections: list[dict[str, Any]],
    emulate: bool = False,
) -> Tensor:
    """Only the experts that some token chose are read. A token's sum runs in an order that depends on it alone.

    The sum is kept in the dtype of `weights`, fp32 or fp64, and rounded once.
    """
    experts = _Experts(tensors, projections, activation, emulate)
    run = _experts_in_turn if x.device.type == "cpu" else _experts_gathered
    return run(x, ids, weights, experts).to(x.dtype)


def _experts_in_turn(x: Tensor, ids: Tensor, weights: Tensor, experts: _Experts) -> Tensor:
    """Each used expert once, in ascending order, over the tokens that chose it."""
    top_k = ids.shape[1]
    chosen = ids.flatten()
    order = chosen.argsort(stable=True)
    used, counts = chosen[order].unique_consecutive(return_counts=True)
    flat_weights = weights.flatten()
    out = None
    for expert, pairs in zip(used.tolist(), order.split(counts.tolist()), strict=True):
        tokens = pairs // top_k
        y = experts(x[tokens], expert).to(weights.dtype) * flat_weights[pairs, None]
        if out is None:
            out = torch.zeros(x.shape[0], y.shape[1], dtype=y.dtype)
        out.index_add_(0, tokens, y)
    return out if out is not None else torch.zeros_like(x, dtype=weights.dtype)


def _experts_gathered(x: Tensor, ids: Tensor, weights: Tensor, experts: _Experts) -> Tensor:
    """Each (token, expert) pair with gathered weights: nothing is read back from the device."""
    (tokens, top_k), chosen = ids.shape, ids.flatten()
    step = max(1, GATHERED_EXPERT_BYTES // experts.dense_bytes)
    pairs = x.repeat_interleave(top_k, dim=0, output_size=tokens * top_k).unsqueeze(1)
    parts = [experts(*part) for part in zip(pairs.split(step), chosen.split(step), strict=True)]
    y = torch.cat(parts).view(tokens, top_k, -1).to(weights.dtype)
    return (y * weights.unsqueeze(-1)).sum(1)


OPERATORS: dict[str, Callable[..., Any]] = {
    "embedding": embedding,
    "linear": linear,
    "rms_norm": rms_norm,
    "gated_rms_norm": gated_rms_norm,
    "silu": F.silu,
    "squared_relu": squared_relu,
    "sigmoid": torch.sigmoid,
    "add": torch.add,
    "multiply": torch.mul,
    "split": split,
    "concat": concat,
    "reshape": reshape,
    "rope": rope,
    "gather": gather,
    "route_sigmoid": route_sigmoid,
    "route_softmax": route_softmax,
    "moe": moe,
}
"""Stateless operators by name; stateful ones live in `plugins.torch_ops`."""

WEIGHT_OPERATORS = {"embedding": 1, "linear": 1, "moe": 3}
"""Operators whose weights may be quantized: the number of inputs before the first weight."""


def attribute_dtypes(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes with dtype names turned into dtypes."""
    return {key: torch_dtype(value) if key.endswith("dtype") else value for key, value in attributes.items()}
