"""The operators as `torch.library` operators `replayssm::*`, which torch.compile and torch.export accept.

An operator's state becomes three arguments: its tensors in `state_parts` order, the error flag, and the geometry and
settings as a string. The public functions below have the signatures of `plugins.reference` and do that flattening.
Implementations are chosen by the device of the tensors: the references serve "cpu"; another device joins by
`register_implementation`, and operators with tensors on a device without one raise NotImplementedError.

On a GPU a caller who knows the lengths of its rows should say whether any is a prefill row:

    with launch.prefill_rows(max(lengths) > settings.max_window):
        y = torch_ops.mamba2_window(...)

Lengths lie on the device, and an operator does not wait for it. Left alone it takes prefill rows for certain only where
there are more tokens than windows of all rows could have; a short prompt beside idle rows stays below that and is
walked token by token: the same result within rounding, up to hundreds of times slower.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from replayssm.plugins import reference
from replayssm.plugins.state import LayerState, commit, copy_slot, set_checkpoint_position

__all__ = [
    "attention_window",
    "causal_conv1d_window",
    "commit",
    "copy_slot",
    "gdn_window",
    "mamba2_window",
    "register_implementation",
    "set_checkpoint_position",
]

_STATE = "Tensor(a!)[] state, Tensor(b!) error_flag, str spec"
_ROWS = "Tensor seq_lens, Tensor window_starts, Tensor window_lens, Tensor state_batch_indices"


class _Operator:
    """One registered operator: `inputs` of its schema before the state, `tail` after the rows."""

    def __init__(self, name: str, inputs: str, tail: str, output_like: int) -> None:
        self.num_inputs, self.output_like = inputs.count("Tensor"), output_like
        self.op = torch.library.custom_op(
            f"replayssm::{name}",
            self.flattened(getattr(reference, name)),
            mutates_args=("state", "error_flag"),
            device_types="cpu",
            schema=f"({inputs}, {_STATE}, {_ROWS}{tail}) -> Tensor",
        )
        self.op.register_fake(self.fake)

    def flattened(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        """`function` of a LayerState, taking the flat arguments of the schema."""
        count = self.num_inputs

        def flat(*args):
            tensors, error_flag, spec = args[count : count + 3]
            return function(*args[:count], LayerState.from_flat(spec, tensors, error_flag), *args[count + 3 :])

        return flat

    def fake(self, *args):
        """Contiguous, with shape, dtype and device of the input that the output resembles."""
        like = args[self.output_like]
        return like.new_empty(like.shape)


_OPERATORS = {
    "mamba2_window": _Operator(
        "mamba2_window",
        "Tensor x, Tensor dt, Tensor B, Tensor C, Tensor A_log, Tensor D, Tensor dt_bias",
        ", SymInt layer",
        output_like=0,
    ),
    "gdn_window": _Operator(
        "gdn_window",
        "Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias",
        ", SymInt layer",
        output_like=2,
    ),
    "causal_conv1d_window": _Operator(
        "causal_conv1d_window", "Tensor x, Tensor weight, Tensor? bias", "", output_like=0
    ),
    "attention_window": _Operator("attention_window", "Tensor q, Tensor k, Tensor v", ", float scale", output_like=0),
}


def register_implementation(name: str, device_type: str, function: Callable[..., torch.Tensor]) -> None:
    """Let `function`, with the signature of the reference of that name, serve tensors on `device_type` ("cuda").

    It must update the state's tensors in place and return a contiguous tensor that aliases none of its arguments.
    """
    if name not in _OPERATORS:
        raise ValueError(f"unknown operator {name!r}; there are {', '.join(_OPERATORS)}")
    operator = _OPERATORS[name]
    operator.op.register_kernel(device_type, operator.flattened(function))


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
) -> torch.Tensor:
    """`reference.mamba2_window` as an operator: y [T, H, P]."""
    rows = (seq_lens, window_starts, window_lens, state_batch_indices)
    flat = (state.flat(), state.error_flag, state.spec)
    return torch.ops.replayssm.mamba2_window(x, dt, B, C, A_log, D, dt_bias, *flat, *rows, layer)


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
) -> torch.Tensor:
    """`reference.gdn_window` as an operator: o [T, Hv, dv]."""
    rows = (seq_lens, window_starts, window_lens, state_batch_indices)
    flat = (state.flat(), state.error_flag, state.spec)
    return torch.ops.replayssm.gdn_window(q, k, v, a, b, A_log, dt_bias, *flat, *rows, layer)


def causal_conv1d_window(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: LayerState,
    seq_lens: torch.Tensor,
    window_starts: torch.Tensor,
    window_lens: torch.Tensor,
    state_batch_indices: torch.Tensor,
) -> torch.Tensor:
    """`reference.causal_conv1d_window` as an operator: [T, C]."""
    rows = (seq_lens, window_starts, window_lens, state_batch_indices)
    flat = (state.flat(), state.error_flag, state.spec)
    return torch.ops.replayssm.causal_conv1d_window(x, weight, bias, *flat, *rows)


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
) -> torch.Tensor:
    """`reference.attention_window` as an operator: [T, Hq, hd]."""
    rows = (seq_lens, window_starts, window_lens, state_batch_indices)
    flat = (state.flat(), state.error_flag, state.spec)
    return torch.ops.replayssm.attention_window(q, k, v, *flat, *rows, scale)
