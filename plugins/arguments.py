"""Arguments of the kernels, checked and in the kernels' order: inputs, int32 scalars, outputs.

State parts are in place and appear in both groups, which is what TensorRT plugins demand. Whatever does not fit raises
one ValueError that names the tensor.
"""

from __future__ import annotations

import struct

import torch

from replayssm.plugins.contract import AttentionGeometry, ConvGeometry, GdnGeometry, Mamba2Geometry, state_parts
from replayssm.plugins.state import LayerState, torch_dtype

Argument = torch.Tensor | int | None

_INDEX_NAMES = ("seq_lens", "window_starts", "window_lens", "state_batch_indices")


def mamba2_arguments(
    x, dt, B, C, A_log, D, dt_bias, state, index, layer, out, skip_prefill: bool = False
) -> list[Argument]:
    """Arguments of mamba2_{window,prefill,serial}.cu in the kernel's order; ValueError for what does not fit.

    skip_prefill: the window kernel leaves prefill rows to the prefill kernel.
    """
    geometry, tokens = state.expect(Mamba2Geometry), x.shape[0]
    H, P, N, G = geometry.nheads, geometry.headdim, geometry.dstate, geometry.ngroups
    inputs = (
        ("x", x, (tokens, H, P), 8),
        ("dt", dt, (tokens, H), 1),
        ("B", B, (tokens, G, N), 8),
        ("C", C, (tokens, G, N), 8),
    )
    constants = tuple((name, tensor, (H,)) for name, tensor in (("A_log", A_log), ("D", D), ("dt_bias", dt_bias)))
    return _window_arguments(inputs, constants, state, index, layer, out, (tokens, H, P), skip_prefill)


def gdn_arguments(
    q, k, v, a, b, A_log, dt_bias, state, index, layer, out, skip_prefill: bool = False
) -> list[Argument]:
    """Arguments of gdn_{window,prefill,serial}.cu, as `mamba2_arguments`."""
    geometry, tokens = state.expect(GdnGeometry), v.shape[0]
    Hk, Hv, dk, dv = geometry.num_k_heads, geometry.num_v_heads, geometry.head_k_dim, geometry.head_v_dim
    inputs = (
        ("q", q, (tokens, Hk, dk), 8),
        ("k", k, (tokens, Hk, dk), 8),
        ("v", v, (tokens, Hv, dv), 8),
        ("a", a, (tokens, Hv), 1),
        ("b", b, (tokens, Hv), 1),
    )
    constants = tuple((name, tensor, (Hv,)) for name, tensor in (("A_log", A_log), ("dt_bias", dt_bias)))
    return _window_arguments(inputs, constants, state, index, layer, out, (tokens, Hv, dv), skip_prefill)


def conv_arguments(x, weight, bias, state, index, out) -> list[Argument]:
    """Arguments of causal_conv1d_window.cu in the kernel's order; ValueError for what does not fit."""
    geometry, tokens = state.expect(ConvGeometry), x.shape[0]
    act = torch_dtype(state.settings.activation_dtype)
    ring = state["conv_ring"]
    _check_index(index)
    _check_token_rows("x", x, (tokens, geometry.conv_dim), act, 8)
    _check_dense("weight", weight, (geometry.conv_dim, geometry.conv_kernel), weight.dtype)
    if bias is not None:
        _check_dense("bias", bias, (geometry.conv_dim,), weight.dtype)
    _check_dense("out", out, (tokens, geometry.conv_dim), act)
    scalars = [tokens, state.slots, state.settings.max_seq_len, x.stride(0), ring.stride(0)]
    return [x, weight, bias, ring, state.error_flag, *index, *scalars, out, ring, state.error_flag]


def _window_arguments(inputs, constants, state, index, layer, out, out_shape, skip_prefill) -> list[Argument]:
    settings = state.settings
    act = torch_dtype(settings.activation_dtype)
    _check_index(index)
    for name, tensor, shape, multiple in inputs:
        _check_token_rows(name, tensor, shape, act, multiple)
    for name, tensor, shape in constants:
        _check_dense(name, tensor, shape, torch.float32)
    _check_dense("out", out, out_shape, act)
    parts = _parts(state)
    strides = [0 if part is None else part.stride(0) for part in parts]
    scalars = [out_shape[0], state.slots, settings.max_seq_len, layer, *settings.rounding_scalars]
    if not (settings.is_baseline or settings.serial_exact):
        scalars.append(int(skip_prefill))
    scalars += [tensor.stride(0) for _, tensor, _, _ in inputs] + strides
    return [
        *(tensor for _, tensor, _, _ in inputs),
        *(tensor for _, tensor, _ in constants),
        *parts,
        state.error_flag,
        *index,
        *scalars,
        out,
        *parts,
        state.error_flag,
    ]


def _parts(state: LayerState) -> list[torch.Tensor | None]:
    """State parts in the kernel's order. Serial kernels take every part of both modes, None where there is none."""
    if state.settings.is_baseline or state.settings.serial_exact:
        ring = [part.name for part in state.geometry.ring_parts(state.settings)]
        parts = [state.tensors.get(name) for name in ("checkpoint", "checkpoint_position", *ring, "snapshots")]
    else:
        parts = state.flat()
    for spec in state_parts(state.geometry, state.settings):
        tensor = state[spec.name]
        if not tensor[0].is_contiguous() or tensor.dtype != torch_dtype(spec.dtype) or tensor.data_ptr() % 16:
            raise ValueError(
                f"state part {spec.name} must be dense within a slot, on a 16-byte boundary and {spec.dtype}, got "
                f"{tensor.dtype} with strides {tensor.stride()}: take it from `allocate_state`"
            )
        scalars = ("ring_dt", "ring_g", "readout_scale", "checkpoint_scale")
        loaded_by_16_bytes = spec.dtype != "int32" and not spec.name.startswith(scalars)
        if tensor.stride(0) > 2**31 - 1 or (loaded_by_16_bytes and tensor.stride(0) * tensor.element_size() % 16):
            raise ValueError(
                f"state part {spec.name}: slots must lie a multiple of 16 bytes apart, below 2^31 elements"
            )
    return parts


def _check_index(index: tuple[torch.Tensor, ...]) -> None:
    rows = index[0].shape
    for name, tensor in zip(_INDEX_NAMES, index, strict=True):
        if tensor.shape != rows or tensor.dim() != 1 or tensor.dtype != torch.int32 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be a dense int32 tensor {list(rows)}, got {list(tensor.shape)} of {tensor.dtype}"
            )


def _check_token_rows(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, multiple: int
) -> None:
    """Tokens may be strided (a slice of a projection's output), what belongs to a token must be dense."""
    if tuple(tensor.shape) != shape or tensor.dtype != dtype:
        raise ValueError(f"{name} must be {list(shape)} of {dtype}, got {list(tensor.shape)} of {tensor.dtype}")
    dense = 1
    for size, stride in reversed(list(zip(shape[1:], tensor.stride()[1:], strict=True))):
        if size != 1 and stride != dense:
            raise ValueError(f"{name}: all dimensions but the first must be dense, got strides {tensor.stride()}")
        dense *= size
    if multiple > 1 and (tensor.data_ptr() % 16 or tensor.stride(0) % multiple):
        raise ValueError(f"{name}: tokens must start on 16-byte boundaries, got stride {tensor.stride(0)} elements")
    if tensor.stride(0) > 2**27:
        raise ValueError(f"{name}: tokens lie {tensor.stride(0)} elements apart; a window must span less than 2^31")


def _check_dense(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be a dense {list(shape)} of {dtype}, got {list(tensor.shape)} of {tensor.dtype} with strides "
            f"{tensor.stride()}"
        )


def attention_arguments(q, k, v, state, index, scale, out) -> list[Argument]:
    """Arguments of attention_window.cu in the kernel's order; ValueError for what does not fit."""
    geometry, settings = state.expect(AttentionGeometry), state.settings
    tokens, act, keys = q.shape[0], torch_dtype(settings.activation_dtype), state["k_cache"]
    _check_index(index)
    _check_token_rows("q", q, (tokens, q.shape[1], geometry.head_dim), act, 8)
    for name, tensor in (("k", k), ("v", v)):
        _check_token_rows(name, tensor, (tokens, geometry.num_kv_heads, geometry.head_dim), act, 8)
    _check_dense("out", out, tuple(q.shape), act)
    caches = [keys, state["v_cache"]]
    for part in caches:
        if part.stride() != keys.stride() or not part[0].is_contiguous() or keys.stride(0) % 8:
            raise ValueError(f"KV caches must be alike and dense within a slot, got strides {part.stride()}")
    bits = struct.unpack("i", struct.pack("f", scale))[0]
    scalars = [tokens, state.slots, settings.max_seq_len, index[0].shape[0], bits]
    scalars += [q.stride(0), k.stride(0), v.stride(0), *divmod(keys.stride(0), 2**16)]
    return [q, k, v, *caches, state.error_flag, *index, *scalars, out, *caches, state.error_flag]
