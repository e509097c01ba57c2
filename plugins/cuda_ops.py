"""CUDA implementations behind the operators of `plugins.torch_ops`.

`register()` makes the kernels serve CUDA tensors; it compiles nothing until an operator is called. Decode and verify
rows run in one launch per operator; calls with prefill rows add a launch of the prefill kernels, where these take the
layer.

Sizes and formats without a kernel (see `geometry.UnsupportedGeometryError`) run the PyTorch reference on the CPU with
copies both ways: correct, slow, not capturable; a warning says so once per reason.

Whole generations of the example models run on them on an H200, captured in CUDA graphs, and give the CPU's tokens
(tests/runtime/test_session_cuda.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, wraps

import torch

from replayssm.plugins import geometry as geo
from replayssm.plugins import launch, reference
from replayssm.plugins.contract import AttentionGeometry, ConvGeometry
from replayssm.plugins.geometry import UnsupportedGeometryError
from replayssm.plugins.state import LayerState
from replayssm.plugins.torch_ops import register_implementation


@cache
def register() -> None:
    """Serve the operators' CUDA tensors. Idempotent."""
    for name in ("mamba2_window", "gdn_window", "causal_conv1d_window", "attention_window"):
        register_implementation(name, "cuda", globals()[name])


def _float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float32 and tensor.is_contiguous() else tensor.float().contiguous()


def _int32(index: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.to(torch.int32).contiguous() for tensor in index)


def _token_rows(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` [T, ...] as the kernels read it: a copy only where a token is not dense or not on a 16-byte boundary."""
    tensor = tensor.to(dtype)
    dense = tensor[:1].is_contiguous() and tensor.data_ptr() % 16 == 0 and tensor.stride(0) % 8 == 0
    # `contiguous` leaves a single token as it is, wherever it lies.
    return tensor if dense or tensor.shape[0] == 0 else tensor.clone(memory_format=torch.contiguous_format)


def _or_reference(name: str) -> Callable[[Callable], Callable]:
    """Run the reference where the decorated function raises UnsupportedGeometryError."""

    def decorate(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @wraps(function)
        def wrapped(*args):
            try:
                return function(*args)
            except UnsupportedGeometryError as error:
                return _reference(name, str(error), *args)

        return wrapped

    return decorate


@cache
def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)


def _reference(name: str, reason: str, *args) -> torch.Tensor:
    """The reference on copies of everything, then the state copied back."""
    _warn(f"{name} runs its PyTorch reference on the CPU, which is slow: {reason}")
    device = next(arg for arg in args if isinstance(arg, torch.Tensor)).device
    state = next(arg for arg in args if isinstance(arg, LayerState))
    host = LayerState(
        state.geometry,
        state.settings,
        {part: tensor.cpu() for part, tensor in state.tensors.items()},
        state.error_flag.cpu(),
    )
    on_host = [host if arg is state else arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args]
    out = getattr(reference, name)(*on_host)
    for part, tensor in state.tensors.items():
        tensor.copy_(host.tensors[part])
    state.error_flag.copy_(host.error_flag)
    return out.to(device)


_leave_gaps: ContextVar[bool] = ContextVar("leave_gaps", default=False)


@contextmanager
def gaps_left_unwritten() -> Iterator[None]:
    """Within this context, outputs of tokens that belong to no row hold anything instead of zeros.

    For callers that know those tokens and ignore them, such as steps of a fixed width: zeros cost a fill per operator.
    """
    before = _leave_gaps.set(True)
    try:
        yield
    finally:
        _leave_gaps.reset(before)


def _output(like: torch.Tensor) -> torch.Tensor | None:
    """Where a kernel writes: None lets the launcher allocate zeros."""
    return torch.empty_like(like, memory_format=torch.contiguous_format) if _leave_gaps.get() else None


def has_kernel(state: LayerState) -> bool:
    """Whether a kernel serves this state on its device. Of attention and convolutions, those with a usual call."""
    geometry, settings = state.geometry, state.settings
    arch = launch.device_arch(state.error_flag.device)
    try:
        if isinstance(geometry, ConvGeometry):
            geo.conv_config(geometry, settings, False, settings.activation_dtype)
        elif isinstance(geometry, AttentionGeometry):
            geo.attention_config(geometry, settings, geometry.num_kv_heads)
        else:
            geo.window_config(geometry, settings, arch)
    except UnsupportedGeometryError:
        return False
    return True


@_or_reference("mamba2_window")
def mamba2_window(x, dt, B, C, A_log, D, dt_bias, state, *rest) -> torch.Tensor:
    *index, layer = rest
    packed = [_token_rows(tensor, x.dtype) for tensor in (x, B, C)]
    constants = [_float32(tensor) for tensor in (A_log, D, dt_bias)]
    inputs = (packed[0], dt.to(x.dtype), *packed[1:], *constants)
    return launch.mamba2_window(*inputs, state, *_int32(index), layer, _output(x))


@_or_reference("gdn_window")
def gdn_window(q, k, v, a, b, A_log, dt_bias, state, *rest) -> torch.Tensor:
    *index, layer = rest
    packed = [_token_rows(tensor, v.dtype) for tensor in (q, k, v)]
    gates = [tensor.to(v.dtype) for tensor in (a, b)]
    inputs = (*packed, *gates, _float32(A_log), _float32(dt_bias))
    return launch.gdn_window(*inputs, state, *_int32(index), layer, _output(v))


@_or_reference("causal_conv1d_window")
def causal_conv1d_window(x, weight, bias, state, *index) -> torch.Tensor:
    bias = None if bias is None else bias.to(weight.dtype).contiguous()
    x = _token_rows(x, x.dtype)
    return launch.causal_conv1d_window(x, weight.contiguous(), bias, state, *_int32(index), _output(x))


@_or_reference("attention_window")
def attention_window(q, k, v, state, *rest) -> torch.Tensor:
    *index, scale = rest
    packed = [_token_rows(tensor, q.dtype) for tensor in (q, k, v)]
    return launch.attention_window(*packed, state, *_int32(index), scale)
