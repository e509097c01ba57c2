"""Continuous batching: requests come, share a session's slots step by step, and go.

Every step is one mixed call: each decoding request has a row of its last token and its drafts, and prompts move on by
whole chunks as far as the token budget and the spread of flushes (`flush_phase`) allow. A chunk is never cut
differently because of other requests, so a request's windows, and with them its tokens, are those it has alone; only
draft lengths may follow its own history and the batch. The scheduler belongs to one thread; `engine_loop` is the door
for others.

Without drafts every token of a window stands, and a captured step leaves its choices on the device. So the next step
starts before the host has read those of the last one, and what the host does costs the device no time. A request that
turns out to have ended then runs once more, and nobody looks at what it gives. Drafts that the host makes need those
choices; where many requests run, they take turns in two halves, and the device computes one while the host is busy with
the other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from replayssm.runtime.choice import Choice, choose
from replayssm.runtime.cuda_graphs import LAST_CHOSEN
from replayssm.runtime.draft_length import AdaptiveDraftLength
from replayssm.runtime.flush_phase import FlushPhases, next_history
from replayssm.runtime.prefix_cache import PrefixCache, Snapshot
from replayssm.runtime.program import Finish
from replayssm.runtime.requests import Request, Swapped
from replayssm.runtime.scheduler_options import QueueFullError, SchedulerOptions, SchedulerStats
from replayssm.runtime.session import Row, Session, StepResult
from replayssm.runtime.speculation import Committed, Draft, Drafter, DraftRequest, observes

__all__ = ["QueueFullError", "Scheduler", "SchedulerOptions", "SchedulerStats", "checked_draft_len"]

_NO_DRAFT = Draft([])
HALVED_ROWS = 128
"""Decoding rows from which drafting requests run in two halves. Fewer do not outweigh reading the weights twice."""
GATHERED_ROWS, GATHERED_STEPS = 64, 8
"""Beside so many decoding rows of captured steps, chunks of prompts gather for so many steps. They are not captured:
launching their operators keeps the host busy for some 35 ms (H200, Nano-4B) however many they are, while a captured
step of 256 rows takes the device 9.5."""


@dataclass(frozen=True)
class _Started:
    """A step that the device computes. positions: tokens of each request's sequence before its window."""

    requests: list[Request]
    rows: list[Row]
    positions: list[int]
    finish: Finish

    def of(self, indices: Sequence[int]) -> _Started:
        """The same step, with these of its rows only."""
        columns = ([column[i] for i in indices] for column in (self.requests, self.rows, self.positions))
        return _Started(*columns, self.finish)


class Scheduler:
    """First come, first served over a session's free slots. See `SchedulerOptions`."""

    def __init__(
        self,
        session: Session,
        drafter: Drafter | None = None,
        options: SchedulerOptions | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.session = session
        self.options = options or SchedulerOptions()
        self.draft_len = checked_draft_len(session, drafter, self.options.draft_len)
        self.max_num_tokens = _checked_budget(session, self.options.max_num_tokens)
        self.prefix_cache = PrefixCache(self.options.prefix_cache_bytes, session.prefill_chunk)
        self.stats = SchedulerStats()
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.swapped_requests = 0
        self.swapped_bytes = 0
        self._drafter, self._acceptance = drafter, AdaptiveDraftLength.for_all()
        self._started: _Started | None = None
        self._chunk_step = -GATHERED_STEPS
        self._clock = clock
        self._numbers = 0
        self._mean_duration = 1.0

    # Requests

    def submit(self, request: Request) -> Request:
        """Queue a request. Raises QueueFullError if max_queue requests wait already."""
        self.check_room(0)
        request.number, request.submitted = self._numbers, self._clock()
        self._numbers += 1
        if self._drafter is not None and self.options.draft_costs is not None:
            request.draft_length = AdaptiveDraftLength(self._acceptance)
        self.waiting.append(request)
        return request

    def check_room(self, arriving: int) -> None:
        """QueueFullError unless one more request may wait beside those here and `arriving` others."""
        limit = self.options.max_queue
        waiting = arriving + len(self.waiting) - self.swapped_requests
        if limit is not None and waiting >= limit:
            raise QueueFullError(waiting, max(1.0, self._mean_duration * waiting / self.session.slots))

    def cancel(self, request: Request, reason: str = "cancelled", error: str | None = None) -> None:
        """End a request wherever it is; one that has ended stays as it was."""
        if request.finish_reason is not None:
            return
        if request in self.running:
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            self._drop_swapped(request)
        else:
            raise ValueError("the request was not submitted here")
        request.end(reason, error)

    def preempt(self, request: Request) -> None:
        """Move a running request to host memory and to the end of the queue; it continues bit-identically."""
        if request not in self.running:
            raise ValueError("only a running request can be preempted")
        self._catch_up()
        if request.finish_reason is not None:
            return
        request.swapped = Swapped(self.session.save(request.slot), self._snapshot_drafter(request.slot))
        self._leave(request)
        # In this order, so that a reader in another thread never counts too few waiting requests.
        self.waiting.append(request)
        self.swapped_requests += 1
        self.swapped_bytes += len(request.swapped.blob)
        request.preemptions += 1
        self.stats.preemptions += 1

    def close(self, reason: str = "cancelled", error: str | None = None) -> None:
        """End every request."""
        for request in [*self.running, *self.waiting]:
            self.cancel(request, reason, error)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def report(self) -> dict[str, Any]:
        """Counts and levels, for metrics."""
        return {
            **asdict(self.stats),
            "waiting": len(self.waiting),
            "running": len(self.running),
            "slots": self.session.slots,
            "free_slots": self.session.free_slots,
            "state_bytes": self.session.state_bytes,
            "swapped_requests": self.swapped_requests,
            "swapped_bytes": self.swapped_bytes,
            "prefix_cache_bytes": self.prefix_cache.bytes,
            "prefix_cache_hits": self.prefix_cache.hits,
            "prefix_cache_misses": self.prefix_cache.misses,
        }

    # A step

    def step(self) -> bool:
        """Admit, start one mixed step and settle it, or the one before where steps run ahead. False if there was
        nothing to do.

        Raises what the session, the drafter or a callback raises; running requests cannot go on then, so close.
        """
        self._expire()
        self._share()
        self._admit()
        halves = self._takes_halves()
        requests = self._select(halves)
        last, self._started = self._started, None
        runs_ahead = self._may_run_ahead(requests)
        started = self._start_step(requests, runs_ahead) if requests else None
        if last is not None:
            self._finish_step(last)
        if started is not None and runs_ahead and (self._drafter is None or halves):
            self._started = started
        elif started is not None:
            self._finish_step(started)
        return started is not None or last is not None

    def _start_step(self, requests: list[Request], chosen_only: bool) -> _Started:
        self._propose([request for request in requests if not request.plan])
        rows, positions = [_row(request) for request in requests], [request.fed for request in requests]
        if self.session.can_run_ahead:
            finish = self.session.start_step(rows, chosen_only)
        else:
            result = self.session.step(rows)
            finish = lambda: result  # noqa: E731
        self.stats.steps += 1
        if self._drafter is None:
            self._advance(requests, rows, [len(row.tokens) for row in rows])
        return _Started(requests, rows, positions, finish)

    def _may_run_ahead(self, requests: list[Request]) -> bool:
        """Whether nothing but the choices of a step of these requests is wanted, and others may start before them."""
        if not self.session.can_run_ahead or not (self._drafter is None or getattr(self._drafter, "on_host", False)):
            return False
        return not any(
            request.processor is not None
            or request.logprobs is not None
            or (request.snapshots and request.plan and request.fed + request.plan[0] in request.snapshots)
            for request in requests
        )

    def _takes_halves(self) -> bool:
        """Whether drafting requests take turns in two halves: all of them may run ahead then, so none falls behind."""
        if self._drafter is None or len(self.running) < HALVED_ROWS:
            return False
        decoding = sum(not request.plan for request in self.running)
        # Chunks of prompts would run beside one half only, and it is the host that they keep busy.
        has_chunks = any(request.plan and self._is_chunk(request) for request in self.running)
        if decoding < HALVED_ROWS or (has_chunks and self._chunks_are_due(decoding)):
            return False
        return self._may_run_ahead(self.running)

    def _is_chunk(self, request: Request) -> bool:
        """Whether a prompt's next window is longer than captured steps take."""
        return request.plan[0] > self.session.settings.max_window

    def _chunks_are_due(self, decoding: int) -> bool:
        """Whether chunks of prompts may run beside so many decoding rows in this step."""
        if decoding < GATHERED_ROWS or not self.session.can_run_ahead:
            return True
        return self.stats.steps - self._chunk_step >= GATHERED_STEPS

    def _catch_up(self) -> None:
        """Settle the step that runs ahead, if there is one."""
        last, self._started = self._started, None
        if last is not None:
            self._finish_step(last)

    def _finish_step(self, step: _Started) -> None:
        result = step.finish()
        choices = choose(step.requests, step.rows, result, step.positions)
        if self._drafter is not None:
            # Who ended meanwhile has no slot any more.
            going_on = [index for index, request in enumerate(step.requests) if request.finish_reason is None]
            if len(going_on) < len(step.requests):
                choices = [choices[index] for index in going_on]
                step = step.of(going_on)
            stands = [
                len(row.tokens) if request.plan or choice.error is not None else len(choice.tokens)
                for request, row, choice in zip(step.requests, step.rows, choices, strict=True)
            ]
            self._count_drafts(step, stands, choices)
            self._advance(step.requests, step.rows, stands)
        now = self._clock()
        for request, position, choice in zip(step.requests, step.positions, choices, strict=True):
            if request.finish_reason is not None:
                continue
            if choice.error is not None:
                request.end("error", choice.error)
            elif choice.tokens:
                if position >= len(request.prompt):
                    request.calls += 1
                    self.stats.decode_calls += 1
                before = request.generated_count
                request.take(choice.tokens, choice.logprobs, now)
                self.stats.generated_tokens += request.generated_count - before
        if self._drafter is not None and observes(self._drafter):
            self._observe(step, stands, result)
        for request in step.requests:
            if request.finish_reason is not None:
                if request.slot >= 0:
                    self._leave(request)
            elif request.snapshots and request.fed in request.snapshots and request.plan:
                self._keep_snapshot(request)

    def _expire(self) -> None:
        now = self._clock()
        for request in [*self.running, *self.waiting]:
            if request.deadline is not None and now >= request.deadline:
                self.cancel(request, "timeout")

    def _share(self) -> None:
        """Preempt whoever has had its time slice, if someone waits for the slot."""
        if self.options.time_slice is None:
            return
        short = len(self.waiting) - self.session.free_slots
        if short <= 0:
            return
        had = [r for r in self.running if self.stats.steps - r.slice_start >= self.options.time_slice]
        for request in sorted(had, key=lambda request: request.slice_start)[:short]:
            if self.swapped_bytes >= self.options.swap_bytes:
                return
            if request.finish_reason is None:
                self.preempt(request)

    def _admit(self) -> None:
        while self.waiting and self.session.free_slots:
            request = self.waiting[0]
            if request.swapped is None:
                self._start(request)
            else:
                request.slot = self.session.load(request.swapped.blob)
                self._restore_drafter(request.slot, request.swapped.drafter)
                self._drop_swapped(request)
            self.waiting.popleft()
            request.served = request.slice_start = self.stats.steps
            self.running.append(request)

    def _start(self, request: Request) -> None:
        request.plan = deque(self.session.prefill_plan(request.prompt))
        snapshot, request.snapshots = self.prefix_cache.lookup(request.prompt, len(request.prompt) - request.plan[-1])
        if snapshot is None:
            request.slot = self.session.allocate()
        else:
            request.slot = self.session.load(snapshot.blob)
            self._restore_drafter(request.slot, snapshot.drafter)
            request.fed = request.cached_tokens = snapshot.seq_len
            request.history = snapshot.history
            for _ in range(snapshot.seq_len // self.session.prefill_chunk):
                request.plan.popleft()
            self.stats.cached_tokens += snapshot.seq_len
        request.admitted = self._clock()

    def _select(self, halves: bool) -> list[Request]:
        """Every decoding request that is not in a step, at most half of all where they take turns, and prompts in turn
        as far as the budget and the spread of flushes allow."""
        running = self.running
        if self._drafter is not None and self._started is not None:
            busy = set(map(id, self._started.requests))
            running = [request for request in running if id(request) not in busy]
        decoding = [request for request in running if not request.plan and request.remaining > request.unread]
        if halves:
            decoding = decoding[: -(-len(self.running) // 2)]
        budget = self.max_num_tokens - len(decoding) * (1 + self.draft_len)
        buffer_len = self.session.settings.buffer_len
        pace = 1 + self.stats.accepted_tokens / max(self.stats.decode_calls, 1)
        prompts = sorted((r for r in running if r.plan), key=lambda r: (r.served, r.number))
        if not self._chunks_are_due(len(decoding)):
            prompts = [request for request in prompts if not self._is_chunk(request)]
        if not prompts:
            return decoding
        phases = FlushPhases((request.history for request in decoding), len(running), buffer_len, pace)
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
            request.served = self.stats.steps + 1
            prefilling.append(request)
        if any(self._is_chunk(request) for request in prefilling):
            self._chunk_step = self.stats.steps
        return [*decoding, *prefilling]

    def _propose(self, decoding: list[Request]) -> None:
        if self._drafter is None:
            return
        asking = []
        costs = self.options.draft_costs
        costs = None if costs is None else costs.relative(len(decoding))[: self.draft_len + 1]
        draws = self.options.draft_sampling
        for request in decoding:
            request.draft = _NO_DRAFT
            limit = self.draft_len if request.draft_length is None else request.draft_length.choose(costs)
            # A window yields one token more than its drafts, so the last remaining token needs no draft.
            count = min(limit, request.remaining - 1)
            if count > 0:
                params = request.params if draws and not request.params.is_greedy else None
                asking.append((request, DraftRequest(request.slot, request.tokens, count, params)))
        if not asking:
            return
        drafts = self._drafter.draft([wanted for _, wanted in asking])
        for (request, wanted), draft in zip(asking, drafts, strict=True):
            count = wanted.max_tokens
            if len(draft.tokens) > count:
                draft = Draft(draft.tokens[:count], None if draft.probs is None else draft.probs[:count])
            request.draft = draft

    def _advance(self, requests: Sequence[Request], rows: Sequence[Row], stands: Sequence[int]) -> None:
        """Let the first stands[i] tokens of each row's window stand."""
        longest, buffer_len = self.session.settings.max_window, self.session.settings.buffer_len
        tentative = {}
        for request, row, count in zip(requests, rows, stands, strict=True):
            window = len(row.tokens)
            if request.plan:
                request.plan.popleft()
                self.stats.prompt_tokens += window
            if window <= longest:
                tentative[row.slot] = count
            request.fed += count
            if buffer_len:
                history = next_history(request.history, window, buffer_len)
                request.history = 0 if window > longest else history + count
        self.session.advance(tentative)

    def _count_drafts(self, step: _Started, stands: Sequence[int], choices: Sequence[Choice]) -> None:
        for request, row, count, choice in zip(step.requests, step.rows, stands, choices, strict=True):
            if request.plan or choice.error is not None:
                continue
            drafted = len(row.tokens) - 1
            request.drafted += drafted
            self.stats.drafted_tokens += drafted
            self.stats.accepted_tokens += count - 1
            if request.draft_length is not None:
                request.draft_length.observe(drafted, count - 1)

    def _observe(self, step: _Started, stands: Sequence[int], result: StepResult) -> None:
        """Tell the drafter what stands, of the requests that go on."""
        self._drafter.observe(
            [
                Committed(row.slot, list(row.tokens[:count]), result.row_hidden_states(index)[:count])
                for index, (request, row, count) in enumerate(zip(step.requests, step.rows, stands, strict=True))
                if request.finish_reason is None
            ]
        )

    # Slots

    def _keep_snapshot(self, request: Request) -> None:
        known = self._snapshot_drafter(request.slot)
        snapshot = Snapshot(request.fed, self.session.save(request.slot), known, request.history)
        self.prefix_cache.store(request.prompt, snapshot)

    def _leave(self, request: Request) -> None:
        """Take a request off its slot."""
        self.running.remove(request)
        self.session.free(request.slot)
        if self._drafter is not None:
            self._drafter.release(request.slot)
        request.slot = -1
        if request.finish_reason is not None:
            duration = self._clock() - request.admitted
            self._mean_duration += 0.1 * (duration - self._mean_duration)

    def _drop_swapped(self, request: Request) -> None:
        if request.swapped is not None:
            self.swapped_requests -= 1
            self.swapped_bytes -= len(request.swapped.blob)
            request.swapped = None

    def _snapshot_drafter(self, slot: int) -> object:
        snapshot = getattr(self._drafter, "snapshot", None)
        return None if snapshot is None else snapshot(slot)

    def _restore_drafter(self, slot: int, known: object) -> None:
        if known is not None:
            self._drafter.restore(slot, known)


def _row(request: Request) -> Row:
    if not request.plan:
        token = LAST_CHOSEN if request.unread else request.tokens[-1]
        return Row(request.slot, [token, *request.draft.tokens], "all", request.params)
    end = request.fed + request.plan[0]
    wanted = "last" if end == len(request.prompt) else "none"
    return Row(request.slot, request.prompt[request.fed : end], wanted, request.params)


def checked_draft_len(session: Session, drafter: Drafter | None, draft_len: int | None) -> int:
    """Drafts per call, 0 without a drafter. ValueError for what the engine's windows cannot hold."""
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


def _checked_budget(session: Session, max_num_tokens: int | None) -> int:
    """Tokens of a step; at least what lets a prompt move on while all other slots decode."""
    least = (session.slots - 1) * session.settings.max_window + max(session.prefill_chunk, session.settings.max_window)
    if max_num_tokens is None:
        return max(8192, least)
    if max_num_tokens < least:
        raise ValueError(
            f"max_num_tokens {max_num_tokens} is less than the {least} tokens of one prompt chunk "
            f"({session.prefill_chunk}) beside {session.slots - 1} decoding slots: raise it, or use fewer slots"
        )
    return max_num_tokens
