"""Steps of one network: from rows on the host to logits, through a captured graph where the rows fit one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy
import torch

from replayssm.plugins.launch import prefill_rows
from replayssm.plugins.network import Network
from replayssm.plugins.state import LayerState, allocate_state, raise_on_error, torch_dtype
from replayssm.runtime.cuda_graphs import Chosen, StepGraphs
from replayssm.runtime.engine import Engine
from replayssm.runtime.errors import InferenceError
from replayssm.runtime.executor import Executor
from replayssm.runtime.sampling import SamplingParams

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


@dataclass(frozen=True)
class StepResult:
    """Outputs of a step. logits [R, vocab] (fp32) of the wanted tokens, hidden_states [T, hidden] of all.

    chosen: what the step itself chose behind each of the R tokens, None where the caller has to. Logits of a captured
    step are overwritten by the next step.
    """

    logits: torch.Tensor
    hidden_states: torch.Tensor
    logits_spans: tuple[slice, ...]
    token_spans: tuple[slice, ...]
    chosen: Chosen | None = field(default=None, kw_only=True)

    def row_logits(self, row: int) -> torch.Tensor:
        """Logits of one row, [1, vocab], [len(tokens), vocab] or [0, vocab]."""
        return self.logits[self.logits_spans[row]]

    def row_hidden_states(self, row: int) -> torch.Tensor:
        """Hidden states [len(tokens), hidden] of one row."""
        return self.hidden_states[self.token_spans[row]]


class _GraphStepResult(StepResult):
    """A step of a graph, whose outputs have gaps between rows; the R wanted logits are gathered when they are read."""

    def __init__(
        self,
        outputs: tuple[torch.Tensor, torch.Tensor],
        indices: numpy.ndarray,
        spans: tuple[tuple[slice, ...], tuple[slice, ...]],
        chosen: Chosen,
    ) -> None:
        values = {"_outputs": outputs, "_indices": indices, "logits_spans": spans[0], "token_spans": spans[1]}
        for name, value in {**values, "chosen": chosen}.items():
            object.__setattr__(self, name, value)

    @cached_property
    def logits(self) -> torch.Tensor:
        logits = self._outputs[0]
        # Indices rise, so as many as there are tokens are all of them.
        if len(self._indices) == logits.shape[0]:
            return logits
        return logits.index_select(0, torch.from_numpy(self._indices).to(logits.device))

    @cached_property
    def hidden_states(self) -> torch.Tensor:
        """A copy, because drafters keep hidden states beyond the step."""
        return self._outputs[1].clone()


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
        self.executor = make_executor(network, self.states)
        self.wait_s = 0.0
        graphs = graphs and (device.type != "cuda" or _has_kernels(self.states.values()))
        self.graphs = None
        if graphs:
            spec = network.inputs.get("hidden_states")
            hidden = None if spec is None else (spec.shape[-1], torch_dtype(spec.dtype))
            self.graphs = StepGraphs(self.executor, error_flag, slots, settings.max_window, hidden)

    def __call__(
        self,
        rows: Sequence[Row | DraftRow],
        seq_lens: Sequence[int],
        wanted: Sequence[str],
        hidden_states: torch.Tensor | None = None,
    ) -> StepResult:
        """Run `rows`, whose windows begin at `seq_lens`. Raises InferenceError if an operator refused a row."""
        if self.graphs is not None and all(len(row.tokens) <= self._max_window for row in rows):
            return self._captured(rows, seq_lens, wanted, hidden_states)
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
        self.check()
        return StepResult(outputs["logits"], outputs["hidden_states"], *spans)

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

    def _captured(
        self,
        rows: Sequence[Row | DraftRow],
        seq_lens: Sequence[int],
        wanted: Sequence[str],
        hidden_states: torch.Tensor | None,
    ) -> StepResult:
        lengths = [len(row.tokens) for row in rows]
        params = [getattr(row, "params", None) or SamplingParams() for row in rows]
        sampled = not all(row.is_greedy for row in params)
        graph = self.graphs.get(len(rows), max(lengths), sampled)
        graph.load([row.tokens for row in rows], seq_lens, [row.slot for row in rows], params if sampled else None)
        if hidden_states is not None:
            graph.load_hidden_states(hidden_states, lengths)
        graph.launch()
        # What needs no answer is done while the device runs.
        indices, spans = _spans(range(0, len(rows) * graph.window, graph.window), lengths, wanted)
        begin = time.perf_counter()
        chosen, flag = graph.wait(places=indices)
        self.wait_s += time.perf_counter() - begin
        if flag:
            self.check()
        return _GraphStepResult((graph.logits, graph.hidden_states), indices, spans, chosen)

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
        operators=engine.operators,
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
