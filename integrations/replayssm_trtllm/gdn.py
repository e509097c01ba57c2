"""Gated DeltaNet mixers: `fused_sigmoid_gating_delta_rule_update` becomes `gdn_window`.

A batch of decode rows alone goes through `forward_decode`, which calls that operator. A mixed batch goes through
`forward_extend`, which computes prompt and decode rows together with a chunked kernel on the pool: the rows are parted
here, and each part takes TensorRT-LLM's own path for a batch of its kind.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from replayssm.plugins import torch_ops
from replayssm.plugins.contract import GdnGeometry
from replayssm.plugins.cuda_ops import gaps_left_unwritten

from .layer import Layer, replace_global
from .settings import RefusedError

GLOBAL = "fused_sigmoid_gating_delta_rule_update"

_DECODE = {
    "A_log", "a", "dt_bias", "softplus_beta", "softplus_threshold", "q", "k", "v", "b", "scale", "initial_state_source",
    "initial_state_indices", "cu_seqlens", "use_qk_l2norm_in_kernel", "output",
}  # fmt: skip
"""Arguments of the decode operator that this package understands."""

_EXTEND = {
    "mixed_qkv", "a", "b", "batch_size", "has_initial_states", "cache_indices", "query_start_loc",
    "query_start_loc_long", "num_prefill_tokens", "num_decode_tokens", "state_indices_p", "state_indices_d",
    "num_prefill",
}  # fmt: skip
_EXTEND_OPTIONAL = {
    "z", "num_decodes", "use_replay", "replay_metadata", "layer_cache", "replay_work_items", "replay_n_writes",
    "use_cached_replay_all_layer_commit", "conv_states", "ssm_states", "spec_metadata", "intermediate_conv_states",
    "intermediate_ssm_states", "is_target_verify", "output",
}  # fmt: skip
"""Keyword arguments of `forward_extend` in the versions read. A call with others is not parted."""


class GdnLayer(Layer):
    """tensorrt_llm/_torch/modules/mamba/gdn_mixer.py (first: models/modeling_qwen3_next.py): Qwen3NextGatedDeltaNet."""

    def __init__(self, mixer: Any, index: int) -> None:
        super().__init__(mixer, index)
        wanted = ("A_log", "dt_bias", "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "attn_tp_size",
                  "forward_decode", "forward_extend")  # fmt: skip
        missing = [name for name in wanted if not hasattr(mixer, name)]
        if missing:
            raise RefusedError(f"the mixer of layer {index} lacks {', '.join(missing)}: its spelling is unknown")
        self.original = replace_global(type(mixer).forward_decode, GLOBAL)
        self.parameters = inspect.signature(self.original)
        self.extend, self.decode_rows = mixer.forward_extend, mixer.forward_decode

    def replace(self) -> None:
        self.mixer.forward_extend = self.forward_extend

    def geometry(self) -> GdnGeometry:
        mixer, ranks = self.mixer, self.mixer.attn_tp_size
        return GdnGeometry(mixer.num_k_heads // ranks, mixer.num_v_heads // ranks, mixer.head_k_dim, mixer.head_v_dim)

    def decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        call = self._arguments(*args, **kwargs)
        if call is None or not self._is_one_token(call):
            return self.call_original(self.original, *args, **kwargs)
        state, rows = self.operands()
        tokens = call["q"].shape[1]
        packed = (call[name].flatten(0, 1) for name in ("q", "k", "v"))
        gates = (call[name].reshape(tokens, -1) for name in ("a", "b"))
        with gaps_left_unwritten():  # every token is a row's
            o = torch_ops.gdn_window(
                *packed, *gates, call["A_log"], call["dt_bias"], state, *rows.arguments, self.index
            )[None]
        output = call.get("output")
        return o if output is None else output.copy_(o.view(output.shape))

    def _arguments(self, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
        """Arguments of the call by name, defaults included; None for one that uses something unknown."""
        try:
            bound = self.parameters.bind(*args, **kwargs)
        except TypeError:
            return None
        bound.apply_defaults()
        call = bound.arguments
        return call if all(name in _DECODE or value in (None, False) for name, value in call.items()) else None

    def _is_one_token(self, call: dict[str, Any]) -> bool:
        q, v, scale = call["q"], call["v"], call.get("scale")
        return (
            q.dim() == v.dim() == 4
            and q.shape[0] == 1
            and call.get("use_qk_l2norm_in_kernel") is True
            and (call.get("softplus_beta"), call.get("softplus_threshold")) == (1.0, 20.0)
            and (scale is None or abs(scale * self.mixer.head_k_dim**0.5 - 1) < 1e-6)
            and self.serves(call["initial_state_source"], call["initial_state_indices"], q.shape[1])
            and str(q.dtype) == str(v.dtype) == f"torch.{self.state.settings.activation_dtype}"
        )

    def forward_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """In the place of the mixer's: parts a mixed batch, passes everything else on."""
        batch = self.batch
        if batch is None or batch.decodes == 0 or kwargs.get("is_target_verify"):
            return self.extend(*args, **kwargs)
        conv_states, ssm_states, *rest = [
            *args,
            *(kwargs.get(name) for name in ("conv_states", "ssm_states")[len(args) :]),
        ]
        if rest or not _EXTEND <= set(kwargs) <= _EXTEND | _EXTEND_OPTIONAL or not batch.one_token:
            return self.call_original(self.extend, *args, **kwargs)
        options = {name: value for name, value in kwargs.items() if name not in ("conv_states", "ssm_states")}
        output, tokens, prompts = options.pop("output", None), options["num_prefill_tokens"], options["num_prefill"]
        starts, starts_long = options["query_start_loc"], options["query_start_loc_long"]
        head, tail = slice(0, tokens), slice(tokens, None)
        packed = [name for name in ("mixed_qkv", "a", "b", "z") if name in options]
        first = options | {name: options[name][head] for name in packed}
        first |= {"batch_size": prompts, "cache_indices": options["state_indices_p"], "num_decode_tokens": 0,
                  "state_indices_d": options["state_indices_d"][:0], "query_start_loc": starts[: prompts + 1],
                  "query_start_loc_long": starts_long[: prompts + 1]}  # fmt: skip
        second = options | {name: options[name][tail] for name in packed}
        second |= {"cache_indices": options["state_indices_d"], "num_decodes": batch.decodes,
                   "query_start_loc_long": starts_long[prompts:] - starts_long[prompts]}  # fmt: skip
        second.pop("query_start_loc")
        if "num_decodes" in options:
            first["num_decodes"] = 0
        if output is not None:
            first["output"], second["output"] = output[:, head], output[:, tail]
        out_first = self.extend(conv_states, ssm_states, **first)
        out_second = self.decode_rows(conv_states, ssm_states, **second)
        return torch.cat((out_first, out_second), dim=1) if output is None else output

    def sample(self, tokens: int, pool: torch.Tensor, generator: torch.Generator) -> list[tuple[tuple, dict]]:
        geometry, act = self.geometry(), self.activation_dtype
        Hk, Hv, dk, dv = geometry.num_k_heads, geometry.num_v_heads, geometry.head_k_dim, geometry.head_v_dim

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(pool.device, act)

        slots = torch.ones(1, dtype=torch.int32, device=pool.device)
        starts = torch.arange(2, device=pool.device)
        calls = []
        for _ in range(tokens):
            options = {"q": random(1, 1, Hk, dk), "k": random(1, 1, Hk, dk), "v": random(1, 1, Hv, dv),
                       "a": random(1, Hv), "b": random(1, Hv), "A_log": self.mixer.A_log,
                       "dt_bias": self.mixer.dt_bias, "initial_state_source": pool, "initial_state_indices": slots,
                       "cu_seqlens": starts, "use_qk_l2norm_in_kernel": True, "softplus_beta": 1.0,
                       "softplus_threshold": 20.0}  # fmt: skip
            calls.append(((), options))
        return calls
