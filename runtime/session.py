"""A session: a fixed pool of slots, and the calls that move sequences forward in them.

Every call is one `step` over rows, and a row is one slot's window of new tokens. Windows of up to 1 + max_draft_len
tokens are tentative: the slot's length grows only when `advance` says how many of them stand, which is all that a
rejected draft costs. Longer windows are prefill and stand at once. Rows of all kinds mix in one step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from replayssm.plugins.contract import ReplaySettings
from replayssm.plugins.manifest import EngineDirectoryError
from replayssm.plugins.network import Network
from replayssm.plugins.slot_blob import load_slot, save_slot, stagger_tail
from replayssm.plugins.state import LayerState, allocate_state, commit, copy_slot, raise_on_error
from replayssm.runtime.engine import Engine
from replayssm.runtime.errors import InferenceError
from replayssm.runtime.executor import Executor

PREFILL_CHUNK = 256
LOGITS = ("last", "all", "none")


@dataclass(frozen=True)
class Row:
    """The next tokens of one slot, and whose logits are wanted: of the "last" token, of "all", or "none"."""

    slot: int
    tokens: Sequence[int]
    logits: str = "last"


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
    """Outputs of a step. logits [R, vocab] (fp32) of the wanted tokens, hidden_states [T, hidden] of all."""

    logits: torch.Tensor
    hidden_states: torch.Tensor
    logits_spans: tuple[slice, ...]
    token_spans: tuple[slice, ...]

    def row_logits(self, row: int) -> torch.Tensor:
        """Logits of one row, [1, vocab], [len(tokens), vocab] or [0, vocab]."""
        return self.logits[self.logits_spans[row]]

    def row_hidden_states(self, row: int) -> torch.Tensor:
        """Hidden states [len(tokens), hidden] of one row."""
        return self.hidden_states[self.token_spans[row]]


class _Program:
    """A network with its states and its executor."""

    def __init__(
        self,
        network: Network,
        engine: Engine,
        slots: int,
        device: torch.device,
        error_flag: torch.Tensor,
        unpacked: dict[str, torch.Tensor],
    ) -> None:
        settings = engine.manifest.replay
        self.states = {
            name: allocate_state(spec.geometry, settings, slots, device, error_flag)
            for name, spec in network.states.items()
        }
        self._device = device
        self._error_flag = error_flag
        self._executor = Executor(network, engine.weights, self.states, device, unpacked=unpacked)

    def __call__(
        self,
        rows: Sequence[Row | DraftRow],
        seq_lens: Sequence[int],
        wanted: Sequence[str],
        hidden_states: torch.Tensor | None = None,
    ) -> StepResult:
        """Run `rows`, whose windows begin at `seq_lens`. Raises InferenceError if an operator refused a row."""
        lengths = [len(row.tokens) for row in rows]
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        token_spans = tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=False))
        indices: list[int] = []
        logits_spans = []
        for span, want in zip(token_spans, wanted, strict=True):
            first = {"all": span.start, "last": span.stop - 1, "none": span.stop}[want]
            logits_spans.append(slice(len(indices), len(indices) + span.stop - first))
            indices.extend(range(first, span.stop))
        inputs = {
            "token_ids": self._tensor([token for row in rows for token in row.tokens], torch.int64),
            "positions": self._tensor(
                [seq_len + i for seq_len, length in zip(seq_lens, lengths, strict=True) for i in range(length)]
            ),
            "seq_lens": self._tensor(seq_lens),
            "window_starts": self._tensor(starts[:-1]),
            "window_lens": self._tensor(lengths),
            "state_batch_indices": self._tensor([row.slot for row in rows]),
            "logits_indices": self._tensor(indices, torch.int64),
        }
        if hidden_states is not None:
            inputs["hidden_states"] = hidden_states
        outputs = self._executor(inputs)
        try:
            raise_on_error(self._error_flag)
        except RuntimeError as error:
            raise InferenceError(
                f"{error}; start again with a new session, and if it returns, rebuild the engine or report it"
            ) from error
        return StepResult(outputs["logits"], outputs["hidden_states"], tuple(logits_spans), token_spans)

    def _tensor(self, values: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device)


def checked_device(device: torch.device | str) -> torch.device:
    """`device`; ValueError if it is a GPU that torch cannot use."""
    device = torch.device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("torch sees no CUDA device (`replayssm doctor` says why): use device cpu")
    return device


class Session:
    """Slots over one engine.

    slots: sequences held at the same time; None takes the engine's max_batch_size.
    prefill_chunk: tokens of one prefill window. Outputs depend on it in the last bits, so it is fixed per session.
    """

    def __init__(
        self,
        engine: Engine,
        slots: int | None = None,
        device: torch.device | str = "cpu",
        prefill_chunk: int = PREFILL_CHUNK,
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
        unpacked: dict[str, torch.Tensor] = {}
        try:
            self._programs = {
                name: _Program(network, engine, self.slots, self.device, flag, unpacked)
                for name, network in engine.networks.items()
            }
        except (LookupError, TypeError, AttributeError, RuntimeError, MemoryError) as error:
            raise self._unfit(error) from error
        self._free = list(range(self.slots))
        self._seq_lens: dict[int, int] = {}
        self._windows: dict[int, int] = {}

    def _unfit(self, error: Exception) -> Exception:
        """What to raise for an error that a checked engine of this version cannot cause, or else `error` itself."""
        if self.device.type != "cpu" or isinstance(error, InferenceError):
            return error
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            return ValueError(f"the memory does not hold the weights and the state of {self.slots} sequences ({error})")
        return EngineDirectoryError(
            f"the networks of {self.engine.directory} do not fit this version ({type(error).__name__}: {error}): "
            "rebuild the engine"
        )

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

    def history_len(self, slot: int) -> int:
        """Tokens of the slot that only the ring holds, of the first layer that keeps a ring; reads the device."""
        length = self.seq_len(slot)
        rings = [state for state in self.states.values() if "checkpoint_position" in state.tensors]
        return length - int(rings[0]["checkpoint_position"][slot].flatten()[0]) if rings and length else 0

    @property
    def states(self) -> dict[str, LayerState]:
        """All states by "network/state"."""
        return {
            f"{program}/{name}": state
            for program, value in self._programs.items()
            for name, state in value.states.items()
        }

    @property
    def state_bytes(self) -> int:
        """Bytes of all slots' state."""
        return sum(state.nbytes for state in self.states.values())

    # Steps

    def step(self, rows: Sequence[Row]) -> StepResult:
        """Run the windows of `rows`, each from its slot's length.

        A window of up to 1 + max_draft_len tokens is tentative: call `advance`, or run another window in its place. A
        longer one is prefill and advances the slot by itself. At most one row per slot.
        Raises ValueError for rows that cannot run (nothing has happened then).
        """
        self._check_rows(rows)
        seq_lens = [self._seq_lens[row.slot] for row in rows]
        result = self._programs["main"](rows, seq_lens, [row.logits for row in rows])
        for row in rows:
            if len(row.tokens) > self.settings.max_window:
                self._seq_lens[row.slot] += len(row.tokens)
                self._windows[row.slot] = 0
            else:
                self._windows[row.slot] = len(row.tokens)
        return result

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
            for state in self.states.values():
                commit(state, restored, [accepted[slot] for slot in restored])
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

    def warm_up(self) -> None:
        """Run a token in a free slot and forget it: one-time costs of imports and kernels are then paid.

        Raises EngineDirectoryError if the engine's networks cannot be run.
        """
        slot = self.allocate()
        try:
            result = self.step([Row(slot, [0])])
            if "mtp" in self._programs:
                self.draft_step([DraftRow(slot, [0], 0, result.hidden_states)])
        except (LookupError, TypeError, AttributeError, RuntimeError, MemoryError) as error:
            # Shapes that contradict each other show here first.
            raise self._unfit(error) from error
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
        for row in rows:
            self._check_slot(row.slot)
            if row.logits not in LOGITS:
                raise ValueError(f"logits must be one of {', '.join(LOGITS)}, got {row.logits!r}")
            if self._is_final(self._windows[row.slot]):
                raise ValueError(f"slot {row.slot}: the baseline cannot run a window again, call advance first")
            self._check_tokens(row.slot, row.tokens)

    def _check_tokens(self, slot: int, tokens: Sequence[int]) -> None:
        if not len(tokens):
            raise ValueError(f"slot {slot}: a window needs at least one token")
        end = self._seq_lens[slot] + len(tokens)
        if end > self.settings.max_seq_len:
            raise ValueError(
                f"slot {slot}: {end} tokens are more than the engine's max_seq_len {self.settings.max_seq_len}: "
                "shorten the text or rebuild the engine with a larger --max-seq-len"
            )
        check_token_ids(tokens, self.engine.vocab_size)


def check_token_ids(tokens: Iterable[int], vocab_size: int) -> None:
    """ValueError for the first token id outside the vocabulary."""
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {vocab_size}")
