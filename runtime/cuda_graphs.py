"""Captured steps: one CUDA graph per number of rows and window length, with the choice of tokens inside.

A graph's rows have `window` tokens each, the first window_lens[b] of which are real; rows that a step does not use are
padding (design rule 8). Positions, slots and lengths are read from device memory, so a graph replays unchanged for
ever. A step costs the host one copy in, one launch, one copy out and one wait. Each slot's last choice stays on the
device too, so a step can be launched before the host has read the choices of the one before.

On the CPU the same code runs with a stand-in that calls what would have been captured, for tests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy
import torch

from replayssm.plugins import row_order, step_ends
from replayssm.plugins.contract import PAD_SLOT_ID
from replayssm.plugins.state import LayerState
from replayssm.runtime.executor import NetworkExecutor
from replayssm.runtime.graph_memsets import replace_memsets
from replayssm.runtime.plan_calls import ROWS
from replayssm.runtime.sampling import SamplingBatch, SamplingParams, VocabularyPart, likeliest, sample_tokens

Tensor = torch.Tensor
Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes what a step does and returns how to do it again."""


def row_buckets(slots: int) -> list[int]:
    """Numbers of rows that graphs are captured for: powers of two to 64, then multiples of 64, and `slots` itself."""
    small = [1 << i for i in range(7) if 1 << i < slots]
    return [*small, *range(128, slots, 64), slots]


def window_classes(max_window: int) -> list[int]:
    """Window lengths that graphs are captured for: powers of two to half of `max_window`, and `max_window` itself."""
    return [*(1 << i for i in range(max_window.bit_length()) if 2 << i <= max_window), max_window]


class Chosen(NamedTuple):
    """Per token of a step: the token chosen behind it, and whether its logits were finite."""

    tokens: list[int]
    finite: list[bool]


def capture_eagerly(body: Callable[[], None]) -> Callable[[], None]:
    """Stand-in for a capture where there is no GPU. A capture runs the body once to warm up, so this does too."""
    body()
    return body


class CudaCapture:
    """Captures into graphs that share one memory pool, because they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        from replayssm.plugins.cuda_ops import gaps_left_unwritten

        # Compiling, loading and library handles must not fall into the capture.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            body()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        # Other threads of a server may use the device meanwhile.
        capture = torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local")
        # Tokens behind a short window, or of padding rows, are ignored whatever they hold.
        with capture, gaps_left_unwritten():
            body()
        replace_memsets(graph.raw_cuda_graph(), self._device)
        graph.instantiate()
        return graph.replay


class Buffers:
    """Inputs of a step as views of one block on the device and one, page-locked, on the host: one copy moves all.

    Two blocks on the host take turns, because the copy of the one before may still wait behind a running step; a third
    upload waits for the first.
    """

    def __init__(self, layout: Sequence[tuple[str, torch.dtype, int]], device: torch.device) -> None:
        size = sum(-(-count * dtype.itemsize // 16) * 16 for _, dtype, count in layout)
        blocks = [torch.zeros(size, dtype=torch.uint8, device=device)]
        blocks += [torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)]
        self._device, *self._hosts = blocks
        views, offset = ({}, {}, {}), 0
        for name, dtype, count in layout:
            end = offset + count * dtype.itemsize
            for block, view in zip(blocks, views, strict=True):
                view[name] = block[offset:end].view(dtype)
            offset = -(-end // 16) * 16
        self.device, *hosts = views
        self._views = [{name: tensor.numpy() for name, tensor in host.items()} for host in hosts]
        self._copied = [torch.cuda.Event() if device.type == "cuda" else None for _ in range(2)]
        self._turn = 0

    def clear(self) -> dict[str, numpy.ndarray]:
        """The inputs of the next upload, on the host: only padding rows so far."""
        self._turn = 1 - self._turn
        if self._copied[self._turn] is not None:
            self._copied[self._turn].synchronize()
        self._hosts[self._turn].zero_()
        host = self._views[self._turn]
        host["state_batch_indices"].fill(PAD_SLOT_ID)
        return host

    def upload(self) -> None:
        self._device.copy_(self._hosts[self._turn], non_blocking=True)
        if self._copied[self._turn] is not None:
            self._copied[self._turn].record()


def keep_outputs(graph: object, **outputs: Tensor) -> None:
    """Name a graph's outputs. It writes the same tensors at every replay, and so does its stand-in."""
    for name, value in outputs.items():
        if value.device.type == "cpu" and hasattr(graph, name):
            getattr(graph, name).copy_(value)
        else:
            setattr(graph, name, value)


class StepGraph:
    """One step of `rows` rows with windows of `window` tokens, captured.

    device_inputs: token_ids [rows * window], seq_lens, window_lens and state_batch_indices [rows], which `launch`
        reads; whoever drives the graph on the device writes them there instead of calling `load`.
    logits [rows * window, vocab] and hidden_states [rows * window, hidden]: of the last launch; the next launch of any
        graph overwrites them.
    kind: how tokens are chosen, as `sampling.KINDS` has it; rows of earlier kinds may be among the others.
    hidden: size and dtype of the hidden states that a draft head reads beside every token.
    part: what the executor's logits are of, None for the whole vocabulary. `logits` are of the same, but whole beside
        hidden states, where all of them are read.
    last_tokens: int64 [slots + 1], what each slot's last step chose; the last entry is that of padding rows. None for a
        network whose tokens are not chosen here.
    ordered_by: a state whose rows, where they are many, the network is to see in the order of `row_order`.
    """

    def __init__(
        self,
        executor: NetworkExecutor,
        error_flag: Tensor,
        rows: int,
        window: int,
        capture: Capture,
        *,
        kind: str = "greedy",
        hidden: tuple[int, torch.dtype] | None = None,
        part: VocabularyPart | None = None,
        last_tokens: Tensor | None = None,
        ordered_by: LayerState | None = None,
    ) -> None:
        self.rows, self.window, self.kind = rows, window, kind
        self.part = part if hidden is None else None
        self._join = part.gather if part is not None and hidden is not None else None
        self._last_tokens = last_tokens
        self._ordered_by = ordered_by if rows >= row_order.ORDERED_ROWS else None
        self._executor, self._error_flag = executor, error_flag
        device = error_flag.device
        integers = ("seq_lens", "window_lens", "state_batch_indices")
        layout = [("token_ids", torch.int64, rows * window), *((name, torch.int32, rows) for name in integers)]
        if kind != "greedy":
            layout += [(name, dtype, rows) for name, dtype in SamplingBatch.COLUMNS.items()]
        self._buffers = Buffers(layout, device)
        self.device_inputs = self._buffers.device
        self._buffers.clear()
        self._buffers.upload()
        self._starts = torch.arange(0, rows * window, window, dtype=torch.int32, device=device)
        self._hidden = None if hidden is None else torch.zeros(rows * window, hidden[0], dtype=hidden[1], device=device)
        size = 2 * rows * window + 1
        pinned = device.type == "cuda"
        self._answers = [torch.empty(size, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._events = [torch.cuda.Event() if pinned else None for _ in range(2)]
        self._launched = 0
        self._replay = capture(self._body)

    def load(
        self,
        windows: Sequence[Sequence[int]],
        seq_lens: Sequence[int],
        slots: Sequence[int],
        params: Sequence[SamplingParams] | None = None,
    ) -> None:
        """Set the inputs of the next launch: at most `rows` windows of at most `window` tokens."""
        count, host = len(windows), self._buffers.clear()
        lengths = numpy.fromiter(map(len, windows), numpy.int32, count)
        filled = numpy.arange(self.window) < lengths[:, None]
        tokens = numpy.fromiter(chain.from_iterable(windows), numpy.int64, int(lengths.sum()))
        host["token_ids"].reshape(self.rows, self.window)[:count][filled] = tokens
        host["seq_lens"][:count] = seq_lens
        host["window_lens"][:count] = lengths
        host["state_batch_indices"][:count] = slots
        if self.kind != "greedy":
            for name, values in SamplingBatch.columns(params or []).items():
                host[name][:count] = values.numpy()
        self._buffers.upload()

    def load_hidden_states(self, hidden_states: Tensor, lengths: Sequence[int]) -> None:
        """Hidden states [sum of lengths, hidden] of the windows that `load` was given."""
        if self.window == 1:
            self._hidden[: len(lengths)] = hidden_states
            return
        places = [row * self.window + i for row, length in enumerate(lengths) for i in range(length)]
        self._hidden.index_copy_(0, torch.tensor(places, device=hidden_states.device), hidden_states)

    def launch(self) -> int:
        """Run the step and start copying its answers to the host; returns the launch's number, for `wait`."""
        self._replay()
        slot = self._launched % 2
        self._answers[slot].copy_(self._results, non_blocking=True)
        if self._events[slot] is not None:
            self._events[slot].record()
        self._launched += 1
        return self._launched - 1

    def wait(self, launch: int | None = None, places: numpy.ndarray | None = None) -> tuple[Chosen, int]:
        """(what a launch chose per token, the device's error flag), of one of the last two launches; None: the last.

        places: indices of the tokens that are wanted; None takes all.
        """
        slot = (self._launched - 1 if launch is None else launch) % 2
        if self._events[slot] is not None:
            self._events[slot].synchronize()
        values = self._answers[slot].numpy()
        count = self.rows * self.window
        tokens, finite = values[:count], values[count : 2 * count] != 0
        if places is not None:
            tokens, finite = tokens[places], finite[places]
        return Chosen(tokens.tolist(), finite.tolist()), int(values[-1])

    def _body(self) -> None:
        given = self.device_inputs
        slots = given["state_batch_indices"]
        token_ids, positions = step_ends.begin(given["token_ids"], given["seq_lens"], slots, self._last_tokens)
        rows = (given["seq_lens"], self._starts, given["window_lens"], slots)
        if self._ordered_by is not None:
            rows = row_order.folding_first(rows, self._ordered_by)
        inputs = {"token_ids": token_ids, "positions": positions, **dict(zip(ROWS, rows, strict=True))}
        inputs["logits_indices"] = None
        if self._hidden is not None:
            inputs["hidden_states"] = self._hidden
        outputs = self._executor(inputs)
        logits = outputs["logits"] if self._join is None else self._join(outputs["logits"])
        keep_outputs(self, logits=logits, hidden_states=outputs["hidden_states"])
        largest, tokens = likeliest(self.logits, self.part)
        if self.kind != "greedy":
            tokens = self._sample(positions, largest.isfinite())
        given = (given["window_lens"], slots, self._last_tokens, given["token_ids"], given["seq_lens"])
        self._results = step_ends.end(largest, tokens, self._error_flag, *given)

    def _sample(self, positions: Tensor, finite: Tensor) -> Tensor:
        columns = {
            name: self.device_inputs[name].unsqueeze(1).expand(-1, self.window).flatten()
            for name in SamplingBatch.COLUMNS
        }
        batch = SamplingBatch.from_columns(columns, positions.to(torch.int64) + 1, self.kind)
        return sample_tokens(self.logits.masked_fill(~finite.unsqueeze(1), 0.0), batch, self.part)


class StepGraphs:
    """The graphs of one network, captured when they are first needed.

    slots: most rows of a step; max_window: most tokens of a row; hidden, part, ordered_by: as for `StepGraph`.
    """

    def __init__(
        self,
        executor: NetworkExecutor,
        error_flag: Tensor,
        slots: int,
        max_window: int,
        hidden: tuple[int, torch.dtype] | None = None,
        part: VocabularyPart | None = None,
        ordered_by: LayerState | None = None,
    ) -> None:
        self._executor, self._error_flag, self._hidden, self._part = executor, error_flag, hidden, part
        self._ordered_by = ordered_by
        device = error_flag.device
        self.capture = CudaCapture(device) if device.type == "cuda" else capture_eagerly
        self._rows, self._windows = row_buckets(slots), window_classes(max_window)
        self._graphs: dict[tuple[int, int, str], StepGraph] = {}
        self.last_tokens = None if hidden else torch.zeros(slots + 1, dtype=torch.int64, device=device)

    def __len__(self) -> int:
        """Graphs captured so far."""
        return len(self._graphs)

    def prepare(self) -> None:
        """Capture windows of every length and number of rows, so that no request waits for it.

        Greedy ones, and those that draw tokens without filters, as OpenAI's clients ask for by default.
        """
        # The largest first: the others then find their memory in the pool.
        for rows in reversed(self._rows):
            for window in reversed(self._windows):
                for kind in ("greedy",) if self._hidden else ("greedy", "plain"):
                    self.get(rows, window, kind)

    def _classes(self, rows: int, window: int) -> tuple[int, int]:
        return self._rows[bisect_left(self._rows, rows)], self._windows[bisect_left(self._windows, window)]

    def tokens(self, rows: int, window: int) -> int:
        """Tokens, padding included, of the graph that `get` gives."""
        row_bucket, window_class = self._classes(rows, window)
        return row_bucket * window_class

    def get(self, rows: int, window: int, kind: str = "greedy") -> StepGraph:
        """The smallest graph for `rows` rows whose longest window has `window` tokens."""
        row_bucket, window_class = self._classes(rows, window)
        key = (row_bucket, window_class, kind)
        if key not in self._graphs:
            self._graphs[key] = StepGraph(
                self._executor,
                self._error_flag,
                row_bucket,
                window_class,
                self.capture,
                kind=kind,
                hidden=self._hidden,
                part=self._part,
                last_tokens=self.last_tokens,
                ordered_by=self._ordered_by,
            )
        return self._graphs[key]
