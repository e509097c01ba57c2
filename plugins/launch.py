"""The only place that launches kernels.

Each operator has one function here with the operator's signature plus `out`. A call checks its arguments (host work
that a replayed CUDA graph does not repeat), builds the argument list and makes one driver call on the caller's current
stream. Nothing is allocated (but `out`, if it is not given) and nothing synchronises, so launches can be captured in
CUDA graphs. The first launch of a variant compiles and loads it, which must happen before a capture: one eager call
does it.

Argument order of every kernel: inputs, int32 scalars, outputs; state parts are in place and appear in both groups.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch

from replayssm.plugins import geometry as geo
from replayssm.plugins.contract import state_parts
from replayssm.plugins.geometry import KernelConfig, UnsupportedGeometryError
from replayssm.plugins.nvrtc import compile_kernel
from replayssm.plugins.state import LayerState, torch_dtype

Argument = torch.Tensor | int | None

_INDEX_NAMES = ("seq_lens", "window_starts", "window_lens", "state_batch_indices")


def mamba2_window(
    x: torch.Tensor,
    dt: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    A_log: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    state: LayerState,
    seq_lens: torch.Tensor,
    window_starts: torch.Tensor,
    window_lens: torch.Tensor,
    state_batch_indices: torch.Tensor,
    layer: int,
    out: torch.Tensor | None = None,
    config: KernelConfig | None = None,
) -> torch.Tensor:
    """`reference.mamba2_window` on a GPU.

    out: [T, H, P], dense; tokens without a row keep what they held. Allocated and zeroed if it is not given.
    config: a variant other than the layer's own, for measurements.
    """
    config = config or geo.window_config(state.geometry, state.settings, device_arch(x.device))
    out = torch.zeros_like(x, memory_format=torch.contiguous_format) if out is None else out
    launch(
        config,
        mamba2_arguments(
            x,
            dt,
            B,
            C,
            A_log,
            D,
            dt_bias,
            state,
            (seq_lens, window_starts, window_lens, state_batch_indices),
            layer,
            out,
        ),
        x.device,
        seq_lens.shape[0],
    )
    return out


def gdn_window(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    state: LayerState,
    seq_lens: torch.Tensor,
    window_starts: torch.Tensor,
    window_lens: torch.Tensor,
    state_batch_indices: torch.Tensor,
    layer: int,
    out: torch.Tensor | None = None,
    config: KernelConfig | None = None,
) -> torch.Tensor:
    """`reference.gdn_window` on a GPU; `out` [T, Hv, dv] and `config` as for `mamba2_window`."""
    config = config or geo.window_config(state.geometry, state.settings, device_arch(v.device))
    out = torch.zeros_like(v, memory_format=torch.contiguous_format) if out is None else out
    launch(
        config,
        gdn_arguments(
            q,
            k,
            v,
            a,
            b,
            A_log,
            dt_bias,
            state,
            (seq_lens, window_starts, window_lens, state_batch_indices),
            layer,
            out,
        ),
        v.device,
        seq_lens.shape[0],
    )
    return out


def causal_conv1d_window(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: LayerState,
    seq_lens: torch.Tensor,
    window_starts: torch.Tensor,
    window_lens: torch.Tensor,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reference.causal_conv1d_window` on a GPU; `out` [T, C] as for `mamba2_window`."""
    config = geo.conv_config(state.geometry, state.settings, bias is not None, str(weight.dtype).removeprefix("torch."))
    out = torch.zeros_like(x, memory_format=torch.contiguous_format) if out is None else out
    launch(
        config,
        conv_arguments(x, weight, bias, state, (seq_lens, window_starts, window_lens, state_batch_indices), out),
        x.device,
        seq_lens.shape[0],
        conv_chunks(x.shape[0], seq_lens.shape[0], state),
    )
    return out


def conv_chunks(tokens: int, rows: int, state: LayerState) -> int:
    """Blocks along a row's window: one unless some row must be a long one."""
    return (
        1 if tokens <= rows * max(state.settings.max_window, geo.CONV_CHUNK) else min(64, -(-tokens // geo.CONV_CHUNK))
    )


def mamba2_arguments(x, dt, B, C, A_log, D, dt_bias, state, index, layer, out) -> list[Argument]:
    """Arguments of mamba2_window.cu or mamba2_serial.cu in the kernel's order; ValueError for what does not fit."""
    geometry, tokens = state.geometry, x.shape[0]
    H, P, N, G = geometry.nheads, geometry.headdim, geometry.dstate, geometry.ngroups
    inputs = (
        ("x", x, (tokens, H, P), 8),
        ("dt", dt, (tokens, H), 1),
        ("B", B, (tokens, G, N), 8),
        ("C", C, (tokens, G, N), 8),
    )
    constants = tuple((name, tensor, (H,)) for name, tensor in (("A_log", A_log), ("D", D), ("dt_bias", dt_bias)))
    return _window_arguments(inputs, constants, state, index, layer, out, (tokens, H, P))


def gdn_arguments(q, k, v, a, b, A_log, dt_bias, state, index, layer, out) -> list[Argument]:
    """Arguments of gdn_window.cu or gdn_serial.cu in the kernel's order; ValueError for what does not fit."""
    geometry, tokens = state.geometry, v.shape[0]
    Hk, Hv, dk, dv = geometry.num_k_heads, geometry.num_v_heads, geometry.head_k_dim, geometry.head_v_dim
    inputs = (
        ("q", q, (tokens, Hk, dk), 8),
        ("k", k, (tokens, Hk, dk), 8),
        ("v", v, (tokens, Hv, dv), 8),
        ("a", a, (tokens, Hv), 1),
        ("b", b, (tokens, Hv), 1),
    )
    constants = tuple((name, tensor, (Hv,)) for name, tensor in (("A_log", A_log), ("dt_bias", dt_bias)))
    return _window_arguments(inputs, constants, state, index, layer, out, (tokens, Hv, dv))


def conv_arguments(x, weight, bias, state, index, out) -> list[Argument]:
    """Arguments of causal_conv1d_window.cu in the kernel's order; ValueError for what does not fit."""
    tokens, channels, taps = x.shape[0], state.geometry.conv_dim, state.geometry.conv_kernel
    act = torch_dtype(state.settings.activation_dtype)
    ring = state["conv_ring"]
    _check_index(index)
    _check_token_rows("x", x, (tokens, channels), act, 8)
    _check_dense("weight", weight, (channels, taps), weight.dtype)
    if bias is not None:
        _check_dense("bias", bias, (channels,), weight.dtype)
    _check_dense("out", out, (tokens, channels), act)
    scalars = [tokens, state.slots, state.settings.max_seq_len, x.stride(0), ring.stride(0)]
    return [x, weight, bias, ring, state.error_flag, *index, *scalars, out, ring, state.error_flag]


def _window_arguments(inputs, constants, state, index, layer, out, out_shape) -> list[Argument]:
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
    scalars = [out_shape[0], state.slots, settings.max_seq_len, layer]
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
    ring = [part.name for part in state.geometry.ring_parts(state.settings)]
    names = ["checkpoint", "checkpoint_position", *ring]
    if state.settings.is_baseline or state.settings.serial_exact:
        names.append("snapshots")
    parts = [state.tensors.get(name) for name in names]
    for spec in state_parts(state.geometry, state.settings):
        tensor = state[spec.name]
        if not tensor[0].is_contiguous() or tensor.dtype != torch_dtype(spec.dtype) or tensor.data_ptr() % 16:
            raise ValueError(f"state part {spec.name} must be dense within a slot, aligned and {spec.dtype}")
        loaded_by_16_bytes = spec.dtype != "int32" and not spec.name.startswith(("ring_dt", "ring_g"))
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
    if tensor.stride(0) > 2**31 - 1:
        raise ValueError(f"{name}: tokens lie {tensor.stride(0)} elements apart, which exceeds int32")


def _check_dense(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be a dense {list(shape)} of {dtype}, got {list(tensor.shape)} of {tensor.dtype} with strides "
            f"{tensor.stride()}"
        )


@cache
def device_arch(device: torch.device) -> int:
    """Compute capability of a CUDA device as major * 10 + minor."""
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


class LoadedKernel:
    """A kernel on one device, and the buffers through which its arguments pass."""

    def __init__(self, config: KernelConfig, image: bytes) -> None:
        """Load `image`, a cubin for the current device."""
        from cuda.bindings import driver

        self._driver, self.config = driver, config
        self._module = self._check(driver.cuModuleLoadData(image))
        self._function = self._check(driver.cuModuleGetFunction(self._module, config.kernel.encode()))
        if config.shared_bytes > geo.EMBEDDED_SHARED_BYTES:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._check(driver.cuFuncSetAttribute(self._function, attribute, config.shared_bytes))

    def __call__(
        self, arguments: list[Argument], rows: int, grid_z: int, stream: int, blocks_x: int | None = None
    ) -> None:
        count = len(arguments)
        # The driver copies the values during the call, so both buffers may be temporary.
        values = (ctypes.c_uint64 * count)(
            *(
                argument & 0xFFFFFFFF if isinstance(argument, int) else 0 if argument is None else argument.data_ptr()
                for argument in arguments
            )
        )
        base = ctypes.addressof(values)
        pointers = (ctypes.c_void_p * count)(*range(base, base + 8 * count, 8))
        config = self.config
        self._check(
            self._driver.cuLaunchKernel(
                self._function,
                blocks_x or config.blocks_x,
                rows,
                grid_z,
                config.threads,
                1,
                1,
                config.shared_bytes,
                self._driver.CUstream(stream),
                ctypes.addressof(pointers),
                0,
            )
        )

    def _check(self, result: tuple):
        code, *values = result
        if code != self._driver.CUresult.CUDA_SUCCESS:
            text = self._driver.cuGetErrorString(code)[1]
            raise RuntimeError(f"CUDA driver: {text.decode() if text else code}")
        return values[0] if values else None


@cache
def load_kernel(config: KernelConfig, device: torch.device) -> LoadedKernel:
    """The kernel, compiled and loaded on first use."""
    compiled = compile_kernel(config.kernel, dict(config.defines), geo.compile_target(device_arch(device)))
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the device's primary context current
        return LoadedKernel(config, compiled.image)


def launch(config: KernelConfig, arguments: list[Argument], device: torch.device, rows: int, grid_z: int = 1) -> None:
    if rows == 0:
        return
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and argument.device != device:
            raise ValueError(f"all tensors must be on {device}, got one on {argument.device}")
    kernel = load_kernel(config, device)
    kernel(arguments, rows, grid_z, torch.cuda.current_stream(device).cuda_stream)


__all__ = ["UnsupportedGeometryError", "causal_conv1d_window", "gdn_window", "load_kernel", "mamba2_window"]
