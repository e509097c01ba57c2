"""tensorrt_llm/_torch/modules/mamba/selective_state_update.py (all versions): the per-token decode kernel.

`retrieve_parent_token` and the intermediate-state arguments came with speculation (1.3).
"""

import inspect

import torch
import torch.nn.functional as F

PAD_SLOT_ID = -1

CALLS = []
"""Shapes of x of every call: what the tests count."""


def selective_state_update(*args, **kwargs):
    """`update`, and a line in CALLS."""
    CALLS.append(tuple(args[1].shape))
    return update(*args, **kwargs)


def update(
    state,
    x,
    dt,
    A,
    B,
    C,
    D=None,
    z=None,
    dt_bias=None,
    dt_softplus=False,
    state_batch_indices=None,
    pad_slot_id=PAD_SLOT_ID,
    out=None,
    disable_state_update=False,
    intermediate_states_buffer=None,
    cache_steps=None,
    retrieve_parent_token=None,
    intermediate_state_indices=None,
):
    """state [slots, heads, dim, dstate], strided; x, dt [batch, (T,) heads, dim]; A [heads, dim, dstate];
    B, C [batch, (T,) groups, dstate]. fp32 inside; the state is rounded to its dtype once per call."""
    many = x.dim() == 4
    x, dt, B, C = (tensor if many else tensor[:, None] for tensor in (x, dt, B, C))
    slots = state_batch_indices.long()
    S = state[slots].float()
    repeat = x.shape[2] // B.shape[2]
    y = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for step in range(x.shape[1]):
        delta = dt[:, step].float() + (0 if dt_bias is None else dt_bias.float())
        delta = F.softplus(delta) if dt_softplus else delta
        b, c = (tensor[:, step].float().repeat_interleave(repeat, 1) for tensor in (B, C))
        S = S * torch.exp(A * delta[..., None]) + (delta * x[:, step].float())[..., None] * b[:, :, None]
        y[:, step] = (S * c[:, :, None]).sum(-1) + (0 if D is None else D.float() * x[:, step].float())
        if intermediate_states_buffer is not None:
            intermediate_states_buffer[intermediate_state_indices.long(), step] = S.to(state.dtype)
    if z is not None:
        y *= F.silu(z.float().view(y.shape))
    if not disable_state_update:
        state[slots] = S.to(state.dtype)
    y = y.to(x.dtype) if many else y[:, 0].to(x.dtype)
    if out is None:
        return y
    return out.copy_(y.view(out.shape))


selective_state_update.__signature__ = inspect.signature(update)
