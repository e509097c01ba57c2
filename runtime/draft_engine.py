"""Drafts from a second, smaller engine of the same vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from replayssm.runtime.engine import Engine
from replayssm.runtime.session import PREFILL_CHUNK, Row, Session
from replayssm.runtime.speculation import Committed, Draft, DraftRequest, propose

CATCH_UP_TOKENS = 8192
"""Tokens of one step of the draft session while it reads prompts."""


@dataclass
class _Sequence:
    """A request's slot in the draft session, the tokens that stand in it, and the window that ran behind them."""

    slot: int
    fed: int = 0
    window: list[int] = field(default_factory=list)


class EngineDrafter:
    """Proposes what a small model says.

    Proposals are tentative in the draft session too: each next one comes from running the window of the last token and
    the proposals so far again, one token longer, and the part of it that the target takes stands by an integer. Needs
    as many slots as the target session has, and nothing but a request's tokens, so sequences may move between slots.
    """

    observes = False

    def __init__(self, engine: Engine, target: Session, device: torch.device | str = "cpu") -> None:
        if engine.vocab_size != target.engine.vocab_size:
            raise ValueError(
                f"the draft engine's vocabulary has {engine.vocab_size} tokens, the target's "
                f"{target.engine.vocab_size}: both must come from the same tokenizer"
            )
        if engine.manifest.replay.is_baseline:
            raise ValueError("a draft engine runs windows again, which buffer_len 0 cannot: build it with --buffer-len")
        self._session = Session(engine, target.slots, device, PREFILL_CHUNK)
        self._sequences: dict[int, _Sequence] = {}

    @property
    def session(self) -> Session:
        """Where the draft model runs."""
        return self._session

    def observe(self, committed: Sequence[Committed]) -> None:
        pass

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """Up to max_draft_len + 1 proposals of the draft engine per request; none past its max_seq_len."""
        settings = self._session.settings
        drafts = [Draft([]) for _ in requests]
        within = [index for index, request in enumerate(requests) if len(request.tokens) <= settings.max_seq_len]
        self._settle([requests[index] for index in within])
        windows = {index: list(requests[index].tokens[self._known(requests[index]).fed :]) for index in within}
        room = {
            index: min(
                requests[index].max_tokens,
                settings.max_window - len(window) + 1,
                settings.max_seq_len - len(requests[index].tokens) + 1,
            )
            for index, window in windows.items()
        }
        active = [index for index in windows if room[index] > 0]
        while active:
            rows = []
            for index in active:
                known = self._known(requests[index])
                known.window = [*windows[index], *drafts[index].tokens]
                rows.append(Row(known.slot, known.window))
            logits = self._session.step(rows).logits
            propose(logits, [requests[index] for index in active], [drafts[index] for index in active])
            active = [index for index in active if len(drafts[index].tokens) < room[index]]
        return drafts

    def release(self, slot: int) -> None:
        known = self._sequences.pop(slot, None)
        if known is not None:
            self._session.free(known.slot)

    def _known(self, request: DraftRequest) -> _Sequence:
        known = self._sequences.get(request.slot)
        if known is None:
            known = self._sequences[request.slot] = _Sequence(self._session.allocate())
        return known

    def _settle(self, requests: Sequence[DraftRequest]) -> None:
        """Let everything that is certain stand in the draft session, except what each next window has room for."""
        for request in requests:
            known = self._known(request)
            # The last token has to run again in any case: its logits are what the first proposal comes from.
            certain = request.tokens[known.fed : len(request.tokens) - 1]
            stands = 0
            while stands < min(len(known.window), len(certain)) and known.window[stands] == certain[stands]:
                stands += 1
            self._advance(known, stands)
        # A window has room for the last token and for what the target chose itself; more than that goes first.
        room = min(2, self._session.settings.max_window)
        at_once = max(1, CATCH_UP_TOKENS // PREFILL_CHUNK)
        while behind := [r for r in requests if len(r.tokens) - self._known(r).fed > room]:
            self._read([(r, self._known(r)) for r in behind[:at_once]])

    def _read(self, pairs: Sequence[tuple[DraftRequest, _Sequence]]) -> None:
        """Run the next chunk of each of these sequences in one step."""
        rows = [
            Row(known.slot, request.tokens[known.fed : min(known.fed + PREFILL_CHUNK, len(request.tokens) - 1)], "none")
            for request, known in pairs
        ]
        self._session.step(rows)
        for row, (_, known) in zip(rows, pairs, strict=True):
            if len(row.tokens) <= self._session.settings.max_window:
                self._advance(known, len(row.tokens))
            else:
                known.fed, known.window = known.fed + len(row.tokens), []

    def _advance(self, known: _Sequence, count: int) -> None:
        if known.window or count:
            self._session.advance({known.slot: count})
        known.fed, known.window = known.fed + count, []
