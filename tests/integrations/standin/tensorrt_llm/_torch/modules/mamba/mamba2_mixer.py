"""tensorrt_llm/_torch/modules/mamba/mamba2_mixer.py: Mamba2Mixer with the spellings of its decode operator.

"global" (1.0, 1.1): the module's `selective_state_update`, z passed to it, no `out`, slots from the manager.
"selective_state_update_func_no_mtp", "selective_state_update_func" (1.2, 1.3): an attribute, which verifies drafts too.
"_stp_ssu_func" (1.3, 1.4): an attribute for single tokens; `_mtp_ssu_func` verifies.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn

import tensorrt_llm

from .causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from .selective_state_update import selective_state_update, update


class Mamba2Mixer(nn.Module):
    def __init__(self, *, layer_idx, config):
        super().__init__()
        self.spelling, self.layer_idx = config.spelling, layer_idx
        self.tp_nheads, self.tp_ngroups = config.heads, config.groups
        self.head_dim, self.d_state, self.d_conv = config.rows, config.columns, config.conv_kernel
        self.tp_d_inner, self.tp_conv_dim = config.heads * config.rows, config.conv_dim
        self.delta_softplus = True
        width = 2 * self.tp_d_inner + 2 * config.groups * config.columns + config.heads
        # Upstream's Linear holds weights for tensor parallelism and quantization; conv1d is one of them too.
        device = tensorrt_llm.DEVICE
        self.in_proj = nn.Linear(config.hidden_size, width, bias=False, dtype=config.dtype, device=device)
        self.conv1d = nn.Linear(config.conv_kernel, config.conv_dim, bias=True, dtype=config.dtype, device=device)
        self.out_proj = nn.Linear(self.tp_d_inner, config.hidden_size, bias=False, dtype=config.dtype, device=device)
        for name, value in (
            ("A", -torch.rand(config.heads) - 0.05),
            ("D", torch.rand(config.heads)),
            ("dt_bias", torch.rand(config.heads) - 2),
        ):
            setattr(self, name, nn.Parameter(value.to(device), requires_grad=False))
        if self.spelling == "_stp_ssu_func":
            self._stp_ssu_func = self._mtp_ssu_func = selective_state_update
        elif self.spelling != "global":
            setattr(self, self.spelling, selective_state_update)

    def forward(self, hidden_states, attn_metadata, mamba_metadata, spec_metadata=None, lora_params=None, **kwargs):
        prefills, prefill_tokens = attn_metadata.num_contexts, attn_metadata.num_ctx_tokens
        decodes = attn_metadata.seq_lens.shape[0] - prefills
        manager = attn_metadata.kv_cache_manager
        indices = manager.get_state_indices() if self.spelling == "global" else mamba_metadata.state_indices
        slots_p, slots_d = torch.split(indices[: prefills + decodes], [prefills, decodes])
        conv_states, ssm_states = manager.get_conv_states(self.layer_idx), manager.get_ssm_states(self.layer_idx)
        zxbcdt = self.in_proj(hidden_states)
        z, xbc, dt = torch.split(zxbcdt, [self.tp_d_inner, self.tp_conv_dim, self.tp_nheads], dim=-1)
        out = torch.empty_like(zxbcdt[:, : self.tp_d_inner]).contiguous()
        head, tail = slice(0, prefill_tokens), slice(prefill_tokens, None)
        if prefills:
            out[head] = self._prefill(xbc[head], dt[head], conv_states, ssm_states, slots_p, mamba_metadata, prefills)
        if decodes:
            verify = manager.is_speculative() and spec_metadata is not None
            step = self._verify if verify else self._decode
            step(xbc[tail], dt[tail], z[tail], conv_states, ssm_states, slots_d, out[tail], manager)
        if self.spelling == "global":
            out[head] = out[head] * F.silu(z[head])
        else:
            out = out * F.silu(z)
        return self.out_proj(out)

    def _prefill(self, xbc, dt, conv_states, ssm_states, slots, metadata, prefills):
        """`causal_conv1d_fn`, `mamba_chunk_scan_combined`, then the final states go to the pool."""
        has_initial = metadata.has_initial_states[:prefills]
        starts = metadata.cu_seqlens[: prefills + 1]
        xbc = causal_conv1d_fn(
            xbc.t(), self.conv1d.weight, self.conv1d.bias, query_start_loc=starts, cache_indices=slots,
            has_initial_state=has_initial, conv_states=conv_states,
        ).t()  # fmt: skip
        x, B, C = self._split(xbc)
        y, bounds = torch.empty_like(x), starts.tolist()
        for row, (begin, end) in enumerate(pairwise(bounds)):
            S = ssm_states[slots[row]].float() if bool(has_initial[row]) else ssm_states.new_zeros(
                ssm_states.shape[1:], dtype=torch.float32)  # fmt: skip
            scratch, one = S[None].clone(), torch.zeros(1, dtype=torch.int32, device=x.device)
            for t in range(begin, end):
                row_of = slice(t, t + 1)
                y[row_of] = update(
                    scratch, x[row_of], self._per_dim(dt[row_of].float()), self._expanded()[0], B[row_of], C[row_of],
                    self._expanded()[1], dt_bias=self._expanded()[2], dt_softplus=True, state_batch_indices=one,
                )  # fmt: skip
            ssm_states[slots[row]] = scratch[0].to(ssm_states.dtype)
        return y.flatten(1)

    def _decode(self, xbc, dt, z, conv_states, ssm_states, slots, out, manager):
        xbc = causal_conv1d_update(
            xbc, conv_states, self.conv1d.weight, self.conv1d.bias, "silu", conv_state_indices=slots
        )
        x, B, C = self._split(xbc)
        A, D, dt_bias = self._expanded()
        options = {"dt_bias": dt_bias, "dt_softplus": self.delta_softplus, "state_batch_indices": slots}
        if self.spelling == "global":
            z = z.reshape(x.shape)
            y = selective_state_update(ssm_states, x, self._per_dim(dt), A, B, C, D, z=z, **options)
            out.copy_(y.flatten(1))
            return
        operator = getattr(self, self.spelling)
        x, B, C, dt = x.contiguous(), B.contiguous(), C.contiguous(), self._per_dim(dt.float())
        operator(ssm_states, x, dt, A, B, C, D, z=None, out=out.view(x.shape), **options)

    def _verify(self, xbc, dt, z, conv_states, ssm_states, slots, out, manager):
        """Path 4 of 1.3: the state stays, intermediate states go to a buffer. The convolution is left out here."""
        count = slots.shape[0]
        x, B, C = (part.reshape(count, -1, *part.shape[1:]) for part in self._split(xbc))
        A, D, dt_bias = self._expanded()
        operator = getattr(self, "_mtp_ssu_func", None) or getattr(self, self.spelling)
        operator(
            ssm_states, x, self._per_dim(dt.float()).reshape(x.shape), A, B, C, D, z=None, dt_bias=dt_bias,
            dt_softplus=True, state_batch_indices=slots, out=out.view(x.shape), disable_state_update=True,
            intermediate_states_buffer=manager.intermediate_ssm, cache_steps=x.shape[1],
            intermediate_state_indices=torch.arange(count, device=x.device),
        )  # fmt: skip

    def _split(self, xbc):
        sizes = [self.tp_d_inner, self.tp_ngroups * self.d_state, self.tp_ngroups * self.d_state]
        x, B, C = torch.split(xbc, sizes, dim=-1)
        return x.unflatten(-1, (-1, self.head_dim)), *(part.unflatten(-1, (-1, self.d_state)) for part in (B, C))

    def _per_dim(self, per_head):
        return per_head[..., None].expand(*per_head.shape, self.head_dim)

    def _expanded(self):
        A = self.A[:, None, None].expand(-1, self.head_dim, self.d_state)
        return A, self._per_dim(self.D), self._per_dim(self.dt_bias)
