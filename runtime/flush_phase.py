"""Staggered flushes: which rows will fold their rings in the same step, and whom to hold back (design rule 10).

A row that decodes one token a step folds every L steps, so what matters is the step, modulo L, at which it does. The
tail that prefill leaves (1 to max_window tokens) spreads rows only as far as one window reaches, and not at all where
max_window is 1: every window takes a step, so all rows that end their prompts together also fold together. Therefore
a prompt's tail waits while too many running rows would fold in the same steps as it. Waiting changes no output, since
a row's windows stay the same. Rows of one token a step leave room within L steps; rows whose drafts stand may not, so
the scheduler never waits longer than that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def next_history(history: int, window: int, buffer_len: int) -> int:
    """Tokens in the ring while a window runs (design rule 4): 0 if it folds them first, else `history`."""
    return 0 if history + window > buffer_len else history


class FlushPhases:
    """Rows by the step, modulo L, in which they fold next if they take one token a step.

    histories: tokens in the ring of the rows that run in this step already. rows: those that share the session. pace:
    mean tokens of a row and step. 2 * pace / L of the rows may fold together, at least one.
    """

    def __init__(self, histories: Iterable[int], rows: int, buffer_len: int, pace: float = 1.0) -> None:
        self._buffer_len = buffer_len
        self._limit = max(1, int(2 * pace * rows / buffer_len)) if buffer_len else rows
        self._counts = Counter(self._phase(history) for history in histories) if buffer_len else Counter()

    def _phase(self, history: int) -> int:
        return max(self._buffer_len - history, 0) % self._buffer_len

    def admit(self, tail: int, history: int = 0) -> bool:
        """Whether a row may run its prompt's last window of `tail` tokens in this step; it is counted if so."""
        if not self._buffer_len:
            return True
        # The tail is this step's window, so one token a step begins with the next.
        after = next_history(history, tail, self._buffer_len) + tail
        phase = (self._phase(after) + 1) % self._buffer_len
        if self._counts[phase] >= self._limit:
            return False
        self._counts[phase] += 1
        return True
