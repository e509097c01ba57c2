"""Kernels of other projects, where they can be imported, each at the best launch configuration tried.

These rewrite the whole state for every token; `replay_peers` holds those that keep a ring as ours do. All get tensors
of the same sizes as ours, are timed like ours and checked against our output in the same run. Names begin with the
project and its version.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib.metadata import PackageNotFoundError, version

import torch


def version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown version"


MAMBA_CONFIGS = ((4, 4), (8, 1), (16, 1), (16, 2))
"""(rows per program, warps) of selective_state_update; the first is what it picks itself at dstate 128."""


def mamba2_peers(layer) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """name -> call(slots [batch]) returning y: selective_state_update of every importable project, by configuration."""
    return {**_mamba_ssm(layer), **_vllm(layer), **_flashinfer(layer)}


def per_head(layer) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A [H, P, N], D and dt_bias [H, P] as views that repeat one number per head."""
    A_log, D, dt_bias = layer.constants
    H, P, N = layer.geometry.state_shape
    A = (-torch.exp(A_log))[:, None, None].expand(H, P, N)
    return A, D[:, None].expand(H, P), dt_bias[:, None].expand(H, P)


def _flashinfer(layer) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    if layer.window > 1:
        return {}
    try:
        from flashinfer.mamba import selective_state_update as update
    except ImportError:
        return {}
    (x, _, B, C), (A, D, dt_bias) = windows_of(layer), per_head(layer)
    dt, out = wide_steps(layer), torch.empty_like(x)

    def call(slots: torch.Tensor, algorithm: str) -> torch.Tensor:
        update(
            layer.state["checkpoint"], x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=True,
            state_batch_indices=slots, out=out, algorithm=algorithm,
        )  # fmt: skip
        return out

    name = f"flashinfer {version_of('flashinfer-python')} {{}}"
    return {name.format(one): partial(call, algorithm=one) for one in ("simple", "vertical", "horizontal")}


def wide_steps(layer) -> torch.Tensor:
    """dt of every token as float32, repeated over a head's rows: flashinfer wants one dtype of dt, its bias and D."""
    return layer.inputs[1].float()[..., None].expand(layer.inputs[0].shape)


def windows_of(layer) -> tuple[torch.Tensor, ...]:
    """x, dt, B, C as [batch, ...] of single tokens or [batch, window, ...], dt repeated over a head's rows."""
    x, dt, B, C = layer.inputs
    inputs = x, dt[..., None].expand(*dt.shape, x.shape[2]), B, C
    if layer.window == 1:
        return inputs
    return tuple(tensor.unflatten(0, (layer.batch, layer.window)) for tensor in inputs)


def _mamba_ssm(layer) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    if layer.window > 1:
        return {}
    try:
        import triton
        from mamba_ssm.ops.triton.selective_state_update import _selective_scan_update_kernel as kernel
    except ImportError:
        return {}
    g, state = layer.geometry, layer.state["checkpoint"]
    x, dt, B, C = layer.inputs
    H, P, N = g.state_shape
    (A, D, dt_bias), dt = per_head(layer), dt[:, :, None].expand(-1, H, P)
    out = torch.empty_like(x)

    def call(slots: torch.Tensor, rows: int, warps: int) -> torch.Tensor:
        kernel[(triton.cdiv(P, rows), layer.batch, H)](
            state, x, dt, dt_bias, A, B, C, D, None, out, slots, layer.batch, H, P, N, H // g.ngroups,
            *state.stride(), *x.stride(), *dt.stride(), *dt_bias.stride(), *A.stride(), *B.stride(), *C.stride(),
            *D.stride(), 0, 0, 0, *out.stride(), True, True, rows, num_warps=warps,
        )  # fmt: skip
        return out

    name = f"mamba-ssm {version_of('mamba-ssm')}"
    return {
        f"{name} rows {rows} warps {warps}": lambda slots, rows=rows, warps=warps: call(slots, rows, warps)
        for rows, warps in MAMBA_CONFIGS
        if P % rows == 0 or rows <= P
    }


def _vllm(layer) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """vLLM's selective_state_update with the configuration it chooses for this GPU itself, and with `MAMBA_CONFIGS`."""
    if layer.window > 1:
        return {}
    try:
        from vllm.model_executor.layers.mamba.ops import mamba_ssm
    except ImportError:
        return {}
    (x, dt, B, C), (A, D, dt_bias) = windows_of(layer), per_head(layer)
    out = torch.empty_like(x)

    def call(slots: torch.Tensor, config: tuple[int, int] | None) -> torch.Tensor:
        with mamba_ssm.override_ssm_config(config) if config else nullcontext():
            mamba_ssm.selective_state_update(
                layer.state["checkpoint"], x, dt, A, B, C, D, dt_bias, dt_softplus=True, state_batch_indices=slots,
                null_block_id=-1, out=out,
            )  # fmt: skip
        return out

    name = f"vllm {version_of('vllm')}"
    return {f"{name} own choice": partial(call, config=None)} | {
        f"{name} rows {rows} warps {warps}": partial(call, config=(rows, warps)) for rows, warps in MAMBA_CONFIGS
    }


GDN_CONFIGS = ((8, 1, False), (8, 1, True), (16, 1, True), (16, 2, True), (32, 2, True), (32, 4, True))
"""(rows per program, warps, whether the state is rewritten in place) of the fused recurrent kernel; the first is what
its own launcher does."""


def gdn_peers(layer) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """name -> call(slots) returning o; flash-linear-attention's fused recurrent kernel, one entry per configuration.

    None for windows of several tokens: it keeps the state after the last only, which is no verification.
    """
    if layer.window > 1:
        return {}
    try:
        from fla.ops.gated_delta_rule.fused_recurrent import fused_recurrent_gated_delta_rule_fwd_kernel as kernel
    except ImportError:
        return {}
    q, k, v, a, b = (tensor[:, None] for tensor in layer.inputs)
    A_log, dt_bias = layer.constants
    g, batch, out = layer.geometry, layer.batch, torch.empty_like(layer.inputs[2])
    scale, checkpoint = g.head_k_dim**-0.5, layer.state["checkpoint"]
    written = torch.empty_like(checkpoint[:batch])

    def call(slots: torch.Tensor, rows: int, warps: int, in_place: bool) -> torch.Tensor:
        first = int(layer.first_slot[slots.data_ptr()])
        state = checkpoint[first : first + batch]
        kernel[(batch * g.num_v_heads * (g.head_v_dim // rows),)](
            q, k, v, a, None, None, b, A_log, dt_bias, out, state, state if in_place else written, None, scale, 1,
            H=g.num_k_heads, HV=g.num_v_heads, K=g.head_k_dim, V=g.head_v_dim, BK=g.head_k_dim, BV=rows,
            IS_BETA_HEADWISE=True, USE_QK_L2NORM_IN_KERNEL=True, APPLY_BETA_SIGMOID=True, ALLOW_NEG_EIGVAL=False,
            STATE_V_FIRST=True, num_warps=warps, num_stages=3,
        )  # fmt: skip
        return out

    name = f"fla {version_of('flash-linear-attention')} fused_recurrent"
    return {
        f"{name} rows {rows} warps {warps}{' in place' if in_place else ''}": (
            lambda slots, config=(rows, warps, in_place): call(slots, *config)
        )
        for rows, warps, in_place in GDN_CONFIGS
        if g.head_v_dim % rows == 0
    }


def mamba2_prefill_peers(prompt) -> dict[str, list[Callable[[], torch.Tensor]]]:
    """name -> one call per input set, returning y; mamba-ssm's chunk scan, one entry per chunk length."""
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined as scan
    except ImportError:
        return {}
    A_log, D, dt_bias = prompt.constants
    A, shape = -torch.exp(A_log), (prompt.batch, prompt.tokens)

    def call(inputs: list[torch.Tensor], chunk: int) -> torch.Tensor:
        x, dt, B, C = (tensor.unflatten(0, shape) for tensor in inputs)
        with torch.no_grad():
            y, _ = scan(x, dt, A, B, C, chunk, D=D, dt_bias=dt_bias, dt_softplus=True, return_final_states=True)
        return y

    return {
        f"mamba-ssm {version_of('mamba-ssm')} chunk {chunk}": [
            lambda inputs=inputs, chunk=chunk: call(inputs, chunk) for inputs in prompt.inputs
        ]
        for chunk in (128, 256)
    }


def gdn_prefill_peers(prompt) -> dict[str, list[Callable[[], torch.Tensor]]]:
    """name -> one call per input set, returning o; flash-linear-attention's chunked gated delta rule."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as chunked
    except ImportError:
        return {}
    A_log, dt_bias = prompt.constants
    shape = (prompt.batch, prompt.tokens)

    def call(inputs: list[torch.Tensor]) -> torch.Tensor:
        q, k, v, a, b = (tensor.unflatten(0, shape) for tensor in inputs)
        with torch.no_grad():
            o, _ = chunked(
                q, k, v, g=a, beta=b, output_final_state=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                A_log=A_log, dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True, state_v_first=True,
            )  # fmt: skip
        return o

    name = f"fla {version_of('flash-linear-attention')} chunk"
    return {name: [lambda inputs=inputs: call(inputs) for inputs in prompt.inputs]}
