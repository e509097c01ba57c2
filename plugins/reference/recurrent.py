"""What one call of a recurrent operator does with its rows, whatever the recurrence.

Three modes share it. *Replay* computes a window from the checkpoint and the ring at once. *Serial-exact* keeps the same
slots but rebuilds the state token by token, rounding it to the checkpoint format after each. *Baseline* does that too,
but stores the state after every token instead of the tokens, so that both give bit-equal outputs. The output of a token
reads the state before it is rounded, as plain kernels do, which hold it in registers.

A state that is stored at position c is rounded with the random bits of (layer, c), whichever row, window or mode stores
it. A flush starts from the checkpoint, never from the readout; outputs read the readout, if there is one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from replayssm.plugins.reference.formats import (
    RandomKey,
    decode_checkpoint,
    encode_checkpoint,
    load_checkpoint,
    load_readout,
    store_state,
)
from replayssm.plugins.reference.layout import Spans, aligned, decays, tokens_per_boundary
from replayssm.plugins.reference.rows import Row
from replayssm.plugins.state import LayerState

PREFILL_CHUNK = 64
"""Tokens that a prefill row computes at once; the state between chunks stays in the accumulation dtype."""


@dataclass
class RecurrentCall(ABC):
    """One call: `state`, `layer`, `out` [T, heads, rows of S], which starts as zeros in the accumulation dtype and is
    filled in, and the packed inputs that a subclass adds.

    State tensors S are [heads, rows, columns] in the accumulation dtype, None for zero.
    """

    state: LayerState
    layer: int
    out: torch.Tensor

    @property
    def acc(self) -> torch.dtype:
        """The accumulation dtype."""
        return self.out.dtype

    @property
    def boundary(self) -> int:
        """Tokens at whose multiples the span of a row may start."""
        heads, rows, columns = self.state.geometry.state_shape
        groups = heads // self.state.geometry.heads_per_group
        return tokens_per_boundary(heads * rows, groups * columns)

    @abstractmethod
    def ring_inputs(self) -> dict[str, torch.Tensor]:
        """Packed values [T, ...] of the ring parts that are known before the outputs."""

    def ring_results(self) -> dict[str, torch.Tensor]:
        """Packed values [T, ...] of the ring parts that computing the outputs gives."""
        return {}

    @abstractmethod
    def history(self, row: Row) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(log decay [n, heads], values [n, heads, rows], keys [n, groups, columns]) of a row's history."""

    @abstractmethod
    def replay(self, rows: Sequence[Row], windows: Spans) -> None:
        """Outputs of rows whose windows are in the ring, all of a window's tokens at once."""

    @abstractmethod
    def chunk(self, S: torch.Tensor | None, tokens: slice) -> torch.Tensor:
        """S after the packed tokens of a slice, whose outputs it fills in, all at once."""

    @abstractmethod
    def step(self, S: torch.Tensor, token: int) -> torch.Tensor:
        """S after one packed token, whose output it fills in."""

    def run(self, rows: Sequence[Row]) -> None:
        """Fill `out` for all rows and update the state."""
        settings = self.state.settings
        short = [row for row in rows if not row.prefill]
        if settings.is_baseline:
            for row in short:
                self.serial(row)
        elif short:
            short = self.flush(short)
            windows = Spans(short, with_history=False, boundary=self.boundary)
            self.append(windows, self.ring_inputs())
            if settings.serial_exact:
                for row in short:
                    self.serial(row)
            else:
                self.replay(short, windows)
            self.append(windows, self.ring_results())
        for row in rows:
            if row.prefill:
                self.prefill(row)

    def flush(self, rows: Sequence[Row]) -> list[Row]:
        """Rules 4 and 6: fold histories that are due; the rows as they are afterwards. Stores c where it changes."""
        after, updates = [], {}
        for row in rows:
            if row.flush:
                self.store(row.slot, self.state_at_window(row), row.seq_len)
                row = row._replace(checkpoint_position=row.seq_len, flush=False)
            if row.checkpoint_position == row.seq_len:
                updates[row.slot] = row.seq_len
            after.append(row)
        self.store_positions(updates)
        return after

    def prefill(self, row: Row) -> None:
        """Rule 5: fold history and window into the checkpoint, append nothing."""
        S = self.rounded_at_window(row)
        end = row.start + row.length
        for start in range(row.start, end, PREFILL_CHUNK):
            S = self.chunk(S, slice(start, min(start + PREFILL_CHUNK, end)))
        self.store(row.slot, S, row.end)
        self.store_positions({row.slot: row.end})

    def append(self, windows: Spans, parts: dict[str, torch.Tensor]) -> None:
        """Store packed values at the windows' positions of the ring."""
        for part, values in parts.items():
            windows.write_ring(self.state[part], values)

    def serial(self, row: Row) -> None:
        """Window of the baseline or of serial-exact mode, token by token."""
        settings = self.state.settings
        S = self.rounded_at_window(row)
        if S is None:
            S = self.out.new_zeros(self.state.geometry.state_shape)
        for index in range(row.length):
            parts = self.encoded(self.step(S, row.start + index), row.seq_len + index + 1)
            S = decode_checkpoint(parts, self.acc)
            if settings.is_baseline:
                for name, values in parts.items():
                    if row.length == 1:
                        self.state[name][row.slot] = values
                    else:
                        self.state[name.replace("checkpoint", "snapshots")][row.slot, index] = values

    def rounded_at_window(self, row: Row) -> torch.Tensor | None:
        """S at seq_len as the next token sees it: serial-exact mode has rounded it, replay keeps the history exact."""
        S = self.state_at_window(row)
        return self.rounded(S, row.seq_len) if self.state.settings.serial_exact and row.history else S

    def state_at_window(self, row: Row) -> torch.Tensor | None:
        """S at seq_len before it is rounded: what a flush stores."""
        S = self.read_checkpoint(row)
        if not row.history:
            return S
        log_decay, values, keys = self.history(row)
        if not self.state.settings.serial_exact:
            return add_outer(S, decays(log_decay, 1)[:, 0], values, keys)
        if S is None:
            S = self.out.new_zeros(self.state.geometry.state_shape)
        for index in range(row.history):
            if index:
                S = self.rounded(S, row.checkpoint_position + index)
            S = step_outer(S, torch.exp(log_decay[index]), values[index], keys[index])
        return S

    def read_checkpoint(self, row: Row) -> torch.Tensor | None:
        """S_c in the accumulation dtype, None for zero: a slot at c == 0 may hold anything."""
        return aligned(load_checkpoint(self.state, row.slot, self.acc)) if row.checkpoint_position else None

    def read_readout(self, row: Row) -> torch.Tensor | None:
        """S_c as outputs read it, like `read_checkpoint`."""
        return aligned(load_readout(self.state, row.slot, self.acc)) if row.checkpoint_position else None

    def store(self, slot: int, S: torch.Tensor, position: int) -> None:
        """Checkpoint and readout of S, which stands at `position`."""
        store_state(self.state, slot, S, RandomKey(self.layer, position))

    def encoded(self, S: torch.Tensor, position: int) -> dict[str, torch.Tensor]:
        """Checkpoint parts of S at `position`."""
        return encode_checkpoint(S, self.state.settings, RandomKey(self.layer, position))

    def rounded(self, S: torch.Tensor, position: int) -> torch.Tensor:
        """S as the checkpoint format holds it, in the accumulation dtype."""
        return decode_checkpoint(self.encoded(S, position), self.acc)

    def store_positions(self, updates: dict[int, int]) -> None:
        """Write c of some slots into every tile; the baseline keeps none."""
        tensor = self.state.tensors.get("checkpoint_position")
        if tensor is not None and updates:
            positions = torch.tensor(list(updates.values()), dtype=tensor.dtype)
            tensor[torch.tensor(list(updates))] = positions[:, None, None]


def apply_state(S: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """S times vectors that groups of heads share: S [heads, rows, n], vectors [groups, n, w] -> [heads, rows, w]."""
    heads, rows, columns = S.shape
    groups, _, count = vectors.shape
    return torch.bmm(S.view(groups, -1, columns), vectors).view(heads, rows, count)


def add_outer(S: torch.Tensor | None, decay: torch.Tensor, values: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """decay[:, 0] S + sum_j decay[:, 1 + j] values_j keys_j^T: S after m tokens.

    S [heads, rows, n] or None for zero; decay [heads, 1 + m] towards the last token; values [m, heads, rows];
    keys [m, groups, n].
    """
    tokens, heads, rows = values.shape
    groups, columns = keys.shape[1:]
    weighted = values.permute(1, 2, 0) * decay[:, None, 1:]
    update = torch.bmm(weighted.reshape(groups, -1, tokens), keys.transpose(0, 1)).view(heads, rows, columns)
    return update if S is None else S * decay[:, :1, None] + update


def step_outer(S: torch.Tensor, decay: torch.Tensor, values: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """decay S + values keys^T: S after one token. decay [heads], values [heads, rows], keys [groups, n]."""
    groups, columns = keys.shape
    outer = values.view(groups, -1, 1) * keys.view(groups, 1, columns)
    return S * decay[:, None, None] + outer.view(S.shape)
