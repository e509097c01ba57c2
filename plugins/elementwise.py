"""Norms, activations and rotary embeddings as single kernels: what lies between the matrix products of a step.

Every function has a PyTorch form in `runtime.functional_ops`, which serves every other dtype and device. Inputs are
[T, n] or [T, heads, n] activations of 16 bits whose last dimension is dense, so slices of a projection's output are
taken as they are; outputs are dense. `plan_*` builds the launch without a GPU, for tests that emulate it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache

import torch

from replayssm.plugins import launch
from replayssm.plugins.arguments import Argument
from replayssm.plugins.geometry import FORMATS, KernelConfig, round_up

SIXTEEN_BITS = (torch.bfloat16, torch.float16)
ACTIVATIONS = {"silu_multiply": 0, "multiply_sigmoid": 1, "squared_relu": 2}
CHUNK = 8
"""Elements that a thread loads at once, 16 bytes."""


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
    out: torch.Tensor,
    total: torch.Tensor | None,
) -> Launch:
    """out = norm(x + addend) * weight over the last dimension of x [T, n]; total receives x + addend, rounded."""
    columns = x.shape[-1]
    threads = min(512, round_up(-(-columns // (2 * CHUNK)), 32))
    config = _config(
        "rms_norm",
        x.dtype,
        threads,
        shared=threads // 32 * 4,
        COLUMNS=columns,
        HAS_ADDEND=int(addend is not None),
        ZERO_CENTERED=int(zero_centered),
    )
    strides = [x.stride(0), 0 if addend is None else addend.stride(0)]
    return Launch(config, [x, addend, weight, float_bits(eps), *strides, out, total], x.shape[0], 1)


def plan_gated_rms_norm(
    x: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group_size: int,
    gate_first: bool,
    out: torch.Tensor,
) -> Launch:
    """out = gated norm of x by z, both [T, n]; weight [n] or [group_size]."""
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
    )
    arguments = [x, z, weight, float_bits(eps), x.stride(0), z.stride(0), out]
    return Launch(config, arguments, x.shape[0], -(-(columns // group_size) // (threads // lanes)))


def plan_norm_rope(
    x: torch.Tensor,
    weight: torch.Tensor,
    frequencies: torch.Tensor,
    positions: torch.Tensor,
    eps: float,
    zero_centered: bool,
    out: torch.Tensor,
) -> Launch:
    """out = rope(norm(x) * weight) for x [T, heads, n]; frequencies [dim / 2] of the first dim entries; int32
    positions [T]."""
    _, heads, head_dim = x.shape
    config = _config(
        "norm_rope",
        x.dtype,
        128,
        shared=4 * head_dim * 4,
        HEADS=heads,
        HEAD_DIM=head_dim,
        ROPE_DIM=2 * frequencies.numel(),
        ZERO_CENTERED=int(zero_centered),
    )
    arguments = [x, weight, frequencies, positions, float_bits(eps), x.stride(0), x.stride(1), out]
    return Launch(config, arguments, x.shape[0], -(-heads // 4))


def plan_activation(name: str, x: torch.Tensor, y: torch.Tensor | None, out: torch.Tensor) -> Launch:
    """out = one of ACTIVATIONS of x and y, both [T, n] or [T, heads, n]."""
    tensors = [tensor if tensor.dim() == 3 else tensor.unsqueeze(1) for tensor in (x, y) if tensor is not None]
    _, heads, columns = tensors[0].shape
    threads = min(256, round_up(heads * columns // CHUNK, 32))
    config = _config("activation", x.dtype, threads, HEADS=heads, COLUMNS=columns, ACTIVATION=ACTIVATIONS[name])
    strides = [stride for tensor in tensors for stride in tensor.stride()[:2]]
    arguments = [x, y, *strides, *[0] * (4 - len(strides)), out]
    return Launch(config, arguments, x.shape[0], -(-(heads * columns) // (CHUNK * threads)))


def plan_quantize_fp8(x: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> Launch:
    """out e4m3 [T, n] = x [T, n] in units of scale fp32 [], saturating."""
    columns = x.shape[1]
    threads = min(256, round_up(columns // CHUNK, 32))
    config = _config("quantize_fp8", x.dtype, threads, COLUMNS=columns)
    return Launch(config, [x, scale, x.stride(0), out], x.shape[0], -(-columns // (CHUNK * threads)))


def quantize_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """x [T, n] as e4m3 numbers in units of `scale`, as `plugins.nvfp4.round_to_fp8` rounds it."""
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    plan_quantize_fp8(x, scale, out).run(x.device)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool) -> torch.Tensor:
    """norm(x) * weight over the last dimension."""
    out = _dense_like(x)
    rows, target = (x, out) if x.dim() == 2 else (x.flatten(0, 1), out.flatten(0, 1))
    plan_rms_norm(rows, None, weight, eps, zero_centered, target, None).run(x.device)
    return out


def add_rms_norm(
    x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x + y, norm(x + y) * weight) for [T, n]."""
    total, out = _dense_like(x), _dense_like(x)
    plan_rms_norm(x, y, weight, eps, zero_centered, out, total).run(x.device)
    return total, out


def gated_rms_norm(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float, group_size: int, gate_first: bool
) -> torch.Tensor:
    """See `builders.functional.gated_rms_norm`."""
    out = _dense_like(x)
    plan_gated_rms_norm(x, z, weight, eps, group_size, gate_first, out).run(x.device)
    return out


def norm_rope(
    x: torch.Tensor,
    weight: torch.Tensor,
    positions: torch.Tensor,
    eps: float,
    zero_centered: bool,
    theta: float,
    dim: int,
) -> torch.Tensor:
    """rope(norm(x) * weight) for x [T, heads, n]."""
    out = _dense_like(x)
    frequencies = rope_frequencies(theta, dim, x.device)
    plan_norm_rope(x, weight, frequencies, positions, eps, zero_centered, out).run(x.device)
    return out


def activate(name: str, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    """One of ACTIVATIONS: silu(x) * y, x * sigmoid(y) or relu(x)^2."""
    out = _dense_like(x)
    plan_activation(name, x, y, out).run(x.device)
    return out


@cache
def rope_frequencies(theta: float, dim: int, device: torch.device) -> torch.Tensor:
    """theta^(-2 i / dim) in fp32, as Hugging Face computes it. Kept, because graphs read it again at every replay."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def _dense_like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _config(kernel: str, dtype: torch.dtype, threads: int, shared: int = 0, **defines: int) -> KernelConfig:
    defines["ACTIVATION_FORMAT"] = FORMATS[str(dtype).removeprefix("torch.")]
    defines["BULK_COPY"] = 0
    defines["THREADS"] = threads
    if shared:
        defines["SHARED_BYTES"] = shared
    return KernelConfig(kernel, tuple(sorted(defines.items())), 1, threads, shared)


def float_bits(value: float) -> int:
    return struct.unpack("i", struct.pack("f", value))[0]
