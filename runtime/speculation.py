"""Speculative decoding: who proposes tokens, and which proposals stand.

A drafter proposes tokens for the positions behind a sequence's last token; one verify window of the model gives the
model's own choice at each of them. A proposal without probabilities stands if the model's choice at its position is
the same token. That rule is exact for sampling too: the choice is drawn from the model's distribution p whatever was
proposed, so the output has distribution p, and it equals plain sampling token for token under the same seed. A
proposal drawn from a distribution q goes through rejection sampling (Leviathan et al., ICML 2023; Chen et al., 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from replayssm.runtime.sampling import Purpose, SamplingBatch, SamplingParams, draw, probabilities
from replayssm.runtime.session import DraftRow, Session


@dataclass(slots=True)
class Draft:
    """Proposed tokens and, where they were drawn at random, the distributions [len(tokens), V] they came from."""

    tokens: list[int]
    probs: torch.Tensor | None = None


@dataclass(slots=True)
class DraftRequest:
    """A sequence that wants a draft.

    tokens: the whole sequence; its last token has not been through the model yet.
    max_tokens: most tokens that may be proposed.
    params: how a drafter with a model draws its proposals, which then come with probabilities; None: greedily.
    """

    slot: int
    tokens: Sequence[int]
    max_tokens: int
    params: SamplingParams | None = None


@dataclass
class Committed:
    """Tokens that were committed to a slot in one step, and the model's hidden states [len(tokens), hidden] of each."""

    slot: int
    tokens: Sequence[int]
    hidden_states: torch.Tensor | None


class Drafter(Protocol):
    """Proposes tokens. A drafter may keep what it learns about a slot until `release`.

    One that learns nothing from what is committed says so by `observes = False`, and is not told. `on_host = True`: it
    does without the device, so it can propose while that computes a step of other sequences. One whose knowledge
    does not follow from the tokens alone also has `snapshot(slot)` and `restore(slot, snapshot)`, for sequences that
    move to another slot.
    """

    def observe(self, committed: Sequence[Committed]) -> None:
        """Take note of what one step committed, at most one entry per slot."""

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        """One draft per request; it may be empty."""

    def release(self, slot: int) -> None:
        """Forget the slot's sequence."""


def observes(drafter: Drafter) -> bool:
    """Whether the drafter wants to know what is committed."""
    return getattr(drafter, "observes", True)


def propose(logits: torch.Tensor, requests: Sequence[DraftRequest], drafts: Sequence[Draft]) -> list[int]:
    """Append to each draft the next token of a draft model's `logits` [len(requests), V]; returns the tokens.

    A request with params gets a token drawn from them, and the distribution is kept beside it.
    """
    tokens = logits.argmax(dim=1).tolist()
    drawing = [index for index, request in enumerate(requests) if request.params is not None]
    if drawing:
        positions = [len(requests[index].tokens) + len(drafts[index].tokens) for index in drawing]
        batch = SamplingBatch([requests[index].params for index in drawing], positions, logits.device)
        probs = probabilities(logits[drawing], batch)
        for index, row, token in zip(drawing, probs, draw(probs, batch.uniform(Purpose.DRAFT)).tolist(), strict=True):
            tokens[index], known = token, drafts[index].probs
            drafts[index].probs = row[None] if known is None else torch.cat([known, row[None]])
    for draft, token in zip(drafts, tokens, strict=True):
        draft.tokens.append(token)
    return tokens


def accept_matching(draft_tokens: Sequence[int], target_tokens: Sequence[int]) -> list[int]:
    """Tokens that a verify window yields when proposals stand by equality.

    target_tokens: the model's choice after the window's first token and after each draft, one more than the drafts.
    Returns the drafts that stand and the model's next choice: 1 to len(draft_tokens) + 1 tokens.
    """
    if len(target_tokens) != len(draft_tokens) + 1:
        raise ValueError(f"expected {len(draft_tokens) + 1} target tokens, got {len(target_tokens)}")
    targets = list(target_tokens)
    if targets[:-1] == draft_tokens:
        return targets
    accepted = 0
    while accepted < len(draft_tokens) and draft_tokens[accepted] == target_tokens[accepted]:
        accepted += 1
    return targets[: accepted + 1]


def accept_rejection(
    draft_tokens: Sequence[int],
    draft_probs: torch.Tensor,
    target_probs: torch.Tensor,
    accept_uniforms: torch.Tensor,
    token_uniforms: torch.Tensor,
) -> list[int]:
    """Tokens that a verify window yields under rejection sampling; each is distributed as the model's own.

    draft_probs: [k, V], what the k drafts were drawn from. target_probs: [k + 1, V], the model's distributions.
    accept_uniforms: [k] in [0, 1), decide whether a draft stands, with probability min(1, p / q).
    token_uniforms: [k + 1] in [0, 1), draw the replacement of the first draft that falls, from max(p - q, 0)
        normalised, or the token behind the last draft, from p.
    """
    count = len(draft_tokens)
    if draft_probs.shape[0] != count or target_probs.shape[0] != count + 1:
        raise ValueError(
            f"{count} drafts need {count} draft and {count + 1} target distributions, "
            f"got {draft_probs.shape[0]} and {target_probs.shape[0]}"
        )
    tokens = list(draft_tokens)
    for index, token in enumerate(draft_tokens):
        p, q = target_probs[index], draft_probs[index]
        if accept_uniforms[index] * q[token] < p[token]:
            continue
        residual = (p - q).clamp_min(0.0)
        # Rounding can leave no residual where p and q agree; the draft then stood with probability one up to rounding.
        source = residual if bool(residual.sum() > 0) else p
        return [*tokens[:index], int(draw(source[None], token_uniforms[index : index + 1]))]
    return [*tokens, int(draw(target_probs[count][None], token_uniforms[count : count + 1]))]


class _NgramIndex:
    """Where each n-gram of a growing sequence was last followed by something.

    An n-gram is one integer, 32 bits a token: a step of many rows spends most of its time here, and tuples cost twice
    as much. Tokens count from 1 there, so that what lies before the sequence is no token.
    """

    def __init__(self, min_ngram: int, max_ngram: int) -> None:
        self._followers = [((1 << 32 * size) - 1, {}) for size in range(max_ngram, min_ngram - 1, -1)]
        self._indexed = self._last = 0

    def lookup(self, tokens: Sequence[int]) -> int | None:
        """Start of what followed the longest, most recent earlier occurrence of a suffix of `tokens`."""
        last, followers = self._last, self._followers
        longest = followers[0][0]
        for end, token in enumerate(tokens[self._indexed :], self._indexed):
            for mask, starts in followers:
                starts[last & mask] = end
            last = (last << 32 | token + 1) & longest
        self._indexed, self._last = len(tokens), last
        for mask, starts in followers:
            start = starts.get(last & mask)
            if start:
                return start
        return None


class NgramDrafter:
    """Prompt lookup: proposes what followed the sequence's last tokens when they occurred before.

    The longest matching suffix of min_ngram to max_ngram tokens decides, its most recent occurrence first. A copy that
    reaches the end of the sequence goes on with its own proposals, so a repeating pattern is proposed at full length.
    """

    observes, on_host = False, True

    def __init__(self, max_ngram: int = 4, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"expected 1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}")
        self.min_ngram = min_ngram
        self.max_ngram = max_ngram
        self._indices: dict[int, _NgramIndex] = {}

    def observe(self, committed: Sequence[Committed]) -> None:
        pass

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [Draft(self._draft(request)) for request in requests]

    def _draft(self, request: DraftRequest) -> list[int]:
        index = self._indices.get(request.slot)
        if index is None:
            index = self._indices[request.slot] = _NgramIndex(self.min_ngram, self.max_ngram)
        tokens, count = request.tokens, request.max_tokens
        start = index.lookup(tokens)
        if start is None:
            return []
        draft = list(tokens[start : start + count])
        while len(draft) < count:
            draft += draft[: count - len(draft)]
        return draft

    def release(self, slot: int) -> None:
        self._indices.pop(slot, None)


@dataclass
class _MtpSlot:
    """Tokens and hidden states of the committed positions start .. start + len(tokens) - 1, always at least the last.

    The draft head's cache holds the positions before `start`, and `start` itself where `cached` is 1.
    """

    start: int = 0
    cached: int = 0
    tokens: list[int] = field(default_factory=list)
    hidden_states: list[torch.Tensor] = field(default_factory=list)


class MtpDrafter:
    """Proposes with the checkpoint's multi-token prediction head, applied recursively.

    At position p the head reads the model's hidden state of p and token p + 1, and predicts token p + 2; the next
    recursion reads the head's own hidden state and that prediction. What the recursion leaves in the head's cache lies
    behind the committed positions and is overwritten when they are: the head rolls back with the sequence.
    """

    def __init__(self, session: Session) -> None:
        if "mtp" not in session.engine.networks:
            raise ValueError("this engine has no draft head (MTP): choose ngram drafts or none")
        self._session = session
        self._slots: dict[int, _MtpSlot] = {}

    def observe(self, committed: Sequence[Committed]) -> None:
        rows = []
        for entry in committed:
            known = self._slots.setdefault(entry.slot, _MtpSlot())
            known.tokens += entry.tokens
            known.hidden_states.append(entry.hidden_states)
            # The chunks of long prompts go through the head as they come, all of a step at once, so that hidden states
            # do not pile up. The last token's successor is not known yet.
            if len(known.tokens) > 1 + self._session.settings.max_window:
                rows.append(self._catch_up(entry.slot, known, known.tokens[1:]))
                known.cached = 0
        if rows:
            self._session.draft_step(rows)

    def draft(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        drafts = [Draft([]) for _ in requests]
        rows = []
        for request in requests:
            known = self._slots[request.slot]
            rows.append(self._catch_up(request.slot, known, [*known.tokens[1:], request.tokens[-1]]))
        active = list(range(len(requests)))
        while active:
            result = self._session.draft_step(rows)
            tokens = propose(result.logits, [requests[index] for index in active], [drafts[index] for index in active])
            following = []
            for index, row, token, span in zip(active, rows, tokens, result.token_spans, strict=True):
                if len(drafts[index].tokens) < requests[index].max_tokens:
                    hidden_state = result.hidden_states[span][-1:]
                    following.append((index, DraftRow(row.slot, [token], row.position + len(row.tokens), hidden_state)))
            active, rows = [index for index, _ in following], [row for _, row in following]
        return drafts

    def _catch_up(self, slot: int, known: _MtpSlot, successors: list[int]) -> DraftRow:
        """The row that runs the first len(successors) known positions, except one that is in the cache already.

        Only the last known position is kept. A draft that is asked for again runs that one again.
        """
        count, hidden_states = len(successors), torch.cat(known.hidden_states)
        first = min(known.cached, count - 1)
        row = DraftRow(slot, successors[first:], known.start + first, hidden_states[first:count])
        known.start += len(known.tokens) - 1
        known.cached = 1
        known.tokens = known.tokens[-1:]
        known.hidden_states = [hidden_states[-1:].clone()]
        return row

    def snapshot(self, slot: int) -> object:
        """What is known about a slot now, for `restore` beside `Session.fork` or `Session.load`."""
        known = self._slots.get(slot, _MtpSlot())
        # The copy's next token may be another one, so the pair of the last position has to run again.
        return _MtpSlot(known.start, 0, list(known.tokens), list(known.hidden_states))

    def restore(self, slot: int, snapshot: object) -> None:
        """Draft for `slot`, which holds a copy of the sequence that `snapshot` was taken of."""
        known: _MtpSlot = snapshot
        self._slots[slot] = _MtpSlot(known.start, 0, list(known.tokens), list(known.hidden_states))

    def release(self, slot: int) -> None:
        self._slots.pop(slot, None)
