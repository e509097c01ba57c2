"""A scheduler's drafts: who is asked for how many, and how they fare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replayssm.runtime.choice import Choice
from replayssm.runtime.draft_length import AdaptiveDraftLength
from replayssm.runtime.requests import Request
from replayssm.runtime.scheduler_options import SchedulerOptions, SchedulerStats
from replayssm.runtime.session import Row, Session, StepResult
from replayssm.runtime.speculation import Committed, Draft, Drafter, DraftRequest, observes

_NO_DRAFT = Draft([])


class Drafting:
    """What a scheduler does with its drafter; without one, no request has drafts and nothing needs to be known.

    draft_len: drafts of a window at most. observes: the drafter wants to know what is committed. on_host: it can
    propose while the device computes a step of other sequences.
    """

    def __init__(
        self, session: Session, drafter: Drafter | None, options: SchedulerOptions, stats: SchedulerStats
    ) -> None:
        self.draft_len = checked_draft_len(session, drafter, options.draft_len)
        self.observes = drafter is not None and observes(drafter)
        self.on_host = getattr(drafter, "on_host", False)
        self._drafter, self._options, self._stats = drafter, options, stats
        self._acceptance = AdaptiveDraftLength.for_all()

    def __bool__(self) -> bool:
        return self._drafter is not None

    def begin(self, request: Request) -> None:
        """A request that was submitted."""
        if self and self._options.draft_costs is not None:
            request.draft_length = AdaptiveDraftLength(self._acceptance)

    def propose(self, decoding: Sequence[Request], rows: int) -> None:
        """Give each of these requests its draft for the next window, unless it has it already.

        rows: about as many as will share the step.
        """
        if not self:
            return
        asking = []
        costs = self._options.draft_costs
        costs = None if costs is None else costs.relative(rows)[: self.draft_len + 1]
        draws = self._options.draft_sampling
        for request in decoding:
            if request.drafted_behind == len(request.tokens):
                continue
            request.draft, request.drafted_behind = _NO_DRAFT, len(request.tokens)
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

    def count(
        self, requests: Sequence[Request], rows: Sequence[Row], stands: Sequence[int], choices: Sequence[Choice]
    ) -> None:
        """How the drafts of these rows fared: the first stands[i] tokens of each stand."""
        for request, row, count, choice in zip(requests, rows, stands, choices, strict=True):
            if request.plan or choice.error is not None:
                continue
            drafted = len(row.tokens) - 1
            request.drafted += drafted
            self._stats.drafted_tokens += drafted
            self._stats.accepted_tokens += count - 1
            if request.draft_length is not None:
                request.draft_length.observe(drafted, count - 1)

    def observe(
        self, requests: Sequence[Request], rows: Sequence[Row], stands: Sequence[int], result: StepResult
    ) -> None:
        """Tell the drafter what stands, of the requests that go on."""
        self._drafter.observe(
            [
                Committed(row.slot, list(row.tokens[:count]), result.row_hidden_states(index)[:count])
                for index, (request, row, count) in enumerate(zip(requests, rows, stands, strict=True))
                if request.finish_reason is None
            ]
        )

    # Slots

    def snapshot(self, slot: int) -> Any:
        """What is known about a slot, for `restore`."""
        snapshot = getattr(self._drafter, "snapshot", None)
        return None if snapshot is None else snapshot(slot)

    def restore(self, slot: int, known: Any) -> None:
        if known is not None:
            self._drafter.restore(slot, known)

    def release(self, slot: int) -> None:
        if self:
            self._drafter.release(slot)


def checked_draft_len(session: Session, drafter: Drafter | None, draft_len: int | None) -> int:
    """Drafts per call, 0 without a drafter. ValueError for what the engine's windows cannot hold."""
    limit = session.settings.max_window - 1
    if drafter is None:
        return 0
    if limit == 0:
        raise ValueError("the engine was built without drafts: choose --draft none, or build it with --max-draft-len")
    if draft_len is None:
        return limit
    if not 1 <= draft_len <= limit:
        raise ValueError(f"draft_len must be between 1 and the engine's max_draft_len {limit}, got {draft_len}")
    return draft_len
