"""A session: a fixed pool of slots, and the calls that move sequences forward in them.

Every call is one `step` over rows, and a row is one slot's window of new tokens. Windows of up to 1 + max_draft_len
tokens are tentative: the slot's length grows only when `advance` says how many of them stand, which is all that a
rejected draft costs. Longer windows are prefill and stand at once. Rows of all kinds mix in one step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import torch

from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.slot_blob import load_slot, save_slot, stagger_tail
from replayssm.plugins.state import LayerState, commit_all, copy_slot
from replayssm.plugins.step_ends import LAST_CHOSEN
from replayssm.runtime.cuda_graphs import StepGraph
from replayssm.runtime.engine import Engine
from replayssm.runtime.errors import NOT_FINITE, InferenceError
from replayssm.runtime.executor import NetworkExecutor
from replayssm.runtime.program import Program, executor_maker
from replayssm.runtime.session_checks import check_token_ids, checked_device, unfit
from replayssm.runtime.step_rows import DraftRow, Finish, Row, StepResult

__all__ = ["LOGITS", "PREFILL_CHUNK", "DraftRow", "Row", "Session", "StepResult", "check_token_ids", "checked_device"]

PREFILL_CHUNK = 256
LOGITS = ("last", "all", "none")


class Session:
    """Slots over one engine.

    slots: sequences held at the same time; None takes the engine's max_batch_size.
    prefill_chunk: tokens of one prefill window. Outputs depend on it in the last bits, so it is fixed per session.
    graphs: run steps as captured CUDA graphs, which then also choose the tokens, all but long prefill rows and those
        whose logits are wanted. By default on a GPU; on the CPU the same code runs uncaptured.
    """

    def __init__(
        self,
        engine: Engine,
        slots: int | None = None,
        device: torch.device | str = "cpu",
        prefill_chunk: int = PREFILL_CHUNK,
        graphs: bool | None = None,
    ) -> None:
        limit = engine.manifest.limits.max_batch_size
        self.slots = limit if slots is None else slots
        if not 1 <= self.slots <= limit:
            raise ValueError(f"slots must be between 1 and the engine's max_batch_size {limit}, got {self.slots}")
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk must be positive, got {prefill_chunk}")
        self.engine = engine
        self.settings: ReplaySettings = engine.manifest.replay
        self.prefill_chunk = prefill_chunk
        self.device = checked_device(device)
        if self.device.type == "cuda":
            from replayssm.plugins import cuda_ops

            cuda_ops.register()
        flag = torch.zeros(1, dtype=torch.int32, device=self.device)
        graphs = self.device.type == "cuda" if graphs is None else graphs
        # A plan's kernels are compiled for all slots.
        state_slots = limit if engine.has_plans else self.slots
        try:
            make_executor = executor_maker(engine, self.device)
            self._programs = {
                name: Program(network, engine, state_slots, flag, make_executor, graphs, self.slots * prefill_chunk)
                for name, network in engine.networks.items()
            }
        except (LookupError, TypeError, AttributeError, RuntimeError, MemoryError) as error:
            raise unfit(error, engine, self.slots, self.device) from error
        most = self._programs["main"].executor.max_tokens
        if most is not None and prefill_chunk > most:
            raise ValueError(
                f"prefill_chunk {prefill_chunk} is more than the {most} tokens of the engine's plans: lower it"
            )
        self._free = list(range(self.slots))
        self._seq_lens: dict[int, int] = {}
        self._windows: dict[int, int] = {}

    def close(self) -> None:
        """Give back states and captured steps; the session is of no use afterwards."""
        self._programs = {}

    # Slots

    def allocate(self) -> int:
        """A slot with an empty sequence; the lowest free one. Nothing is cleared: position 0 means empty."""
        if not self._free:
            raise ValueError(
                f"all {self.slots} slots are in use: free one, or build the engine with a larger max_batch_size"
            )
        slot = heapq.heappop(self._free)
        self._seq_lens[slot], self._windows[slot] = 0, 0
        return slot

    def free(self, slot: int) -> None:
        """Give a slot back."""
        self._check_slot(slot)
        del self._seq_lens[slot], self._windows[slot]
        heapq.heappush(self._free, slot)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def seq_len(self, slot: int) -> int:
        """Tokens of the slot's sequence that stand."""
        self._check_slot(slot)
        return self._seq_lens[slot]

    @property
    def states(self) -> dict[str, LayerState]:
        """All states by "network/state"."""
        return {
            f"{program}/{name}": state
            for program, value in self._programs.items()
            for name, state in value.states.items()
        }

    @property
    def executors(self) -> dict[str, NetworkExecutor]:
        """What runs each network, by its name."""
        return {name: program.executor for name, program in self._programs.items()}

    @property
    def state_bytes(self) -> int:
        """Bytes of all slots' state."""
        return sum(state.nbytes for state in self.states.values())

    @property
    def wait_s(self) -> float:
        """Seconds that steps of the network have waited for the device so far; the rest of a step is the host's."""
        return self._programs["main"].wait_s

    # Steps

    def step(self, rows: Sequence[Row]) -> StepResult:
        """Run the windows of `rows`, each from its slot's length.

        A window of up to 1 + max_draft_len tokens is tentative: call `advance`, or run another window in its place. A
        longer one is prefill and advances the slot by itself. At most one row per slot.
        Raises ValueError for rows that cannot run (nothing has happened then).
        """
        return self.start_step(rows)()

    @property
    def can_run_ahead(self) -> bool:
        """Whether a row's first token may be LAST_CHOSEN: a step can then start before the last one was waited for."""
        return self._programs["main"].graphs is not None

    @property
    def captures_prompts(self) -> bool:
        """Whether chunks of prompts run in captured steps too, as far as nobody wants their logits."""
        return self._programs["main"].prompts is not None

    def start_step(self, rows: Sequence[Row], chosen_only: bool = False) -> Finish:
        """`step`, but what waits for the device is the function that it returns.

        Where `can_run_ahead`, another step may be started before that is called; it then finds `chosen` only, because
        logits and hidden states of a captured step last until the next one starts. chosen_only: they are not read at
        all. Raises ValueError as `step` does; any other exception leaves the slots as they were.
        """
        self._check_rows(rows)
        seq_lens = [self._seq_lens[row.slot] for row in rows]
        finish = self._programs["main"].start(rows, seq_lens, [row.logits for row in rows], None, chosen_only)
        for row in rows:
            if len(row.tokens) > self.settings.max_window:
                self._seq_lens[row.slot] += len(row.tokens)
                self._windows[row.slot] = 0
            else:
                self._windows[row.slot] = len(row.tokens)
        return finish

    def advance(self, accepted: Mapping[int, int]) -> None:
        """Let the first accepted[slot] tokens of each slot's tentative window stand; the rest never happened.

        Replay state needs nothing else. The baseline (buffer_len 0) restores a snapshot here, and its windows of one
        token cannot be rejected.
        """
        for slot, count in accepted.items():
            self._check_slot(slot)
            window = self._windows[slot]
            least = 1 if self._is_final(window) else 0
            if not least <= count <= window:
                raise ValueError(f"slot {slot}: expected {least} to {window} accepted tokens, got {count}")
        if self.settings.snapshots:
            restored = [slot for slot in accepted if self._windows[slot] > 1]
            commit_all(self.states.values(), restored, [accepted[slot] for slot in restored])
        for slot, count in accepted.items():
            self._seq_lens[slot] += count
            self._windows[slot] = 0

    def draft_step(self, rows: Sequence[DraftRow]) -> StepResult:
        """Run the draft head over `rows`; logits are those of each row's last token.

        Its cache is addressed by position, so running a position again replaces what it held.
        """
        if "mtp" not in self._programs:
            raise ValueError("this engine has no draft head (MTP): choose ngram drafts or none")
        for row in rows:
            self._check_slot(row.slot)
        hidden_states = torch.cat([row.hidden_states for row in rows])
        return self._programs["mtp"](rows, [row.position for row in rows], ["last"] * len(rows), hidden_states)

    # What most callers need

    def prefill_plan(self, tokens: Sequence[int]) -> list[int]:
        """Lengths of the windows that prefill `tokens`: chunks, then a short tail that staggers flushes (rule 10)."""
        tail = stagger_tail(tokens, self.settings.max_window)
        body = len(tokens) - tail
        chunks = [min(self.prefill_chunk, body - start) for start in range(0, body, self.prefill_chunk)]
        return [*chunks, tail]

    def prefill(self, slot: int, tokens: Sequence[int]) -> torch.Tensor:
        """Append `tokens` to a slot, in chunks; returns the logits [vocab] of the last one."""
        self._check_slot(slot)
        self._check_tokens(slot, tokens)
        start = 0
        for length in self.prefill_plan(tokens):
            end = start + length
            result = self.step([Row(slot, tokens[start:end], "last" if end == len(tokens) else "none")])
            if self._windows[slot]:
                self.advance({slot: length})
            start = end
        return result.logits[0]

    def decode(self, slots: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Append one token to each slot; returns the logits [len(slots), vocab]."""
        result = self.step([Row(slot, [token]) for slot, token in zip(slots, tokens, strict=True)])
        self.advance(dict.fromkeys(slots, 1))
        return result.logits

    def verify(self, windows: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Run a tentative window per slot; returns logits [len(window), vocab] of every token. `advance` settles it."""
        for slot, tokens in windows.items():
            if len(tokens) > self.settings.max_window:
                raise ValueError(
                    f"slot {slot}: a window of {len(tokens)} tokens, the engine's max_draft_len allows "
                    f"{self.settings.max_window}: shorten the draft or rebuild the engine"
                )
        result = self.step([Row(slot, tokens, "all") for slot, tokens in windows.items()])
        return {slot: result.row_logits(index) for index, slot in enumerate(windows)}

    def decode_ahead(self, slots: Sequence[int], tokens: Sequence[int], steps: int) -> Iterator[list[int]]:
        """Greedy decoding of `steps` tokens per slot, beginning with `tokens`; yields each step's choices.

        A graph feeds itself, so the next step is launched before the host has read this one's choices. Whoever stops
        early leaves the slots as if the step ahead had never run; the baseline (buffer_len 0) therefore gets none.
        """
        for slot, token in zip(slots, tokens, strict=True):
            self._check_tokens(slot, [token] * steps)
        self._check_rows([Row(slot, [token]) for slot, token in zip(slots, tokens, strict=True)])
        graphs = self._programs["main"].graphs
        if graphs is None:
            for _ in range(steps):
                tokens = self.decode(slots, tokens).argmax(dim=1).tolist()
                yield tokens
            return
        graph = graphs.get(len(slots), 1)
        graph.load([[token] for token in tokens], [self._seq_lens[slot] for slot in slots], slots)
        ahead = 0 if self.settings.is_baseline else 1
        launches: list[int] = []
        for done in range(steps):
            while len(launches) < min(done + 1 + ahead, steps):
                launches.append(graph.launch())
            chosen, flag = graph.wait(launches[done])
            if flag or not all(chosen.finite[: len(slots)]):
                self._programs["main"].check()
                raise InferenceError(NOT_FINITE)
            for slot in slots:
                self._seq_lens[slot] += 1
            yield chosen.tokens[: len(slots)]

    def step_graph(self, rows: int, window: int = 1, kind: str = "greedy") -> StepGraph:
        """The captured step for that many rows and tokens a row, for measurements that drive it themselves.

        Slots and lengths that it is given are not checked, and this session does not learn what it did.
        """
        graphs = self._programs["main"].graphs
        if graphs is None:
            raise ValueError("this session has no captured steps: create it with graphs=True")
        return graphs.get(rows, window, kind)

    @property
    def captured_steps(self) -> int:
        """Graphs that this session has captured so far."""
        found = (graphs for program in self._programs.values() for graphs in (program.graphs, program.prompts))
        return sum(len(graphs) for graphs in found if graphs is not None)

    def capture_prompts(self) -> None:
        """Capture all prompt steps now, where this session captures them; `warm_up` does so too."""
        if self.captures_prompts:
            self._programs["main"].prompts.prepare()

    def warm_up(self) -> None:
        """Run a token in a free slot and forget it: one-time costs of imports, kernels and graphs are then paid.

        Raises EngineDirectoryError if the engine's networks cannot be run.
        """
        slot = self.allocate()
        try:
            result = self.step([Row(slot, [0])])
            if self.device.type == "cuda":
                for program in self._programs.values():
                    if program.graphs is not None:
                        program.graphs.prepare()
                self.capture_prompts()
            if "mtp" in self._programs:
                self.draft_step([DraftRow(slot, [0], 0, result.hidden_states)])
        except (LookupError, TypeError, AttributeError, RuntimeError, MemoryError) as error:
            # Shapes that contradict each other show here first.
            raise unfit(error, self.engine, self.slots, self.device) from error
        finally:
            self.free(slot)

    # Copies

    def fork(self, slot: int) -> int:
        """A new slot that continues exactly as `slot` does."""
        self._check_settled(slot)
        copy = self.allocate()
        for state in self.states.values():
            copy_slot(state, slot, copy)
        self._seq_lens[copy] = self._seq_lens[slot]
        return copy

    def save(self, slot: int) -> bytes:
        """The slot as bytes, from which any session over an equal engine continues identically."""
        self._check_settled(slot)
        return save_slot(self.states, slot, self._seq_lens[slot])

    def load(self, blob: bytes) -> int:
        """A new slot from what `save` returned."""
        slot = self.allocate()
        try:
            self._seq_lens[slot] = load_slot(blob, self.states, slot)
        except BaseException:
            self.free(slot)
            raise
        return slot

    # Checks

    def _check_slot(self, slot: int) -> None:
        if slot not in self._seq_lens:
            raise ValueError(f"slot {slot} is not in use; slots in use: {sorted(self._seq_lens) or 'none'}")

    def _is_final(self, window: int) -> bool:
        """Whether a tentative window of this length has changed state that cannot be taken back."""
        return self.settings.is_baseline and window == 1

    def _check_settled(self, slot: int) -> None:
        self._check_slot(slot)
        if self._windows[slot]:
            raise ValueError(f"slot {slot} has a tentative window: call advance first")

    def _check_rows(self, rows: Sequence[Row]) -> None:
        if not rows:
            raise ValueError("a step needs at least one row")
        slots = [row.slot for row in rows]
        if len(set(slots)) != len(slots):
            raise ValueError(f"a step has at most one row per slot, got slots {slots}")
        baseline = self.settings.is_baseline
        for row in rows:
            self._check_slot(row.slot)
            if row.logits not in LOGITS:
                raise ValueError(f"logits must be one of {', '.join(LOGITS)}, got {row.logits!r}")
            if baseline and self._is_final(self._windows[row.slot]):
                raise ValueError(f"slot {row.slot}: the baseline cannot run a window again, call advance first")
            self._check_length(row.slot, row.tokens)
        ahead = self.settings.max_window if self.can_run_ahead else 0
        given = (
            row.tokens[1:] if len(row.tokens) <= ahead and row.tokens[0] == LAST_CHOSEN else row.tokens for row in rows
        )
        check_token_ids(chain.from_iterable(given), self.engine.vocab_size)

    def _check_tokens(self, slot: int, tokens: Sequence[int]) -> None:
        self._check_length(slot, tokens)
        check_token_ids(tokens, self.engine.vocab_size)

    def _check_length(self, slot: int, tokens: Sequence[int]) -> None:
        if not len(tokens):
            raise ValueError(f"slot {slot}: a window needs at least one token")
        end = self._seq_lens[slot] + len(tokens)
        if end > self.settings.max_seq_len:
            raise ValueError(
                f"slot {slot}: {end} tokens are more than the engine's max_seq_len {self.settings.max_seq_len}: "
                f"shorten the text, or {self.engine.how_to_lengthen}"
            )
