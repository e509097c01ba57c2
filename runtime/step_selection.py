"""Which requests run in a scheduler's next step.

Every decoding request does, or half of them where they take turns, and prompts move on by whole chunks as far as the
token budget and the spread of flushes (`flush_phase`) allow. A chunk is never cut differently because of other
requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from replayssm.runtime.drafting import Drafting
from replayssm.runtime.flush_phase import FlushPhases
from replayssm.runtime.requests import Request
from replayssm.runtime.scheduler_options import SchedulerStats
from replayssm.runtime.session import Session

HALVED_ROWS = 128
"""Decoding rows from which drafting requests run in two halves. Fewer do not outweigh reading the weights twice."""
TURN_ROWS = 16
"""Rows with drafts, or without, for which a half is one of that kind only: windows of one token then do not pay for
those of drafts. H200, Nano-4B, 128 rows: 5.5 ms without drafts, 10.2 with 4, 10.9 where half of them have some."""
GATHERED_ROWS, GATHERED_TOKENS, GATHERED_STEPS = 64, 512, 8
"""Beside so many decoding rows, chunks of prompts gather until they have so many tokens, or for so many steps: the
device reads all weights for them however few they are."""


class StepSelection:
    """max_num_tokens: budget of a step, as `SchedulerOptions` has it."""

    def __init__(self, session: Session, drafting: Drafting, stats: SchedulerStats, max_num_tokens: int | None) -> None:
        self.max_num_tokens = _checked_budget(session, max_num_tokens)
        self._session, self._drafting, self._stats = session, drafting, stats
        self._chunk_step = -GATHERED_STEPS

    def takes_halves(self, running: Sequence[Request]) -> bool:
        """Whether drafting requests take turns in two halves: all of them may run ahead then, so none falls behind."""
        if not self._drafting or len(running) < HALVED_ROWS:
            return False
        decoding = sum(not request.plan for request in running)
        if decoding < HALVED_ROWS or not self.may_run_ahead(running):
            return False
        # Chunks that are not captured would run beside one half only, and it is the host that they keep busy.
        return self._session.captures_prompts or not self._chunks_are_due(decoding, running)

    def may_run_ahead(self, requests: Sequence[Request]) -> bool:
        """Whether nothing but the choices of a step of these requests is wanted, and others may start before them."""
        if not self._session.can_run_ahead or (self._drafting and not self._drafting.on_host):
            return False
        return not any(
            request.processor is not None
            or request.logprobs is not None
            or (request.snapshots and request.plan and request.fed + request.plan[0] in request.snapshots)
            for request in requests
        )

    def select(self, running: Sequence[Request], busy: Sequence[Request], halves: bool) -> list[Request]:
        """Requests of the next step, those that decode first; none that is in `busy`, a step that has not ended."""
        half = -(-len(running) // 2)
        if busy:
            taken = set(map(id, busy))
            running = [request for request in running if id(request) not in taken]
        decoding = [request for request in running if not request.plan]
        if not self._drafting:
            # A step that has started may choose a request's last token.
            decoding = [request for request in decoding if request.remaining > request.unread]
        prompts = sorted((r for r in running if r.plan), key=lambda r: (r.served, r.number))
        if halves:
            self._drafting.propose(decoding, half)
            decoding, undrafted = self._turn(decoding, busy)
            decoding = sorted(decoding, key=lambda r: r.served)[:half]
            if undrafted:
                prompts = [request for request in prompts if self._is_chunk(request) or request.plan[0] == 1]
        for request in decoding:
            request.served = self._stats.steps + 1
        if not self._chunks_are_due(len(decoding), prompts):
            prompts = [request for request in prompts if not self._is_chunk(request)]
        return [*decoding, *self._prompts(prompts, decoding, len(running))] if prompts else decoding

    def _turn(self, decoding: list[Request], busy: Sequence[Request]) -> tuple[list[Request], bool]:
        """(requests of the next half, whether they are those without drafts and the others' turn comes next).

        Those with drafts and those without take turns where they are enough; the rest waits for one step.
        """
        had_drafts = any(request.draft.tokens for request in busy if not request.plan)
        turn = [request for request in decoding if bool(request.draft.tokens) != had_drafts]
        return (turn, had_drafts) if len(turn) >= TURN_ROWS else (decoding, False)

    def _prompts(self, prompts: Sequence[Request], decoding: Sequence[Request], rows: int) -> list[Request]:
        """In turn, as far as the budget and the spread of flushes allow."""
        stats, buffer_len = self._stats, self._session.settings.buffer_len
        budget = self.max_num_tokens - len(decoding) * (1 + self._drafting.draft_len)
        pace = 1 + stats.accepted_tokens / max(stats.decode_calls, 1)
        phases = FlushPhases((request.history for request in decoding), rows, buffer_len, pace)
        prefilling = []
        for request in prompts:
            if request.plan[0] > budget:
                break
            # Somebody decodes where a tail is held back, so a step always moves on.
            if len(request.plan) == 1 and not phases.admit(request.plan[0], request.history):
                request.held += 1
                if request.held <= buffer_len:
                    continue
            budget -= request.plan[0]
            request.served = stats.steps + 1
            prefilling.append(request)
        if any(map(self._is_chunk, prefilling)):
            self._chunk_step = stats.steps
        return prefilling

    def _is_chunk(self, request: Request) -> bool:
        """Whether a prompt's next window is prefill, and not the tail that runs as an ordinary window."""
        return request.plan[0] > self._session.settings.max_window

    def _chunks_are_due(self, decoding: int, requests: Sequence[Request]) -> bool:
        """Whether chunks of prompts among these requests, if any, may run beside so many decoding rows in this step."""
        tokens = sum(request.plan[0] for request in requests if request.plan and self._is_chunk(request))
        if tokens == 0 or decoding < GATHERED_ROWS or not self._session.can_run_ahead:
            return tokens > 0
        gathered = self._session.captures_prompts and tokens >= GATHERED_TOKENS
        return gathered or self._stats.steps - self._chunk_step >= GATHERED_STEPS


def _checked_budget(session: Session, max_num_tokens: int | None) -> int:
    """Tokens of a step; at least what lets a prompt move on while all other slots decode."""
    least = (session.slots - 1) * session.settings.max_window + max(session.prefill_chunk, session.settings.max_window)
    if max_num_tokens is None:
        return max(8192, least)
    if max_num_tokens < least:
        raise ValueError(
            f"max_num_tokens {max_num_tokens} is less than the {least} tokens of one prompt chunk "
            f"({session.prefill_chunk}) beside {session.slots - 1} decoding slots: raise it, or lower --prefill-chunk"
        )
    return max_num_tokens
