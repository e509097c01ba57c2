"""Captured prompt steps: one CUDA graph per number of packed tokens and rows, for chunks whose logits nobody wants.

Launching the operators of such a step one by one keeps the host busy for some 35 ms (H200, Nano-4B) however few tokens
they have. Tokens of all rows lie behind each other and the rest of the graph's tokens belong to no row; rows that a
step does not use are padding (design rule 8). Longer chunks than the largest graph run uncaptured: the device is then
as long at work as the host.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, chain

import numpy
import torch

from replayssm.plugins.launch import prefill_rows
from replayssm.runtime.cuda_graphs import Buffers, Capture, keep_outputs
from replayssm.runtime.executor import NetworkExecutor

Tensor = torch.Tensor

TOKEN_BUCKETS = (*range(128, 1025, 128), 1536, 2048)
"""Tokens that graphs are captured for. Fewer would cost what 128 do: the time to read the weights."""
TOKENS_PER_ROW = 64
"""Tokens of a row, at least on average, in the graphs for few rows. Those for many cost a block per row that is
padding, in every kernel of the state."""


class PromptGraph:
    """One prompt step of `rows` rows with `tokens` tokens in all, captured.

    logits [0, vocab] and hidden_states [tokens, hidden]: of the last launch; the next launch of any graph overwrites
    them.
    """

    def __init__(
        self, executor: NetworkExecutor, rows: int, tokens: int, capture: Capture, device: torch.device
    ) -> None:
        self.rows, self.tokens, self._executor = rows, tokens, executor
        integers = ("seq_lens", "window_starts", "window_lens", "state_batch_indices")
        layout = [("token_ids", torch.int64, tokens), ("positions", torch.int32, tokens)]
        self._buffers = Buffers([*layout, *((name, torch.int32, rows) for name in integers)], device)
        self._buffers.clear()
        self._buffers.upload()
        self._inputs = {**self._buffers.device, "logits_indices": torch.zeros(0, dtype=torch.int64, device=device)}
        self._replay = capture(self._body)

    def load(self, windows: Sequence[Sequence[int]], seq_lens: Sequence[int], slots: Sequence[int]) -> None:
        """Set the inputs of the next launch: at most `rows` windows of at most `tokens` tokens in all."""
        count, host = len(windows), self._buffers.clear()
        lengths = numpy.fromiter(map(len, windows), numpy.int32, count)
        starts = numpy.fromiter(accumulate(lengths[:-1].tolist(), initial=0), numpy.int32, count)
        total = int(lengths.sum())
        host["token_ids"][:total] = numpy.fromiter(chain.from_iterable(windows), numpy.int64, total)
        first = numpy.subtract(seq_lens, starts, dtype=numpy.int32)
        host["positions"][:total] = numpy.repeat(first, lengths) + numpy.arange(total, dtype=numpy.int32)
        host["seq_lens"][:count] = seq_lens
        host["window_starts"][:count] = starts
        host["window_lens"][:count] = lengths
        host["state_batch_indices"][:count] = slots
        self._buffers.upload()

    def launch(self) -> None:
        """Run the step."""
        self._replay()

    def _body(self) -> None:
        with prefill_rows(True):
            outputs = self._executor(self._inputs)
        keep_outputs(self, logits=outputs["logits"], hidden_states=outputs["hidden_states"])


class PromptGraphs:
    """The prompt graphs of one network, captured when they are first needed.

    slots: most rows of a step; most_tokens: more than a step can have need no graph. max_window: rows are longer.
    """

    def __init__(
        self,
        executor: NetworkExecutor,
        device: torch.device,
        slots: int,
        max_window: int,
        most_tokens: int,
        capture: Capture,
    ) -> None:
        self._executor, self._device, self._capture = executor, device, capture
        self._slots, self._shortest = slots, max_window + 1
        useful = bisect_left(TOKEN_BUCKETS, max(most_tokens, self._shortest))
        self._tokens = TOKEN_BUCKETS[: useful + 1]
        self._graphs: dict[tuple[int, int], PromptGraph] = {}

    def __len__(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    def prepare(self) -> None:
        """Capture all of them, so that no request waits for it."""
        for tokens in reversed(self._tokens):
            for rows in sorted({self._few(tokens), self._many(tokens)}, reverse=True):
                self._graph(rows, tokens)

    def parts(self, lengths: Sequence[int]) -> list[list[int]] | None:
        """Rows of these lengths by the graph that they share, in order; None if one is too long for every graph."""
        if max(lengths) > self._tokens[-1]:
            return None
        parts, filled = [[]], 0
        for index, length in enumerate(lengths):
            if filled + length > self._tokens[-1]:
                parts.append([])
                filled = 0
            parts[-1].append(index)
            filled += length
        return parts

    def get(self, rows: int, tokens: int) -> PromptGraph:
        """The smallest graph for `rows` rows that have `tokens` tokens in all."""
        bucket = self._tokens[bisect_left(self._tokens, tokens)]
        few = self._few(bucket)
        return self._graph(few if rows <= few else self._many(bucket), bucket)

    def _few(self, tokens: int) -> int:
        return min(self._slots, tokens // TOKENS_PER_ROW)

    def _many(self, tokens: int) -> int:
        """As many as there can be."""
        return min(self._slots, max(1, tokens // self._shortest))

    def _graph(self, rows: int, tokens: int) -> PromptGraph:
        key = (rows, tokens)
        if key not in self._graphs:
            self._graphs[key] = PromptGraph(self._executor, rows, tokens, self._capture, self._device)
        return self._graphs[key]
