"""Where each slot stands: the positions that the replay operators need and that TensorRT-LLM's kernels never did.

The operators address state by absolute position. What they are given here is the length of the sequence *with* the new
token (`kv_lens_cuda`): one more than the number of committed tokens, which no formula cares about, and never 0. The
slot of a sequence holds a history exactly if the sequence's next token is the one that `expected` says. In every other
case (a prompt was computed, a state arrived from elsewhere, the slot changed hands) the pool itself is current, and the
checkpoint moves to the row's position. So a slot that TensorRT-LLM rewrites is never combined with a stale ring.

All of this is device work without synchronisation, once per forward call and for all layers at once. A captured graph
repeats it for the lengths and slots of each replay.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm.plugins.contract import PAD_SLOT_ID

from .batch import Batch

POOL_IS_CURRENT = -1
"""`expected` of a slot whose ring means nothing: no length equals it."""


@dataclass(frozen=True)
class Rows:
    """Arguments of the operators for the decode rows of one call: int32 [decodes] on the device, and int64 slots."""

    seq_lens: torch.Tensor
    window_starts: torch.Tensor
    window_lens: torch.Tensor
    state_batch_indices: torch.Tensor
    slots: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """In the operators' order."""
        return self.seq_lens, self.window_starts, self.window_lens, self.state_batch_indices


class Steps:
    """Positions of all slots, shared by the layers of a model.

    expected: int32 [slots], the length that the slot's sequence has at its next token, or POOL_IS_CURRENT.
    positions: int32 [slots, entries], the checkpoint positions of all layers; each layer's state holds a view of it.
    """

    def __init__(self, slots: int, entries: int, device: torch.device) -> None:
        self.expected = torch.full((slots,), POOL_IS_CURRENT, dtype=torch.int32, device=device)
        self.positions = torch.zeros((slots, entries), dtype=torch.int32, device=device)
        self._owner = torch.zeros(slots, dtype=torch.int64, device=device)
        self._arange = torch.arange(slots, dtype=torch.int64, device=device)
        self._arange32 = self._arange.int()
        self._ones = torch.ones(slots, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        tensors = (self.expected, self.positions, self._owner, self._arange, self._arange32, self._ones)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def history_ends(self, batch: Batch) -> torch.Tensor:
        """int32 [contexts]: up to where the ring of a prompt row's slot continues what the row continues, else -1.

        Where lengths are unknown, a slot is taken to continue its own sequence: without block reuse nothing else can
        have put a state there.
        """
        expected = self.expected[batch.slots[: batch.contexts].long()]
        if batch.kv_lens is None or batch.seq_lens is None:
            return expected
        cached = batch.kv_lens[: batch.contexts] - batch.seq_lens[: batch.contexts]
        return torch.where(expected == cached + 1, expected, POOL_IS_CURRENT)

    def forget(self, slots: torch.Tensor) -> None:
        """The pool is, or is about to be, current for these slots (int [n]): their rings mean nothing any more."""
        self.expected[slots.long()] = POOL_IS_CURRENT

    def advance(self, batch: Batch) -> Rows:
        """Take one token of every decode row; moves checkpoints to the rows' positions where the pool is current.

        Padding rows of a captured graph share a slot: one of them is computed, the others become padding rows of the
        operators, so that no two blocks write the same state.
        """
        count = batch.decodes
        row, own = self._rows(count)
        slots = batch.slots[batch.contexts :]
        index = slots.long()
        self._owner[index] = row
        winner = self._owner[index]
        expected = self.expected[index]
        if batch.kv_lens is None:
            known = expected > 0
            length = torch.where(known, expected, 1)
        else:
            length = batch.kv_lens[batch.contexts :][winner]
            known = expected == length
        self.positions[index] = torch.where(known[:, None], self.positions[index], length[:, None])
        self.expected[index] = length + 1
        alone = torch.where(winner == row, slots.int(), PAD_SLOT_ID)
        return Rows(length, own, self._ones[:count], alone, index)

    def _rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        if count > self._arange.shape[0]:
            # More rows than slots: several padding rows in a small pool.
            arange = torch.arange(count, dtype=torch.int64, device=self._arange.device)
            self._arange, self._arange32 = arange, arange.int()
            self._ones = torch.ones(count, dtype=torch.int32, device=arange.device)
        return self._arange[:count], self._arange32[:count]
