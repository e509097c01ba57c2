"""Continuous batching: requests come, share a session's slots step by step, and go.

Every step is one mixed call of those whom `step_selection` names: each decoding request has a row of its last token and
its drafts (`drafting`), each prompt that moves on has one of its next chunk. A request's windows, and with them its
tokens, are those it has alone; only draft lengths may follow its own history and the batch. The scheduler belongs to
one thread; `engine_loop` is the door for others.

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

from replayssm.plugins.step_ends import LAST_CHOSEN
from replayssm.runtime.choice import choose
from replayssm.runtime.drafting import Drafting
from replayssm.runtime.flush_phase import next_history
from replayssm.runtime.prefix_cache import PrefixCache, Snapshot
from replayssm.runtime.requests import FinishReason, Request, Swapped
from replayssm.runtime.scheduler_options import QueueFullError, SchedulerOptions, SchedulerStats
from replayssm.runtime.session import Row, Session
from replayssm.runtime.speculation import Drafter
from replayssm.runtime.step_rows import Finish
from replayssm.runtime.step_selection import StepSelection

__all__ = ["QueueFullError", "Scheduler", "SchedulerOptions", "SchedulerStats"]


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
        self.stats = SchedulerStats()
        self._drafting = Drafting(session, drafter, self.options, self.stats)
        self._selection = StepSelection(session, self._drafting, self.stats, self.options.max_num_tokens)
        self.draft_len, self.max_num_tokens = self._drafting.draft_len, self._selection.max_num_tokens
        self.prefix_cache = PrefixCache(self.options.prefix_cache_bytes, session.prefill_chunk)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.swapped_requests = 0
        self.swapped_bytes = 0
        self._started: _Started | None = None
        self._clock = clock
        self._numbers = 0
        self._mean_duration = 1.0

    # Requests

    def submit(self, request: Request) -> Request:
        """Queue a request. Raises QueueFullError if max_queue requests wait already."""
        self.check_room(0)
        request.number, request.submitted = self._numbers, self._clock()
        self._numbers += 1
        self._drafting.begin(request)
        self.waiting.append(request)
        return request

    def check_room(self, arriving: int) -> None:
        """QueueFullError unless one more request may wait beside those here and `arriving` others."""
        limit = self.options.max_queue
        waiting = arriving + len(self.waiting) - self.swapped_requests
        if limit is not None and waiting >= limit:
            raise QueueFullError(waiting, max(1.0, self._mean_duration * waiting / self.session.slots))

    def cancel(self, request: Request, reason: FinishReason = "cancelled", error: str | None = None) -> None:
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
        request.swapped = Swapped(self.session.save(request.slot), self._drafting.snapshot(request.slot))
        self._leave(request)
        # In this order, so that a reader in another thread never counts too few waiting requests.
        self.waiting.append(request)
        self.swapped_requests += 1
        self.swapped_bytes += len(request.swapped.blob)
        request.preemptions += 1
        self.stats.preemptions += 1

    def close(self, reason: FinishReason = "cancelled", error: str | None = None) -> None:
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
        halves = self._selection.takes_halves(self.running)
        # Without drafts all of a step's tokens stand, so its requests may be in the next one too.
        busy = self._started.requests if self._drafting and self._started is not None else ()
        requests = self._selection.select(self.running, busy, halves)
        last, self._started = self._started, None
        runs_ahead = self._selection.may_run_ahead(requests)
        started = self._start_step(requests, runs_ahead) if requests else None
        if last is not None:
            self._finish_step(last)
        if started is not None and runs_ahead and (halves or not self._drafting):
            self._started = started
        elif started is not None:
            self._finish_step(started)
        return started is not None or last is not None

    def _start_step(self, requests: list[Request], chosen_only: bool) -> _Started:
        decoding = [request for request in requests if not request.plan]
        self._drafting.propose(decoding, len(decoding))
        rows, positions = [_row(request) for request in requests], [request.fed for request in requests]
        if self.session.can_run_ahead:
            finish = self.session.start_step(rows, chosen_only)
        else:
            result = self.session.step(rows)
            finish = lambda: result  # noqa: E731
        self.stats.steps += 1
        if not self._drafting:
            self._advance(requests, rows, [len(row.tokens) for row in rows])
        return _Started(requests, rows, positions, finish)

    def _catch_up(self) -> None:
        """Settle the step that runs ahead, if there is one."""
        last, self._started = self._started, None
        if last is not None:
            self._finish_step(last)

    def _finish_step(self, step: _Started) -> None:
        result = step.finish()
        choices = choose(step.requests, step.rows, result, step.positions)
        if self._drafting:
            # Who ended meanwhile has no slot any more.
            going_on = [index for index, request in enumerate(step.requests) if request.finish_reason is None]
            if len(going_on) < len(step.requests):
                choices = [choices[index] for index in going_on]
                step = step.of(going_on)
            stands = [
                len(row.tokens) if request.plan or choice.error is not None else len(choice.tokens)
                for request, row, choice in zip(step.requests, step.rows, choices, strict=True)
            ]
            self._drafting.count(step.requests, step.rows, stands, choices)
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
                self.stats.generated_tokens += request.take(choice.tokens, choice.logprobs, now)
        if self._drafting.observes:
            self._drafting.observe(step.requests, step.rows, stands, result)
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
                self._drafting.restore(request.slot, request.swapped.drafter)
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
            self._drafting.restore(request.slot, snapshot.drafter)
            request.fed = request.cached_tokens = snapshot.seq_len
            request.history = snapshot.history
            for _ in range(snapshot.seq_len // self.session.prefill_chunk):
                request.plan.popleft()
            self.stats.cached_tokens += snapshot.seq_len
        request.admitted = self._clock()

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

    # Slots

    def _keep_snapshot(self, request: Request) -> None:
        known = self._drafting.snapshot(request.slot)
        snapshot = Snapshot(request.fed, self.session.save(request.slot), known, request.history)
        self.prefix_cache.store(request.prompt, snapshot)

    def _leave(self, request: Request) -> None:
        """Take a request off its slot."""
        self.running.remove(request)
        self.session.free(request.slot)
        self._drafting.release(request.slot)
        request.slot = -1
        if request.finish_reason is not None:
            duration = self._clock() - request.admitted
            self._mean_duration += 0.1 * (duration - self._mean_duration)

    def _drop_swapped(self, request: Request) -> None:
        if request.swapped is not None:
            self.swapped_requests -= 1
            self.swapped_bytes -= len(request.swapped.blob)
            request.swapped = None


def _row(request: Request) -> Row:
    if not request.plan:
        token = LAST_CHOSEN if request.unread else request.tokens[-1]
        return Row(request.slot, [token, *request.draft.tokens], "all", request.params)
    end = request.fed + request.plan[0]
    wanted = "last" if end == len(request.prompt) else "none"
    return Row(request.slot, request.prompt[request.fed : end], wanted, request.params)
