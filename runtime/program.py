"""Steps of one network: from rows on the host to logits, through a captured graph where the rows fit one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from replayssm.plugins import row_order
from replayssm.plugins.launch import prefill_rows
from replayssm.plugins.network import Network
from replayssm.plugins.state import LayerState, allocate_state, raise_on_error, torch_dtype
from replayssm.runtime.cuda_graphs import Chosen, StepGraphs
from replayssm.runtime.engine import Engine
from replayssm.runtime.errors import InferenceError
from replayssm.runtime.executor import Executor, NetworkExecutor
from replayssm.runtime.prompt_graphs import PromptGraphs
from replayssm.runtime.sampling import SamplingBatch, SamplingParams, sample_tokens
from replayssm.runtime.step_rows import DraftRow, Finish, Row, StepResult, joined, picked, spans_of

MakeExecutor = Callable[[Network, Mapping[str, LayerState]], NetworkExecutor]

SPLIT_TOKENS = 320
"""Tokens of padding that a second captured step must spare: what reading the weights once more costs. H200, Nano-4B:
128 rows of 5 tokens take 10.2 ms, 64 of them and 64 of one token 6.8 + 4.1."""


class Program:
    """A network with its states and its executor.

    graphs: run rows of at most max_window tokens through captured graphs, and prompts whose logits nobody wants where
        the executor can be captured with them. prompt_tokens: most tokens of prompts in a step, about.
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
        prompt_tokens: int = 0,
    ) -> None:
        settings, device = engine.manifest.replay, error_flag.device
        self.states = {
            name: allocate_state(spec.geometry, spec.settings(settings), slots, device, error_flag)
            for name, spec in network.states.items()
        }
        self._device, self._error_flag, self._max_window = device, error_flag, settings.max_window
        self._part = engine.vocabulary_part
        self.executor = make_executor(network, self.states)
        self.wait_s = 0.0
        graphs = graphs and (device.type != "cuda" or _has_kernels(self.states.values()))
        self.graphs, self.prompts = None, None
        if graphs:
            spec = network.inputs.get("hidden_states")
            hidden = None if spec is None else (spec.shape[-1], torch_dtype(spec.dtype))
            limits = (slots, settings.max_window)
            ordered_by = row_order.orderable(self.states)
            self.graphs = StepGraphs(self.executor, error_flag, *limits, hidden, self._part, ordered_by)
            if hidden is None and self.executor.captures_prompts:
                self.prompts = PromptGraphs(self.executor, device, *limits, prompt_tokens, self.graphs.capture)

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

        Prefill rows run beside a captured step of all others, not in it: in captured steps before it, or behind it, and
        the device computes it while the host launches the many operators of these. chosen_only: nobody reads logits or
        hidden states; rows of one token then get a captured step of their own where that spares much padding.
        """
        long = [index for index, row in enumerate(rows) if len(row.tokens) > self._max_window]
        if self.graphs is None or (hidden_states is not None and long):
            result = self._eager(rows, seq_lens, wanted, hidden_states)
            return lambda: self._checked(result)
        if hidden_states is not None:
            return self._captured(rows, seq_lens, wanted, hidden_states)
        prompts = self._prompt_parts(rows, wanted, long)
        finishes = [self._prompts(*picked(part, rows, seq_lens, wanted), chosen_only) for part in prompts or ()]
        captured = self._captured_parts(rows, chosen_only)
        if prompts and not captured:
            finishes[-1] = self._flagged(finishes[-1])
        # Behind the prompts: what others give of logits and hidden states lasts until the next captured step, and they
        # bring the error flag.
        finishes += [self._captured(*picked(part, rows, seq_lens, wanted)) for part in captured]
        parts = [*(prompts or ()), *captured]
        if prompts is None:
            parts.append(long)
            finishes.append(self._choosing(*picked(long, rows, seq_lens, wanted)))
        if len(parts) == 1:
            return finishes[0]
        return lambda: joined([finish() for finish in finishes], parts)

    def _prompt_parts(self, rows: Sequence[Row], wanted: Sequence[str], long: list[int]) -> list[list[int]] | None:
        """Prefill rows that share a captured step; None where they are not captured."""
        if not long:
            return []
        if self.prompts is None or any(wanted[index] != "none" for index in long):
            return None
        parts = self.prompts.parts([len(rows[index].tokens) for index in long])
        return None if parts is None else [[long[index] for index in part] for part in parts]

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
        indices, spans = spans_of(starts, lengths, wanted)
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
        try:
            self._timed(lambda: raise_on_error(self._error_flag))
        except RuntimeError as error:
            raise InferenceError(
                f"{error}; start again with a new session, and if it returns, rebuild the engine or report it"
            ) from error

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
            values = self._timed(answer.read)
            if values[-1]:
                self.check()
            result.chosen = Chosen(values[: len(params)], [bool(value) for value in values[len(params) : -1]])
            return result

        return finish

    def _prompts(
        self, rows: Sequence[Row], seq_lens: Sequence[int], wanted: Sequence[str], chosen_only: bool
    ) -> Finish:
        """A captured step of prefill rows, which waits for nothing; the error flag is left to the caller."""
        lengths = [len(row.tokens) for row in rows]
        graph = self.prompts.get(len(rows), sum(lengths))
        graph.load([row.tokens for row in rows], seq_lens, [row.slot for row in rows])
        graph.launch()
        _, spans = spans_of([0, *accumulate(lengths[:-1])], lengths, wanted)
        # Another captured step of this call may follow before anyone reads them.
        hidden_states = graph.hidden_states if chosen_only else graph.hidden_states[: sum(lengths)].clone()
        result = StepResult(graph.logits, hidden_states, *spans, Chosen([], []))
        return lambda: result

    def _flagged(self, finish: Finish) -> Finish:
        """`finish`, once the device has come here, with the error flag as it is then."""
        answer = _Answer(self._error_flag)

        def flagged() -> StepResult:
            if self._timed(answer.read)[0]:
                self.check()
            return finish()

        return flagged

    def _timed(self, wait: Callable[[], Any]) -> Any:
        """What `wait` returns, its time counted as waiting for the device."""
        begin = time.perf_counter()
        try:
            return wait()
        finally:
            self.wait_s += time.perf_counter() - begin

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
        indices, spans = spans_of(range(0, len(rows) * graph.window, graph.window), lengths, wanted)

        def logits() -> torch.Tensor:
            wanted = graph.logits
            # Indices rise, so as many as there are tokens are all of them.
            if len(indices) < len(wanted):
                wanted = wanted.index_select(0, torch.from_numpy(indices).to(wanted.device))
            # Every rank has to read them then.
            return wanted if graph.part is None else graph.part.gather(wanted)

        def finish() -> StepResult:
            chosen, flag = self._timed(lambda: graph.wait(launch, indices))
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
        from replayssm.runtime.plan_executors import plan_executor
        from replayssm.runtime.plans import PlanRuntime

        runtime = PlanRuntime(engine.directory, engine.manifest.target, device)
        return lambda network, states: plan_executor(runtime, network, states, engine.weights)
    emulate = engine.emulate_activation_quantization
    return lambda network, states: Executor(
        network,
        engine.weights,
        states,
        device,
        unpacked=engine.resident(device),
        emulate_activation_quantization=emulate,
        fp8_products=engine.fp8_products,
        fp8_experts=engine.fp8_experts,
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
