"""Norms, activations and rotary embeddings as single kernels: what lies between the matrix products of a step.

Every function has a PyTorch form in `runtime.functional_ops`, which serves every other dtype and device. Inputs are
[T, n] or [T, heads, n] activations of 16 bits whose last dimension is dense, so slices of a projection's output are
taken as they are; outputs are dense. `plan_*` builds the launch without a GPU, for tests that emulate it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from replayssm.plugins import launch
from replayssm.plugins.arguments import Argument
from replayssm.plugins.geometry import FORMATS, KernelConfig, round_up
from replayssm.plugins.state import dtype_name

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
ACTIVATIONS = {"silu_multiply": 0, "multiply_sigmoid": 1, "squared_relu": 2}
CHUNK = 8
"""Elements that a thread loads at once, 16 bytes."""
ARGMAX_CHUNK, ARGMAX_ROWS = 4, 64
"""Numbers that a thread loads at once, 16 bytes; with fewer rows than that PyTorch, which divides rows, is faster."""


@dataclass(frozen=True)
class Launch:
    """A kernel, its arguments and its grid."""

    config: KernelConfig
    arguments: list[Argument]
    blocks_x: int
    blocks_y: int = 1
    blocks_z: int = 1

    def run(self, device: torch.device) -> None:
        launch.launch(self.config, self.arguments, device, self.blocks_y, self.blocks_z, self.blocks_x)


@dataclass(frozen=True)
class Narrow:
    """An output for FP8 products: e4m3 in units of `scale` (fp32 []). wide: the 16-bit output is wanted too."""

    scale: torch.Tensor
    wide: bool = True


Outputs = tuple["torch.Tensor | None", "torch.Tensor | None"]
"""A result in 16 bits and in e4m3, None where that is not wanted."""


def supports(*tensors: torch.Tensor) -> bool:
    """Whether the kernels take these activations: equal 16-bit dtypes, 8-element chunks on 16-byte boundaries."""
    return all(
        tensor.dtype == tensors[0].dtype
        and tensor.dtype in SIXTEEN_BITS
        and tensor.dim() in (2, 3)
        and tensor.shape[-1] % CHUNK == 0
        and tensor.stride(-1) == 1
        and tensor.data_ptr() % 16 == 0
        and all(stride % CHUNK == 0 and stride < 2**31 for stride in tensor.stride()[:-1])
        for tensor in tensors
    )


def supports_scale(*weights: torch.Tensor) -> bool:
    """Whether the kernels take these norm weights: dense fp32."""
    return all(
        weight.dtype == torch.float32 and weight.is_contiguous() and weight.data_ptr() % 16 == 0 for weight in weights
    )


def plan_rms_norm(
    x: torch.Tensor,
    addend: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    zero_centered: bool,
    out: torch.Tensor | None,
    total: torch.Tensor | None,
    narrow: torch.Tensor | None = None,
    narrow_scale: torch.Tensor | None = None,
) -> Launch:
    """out = norm(x + addend) * weight over the last dimension of x [T, n]; total receives x + addend, rounded.

    addend: [T, n], or dense fp32 [parts, T, n], whose sum over the parts is rounded first. narrow: e4m3 [T, n], what is
    or would be in `out`, in units of narrow_scale.
    """
    columns = x.shape[-1]
    threads = min(512, round_up(-(-columns // (2 * CHUNK)), 32))
    config = _config(
        "rms_norm",
        x.dtype,
        threads,
        shared=threads // 32 * 4,
        COLUMNS=columns,
        HAS_ADDEND=int(addend is not None),
        ADDEND_PARTS=addend.shape[0] if addend is not None and addend.dim() == 3 else 0,
        ZERO_CENTERED=int(zero_centered),
        STORES_WIDE=int(out is not None),
        STORES_NARROW=int(narrow is not None),
    )
    strides = [x.stride(0), 0 if addend is None else addend.stride(0)]
    arguments = [x, addend, weight, float_bits(eps), *strides, out, total, narrow_scale, narrow]
    return Launch(config, arguments, x.shape[0], 1)


def plan_gated_rms_norm(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group_size: int,
    gate_first: bool,
    out: torch.Tensor | None,
    narrow: torch.Tensor | None = None,
    narrow_scale: torch.Tensor | None = None,
) -> Launch:
    """out = gated norm of x by z, both [T, n]; weight [n] or [group_size]; narrow: as for `plan_rms_norm`."""
    columns = x.shape[-1]
    chunks = -(-group_size // CHUNK)
    lanes = min(256, round_up(chunks, 32)) if chunks > 16 else max(2, 1 << (chunks - 1).bit_length())
    threads = lanes if lanes > 32 else 128
    config = _config(
        "gated_rms_norm",
        x.dtype,
        threads,
        shared=128,
        COLUMNS=columns,
        GROUP_COLUMNS=group_size,
        WEIGHT_COLUMNS=weight.numel(),
        LANES=lanes,
        GATE_FIRST=int(gate_first),
        STORES_WIDE=int(out is not None),
        STORES_NARROW=int(narrow is not None),
    )
    arguments = [x, z, weight, float_bits(eps), x.stride(0), z.stride(0), out, narrow_scale, narrow]
    return Launch(config, arguments, x.shape[0], -(-(columns // group_size) // (threads // lanes)))


def plan_norm_rope(
    tensors: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    frequencies: torch.Tensor,
    positions: torch.Tensor,
    eps: float,
    zero_centered: bool,
    outs: Sequence[torch.Tensor],
) -> Launch:
    """outs = rope(norm(x) * weight) for one or two x [T, heads, n]; frequencies [dim / 2] of the first dim entries;
    int32 positions [T]."""
    tokens, _, head_dim = tensors[0].shape
    heads = [x.shape[1] for x in tensors] + [0] * (2 - len(tensors))
    strides = [stride for x in tensors for stride in x.stride()[:2]]
    config = _config(
        "norm_rope",
        tensors[0].dtype,
        128,
        shared=4 * head_dim * 4,
        HEADS=heads[0],
        SECOND_HEADS=heads[1],
        HEAD_DIM=head_dim,
        ROPE_DIM=2 * frequencies.numel(),
        ZERO_CENTERED=int(zero_centered),
    )
    pairs = [[*given, None][:2] for given in (tensors, weights, outs)]
    arguments = [*pairs[0], *pairs[1], frequencies, positions, float_bits(eps), *strides, *[0] * (4 - len(strides))]
    return Launch(config, [*arguments, *pairs[2]], tokens, -(-sum(heads) // 4))


def plan_activation(
    name: str,
    x: torch.Tensor,
    y: torch.Tensor | None,
    out: torch.Tensor | None,
    narrow: torch.Tensor | None = None,
    narrow_scale: torch.Tensor | None = None,
) -> Launch:
    """out = one of ACTIVATIONS of x and y, both [T, n] or [T, heads, n]; narrow: as for `plan_rms_norm`."""
    tensors = [tensor if tensor.dim() == 3 else tensor.unsqueeze(1) for tensor in (x, y) if tensor is not None]
    _, heads, columns = tensors[0].shape
    threads = min(256, round_up(heads * columns // CHUNK, 32))
    kinds = {
        "ACTIVATION": ACTIVATIONS[name],
        "STORES_WIDE": int(out is not None),
        "STORES_NARROW": int(narrow is not None),
    }
    config = _config("activation", x.dtype, threads, HEADS=heads, COLUMNS=columns, **kinds)
    strides = [stride for tensor in tensors for stride in tensor.stride()[:2]]
    arguments = [x, y, *strides, *[0] * (4 - len(strides)), out, narrow_scale, narrow]
    return Launch(config, arguments, x.shape[0], -(-(heads * columns) // (CHUNK * threads)))


def plan_quantize_fp8(x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> Launch:
    """out e4m3 [T, n] = x [T, n] in units of scale fp32 [], saturating."""
    columns = x.shape[1]
    threads = min(256, round_up(columns // CHUNK, 32))
    config = _config("quantize_fp8", x.dtype, threads, COLUMNS=columns)
    return Launch(config, [x, scale, x.stride(0), out], x.shape[0], -(-columns // (CHUNK * threads)))


def plan_argmax(x: torch.Tensor, values: torch.Tensor, places: torch.Tensor) -> Launch:
    """values fp32 [R] = the largest of each row of x fp32 [R, n]; places int64 [R] = where it stands."""
    threads = min(512, round_up(-(-x.shape[1] // ARGMAX_CHUNK), 32))
    sizes = {"COLUMNS": x.shape[1], "THREADS": threads, "ITEMS": 8, "SHARED_BYTES": threads // 32 * 8, "BULK_COPY": 0}
    config = KernelConfig("argmax", tuple(sorted(sizes.items())), 1, threads, sizes["SHARED_BYTES"])
    return Launch(config, [x, values, places], x.shape[0])


def takes_rows(x: torch.Tensor) -> bool:
    """Whether `argmax` takes x: enough dense fp32 rows [R, n], one per block, to fill a GPU."""
    dense = x.is_cuda and x.dim() == 2 and x.dtype == torch.float32 and x.is_contiguous() and x.data_ptr() % 16 == 0
    return dense and x.shape[0] >= ARGMAX_ROWS and 0 < x.shape[1] < 2**31 and x.shape[1] % ARGMAX_CHUNK == 0


def argmax(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest, its place) of each row, as `torch.max`: a NaN is larger than all; of equal ones the first."""
    values, places = x.new_empty(x.shape[0]), torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    plan_argmax(x, values, places).run(x.device)
    return values, places


def quantize_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [T, n] as e4m3 numbers in units of `scale`, as `plugins.nvfp4.round_to_fp8` rounds it."""
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    plan_quantize_fp8(x, scale, out).run(x.device)
    return out


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool, narrow: Narrow | None = None
) -> torch.Tensor | Outputs:
    """norm(x) * weight over the last dimension; with `narrow`, both outputs."""
    out, small = _outputs(x, narrow)
    flat = [tensor if tensor is None or tensor.dim() == 2 else tensor.flatten(0, 1) for tensor in (x, out, small)]
    plan_rms_norm(flat[0], None, weight, eps, zero_centered, flat[1], None, flat[2], _scale(narrow)).run(x.device)
    return out if narrow is None else (out, small)


def add_rms_norm(
    x: torch.Tensor,
    y: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    zero_centered: bool,
    narrow: Narrow | None = None,
) -> tuple[torch.Tensor, ...]:
    """(x + y, norm(x + y) * weight) for x [T, n], y as the addend of `plan_rms_norm`; with `narrow`, the norm in e4m3
    too."""
    total, (out, small) = _dense_like(x), _outputs(x, narrow)
    plan_rms_norm(x, y, weight, eps, zero_centered, out, total, small, _scale(narrow)).run(x.device)
    return (total, out) if narrow is None else (total, out, small)


def gated_rms_norm(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group_size: int,
    gate_first: bool,
    narrow: Narrow | None = None,
) -> torch.Tensor | Outputs:
    """See `builders.functional.gated_rms_norm`; with `narrow`, both outputs."""
    out, small = _outputs(x, narrow)
    plan_gated_rms_norm(x, z, weight, eps, group_size, gate_first, out, small, _scale(narrow)).run(x.device)
    return out if narrow is None else (out, small)


def norm_rope(
    tensors: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    positions: torch.Tensor,
    eps: float,
    zero_centered: bool,
    theta: float,
    dim: int,
) -> list[torch.Tensor]:
    """rope(norm(x) * weight) for one or two x [T, heads, n]."""
    outs = [_dense_like(x) for x in tensors]
    frequencies = rope_frequencies(theta, dim, tensors[0].device)
    plan_norm_rope(tensors, weights, frequencies, positions, eps, zero_centered, outs).run(tensors[0].device)
    return outs


def activate(
    name: str, x: torch.Tensor, y: torch.Tensor | None = None, narrow: Narrow | None = None
) -> torch.Tensor | Outputs:
    """One of ACTIVATIONS: silu(x) * y, x * sigmoid(y) or relu(x)^2; with `narrow`, both outputs."""
    out, small = _outputs(x, narrow)
    plan_activation(name, x, y, out, small, _scale(narrow)).run(x.device)
    return out if narrow is None else (out, small)


@cache
def rope_frequencies(theta: float, dim: int, device: torch.device) -> torch.Tensor:
    """theta^(-2 i / dim) in fp32, as Hugging Face computes it. Kept, because graphs read it again at every replay."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def _outputs(x: torch.Tensor, narrow: Narrow | None) -> Outputs:
    out = _dense_like(x) if narrow is None or narrow.wide else None
    small = None if narrow is None else torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return out, small


def _scale(narrow: Narrow | None) -> torch.Tensor | None:
    return None if narrow is None else narrow.scale


def _dense_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _config(kernel: str, dtype: torch.dtype, threads: int, shared: int = 0, **defines: int) -> KernelConfig:
    defines["ACTIVATION_FORMAT"] = FORMATS[dtype_name(dtype)]
    defines["BULK_COPY"] = 0
    defines["THREADS"] = threads
    if shared:
        defines["SHARED_BYTES"] = shared
    return KernelConfig(kernel, tuple(sorted(defines.items())), 1, threads, shared)


def float_bits(value: float) -> int:
    return struct.unpack("i", struct.pack("f", value))[0]
