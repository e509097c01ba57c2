"""What a captured step does before its network and behind the choice of tokens, in one kernel each.

Rows have `window` tokens each, window_lens[b] of which are real; slots [rows] are int32, PAD_SLOT_ID without one.
last_tokens int64 [slots + 1]: what each slot's last step chose, the last entry that of rows without a slot; None where
tokens are not chosen. PyTorch does the same on the CPU, in some twenty operators.
"""

from __future__ import annotations

import torch

from replayssm.plugins.contract import PAD_SLOT_ID
from replayssm.plugins.elementwise import Launch
from replayssm.plugins.geometry import KernelConfig

Tensor = torch.Tensor

LAST_CHOSEN = -1
"""In place of a row's first token: the one that the slot's last step chose."""
THREADS = 128


def plan_begin(
    token_ids: Tensor, seq_lens: Tensor, slots: Tensor, last_tokens: Tensor | None, tokens: Tensor, positions: Tensor
) -> Launch:
    """The launch of `begin` that writes tokens and positions."""
    count, num_slots = token_ids.numel(), 0 if last_tokens is None else last_tokens.numel() - 1
    defines = {"LAST_CHOSEN": LAST_CHOSEN, "THREADS": THREADS, "WINDOW": count // seq_lens.numel()}
    config = KernelConfig("step_begin", tuple(sorted({**defines, "BULK_COPY": 0}.items())), 1, THREADS, 0)
    arguments = [token_ids, seq_lens, slots, last_tokens, count, num_slots, tokens, positions]
    return Launch(config, arguments, -(-count // THREADS))


def begin(token_ids: Tensor, seq_lens: Tensor, slots: Tensor, last_tokens: Tensor | None) -> tuple[Tensor, Tensor]:
    """(tokens int64, positions int32), both [rows * window], of token_ids [rows * window] behind seq_lens [rows]."""
    if token_ids.is_cuda:
        tokens, positions = torch.empty_like(token_ids), torch.empty_like(token_ids, dtype=torch.int32)
        plan_begin(token_ids, seq_lens, slots, last_tokens, tokens, positions).run(token_ids.device)
        return tokens, positions
    rows = seq_lens.numel()
    tokens = token_ids.view(rows, -1).clone()
    positions = seq_lens.unsqueeze(1) + torch.arange(tokens.shape[1], dtype=torch.int32)
    if last_tokens is not None:
        chosen = last_tokens.index_select(0, _places(slots, last_tokens))
        tokens[:, 0] = torch.where(tokens[:, 0] == LAST_CHOSEN, chosen, tokens[:, 0])
    return tokens.flatten(), positions.flatten()


def plan_end(
    largest: Tensor,
    chosen: Tensor,
    error_flag: Tensor,
    window_lens: Tensor,
    slots: Tensor,
    last_tokens: Tensor | None,
    token_ids: Tensor,
    seq_lens: Tensor,
    answer: Tensor,
) -> Launch:
    """The launch of `end` that writes the answer."""
    count, num_slots = chosen.numel(), 0 if last_tokens is None else last_tokens.numel() - 1
    defines = {"BULK_COPY": 0, "THREADS": THREADS, "WINDOW": count // slots.numel()}
    config = KernelConfig("step_end", tuple(sorted(defines.items())), 1, THREADS, 0)
    arguments = [largest, chosen, error_flag, window_lens, slots, count, num_slots]
    return Launch(config, [*arguments, answer, last_tokens, token_ids, seq_lens], -(-count // THREADS))


def end(
    largest: Tensor,
    chosen: Tensor,
    error_flag: Tensor,
    window_lens: Tensor,
    slots: Tensor,
    last_tokens: Tensor | None,
    token_ids: Tensor,
    seq_lens: Tensor,
) -> Tensor:
    """int64 [2 * rows * window + 1]: tokens, whether the largest logit of each is finite, and the error flag.

    last_tokens is updated; so are, where rows have one token, token_ids and seq_lens to what the next step reads if the
    host does not load another.
    """
    if chosen.is_cuda and largest.dtype == torch.float32:
        answer = torch.empty(2 * chosen.numel() + 1, dtype=torch.int64, device=chosen.device)
        given = (window_lens, slots, last_tokens, token_ids, seq_lens)
        plan_end(largest, chosen, error_flag, *given, answer).run(chosen.device)
        return answer
    rows = slots.numel()
    if last_tokens is not None:
        ends = torch.arange(rows, device=chosen.device), window_lens.clamp(min=1).to(torch.int64) - 1
        last_tokens.index_copy_(0, _places(slots, last_tokens), chosen.view(rows, -1)[ends])
    if chosen.numel() == rows:
        token_ids.copy_(chosen)
        seq_lens.add_(window_lens)
    return torch.cat([chosen, largest.isfinite().to(torch.int64), error_flag.to(torch.int64)])


def _places(slots: Tensor, last_tokens: Tensor) -> Tensor:
    return torch.where(slots == PAD_SLOT_ID, len(last_tokens) - 1, slots.to(torch.int64))
