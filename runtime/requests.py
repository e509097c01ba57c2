"""A request on its way through the scheduler: what was asked, how far it is, and what it has produced."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from replayssm.runtime.draft_length import AdaptiveDraftLength
from replayssm.runtime.logits_processor import LogitsProcessor
from replayssm.runtime.sampling import SamplingParams
from replayssm.runtime.session import Session, check_token_ids
from replayssm.runtime.speculation import Draft
from replayssm.runtime.text import TextStream


class PromptTooLongError(ValueError):
    """A prompt that leaves no room for output."""


FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]
"""Why a request ended. "stop": end token or stop string. "length": max_tokens or the engine's max_seq_len."""


@dataclass(frozen=True)
class TokenLogprob:
    """Natural logarithm of a token's probability before temperature and filters; `top` holds the likeliest tokens."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Update:
    """What one step added to a request. text: final text, None without a tokenizer; finish_reason: set in the last."""

    tokens: tuple[int, ...]
    text: str | None
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class Swapped:
    """A sequence that waits in host memory: its state, and what the drafter knows about it."""

    blob: bytes
    drafter: object


@dataclass(eq=False)
class Request:
    """One sequence to generate. Make it with `Request.create`; the scheduler owns everything below `on_update`.

    prompt: token ids. max_tokens: most tokens to generate. end_tokens: tokens that end the sequence.
    stream: turns tokens into text and finds stop strings. logprobs: None, or how many likeliest tokens to report
        beside each token's own probability. deadline: clock time after which the request is given up.
    processor: changes logits before a token is chosen; log-probabilities stay those of the model.
    on_update: called in the scheduler's thread after every step that gave tokens, and once at the end.
    """

    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    end_tokens: frozenset[int]
    stream: TextStream | None = None
    logprobs: int | None = None
    deadline: float | None = None
    processor: LogitsProcessor | None = None
    on_update: Callable[[Request, Update], None] | None = None

    number: int = -1
    slot: int = -1
    plan: deque[int] = field(default_factory=deque)
    fed: int = 0
    history: int = 0
    held: int = 0
    tokens: list[int] = field(default_factory=list)
    draft: Draft = field(default_factory=lambda: Draft([]))
    drafted_behind: int = -1
    draft_length: AdaptiveDraftLength | None = None
    swapped: Swapped | None = None
    snapshots: frozenset[int] = frozenset()
    served: int = 0
    slice_start: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    # Counts and times for reports. Times are the scheduler's clock, in seconds.
    calls: int = 0
    drafted: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    submitted: float = 0.0
    admitted: float = 0.0
    first: float = 0.0
    last: float = 0.0

    @classmethod
    def create(
        cls,
        session: Session,
        prompt: Sequence[int],
        max_tokens: int,
        params: SamplingParams | None = None,
        *,
        name: str = "the prompt",
        end_tokens: Sequence[int] | None = None,
        tokenizer: Any = None,
        stop: Sequence[str] = (),
        dropped: frozenset[int] | None = None,
        **options: Any,
    ) -> Request:
        """A checked request for `session`'s engine. max_tokens is cut to what max_seq_len leaves.

        stop, dropped: as `TextStream` takes them.

        Raises ValueError for an empty, overlong or foreign prompt, max_tokens < 1, or stop strings without a tokenizer.
        """
        tokens = [int(token) for token in prompt]
        limit = session.settings.max_seq_len
        if not tokens:
            raise ValueError(f"{name} is empty: it needs at least one token")
        if len(tokens) >= limit:
            raise PromptTooLongError(
                f"{name} has {len(tokens)} tokens, but a sequence has at most {limit} with its output: shorten the "
                f"prompt, or {session.engine.how_to_lengthen}"
            )
        check_token_ids(tokens, session.engine.vocab_size)
        if max_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {max_tokens}")
        if stop and tokenizer is None:
            raise ValueError("stop strings need a tokenizer")
        return cls(
            tokens,
            params or SamplingParams(),
            min(max_tokens, limit - len(tokens)),
            frozenset(session.engine.eos_token_ids if end_tokens is None else end_tokens),
            None if tokenizer is None else TextStream(tokenizer, stop, dropped),
            tokens=list(tokens),
            **options,
        )

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def generated_count(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def remaining(self) -> int:
        return self.max_tokens + len(self.prompt) - len(self.tokens)

    @property
    def unread(self) -> int:
        """1 where the step that chooses the next token has started and was not read yet."""
        return 0 if self.plan else self.fed - len(self.tokens) + 1

    @property
    def text(self) -> str | None:
        return None if self.stream is None else self.stream.text

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens per verify or decode call; None where the prompt's own logits gave all of them."""
        return (self.generated_count - 1) / self.calls if self.calls else None

    def take(self, new: Sequence[int], logprobs: Sequence[TokenLogprob], now: float) -> int:
        """Append a window's tokens up to the first that ends the sequence, and report them; returns how many."""
        kept, completed = list(new), False
        has_ended = not self.end_tokens.isdisjoint(kept)
        if has_ended:
            kept = kept[: 1 + next(i for i, token in enumerate(kept) if token in self.end_tokens)]
        if self.processor is not None:
            kept = kept[: self.processor.accept(kept)]
            completed = self.processor.finished
        text = None
        if self.stream is not None:
            text = self.stream.push(kept)
            if self.stream.stopped:
                kept = kept[: self.stream.count - self.generated_count]
        self.tokens += kept
        self.first = self.first or now
        self.last = now
        if has_ended or completed or (self.stream is not None and self.stream.stopped):
            self.finish_reason = "stop"
        elif self.remaining <= 0:
            self.finish_reason = "length"
        if self.finish_reason and self.stream is not None:
            text += self.stream.finish()
        if self.on_update is not None:
            self.on_update(self, Update(tuple(kept), text, tuple(logprobs[: len(kept)]), self.finish_reason))
        return len(kept)

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """End the request without more tokens; text that was held back becomes final."""
        self.finish_reason, self.error = reason, error
        text = None if self.stream is None else self.stream.finish()
        if self.on_update is not None:
            self.on_update(self, Update((), text, (), reason))
