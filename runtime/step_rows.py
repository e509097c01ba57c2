"""The rows of a step, and what a step gives for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy
import torch

from replayssm.runtime.cuda_graphs import Chosen
from replayssm.runtime.sampling import SamplingParams


class Row(NamedTuple):
    """The next tokens of one slot, and whose logits are wanted: of the "last" token, of "all", or "none".

    params: how a captured step chooses the tokens behind them; None takes the likeliest.
    """

    slot: int
    tokens: Sequence[int]
    logits: str = "last"
    params: SamplingParams | None = None


@dataclass(frozen=True)
class DraftRow:
    """Tokens for the draft head, which has no tentative windows of its own.

    position: of the first token's *predecessor*: the pair (hidden state of p, token p + 1) is kept at p.
    hidden_states: [len(tokens), hidden], of the predecessors.
    """

    slot: int
    tokens: Sequence[int]
    position: int
    hidden_states: torch.Tensor


class StepResult:
    """Outputs of a step. logits [R, vocab] (fp32) of the wanted tokens, hidden_states [T, hidden] of all.

    logits_spans, token_spans: of each row, among the R and the T. chosen: what the step itself chose behind each of the
    R tokens, None where the caller has to.

    Outputs may be given as functions that make them when they are read. Those of a captured step are: the next step
    overwrites what they are made of.
    """

    def __init__(
        self,
        logits: torch.Tensor | Callable[[], torch.Tensor],
        hidden_states: torch.Tensor | Callable[[], torch.Tensor],
        logits_spans: tuple[slice, ...],
        token_spans: tuple[slice, ...],
        chosen: Chosen | None = None,
    ) -> None:
        self._logits, self._hidden_states = logits, hidden_states
        self.logits_spans, self.token_spans, self.chosen = logits_spans, token_spans, chosen

    @cached_property
    def logits(self) -> torch.Tensor:
        return self._logits() if callable(self._logits) else self._logits

    @cached_property
    def hidden_states(self) -> torch.Tensor:
        return self._hidden_states() if callable(self._hidden_states) else self._hidden_states

    def row_logits(self, row: int) -> torch.Tensor:
        """Logits of one row, [1, vocab], [len(tokens), vocab] or [0, vocab]."""
        return self.logits[self.logits_spans[row]]

    def row_hidden_states(self, row: int) -> torch.Tensor:
        """Hidden states [len(tokens), hidden] of one row."""
        return self.hidden_states[self.token_spans[row]]


Finish = Callable[[], StepResult]
"""Waits for a step that was started, and returns its outputs. Raises InferenceError if an operator refused a row."""


def picked(part: Sequence[int], *columns: Sequence[Any]) -> list[Sequence[Any]]:
    """These entries of each column."""
    whole = len(part) == len(columns[0])
    return list(columns) if whole else [[column[index] for index in part] for column in columns]


def joined(results: Sequence[StepResult], parts: Sequence[Sequence[int]]) -> StepResult:
    """One result of the rows of several, which are those of `parts`."""
    rows = sum(map(len, parts))
    spans: tuple[list, list] = ([slice(0)] * rows, [slice(0)] * rows)
    tokens: list[int] = []
    finite: list[bool] = []
    counts = [max(span.stop for span in result.token_spans) for result in results]
    for result, part, behind in zip(results, parts, [0, *accumulate(counts)], strict=False):
        for index, logits_span, token_span in zip(part, result.logits_spans, result.token_spans, strict=True):
            spans[0][index] = slice(logits_span.start + len(tokens), logits_span.stop + len(tokens))
            spans[1][index] = slice(token_span.start + behind, token_span.stop + behind)
        tokens, finite = tokens + result.chosen.tokens, finite + result.chosen.finite
    return StepResult(
        # Prompts have none, and of a rank not even the width of the others.
        lambda: torch.cat([result.logits for result in results if result.chosen.tokens] or [results[0].logits]),
        lambda: torch.cat([result.hidden_states[:count] for result, count in zip(results, counts, strict=True)]),
        *map(tuple, spans),
        Chosen(tokens, finite),
    )


def spans_of(
    starts: Sequence[int], lengths: Sequence[int], wanted: Sequence[str]
) -> tuple[numpy.ndarray, tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """(tokens whose logits are wanted, int64, (each row's span among them, each row's span among all tokens))."""
    ends = numpy.add(starts, lengths, dtype=numpy.int64)
    counts = numpy.array(
        [length if want == "all" else want == "last" for length, want in zip(lengths, wanted, strict=True)],
        dtype=numpy.int64,
    )
    behind = counts.cumsum()
    # Row b's tokens end at ends[b], and at behind[b] among those that are wanted.
    indices = numpy.repeat(ends - behind, counts) + numpy.arange(counts.sum())
    spans = tuple(map(slice, (behind - counts).tolist(), behind.tolist()))
    return indices, (spans, tuple(map(slice, starts, ends.tolist())))
