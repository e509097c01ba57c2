"""Steps of one network: from rows on the host to logits, through a captured graph where the rows fit one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy
import torch

from replayssm.plugins.launch import prefill_rows
from replayssm.plugins.network import Network
from replayssm.plugins.state import LayerState, allocate_state, raise_on_error, torch_dtype
from replayssm.runtime.cuda_graphs import Chosen, StepGraphs
from replayssm.runtime.engine import Engine
from replayssm.runtime.errors import InferenceError
from replayssm.runtime.executor import Executor
from replayssm.runtime.sampling import SamplingBatch, SamplingParams, sample_tokens

MakeExecutor = Callable[[Network, Mapping[str, LayerState]], Callable[[Mapping[str, torch.Tensor]], dict]]
"""Makes what runs a network over its states: inputs by name in, outputs by public name out."""


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


SPLIT_TOKENS = 256
"""Tokens of padding that a second captured step must spare: what reading the weights once more costs. On an H200, a
verify step of 1,280 tokens of a 4B model spends 11.7 ms in products, one of 256 tokens 2.9 ms, of which 1.9 ms are the
weights."""

Finish = Callable[[], StepResult]
"""Waits for a step that was started, and returns its outputs. Raises InferenceError if an operator refused a row."""


class Program:
    """A network with its states and its executor.

    graphs: run steps whose rows have at most max_window tokens through captured graphs.
    wait_s: seconds that calls have waited for the device so far.
    """

    def __init__(
        self,
        network: Network,
        engine: Engine,
        slots: int,
        error_flag: torch.Tensor,
        make_executor: MakeExecutor,
        graphs: bool = False,
    ) -> None:
        settings, device = engine.manifest.replay, error_flag.device
        self.states = {
            name: allocate_state(spec.geometry, settings, slots, device, error_flag)
            for name, spec in network.states.items()
        }
        self._device, self._error_flag, self._max_window = device, error_flag, settings.max_window
        self._part = engine.vocabulary_part
        self.executor = make_executor(network, self.states)
        self.wait_s = 0.0
        graphs = graphs and (device.type != "cuda" or _has_kernels(self.states.values()))
        self.graphs = None
        if graphs:
            spec = network.inputs.get("hidden_states")
            hidden = None if spec is None else (spec.shape[-1], torch_dtype(spec.dtype))
            self.graphs = StepGraphs(self.executor, error_flag, slots, settings.max_window, hidden, self._part)

    def __call__(self, *arguments: Any) -> StepResult:
        """`start`, and wait."""
        return self.start(*arguments)()

    def start(
        self,
        rows: Sequence[Row | DraftRow],
        seq_lens: Sequence[int],
        wanted: Sequence[str],
        hidden_states: torch.Tensor | None = None,
        chosen_only: bool = False,
    ) -> Finish:
        """Run `rows`, whose windows begin at `seq_lens`; what is returned waits for them.

        Prefill rows run beside a captured step of all others, not in it: the device computes that one while the host
        launches the many operators of these. chosen_only: nobody reads logits or hidden states; rows of one token then
        get a captured step of their own where that spares much padding.
        """
        short = [len(row.tokens) <= self._max_window for row in rows]
        if self.graphs is None or (hidden_states is not None and not all(short)):
            result = self._eager(rows, seq_lens, wanted, hidden_states)
            return lambda: self._checked(result)
        if hidden_states is not None:
            return self._captured(rows, seq_lens, wanted, hidden_states)
        parts = self._captured_parts(rows, chosen_only)
        finishes = [self._captured(*_picked(part, rows, seq_lens, wanted)) for part in parts]
        if not all(short):
            parts.append([index for index, one in enumerate(short) if not one])
            finishes.append(self._choosing(*_picked(parts[-1], rows, seq_lens, wanted)))
        if len(parts) == 1:
            return finishes[0]
        return lambda: _joined([finish() for finish in finishes], parts)

    def _captured_parts(self, rows: Sequence[Row], chosen_only: bool) -> list[list[int]]:
        """Rows that share a captured step."""
        lengths = {index: len(row.tokens) for index, row in enumerate(rows) if len(row.tokens) <= self._max_window}
        parts = [list(lengths)] if lengths else []
        if chosen_only and lengths:
            split = [
                part
                for part in ([i for i, n in lengths.items() if n == 1], [i for i, n in lengths.items() if n > 1])
                if part
            ]
            tokens = [
                sum(self.graphs.tokens(len(part), max(lengths[i] for i in part)) for part in some)
                for some in (parts, split)
            ]
            if tokens[0] - tokens[1] >= SPLIT_TOKENS:
                return split
        return parts

    def _eager(
        self,
        rows: Sequence[Row | DraftRow],
        seq_lens: Sequence[int],
        wanted: Sequence[str],
        hidden_states: torch.Tensor | None = None,
    ) -> StepResult:
        lengths = [len(row.tokens) for row in rows]
        starts = [0, *accumulate(lengths[:-1])]
        indices, spans = _spans(starts, lengths, wanted)
        inputs = {
            "token_ids": self._tensor([token for row in rows for token in row.tokens], torch.int64),
            "positions": self._tensor(
                [seq_len + i for seq_len, length in zip(seq_lens, lengths, strict=True) for i in range(length)]
            ),
            "seq_lens": self._tensor(seq_lens),
            "window_starts": self._tensor(starts),
            "window_lens": self._tensor(lengths),
            "state_batch_indices": self._tensor([row.slot for row in rows]),
            "logits_indices": torch.from_numpy(indices).to(self._device),
        }
        if hidden_states is not None:
            inputs["hidden_states"] = hidden_states
        with prefill_rows(max(lengths, default=0) > self._max_window):
            outputs = self.executor(inputs)
        logits = outputs["logits"] if self._part is None else self._part.gather(outputs["logits"])
        return StepResult(logits, outputs["hidden_states"], *spans)

    def _checked(self, result: StepResult) -> StepResult:
        self.check()
        return result

    def check(self) -> None:
        """InferenceError if an operator refused a row since the last check. Waits for the device."""
        begin = time.perf_counter()
        try:
            raise_on_error(self._error_flag)
        except RuntimeError as error:
            raise InferenceError(
                f"{error}; start again with a new session, and if it returns, rebuild the engine or report it"
            ) from error
        finally:
            self.wait_s += time.perf_counter() - begin

    def _choosing(self, rows: Sequence[Row], seq_lens: Sequence[int], wanted: Sequence[str]) -> Finish:
        """An eager step that chooses its tokens, as captured ones do."""
        result = self._eager(rows, seq_lens, wanted)
        counts = [span.stop - span.start for span in result.logits_spans]
        params = [row.params or SamplingParams() for row, count in zip(rows, counts, strict=True) for _ in range(count)]
        positions = [
            seq_len + len(row.tokens) - count + 1 + offset
            for row, seq_len, count in zip(rows, seq_lens, counts, strict=True)
            for offset in range(count)
        ]
        finite = torch.zeros(0, dtype=torch.bool, device=self._device)
        tokens = finite.to(torch.int64)
        if params:
            finite = result.logits.amax(dim=1).isfinite()
            logits = result.logits.masked_fill(~finite[:, None], 0.0)
            tokens = sample_tokens(logits, SamplingBatch(params, positions, self._device))
        ends = [
            (row.slot, span.stop - 1)
            for row, span in zip(rows, result.logits_spans, strict=True)
            if span.stop > span.start
        ]
        if ends:
            slots, places = (self._tensor(values, torch.int64) for values in zip(*ends, strict=True))
            self.graphs.last_tokens.index_copy_(0, slots, tokens[places])
        answer = _Answer(torch.cat([tokens, finite.to(torch.int64), self._error_flag.to(torch.int64)]))

        def finish() -> StepResult:
            begin = time.perf_counter()
            values = answer.read()
            self.wait_s += time.perf_counter() - begin
            if values[-1]:
                self.check()
            result.chosen = Chosen(values[: len(params)], [bool(value) for value in values[len(params) : -1]])
            return result

        return finish

    def _captured(
        self,
        rows: Sequence[Row | DraftRow],
        seq_lens: Sequence[int],
        wanted: Sequence[str],
        hidden_states: torch.Tensor | None = None,
    ) -> Finish:
        lengths = [len(row.tokens) for row in rows]
        params = [getattr(row, "params", None) or SamplingParams() for row in rows]
        kind = SamplingBatch.kind_of(params)
        graph = self.graphs.get(len(rows), max(lengths), kind)
        graph.load([row.tokens for row in rows], seq_lens, [row.slot for row in rows], params)
        if hidden_states is not None:
            graph.load_hidden_states(hidden_states, lengths)
        launch = graph.launch()
        # What needs no answer is done while the device runs.
        indices, spans = _spans(range(0, len(rows) * graph.window, graph.window), lengths, wanted)

        def logits() -> torch.Tensor:
            wanted = graph.logits
            # Indices rise, so as many as there are tokens are all of them.
            if len(indices) < len(wanted):
                wanted = wanted.index_select(0, torch.from_numpy(indices).to(wanted.device))
            # Every rank has to read them then.
            return wanted if graph.part is None else graph.part.gather(wanted)

        def finish() -> StepResult:
            begin = time.perf_counter()
            chosen, flag = graph.wait(launch, indices)
            self.wait_s += time.perf_counter() - begin
            if flag:
                self.check()
            # Drafters keep hidden states beyond the step, so they get a copy.
            return StepResult(logits, lambda: graph.hidden_states.clone(), *spans, chosen)

        return finish

    def _tensor(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)


def _has_kernels(states: Iterable[LayerState]) -> bool:
    """Whether kernels serve all of these states; a reference copies state to the host, which no graph can hold."""
    from replayssm.plugins import cuda_ops

    return all(cuda_ops.has_kernel(state) for state in states)


def executor_maker(engine: Engine, device: torch.device) -> MakeExecutor:
    """What runs the networks of `engine`: plans, where it has them, or else PyTorch."""
    if engine.has_plans:
        from replayssm.runtime.plans import PlanRuntime

        runtime = PlanRuntime(engine.directory, engine.manifest.target, device)
        return lambda network, states: runtime.executor(network, states, engine.weights)
    emulate = engine.emulate_activation_quantization
    return lambda network, states: Executor(
        network,
        engine.weights,
        states,
        device,
        unpacked=engine.resident(device),
        emulate_activation_quantization=emulate,
        fp8_products=engine.fp8_products,
        operators=engine.operators,
    )


class _Answer:
    """Values on their way to the host, for whoever reads them when later steps run already."""

    def __init__(self, values: torch.Tensor) -> None:
        self._event = None
        self._values = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


def _picked(part: Sequence[int], *columns: Sequence[Any]) -> list[Sequence[Any]]:
    """These entries of each column."""
    whole = len(part) == len(columns[0])
    return list(columns) if whole else [[column[index] for index in part] for column in columns]


def _joined(results: Sequence[StepResult], parts: Sequence[Sequence[int]]) -> StepResult:
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
        lambda: torch.cat([result.logits for result in results]),
        lambda: torch.cat([result.hidden_states[:count] for result, count in zip(results, counts, strict=True)]),
        *map(tuple, spans),
        Chosen(tokens, finite),
    )


def _spans(
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
