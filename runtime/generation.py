"""Generation for a list of prompts, batched continuously over a session's slots."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from replayssm.runtime.sampling import Purpose, SamplingBatch, SamplingParams, probabilities, sample, uniform
from replayssm.runtime.session import Row, Session, StepResult, check_token_ids
from replayssm.runtime.speculation import Draft, Drafter, DraftRequest, accept_matching, accept_rejection
from replayssm.runtime.text import TextStream


@dataclass(frozen=True)
class GenerationResult:
    """Output for one prompt.

    token_ids: generated tokens, with the end token if one was generated. text: decoded without special tokens and
        without the stop string; None without a tokenizer.
    finish_reason: "stop" (end token or stop string) or "length" (max_new_tokens or the engine's max_seq_len).
    acceptance_length: mean tokens per verify or decode call; None where the prompt's own logits gave all of them.
    timing: prefill_s (admission to first token), decode_s (first to last token), tokens_per_s while decoding.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str
    acceptance_length: float | None
    timing: dict[str, float | None]


@dataclass
class _Request:
    """A prompt on its way."""

    index: int
    prompt: list[int]
    params: SamplingParams
    max_tokens: int
    stream: TextStream | None
    slot: int = -1
    plan: deque[int] = field(default_factory=deque)
    fed: int = 0
    tokens: list[int] = field(default_factory=list)
    draft: Draft = field(default_factory=lambda: Draft([]))
    calls: int = 0
    finish_reason: str | None = None
    admitted: float = 0.0
    first: float = 0.0
    last: float = 0.0

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def remaining(self) -> int:
        return len(self.prompt) + self.max_tokens - len(self.tokens)

    def result(self) -> GenerationResult:
        count = len(self.tokens) - len(self.prompt)
        decode_s = self.last - self.first
        return GenerationResult(
            prompt_token_ids=self.prompt,
            token_ids=self.generated,
            text=None if self.stream is None else self.stream.text,
            finish_reason=self.finish_reason,
            acceptance_length=(count - 1) / self.calls if self.calls else None,
            timing={
                "prefill_s": self.first - self.admitted,
                "decode_s": decode_s,
                "tokens_per_s": (count - 1) / decode_s if count > 1 and decode_s > 0 else None,
            },
        )


def generate(
    session: Session,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 128,
    sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    drafter: Drafter | None = None,
    draft_len: int | None = None,
    *,
    eos_token_ids: Sequence[int] | None = None,
    stop: Sequence[str] = (),
    tokenizer: Any = None,
    on_tokens: Callable[[int, list[int], str | None], None] | None = None,
) -> list[GenerationResult]:
    """Continue every prompt; any number of prompts shares the session's free slots.

    prompts: token ids. sampling: one for all, or one per prompt; None is greedy.
    drafter, draft_len: speculation with up to draft_len tokens; None takes the engine's max_draft_len.
    eos_token_ids: tokens that end a sequence; None takes the checkpoint's, () ignores them.
    stop: strings that end a sequence; these and result texts need `tokenizer`.
    on_tokens: called with the prompt's index, its new tokens and the text that became final (None without tokenizer).

    Raises ValueError before anything runs if a prompt is empty, too long or not of this vocabulary.
    """
    run = _Run(session, drafter, _checked_draft_len(session, drafter, draft_len), on_tokens)
    run.end_tokens = frozenset(session.engine.eos_token_ids if eos_token_ids is None else eos_token_ids)
    if stop and tokenizer is None:
        raise ValueError("stop strings need a tokenizer")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    params = [sampling or SamplingParams()] * len(prompts) if not isinstance(sampling, Sequence) else list(sampling)
    if len(params) != len(prompts):
        raise ValueError(f"expected one SamplingParams per prompt ({len(prompts)}), got {len(params)}")
    requests = []
    for index, prompt in enumerate(prompts):
        tokens = [int(token) for token in prompt]
        room = _check_prompt(session, index, tokens)
        stream = None if tokenizer is None else TextStream(tokenizer, stop)
        requests.append(_Request(index, tokens, params[index], min(max_new_tokens, room), stream))
    run(requests)
    return [request.result() for request in requests]


def _checked_draft_len(session: Session, drafter: Drafter | None, draft_len: int | None) -> int:
    limit = session.settings.max_window - 1
    if drafter is None:
        return 0
    if limit == 0:
        raise ValueError("the engine was built without drafts: rebuild it with --max-draft-len")
    if draft_len is None:
        return limit
    if not 1 <= draft_len <= limit:
        raise ValueError(f"draft_len must be between 1 and the engine's max_draft_len {limit}, got {draft_len}")
    return draft_len


def _check_prompt(session: Session, index: int, tokens: list[int]) -> int:
    """Tokens that may follow the prompt."""
    if not tokens:
        raise ValueError(f"prompt {index} is empty: it needs at least one token")
    limit = session.settings.max_seq_len
    if len(tokens) >= limit:
        raise ValueError(
            f"prompt {index} has {len(tokens)} tokens, but the engine's max_seq_len is {limit} with the output: "
            "shorten the prompt or rebuild the engine with a larger --max-seq-len"
        )
    check_token_ids(tokens, session.engine.vocab_size)
    return limit - len(tokens)


class _Run:
    """The loop: admit, draft, one mixed step, sample, accept."""

    def __init__(
        self,
        session: Session,
        drafter: Drafter | None,
        draft_len: int,
        on_tokens: Callable[[int, list[int], str | None], None] | None,
    ) -> None:
        self.session = session
        self.drafter = drafter
        self.draft_len = draft_len
        self.on_tokens = on_tokens
        self.end_tokens: frozenset[int] = frozenset()

    def __call__(self, requests: Sequence[_Request]) -> None:
        waiting, running = deque(requests), []
        if waiting and not self.session.free_slots:
            raise ValueError("the session has no free slot")
        try:
            while waiting or running:
                while waiting and self.session.free_slots:
                    running.append(self._admit(waiting.popleft()))
                self._step(running)
                for request in [request for request in running if request.finish_reason]:
                    running.remove(request)
                    self._retire(request)
        finally:
            for request in running:
                self._retire(request)

    def _admit(self, request: _Request) -> _Request:
        request.slot = self.session.allocate()
        request.plan = deque(self.session.prefill_plan(request.prompt))
        request.tokens = list(request.prompt)
        request.admitted = time.perf_counter()
        return request

    def _retire(self, request: _Request) -> None:
        self.session.free(request.slot)
        if self.drafter is not None:
            self.drafter.release(request.slot)

    def _step(self, running: list[_Request]) -> None:
        self._propose([request for request in running if not request.plan])
        rows = [self._row(request) for request in running]
        result = self.session.step(rows)
        choices = self._choose(running, rows, result)
        committed = {}
        for index, (request, row) in enumerate(zip(running, rows, strict=True)):
            new, stands = choices[index], len(row.tokens)
            if request.plan:
                request.plan.popleft()
            else:
                request.calls += 1
                stands = len(new)
            if len(row.tokens) <= self.session.settings.max_window:
                committed[row.slot] = stands
            request.fed += stands
            if self.drafter is not None:
                hidden_states = result.row_hidden_states(index)[:stands]
                self.drafter.observe(row.slot, row.tokens[:stands], hidden_states)
            if new:
                self._take(request, new)
        self.session.advance(committed)

    def _propose(self, decoding: list[_Request]) -> None:
        for request in decoding:
            request.draft = Draft([])
        if self.drafter is None:
            return
        # A window yields one token more than its drafts, so the last remaining token needs no draft.
        asking = [(request, min(self.draft_len, request.remaining - 1)) for request in decoding]
        asking = [(request, count) for request, count in asking if count > 0]
        wanted = [DraftRequest(request.slot, request.tokens, count) for request, count in asking]
        if wanted:
            for (request, count), draft in zip(asking, self.drafter.draft(wanted), strict=True):
                probs = None if draft.probs is None else draft.probs[:count]
                request.draft = Draft(list(draft.tokens[:count]), probs)

    def _row(self, request: _Request) -> Row:
        if not request.plan:
            return Row(request.slot, [request.tokens[-1], *request.draft.tokens], "all")
        end = request.fed + request.plan[0]
        return Row(request.slot, request.prompt[request.fed : end], "last" if end == len(request.prompt) else "none")

    def _choose(self, running: list[_Request], rows: list[Row], result: StepResult) -> list[list[int]]:
        """New tokens of each row: none while a prompt has chunks left, otherwise what its window yields."""
        owners = [
            (request, request.fed + len(row.tokens) - (span.stop - span.start) + 1 + offset)
            for request, row, span in zip(running, rows, result.logits_spans, strict=True)
            for offset in range(span.stop - span.start)
        ]
        if not owners:
            return [[] for _ in rows]
        batch = SamplingBatch(
            [request.params for request, _ in owners], [position for _, position in owners], result.logits.device
        )
        targets = sample(result.logits, batch).tolist()
        choices = []
        for index, request in enumerate(running):
            span = result.logits_spans[index]
            if request.draft.probs is not None and len(rows[index].tokens) > 1 and not request.plan:
                choices.append(self._reject(request, result.row_logits(index)))
            elif span.start == span.stop:
                choices.append([])
            else:
                drafts = [] if request.plan else request.draft.tokens
                choices.append(accept_matching(drafts, targets[span]))
        return choices

    def _reject(self, request: _Request, logits: torch.Tensor) -> list[int]:
        positions = range(len(request.tokens), len(request.tokens) + logits.shape[0])
        batch = SamplingBatch([request.params] * logits.shape[0], positions, logits.device)
        accept = uniform(batch.seeds, batch.positions, Purpose.ACCEPT)
        return accept_rejection(
            request.draft.tokens,
            request.draft.probs,
            probabilities(logits, batch),
            accept[:-1],
            batch.uniform(Purpose.TOKEN),
        )

    def _take(self, request: _Request, new: list[int]) -> None:
        """Append a window's tokens up to the first that ends the sequence, and report them."""
        ended = next((i for i, token in enumerate(new) if token in self.end_tokens), None)
        kept = new if ended is None else new[: ended + 1]
        text = None
        if request.stream is not None:
            text = request.stream.push(kept)
            if request.stream.stopped:
                kept = kept[: request.stream.count - (len(request.tokens) - len(request.prompt))]
        request.tokens += kept
        now = time.perf_counter()
        request.first = request.first or now
        request.last = now
        if ended is not None or (request.stream is not None and request.stream.stopped):
            request.finish_reason = "stop"
        elif request.remaining <= 0:
            request.finish_reason = "length"
        if request.finish_reason and request.stream is not None:
            text += request.stream.finish()
        if self.on_tokens is not None:
            self.on_tokens(request.index, kept, text)
