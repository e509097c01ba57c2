"""What drafts cost on this device: steps of the real engine, timed with every number of drafts and rising batches."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate

from replayssm.runtime.draft_length import DraftCosts
from replayssm.runtime.requests import Request
from replayssm.runtime.scheduler import Scheduler, SchedulerOptions
from replayssm.runtime.session import Session
from replayssm.runtime.speculation import Committed, Draft, Drafter, DraftRequest, observes

REPEATS = 5
BATCH_RATIO = 4


class _FullLength:
    """A drafter whose drafts always have the length that was asked for, so that each number of drafts is timed."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter, self.observes = drafter, observes(drafter)

    def observe(self, committed: Sequence[Committed]) -> None:
        self._drafter.observe(committed)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = self._drafter.draft(requests)
        return [
            Draft((draft.tokens + [0] * request.max_tokens)[: request.max_tokens])
            for draft, request in zip(drafts, requests, strict=True)
        ]

    def release(self, slot: int) -> None:
        self._drafter.release(slot)


def measure_draft_costs(
    session: Session, drafter: Drafter, draft_len: int, clock: Callable[[], float] = time.perf_counter
) -> DraftCosts:
    """Times of whole scheduler steps, proposals and choice included, with 0 to draft_len drafts a row.

    Batches are 1, 4, 16, ... and all of the session's slots, which must be free. A time is the least of REPEATS steps
    after a warm one: other work on the machine can only add to it, and the rare rewrite of the state is left out, whose
    cost per token is the same for every number of drafts. One more draft never counts as less. Raises ValueError
    where max_seq_len leaves no room for that many steps.
    """
    if session.free_slots < session.slots:
        raise ValueError("drafts are measured before requests arrive: the session has slots in use")
    batches = [1]
    while batches[-1] * BATCH_RATIO < session.slots:
        batches.append(batches[-1] * BATCH_RATIO)
    batches = sorted({*batches, session.slots})
    seconds = (
        accumulate((_step_seconds(session, drafter, batch, count, clock) for count in range(draft_len + 1)), max)
        for batch in batches
    )
    return DraftCosts(tuple(batches), tuple(map(tuple, seconds)))


def _step_seconds(session: Session, drafter: Drafter, batch: int, count: int, clock: Callable[[], float]) -> float:
    full = _FullLength(drafter) if count else None
    scheduler = Scheduler(session, full, SchedulerOptions(draft_len=count or None))
    # Longer than a window, so that there is a checkpoint to read.
    prompt = [0] * (session.settings.max_window + 2)
    room = session.settings.max_seq_len - len(prompt)
    requests = [
        scheduler.submit(Request.create(session, prompt, max(room, 1), end_tokens=(), name="the measurement"))
        for _ in range(batch)
    ]
    times = []
    try:
        while len(times) < 1 + REPEATS:
            is_timed = all(request.calls for request in requests)
            started = clock()
            scheduler.step()
            if any(request.finish_reason for request in requests):
                break
            if is_timed:
                times.append(clock() - started)
    finally:
        scheduler.close()
    if len(times) < 2:
        raise ValueError(
            f"max_seq_len {session.settings.max_seq_len} is too short to measure {count} drafts: "
            f"{session.engine.how_to_lengthen}, or leave --adaptive-drafts out"
        )
    return min(times[1:])
