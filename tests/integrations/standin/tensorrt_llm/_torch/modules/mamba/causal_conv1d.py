"""tensorrt_llm/_torch/modules/mamba/causal_conv1d.py (all versions): convolution of prompts and of single tokens."""

from itertools import pairwise

import torch
import torch.nn.functional as F


def causal_conv1d_fn(
    x, weight, bias=None, query_start_loc=None, cache_indices=None, has_initial_state=None, conv_states=None,
    activation="silu",
):  # fmt: skip
    """x [dim, tokens] of packed prompts; conv_states [slots, dim, width - 1] are read where a prompt continues."""
    out = torch.empty_like(x)
    starts = query_start_loc.tolist()
    for row, (begin, end) in enumerate(pairwise(starts)):
        slot = int(cache_indices[row])
        before = conv_states[slot] if bool(has_initial_state[row]) else torch.zeros_like(conv_states[slot])
        window = torch.cat((before, x[:, begin:end]), dim=1)
        out[:, begin:end] = _taps(window, weight, bias)
        conv_states[slot] = window[:, window.shape[1] - conv_states.shape[2] :]
    return out


def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, conv_state_indices=None):
    """x [batch, dim], one token a row; its window is shifted by it."""
    slots = conv_state_indices.long()
    window = torch.cat((conv_state[slots], x[..., None]), dim=2)
    conv_state[slots] = window[..., 1:]
    total = (window.float() * weight.float()).sum(-1) + (0 if bias is None else bias.float())
    return F.silu(total).to(x.dtype)


def _taps(window, weight, bias):
    bias = None if bias is None else bias.float()
    out = F.conv1d(window.float()[None], weight.float()[:, None], bias, groups=window.shape[0])[0]
    return F.silu(out).to(window.dtype)
