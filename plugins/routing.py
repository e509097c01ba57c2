"""Which experts a token goes to, on a GPU: one kernel from the router's logits to ids and weights.

`plan_*` builds the launch without a GPU, for tests that emulate it.
"""

from __future__ import annotations

import torch

from replayssm.plugins.elementwise import SIXTEEN_BITS, Launch, float_bits, supports_scale
from replayssm.plugins.geometry import FORMATS, KernelConfig
from replayssm.plugins.state import dtype_name

Tensor = torch.Tensor

MOST_CHOICES = 32
MOST_EXPERTS = 1024
WARPS = 4
"""Tokens of a block."""


def supports(logits: Tensor, top_k: int, bias: Tensor | None) -> bool:
    """Whether the kernel takes these logits [T, n], dense in the last dimension."""
    return (
        logits.dim() == 2
        and logits.dtype in (torch.float32, *SIXTEEN_BITS)
        and logits.stride(1) == 1
        and logits.stride(0) < 2**31
        and logits.shape[1] <= MOST_EXPERTS
        and top_k <= MOST_CHOICES
        and (bias is None or supports_scale(bias))
    )


def plan_route_tokens(
    logits: Tensor,
    bias: Tensor | None,
    scaling: float,
    normalize: bool,
    parts: int,
    ids: Tensor,
    weights: Tensor,
) -> Launch:
    """ids int64, weights fp32 [T, top_k] of logits [T, parts * experts], whose `parts` are summed.

    With a `bias` fp32 [experts] as `functional_ops.route_sigmoid`, without as `route_softmax`.
    """
    tokens, columns = logits.shape
    wide = logits.dtype == torch.float32
    defines = {
        "ACTIVATION_FORMAT": FORMATS["bfloat16" if wide else dtype_name(logits.dtype)],
        "BULK_COPY": 0,
        "EXPERTS": columns // parts,
        "LOGITS_FP32": int(wide),
        "NORMALIZE": int(normalize),
        "LOGIT_PARTS": parts,
        "SIGMOID": int(bias is not None),
        "THREADS": 32 * WARPS,
        "TOP_K": ids.shape[1],
    }
    config = KernelConfig("route_tokens", tuple(sorted(defines.items())), 1, 32 * WARPS, 0)
    arguments = [logits, bias, tokens, logits.stride(0), float_bits(scaling), ids, weights]
    return Launch(config, arguments, -(-tokens // WARPS))


def route(
    logits: Tensor, bias: Tensor | None, top_k: int, scaling: float = 1.0, normalize: bool = True, parts: int = 1
) -> tuple[Tensor, Tensor]:
    """(ids int64, weights fp32), both [T, top_k]; see `plan_route_tokens`. Equal scores go to the lower expert."""
    shape = (logits.shape[0], top_k)
    ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    plan_route_tokens(logits, bias, scaling, normalize, parts, ids, weights).run(logits.device)
    return ids, weights
