"""Verification of drafts as other projects run it, where they can be imported: every token's fp32 state is stored.

vLLM keeps a slot of its state pool for every token of a window and starts from that of the last accepted one. SGLang
and flashinfer read a row's state and store those after each token in a buffer, from which the accepted one is copied
back later; that copy is not timed. Launch configurations are those that each project picks itself, first, and others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module

import torch
from harness import Timing
from peers import per_head, version_of, wide_steps, windows_of

from replayssm.plugins.contract import Mamba2Geometry

ACCEPTED = 3
"""Tokens of the window before that were accepted, in every row."""


@dataclass(frozen=True)
class Verification:
    """One kernel at one launch configuration.

    is_own_choice: the project launches it so itself.
    launches: one for each set of slots, which returns the outputs, [tokens, ...].
    states: [batch, window, *state_shape], what the first launch stores.
    prepare: puts the layer's checkpoints of the first set where the first launch reads them.
    expected: what the kernel makes of the recurrent outputs [tokens, heads, rows]; they are its outputs if left out.
    """

    peer: str
    configuration: str
    is_own_choice: bool
    launches: list[Callable[[], torch.Tensor]]
    states: torch.Tensor
    prepare: Callable[[], None] = lambda: None
    expected: Callable[[torch.Tensor], torch.Tensor] = field(default=lambda outputs: outputs)

    @property
    def name(self) -> str:
        return f"{self.peer} {self.configuration}".rstrip()


def native_peers(layer) -> Iterator[Verification]:
    """Every kernel that can be imported, at each of its configurations; the layer keeps snapshots of its window."""
    mamba = isinstance(layer.geometry, Mamba2Geometry)
    gdn = (_vllm_fused, _vllm_gdn, _sglang_gdn, _flashinfer_gdn)
    for project in (_vllm_mamba2, _sglang_mamba2, _flashinfer_mamba2) if mamba else gdn:
        try:
            yield from project(layer)
        except ImportError:
            continue
        except Exception as problem:  # a project that is broken here must not hide the others
            print(f"{project.__name__}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)


def kept(found: list[tuple[Timing, Verification]]) -> list[tuple[Timing, Verification]]:
    """Of every peer its fastest configuration, and that which its project launches."""
    fastest: dict[str, tuple[Timing, Verification]] = {}
    for timing, one in found:
        if one.peer not in fastest or timing.median_us < fastest[one.peer][0].median_us:
            fastest[one.peer] = (timing, one)
    return [(timing, one) for timing, one in found if one.is_own_choice or one is fastest[one.peer][1]]


class _Pool:
    """A pool of states, one for each token of a window, as vLLM's kernels take it; its state 0 belongs to nobody."""

    def __init__(self, layer) -> None:
        snapshots, batch, window = layer.state["snapshots"], layer.batch, layer.window
        self.states = snapshots.flatten(0, 1)
        rows = torch.arange(batch * window, device=snapshots.device, dtype=torch.int32).view(batch, window)
        # Each set begins one state later than the layer's own, so the last one has no room.
        self.indices = [rows + 1 + i * batch * window for i in range(layer.sets - 1)]
        self.last = min(ACCEPTED, window) - 1  # token whose state the next window starts from
        self.accepted = torch.full((batch,), self.last + 1, device=snapshots.device, dtype=torch.int32)
        self.starts = torch.arange(batch + 1, device=snapshots.device, dtype=torch.int32) * window
        self.stored = self.states[1 : 1 + batch * window].unflatten(0, (batch, window))
        self._checkpoints = layer.state["checkpoint"][:batch]

    def prepare(self) -> None:
        self.stored[:, self.last].copy_(self._checkpoints)


def _buffers(layer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(slots of the rows, buffer [batch, window, *state_shape] of their states) for each set."""
    batch, snapshots = layer.batch, layer.state["snapshots"]
    return [(slots, snapshots[i * batch : (i + 1) * batch]) for i, slots in enumerate(layer.slots)]


MAMBA2_CONFIGS = ((4, 4), (8, 1), (8, 2), (16, 1), (16, 2), (32, 2))
"""(rows per program, warps); the first is what SGLang's launcher picks at dstate 128."""


def _dividing(configs: tuple[tuple[int, int], ...], layer) -> list[tuple[int, int]]:
    """Those whose rows divide a head's."""
    return [config for config in configs if layer.geometry.state_shape[1] % config[0] == 0]


def _vllm_mamba2(layer) -> Iterator[Verification]:
    from vllm.model_executor.layers.mamba.ops import mamba_ssm

    (x, dt, B, C), (A, D, dt_bias) = (t.flatten(0, 1) for t in windows_of(layer)), per_head(layer)
    pool, out = _Pool(layer), torch.empty_like(x)

    def launch(indices: torch.Tensor, config: tuple[int, int] | None) -> torch.Tensor:
        with mamba_ssm.override_ssm_config(config) if config else nullcontext():
            mamba_ssm.selective_state_update(
                pool.states, x, dt, A, B, C, D, dt_bias, dt_softplus=True, state_batch_indices=indices,
                dst_state_batch_indices=indices, out=out, num_accepted_tokens=pool.accepted, cu_seqlens=pool.starts,
            )  # fmt: skip
        return out

    for config in (None, *_dividing(MAMBA2_CONFIGS, layer)):
        label = "rows {} warps {}".format(*config) if config else "own choice"
        launches = [partial(launch, indices, config) for indices in pool.indices]
        peer = f"vllm {version_of('vllm')} selective_state_update"
        yield Verification(peer, label, config is None, launches, pool.stored, pool.prepare)


def _sglang_mamba2(layer) -> Iterator[Verification]:
    import triton
    from sglang.srt.layers.attention.mamba.ops.mamba_ssm import _selective_scan_update_kernel as kernel

    (x, dt, B, C), (A, D, dt_bias) = windows_of(layer), per_head(layer)
    (H, P, N), batch, window = layer.geometry.state_shape, layer.batch, layer.window
    state, out = layer.state["checkpoint"], torch.empty_like(x)
    rows_of_buffer = torch.arange(batch, device=x.device, dtype=torch.int32)

    def launch(slots: torch.Tensor, buffer: torch.Tensor, rows: int, warps: int) -> torch.Tensor:
        kernel[(triton.cdiv(P, rows), batch, H)](
            state, x, dt, dt_bias, A, B, C, D, None, out, slots, -1, buffer, window, None, rows_of_buffer,
            batch, window, H, P, N, H // layer.geometry.ngroups, *state.stride(), *x.stride(), *dt.stride(),
            *dt_bias.stride(), *A.stride(), *B.stride(), *C.stride(), *D.stride(), 0, 0, 0, 0, *out.stride(), 0, 0,
            True, True, rows, DISABLE_STATE_UPDATE=True, num_warps=warps,
        )  # fmt: skip
        return out.flatten(0, 1)

    for rows, warps in _dividing(MAMBA2_CONFIGS, layer):
        launches = [partial(launch, *one, rows, warps) for one in _buffers(layer)]
        peer, own = f"sglang {version_of('sglang')} selective_state_update", (rows, warps) == MAMBA2_CONFIGS[0]
        yield Verification(peer, f"rows {rows} warps {warps}", own, launches, layer.state["snapshots"][:batch])


def _flashinfer_mamba2(layer) -> Iterator[Verification]:
    """States go to a buffer or, as vLLM's, to slots of the pool."""
    from flashinfer.mamba import selective_state_update as update

    (x, _, B, C), (A, D, dt_bias) = windows_of(layer), per_head(layer)
    dt, out, pool = wide_steps(layer).unflatten(0, x.shape[:2]), torch.empty_like(x), _Pool(layer)
    rows_of_buffer = torch.arange(layer.batch, device=x.device, dtype=torch.int32)
    peer = f"flashinfer {version_of('flashinfer-python')} selective_state_update"

    def to_buffer(slots: torch.Tensor, buffer: torch.Tensor, algorithm: str) -> torch.Tensor:
        update(
            layer.state["checkpoint"], x, dt, A, B, C, D, dt_bias=dt_bias, dt_softplus=True, state_batch_indices=slots,
            out=out, disable_state_update=True, intermediate_states_buffer=buffer,
            intermediate_state_indices=rows_of_buffer, cache_steps=layer.window, algorithm=algorithm,
        )  # fmt: skip
        return out.flatten(0, 1)

    def to_pool(indices: torch.Tensor) -> torch.Tensor:
        tokens = (t.flatten(0, 1) for t in (x, dt))
        update(
            pool.states, *tokens, A, B.flatten(0, 1), C.flatten(0, 1), D, dt_bias=dt_bias, dt_softplus=True,
            state_batch_indices=indices, dst_state_batch_indices=indices, out=out.flatten(0, 1),
            num_accepted_tokens=pool.accepted, cu_seqlens=pool.starts, cache_steps=layer.window,
        )  # fmt: skip
        return out.flatten(0, 1)

    for algorithm in ("auto", "simple", "vertical", "horizontal"):
        launches = [partial(to_buffer, *one, algorithm) for one in _buffers(layer)]
        stored = layer.state["snapshots"][: layer.batch]
        yield Verification(peer, f"buffer {algorithm}", algorithm == "auto", launches, stored)
    launches = [partial(to_pool, indices) for indices in pool.indices]
    yield Verification(peer, "pool", True, launches, pool.stored, pool.prepare)


GDN_CONFIGS = ((8, 1), (16, 1), (16, 2), (32, 1), (32, 4))
"""(rows per program, warps); the last is what vLLM's launcher picks, that before it SGLang's."""


def _vllm_fused(layer) -> Iterator[Verification]:
    """What vLLM runs for such layers by default: its CUDA kernel, which also norms and gates the outputs."""
    import_module("vllm._custom_ops")  # registers the operator

    q, k, v, a, b = layer.inputs
    A_log, dt_bias = layer.constants
    pool, out, eps = _Pool(layer), torch.empty_like(v), 1e-6
    mixed, gate, weight = torch.cat([t.flatten(1) for t in (q, k, v)], 1), torch.randn_like(v), torch.ones_like(v[0, 0])

    def launch(indices: torch.Tensor) -> torch.Tensor:
        torch.ops._C.fused_gdn_decode_post_conv_mtp(
            mixed, a, b, A_log, dt_bias, indices, pool.starts, pool.accepted, pool.states, gate, weight, out,
            q.shape[-1] ** -0.5, eps, "silu",
        )  # fmt: skip
        return out

    def expected(outputs: torch.Tensor) -> torch.Tensor:
        normed = torch.nn.functional.rms_norm(outputs.float(), outputs.shape[-1:], eps=eps)
        return normed * torch.nn.functional.silu(gate.float())

    launches = [partial(launch, indices) for indices in pool.indices]
    peer = f"vllm {version_of('vllm')} fused_gdn_decode_post_conv_mtp"
    yield Verification(peer, "", True, launches, pool.stored, pool.prepare, expected)


def _gdn_shape(layer) -> dict[str, int]:
    """The sizes that both projects' fused kernels are compiled for."""
    g = layer.geometry
    return {"B": 1, "H": g.num_k_heads, "HV": g.num_v_heads, "K": g.head_k_dim, "V": g.head_v_dim, "BK": g.head_k_dim}


def _vllm_gdn(layer) -> Iterator[Verification]:
    """vLLM's Triton kernel, which it runs where it has no fused one."""
    from vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating import (
        fused_sigmoid_gating_delta_rule_update_kernel as kernel,
    )

    q, k, v, a, b = layer.inputs
    A_log, dt_bias = layer.constants
    pool, out, shape = _Pool(layer), torch.empty_like(v), _gdn_shape(layer)

    def launch(indices: torch.Tensor, rows: int, warps: int) -> torch.Tensor:
        size = pool.states.stride(0)
        kernel[(1, shape["V"] // rows, layer.batch * shape["HV"])](
            A_log=A_log, a=a, b=b, dt_bias=dt_bias, beta=1.0, threshold=20.0, q=q, k=k, v=v, o=out, h0=pool.states,
            ht=pool.states, cu_seqlens=pool.starts, ssm_state_indices=indices, num_accepted_tokens=pool.accepted,
            scale=shape["K"] ** -0.5, N=layer.batch, T=q.shape[0], **shape, BV=rows, stride_init_state_token=size,
            stride_final_state_token=size, stride_indices_seq=indices.stride(0), stride_indices_tok=1,
            INPLACE_FINAL_STATE=True, USE_QK_L2NORM_IN_KERNEL=True, IS_KDA=False, num_warps=warps, num_stages=3,
        )  # fmt: skip
        return out

    for rows, warps in _dividing(GDN_CONFIGS, layer):
        launches = [partial(launch, indices, rows, warps) for indices in pool.indices]
        peer = f"vllm {version_of('vllm')} fused_sigmoid_gating_delta_rule_update"
        own = (rows, warps) == GDN_CONFIGS[-1]
        yield Verification(peer, f"rows {rows} warps {warps}", own, launches, pool.stored, pool.prepare)


def _sglang_gdn(layer) -> Iterator[Verification]:
    """SGLang's kernel of `target_verify`."""
    from sglang.srt.layers.attention.fla.fused_sigmoid_gating_recurrent import (
        fused_sigmoid_gating_delta_rule_update_kernel as kernel,
    )

    q, k, v, a, b = layer.inputs
    A_log, dt_bias = layer.constants
    batch, window, out, shape = layer.batch, layer.window, torch.empty_like(v), _gdn_shape(layer)
    if batch * window * layer.state["checkpoint"][0].numel() >= 2**31:
        return  # it counts elements of the buffer in 32 bits
    state = layer.state["checkpoint"]
    rows_of_buffer = torch.arange(batch, device=q.device, dtype=torch.int32)
    starts = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * window

    def launch(slots: torch.Tensor, buffer: torch.Tensor, rows: int, warps: int) -> torch.Tensor:
        kernel[(1, shape["V"] // rows, batch * shape["HV"])](
            A_log=A_log, a=a, dt_bias=dt_bias, softplus_beta=1.0, softplus_threshold=20.0, q=q, k=k, v=v, b=b, o=out,
            h0_source=state, h0_indices=slots, cu_seqlens=starts, intermediate_states_buffer=buffer,
            intermediate_state_indices=rows_of_buffer, cache_steps=window, retrieve_parent_token_ptr=None,
            stride_retrieve_parent_token_seq=0, stride_retrieve_parent_token_token=0, scale=shape["K"] ** -0.5,
            T=q.shape[0], stride_q=q.stride(0), stride_k=k.stride(0), stride_v=v.stride(0), stride_b=b.stride(0),
            NP2_T=1 << (q.shape[0] - 1).bit_length(), **shape, BV=rows, USE_INITIAL_STATE=True,
            USE_QK_L2NORM_IN_KERNEL=True, IS_VARLEN=True, IS_KDA=False, DISABLE_STATE_UPDATE=True,
            CACHE_INTERMEDIATE_STATES=True, HAS_EAGLE_TREE_CUSTOM_ATTN_MASK=False, num_warps=warps, num_stages=3,
        )  # fmt: skip
        return out

    for rows, warps in _dividing(GDN_CONFIGS, layer):
        launches = [partial(launch, *one, rows, warps) for one in _buffers(layer)]
        peer = f"sglang {version_of('sglang')} fused_sigmoid_gating_delta_rule_update"
        own = (rows, warps) == GDN_CONFIGS[-2]
        yield Verification(peer, f"rows {rows} warps {warps}", own, launches, layer.state["snapshots"][:batch])


def _flashinfer_gdn(layer) -> Iterator[Verification]:
    """States go to a buffer or, as vLLM's, to slots of the pool."""
    from flashinfer.gdn_decode import gated_delta_rule_mtp as verify

    q, k, v, a, b = (t.unflatten(0, (layer.batch, layer.window)) for t in layer.inputs)
    A_log, dt_bias = layer.constants
    out, pool = torch.empty_like(v), _Pool(layer)
    peer = f"flashinfer {version_of('flashinfer-python')} gated_delta_rule_mtp"

    def launch(state: torch.Tensor, slots: torch.Tensor, **stores) -> torch.Tensor:
        verify(q, k, v, state, slots, A_log, a, dt_bias, b, scale=q.shape[-1] ** -0.5, output=out, **stores)
        return out.flatten(0, 1)

    launches = [
        partial(launch, layer.state["checkpoint"], slots, intermediate_states_buffer=buffer, disable_state_update=True)
        for slots, buffer in _buffers(layer)
    ]
    yield Verification(peer, "buffer", True, launches, layer.state["snapshots"][: layer.batch])
    launches = [
        partial(
            launch,
            pool.states,
            indices[:, pool.last].contiguous(),
            ssm_state_indices=indices,
            disable_state_update=False,
        )
        for indices in pool.indices
    ]
    yield Verification(peer, "pool", True, launches, pool.stored, pool.prepare)
