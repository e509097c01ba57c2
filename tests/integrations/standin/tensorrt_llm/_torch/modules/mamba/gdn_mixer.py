"""tensorrt_llm/_torch/modules/mamba/gdn_mixer.py (1.3, 1.4; before in models/modeling_qwen3_next.py).

The path that verifies drafts is left out.
"""

import torch
import torch.nn.functional as F
from torch import nn

import tensorrt_llm
from tensorrt_llm._torch.modules.fla.chunk import chunk_gated_delta_rule
from tensorrt_llm._torch.modules.fla.fused_sigmoid_gating_recurrent import (
    fused_sigmoid_gating_delta_rule_update,
    gates,
)

from .causal_conv1d import causal_conv1d_fn, causal_conv1d_update


class Qwen3NextGatedDeltaNet(nn.Module):
    def __init__(self, model_config, aux_stream, layer_idx=None):
        super().__init__()
        config, device = model_config, tensorrt_llm.DEVICE
        self.layer_idx, self.attn_tp_size = layer_idx, 1
        self.num_k_heads, self.num_v_heads = config.groups, config.heads
        self.head_k_dim, self.head_v_dim = config.columns, config.rows
        self.key_dim, self.value_dim = config.groups * config.columns, config.heads * config.rows
        self.conv1d = nn.Linear(config.conv_kernel, config.conv_dim, bias=False, dtype=config.dtype, device=device)
        width = config.conv_dim + self.value_dim
        self.in_proj_qkvz = nn.Linear(config.hidden_size, width, bias=False, dtype=config.dtype, device=device)
        self.in_proj_ba = nn.Linear(config.hidden_size, 2 * config.heads, bias=False, dtype=config.dtype, device=device)
        self.out_proj = nn.Linear(self.value_dim, config.hidden_size, bias=False, dtype=config.dtype, device=device)
        self.dt_bias = nn.Parameter((torch.rand(config.heads) - 2).to(device), requires_grad=False)
        self.A_log = nn.Parameter(torch.log(torch.rand(config.heads) + 0.05).to(device), requires_grad=False)
        self.activation = "silu"

    def forward(self, hidden_states, attn_metadata, mamba_metadata, spec_metadata=None, all_reduce_params=None):
        qkvz, ba = self.in_proj_qkvz(hidden_states), self.in_proj_ba(hidden_states)
        mixed_qkv, z = torch.split(qkvz, [self.conv1d.weight.shape[0], self.value_dim], dim=-1)
        b, a = torch.split(ba, self.num_v_heads, dim=-1)
        core = self.forward_core(mixed_qkv, a, b, attn_metadata, mamba_metadata, spec_metadata=spec_metadata)
        return self.out_proj(core.reshape(-1, self.value_dim) * F.silu(z))

    def forward_core(self, mixed_qkv, a, b, attn_metadata, mamba_metadata, spec_metadata=None, output=None):
        prefills = attn_metadata.num_contexts
        decodes = attn_metadata.seq_lens.shape[0] - prefills
        has_initial = mamba_metadata.has_initial_states
        state_indices = mamba_metadata.state_indices[: prefills + decodes]
        cache = attn_metadata.kv_cache_manager.mamba_layer_cache(self.layer_idx)
        conv_states, ssm_states = cache.conv, cache.temporal
        state_indices_p, state_indices_d = torch.split(state_indices, [prefills, decodes])
        if prefills:  # the mask makes the host wait, which a capture forbids
            fresh = state_indices_p[~has_initial[:prefills]].long()
            ssm_states[fresh], conv_states[fresh] = 0, 0
        options = {
            "mixed_qkv": mixed_qkv,
            "a": a,
            "b": b,
            "has_initial_states": has_initial,
            "cache_indices": state_indices,
            "query_start_loc": mamba_metadata.query_start_loc,
            "query_start_loc_long": mamba_metadata.query_start_loc_long,
            "batch_size": prefills + decodes,
            "num_prefill_tokens": attn_metadata.num_ctx_tokens,
            "num_decode_tokens": attn_metadata.num_tokens - attn_metadata.num_ctx_tokens,
            "state_indices_p": state_indices_p,
            "state_indices_d": state_indices_d,
            "num_prefill": prefills,
            "num_decodes": decodes,
            **self.unknown_arguments,
        }
        if self.passes_z:
            options["z"] = mixed_qkv.new_ones(mixed_qkv.shape[0], self.num_v_heads, self.head_v_dim)
        path = self.forward_extend if prefills else self.forward_decode
        return path(conv_states, ssm_states, spec_metadata=spec_metadata, output=output, **options)

    passes_z = False
    """1.3 before July 2026 passed z [tokens, Hv, V] along, which neither path uses."""

    unknown_arguments = {}  # noqa: RUF012
    """Set by a test: what a later version may add."""

    def forward_decode(
        self, conv_states, ssm_states, query_start_loc_long, spec_metadata=None, intermediate_conv_states=None,
        intermediate_ssm_states=None, is_target_verify=False, output=None, **kwargs,
    ):  # fmt: skip
        slots = kwargs["cache_indices"]
        assert kwargs["mixed_qkv"].shape[0] == slots.shape[0] == query_start_loc_long.shape[0] - 1
        mixed_qkv = causal_conv1d_update(
            kwargs["mixed_qkv"], conv_states, self.conv1d.weight, None, self.activation, conv_state_indices=slots
        )
        query, key, value = self._split(mixed_qkv)
        return fused_sigmoid_gating_delta_rule_update(
            A_log=self.A_log, dt_bias=self.dt_bias, q=query, k=key, v=value, a=kwargs["a"], b=kwargs["b"],
            initial_state_source=ssm_states, initial_state_indices=slots, cu_seqlens=query_start_loc_long,
            use_qk_l2norm_in_kernel=True, softplus_beta=1.0, softplus_threshold=20.0, output=output,
        )  # fmt: skip

    def forward_extend(
        self, conv_states, ssm_states, spec_metadata=None, intermediate_conv_states=None, intermediate_ssm_states=None,
        is_target_verify=False, output=None, **kwargs,
    ):  # fmt: skip
        prefills, tokens = kwargs["num_prefill"], kwargs["num_prefill_tokens"]
        head = causal_conv1d_fn(
            kwargs["mixed_qkv"][:tokens].t(), self.conv1d.weight, None, activation=self.activation,
            conv_states=conv_states, has_initial_state=kwargs["has_initial_states"][:prefills],
            cache_indices=kwargs["state_indices_p"], query_start_loc=kwargs["query_start_loc"][: prefills + 1],
        ).t()  # fmt: skip
        if kwargs["num_decode_tokens"]:
            tail = causal_conv1d_update(
                kwargs["mixed_qkv"][tokens:], conv_states, self.conv1d.weight, None, self.activation,
                conv_state_indices=kwargs["state_indices_d"],
            )  # fmt: skip
            head = torch.cat((head, tail))
        query, key, value = self._split(head)
        g, beta = gates(self.A_log, kwargs["a"], self.dt_bias, kwargs["b"])
        return chunk_gated_delta_rule(
            query, key, value, g, beta, ssm_states, kwargs["cache_indices"], True, kwargs["query_start_loc_long"],
            output=output,
        )  # fmt: skip

    def _split(self, mixed_qkv):
        query, key, value = torch.split(mixed_qkv, [self.key_dim, self.key_dim, self.value_dim], dim=-1)
        heads = (query.unflatten(-1, (-1, self.head_k_dim)), key.unflatten(-1, (-1, self.head_k_dim)))
        return *(part[None] for part in heads), value.unflatten(-1, (-1, self.head_v_dim))[None]
