"""The only place that launches kernels.

Each operator has one function here with the operator's signature plus `out`. A call checks its arguments (host work
that a replayed CUDA graph does not repeat), builds the argument list and makes one driver call on the caller's current
stream. Nothing is allocated (but `out`, if it is not given) and nothing synchronises, so launches can be captured in
CUDA graphs. The first launch of a variant compiles and loads it, which must happen before a capture: one eager call
does it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache, partial

import torch

from replayssm.plugins import geometry as geo
from replayssm.plugins.arguments import (
    Argument,
    attention_arguments,
    conv_arguments,
    gdn_arguments,
    mamba2_arguments,
)
from replayssm.plugins.contract import AttentionGeometry, ConvGeometry
from replayssm.plugins.geometry import KernelConfig, UnsupportedGeometryError
from replayssm.plugins.nvrtc import compile_kernel
from replayssm.plugins.prefill_geometry import prefill_config_or_none
from replayssm.plugins.state import LayerState, dtype_name

LIKELY_PROMPT = 128
"""Tokens of a prefill row, as a guess from which the number of prefill rows of a call follows."""

PAIRED_CONV_ROWS = 128
"""With fewer rows of decode, each has blocks of its own."""

_prefill_rows: ContextVar[bool | None] = ContextVar("prefill_rows", default=None)


@contextmanager
def prefill_rows(exist: bool) -> Iterator[None]:
    """Within this context, calls have prefill rows, or have none, as the caller knows from its own lengths.

    With it, every prefill row is computed by the same kernel, and its result does not depend on the rows beside it.
    """
    before = _prefill_rows.set(exist)
    try:
        yield
    finally:
        _prefill_rows.reset(before)


def known_prefill_rows() -> bool | None:
    """What `prefill_rows` says here; None where the caller said nothing."""
    return _prefill_rows.get()


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
    out = torch.zeros_like(x, memory_format=torch.contiguous_format) if out is None else out
    index = (seq_lens, window_starts, window_lens, state_batch_indices)
    arguments = partial(mamba2_arguments, x, dt, B, C, A_log, D, dt_bias, state, index, layer, out)
    _launch_window(state, x, seq_lens.shape[0], arguments, config)
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
    out = torch.zeros_like(v, memory_format=torch.contiguous_format) if out is None else out
    index = (seq_lens, window_starts, window_lens, state_batch_indices)
    arguments = partial(gdn_arguments, q, k, v, a, b, A_log, dt_bias, state, index, layer, out)
    _launch_window(state, v, seq_lens.shape[0], arguments, config)
    return out


def _launch_window(
    state: LayerState,
    packed: torch.Tensor,
    rows: int,
    arguments: Callable[..., list[Argument]],
    config: KernelConfig | None,
) -> None:
    """The window kernel and, where a prefill row must be among the rows, the prefill kernel behind it.

    The window kernel serves every row but those that it then leaves to the prefill kernel. It must run first: it finds
    a prefill row invalid once that is folded.
    """
    arch = device_arch(packed.device)
    config = config or geo.window_config(state.geometry, state.settings, arch)
    prefill = prefill_kernel(state, packed.shape[0], rows, arch)
    values = arguments(skip_prefill=prefill is not None)
    launch(config, values, packed.device, rows, blocks_x=geo.window_blocks(config, rows, arch))
    if prefill is not None:
        launch(prefill, values, packed.device, rows)


def prefill_kernel(state: LayerState, tokens: int, rows: int, arch: int) -> KernelConfig | None:
    """The prefill kernel of a call, None where the window kernel serves all of its rows.

    Which rows are prefill is known on the device and to callers that say so (`prefill_rows`). Else, more packed tokens
    than `rows` windows can have prove that one is, so decode and verify steps never pay for a second launch. Prefill
    rows that share a call with many idle or shorter rows may stay below that and are walked token by token by the
    window kernel: the same result within rounding, but slowly.
    """
    known = known_prefill_rows()
    exist = tokens > rows * state.settings.max_window if known is None else known
    if not exist:
        return None
    # A guess that changes the speed only: prompts are long.
    prompts = max(1, min(rows, tokens // LIKELY_PROMPT))
    return prefill_config_or_none(state.geometry, state.settings, arch, prompts)


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
    rows = conv_rows(seq_lens.shape[0], state)
    dtype = dtype_name(weight.dtype)
    config = geo.conv_config(state.expect(ConvGeometry), state.settings, bias is not None, dtype, rows)
    out = torch.zeros_like(x, memory_format=torch.contiguous_format) if out is None else out
    launch(
        config,
        conv_arguments(x, weight, bias, state, (seq_lens, window_starts, window_lens, state_batch_indices), out),
        x.device,
        seq_lens.shape[0] // rows,
        conv_chunks(x.shape[0], seq_lens.shape[0], state),
    )
    return out


def attention_window(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    state: LayerState,
    seq_lens: torch.Tensor,
    window_starts: torch.Tensor,
    window_lens: torch.Tensor,
    state_batch_indices: torch.Tensor,
    scale: float,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`reference.attention_window` on a GPU; `out` [T, Hq, hd] is written completely."""
    geometry = state.expect(AttentionGeometry)
    queries = geo.attention_queries(q.shape[1], geometry, q.shape[0], seq_lens.shape[0])
    config = geo.attention_config(geometry, state.settings, q.shape[1], queries)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    index = (seq_lens, window_starts, window_lens, state_batch_indices)
    arguments = attention_arguments(q, k, v, state, index, scale, out)
    launch(config, arguments, q.device, geo.attention_tiles(config), blocks_x=q.shape[0])
    return out


def conv_rows(rows: int, state: LayerState) -> int:
    """Rows of a block: two where decode steps have more of them than run at once."""
    return 2 if state.settings.max_window == 1 and rows % 2 == 0 and rows >= PAIRED_CONV_ROWS else 1


def conv_chunks(tokens: int, rows: int, state: LayerState) -> int:
    """Blocks along a row's window: one unless some row must be a long one, or may be and the caller knows of prompts.

    A row four times as long as the mean then has a block for each of its chunks.
    """
    if known_prefill_rows():
        return min(64, -(-tokens // geo.CONV_CHUNK), -(-4 * tokens // (rows * geo.CONV_CHUNK)))
    return (
        1 if tokens <= rows * max(state.settings.max_window, geo.CONV_CHUNK) else min(64, -(-tokens // geo.CONV_CHUNK))
    )


COPY_THREADS, COPY_BLOCKS = 256, 32
"""Blocks of a row at most: with 32, each copies 20 chunks a thread of the largest states."""


def copy_rows(source: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, target: torch.Tensor) -> bool:
    """target[targets] = source[sources] (int32 [n], no target twice); False where rows are no 16-byte chunks."""
    nbytes = source[0].numel() * source.element_size()
    dense = source.is_contiguous() and target.is_contiguous()
    if not dense or nbytes % 16 or any(tensor.data_ptr() % 16 for tensor in (source, target)):
        return False
    defines = (("CHUNKS", nbytes // 16), ("THREADS", COPY_THREADS))
    blocks = max(1, min(COPY_BLOCKS, -(-nbytes // 16 // COPY_THREADS)))
    config = KernelConfig("copy_rows", defines, blocks, COPY_THREADS, 0)
    launch(config, [source, sources, targets, target], source.device, len(sources))
    return True


@cache
def device_arch(device: torch.device) -> int:
    """Compute capability of a CUDA device as major * 10 + minor."""
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def _carveout(config: KernelConfig) -> int:
    """Percent of a multiprocessor's shared memory that the kernel's blocks are to share."""
    if not config.resident_blocks:
        return 100
    available = torch.cuda.get_device_properties(torch.cuda.current_device()).shared_memory_per_multiprocessor
    return min(100, -(-100 * config.resident_blocks * (config.shared_bytes + geo.RESERVED_BYTES) // available))


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
        if config.shared_bytes:  # as many blocks as are wanted, or fit, at the cost of the first-level cache
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            self._check(driver.cuFuncSetAttribute(self._function, attribute, _carveout(config)))

    @property
    def function(self):
        """The driver's CUfunction, for whoever puts it into a graph by hand."""
        return self._function

    def __call__(
        self, arguments: list[Argument], blocks_y: int, blocks_z: int, stream: int, blocks_x: int | None = None
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
        if config.overlaps:
            where = self._overlapping(blocks_x or config.blocks_x, blocks_y, blocks_z, stream)
            self._check(self._driver.cuLaunchKernelEx(where, self._function, ctypes.addressof(pointers), 0))
            return
        self._check(
            self._driver.cuLaunchKernel(
                self._function,
                blocks_x or config.blocks_x,
                blocks_y,
                blocks_z,
                config.threads,
                1,
                1,
                config.shared_bytes,
                self._driver.CUstream(stream),
                ctypes.addressof(pointers),
                0,
            )
        )

    def _overlapping(self, blocks_x: int, blocks_y: int, blocks_z: int, stream: int):
        """The launch of a kernel that may start while the one before it ends."""
        driver, where = self._driver, self._driver.CUlaunchConfig()
        where.gridDimX, where.gridDimY, where.gridDimZ = blocks_x, blocks_y, blocks_z
        where.blockDimX, where.blockDimY, where.blockDimZ = self.config.threads, 1, 1
        where.sharedMemBytes, where.hStream = self.config.shared_bytes, driver.CUstream(stream)
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        where.attrs, where.numAttrs = [attribute], 1
        return where

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


def launch(
    config: KernelConfig,
    arguments: list[Argument],
    device: torch.device,
    blocks_y: int,
    blocks_z: int = 1,
    blocks_x: int | None = None,
) -> None:
    """Launch on the current stream of `device`; nothing to do for an empty grid."""
    if blocks_y == 0 or blocks_x == 0:
        return
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and argument.device != device:
            raise ValueError(f"all tensors must be on {device}, got one on {argument.device}")
    kernel = load_kernel(config, device)
    kernel(arguments, blocks_y, blocks_z, torch.cuda.current_stream(device).cuda_stream, blocks_x)


__all__ = [
    "UnsupportedGeometryError",
    "attention_window",
    "causal_conv1d_window",
    "gdn_window",
    "known_prefill_rows",
    "load_kernel",
    "mamba2_window",
    "prefill_rows",
]
