"""The draft head proposes what it would propose from scratch, whatever was accepted, rejected, forked or redone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from replayssm.runtime.requests import Request
from replayssm.runtime.scheduler import Scheduler
from replayssm.runtime.session import DraftRow, Row, Session
from replayssm.runtime.speculation import Committed, DraftRequest, MtpDrafter

LAYOUTS = ("nano", "super", "qwen", "qwen_moe")

# float64 matmuls of different batch shapes differ by rounding, some 1e-16 relative per layer; logits are of order 1.
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
"""float64 logits of order 1: sums in another order differ by some 1e-15."""


def draft_from_scratch(engine, tokens, count):
    """(drafts, logits [count, vocab]) of the head run over the whole sequence at once; the last token has not been
    through the model."""
    session = Session(engine, slots=1)
    slot = session.allocate()
    hidden_states = session.step([Row(slot, tokens[:-1], "none")]).hidden_states
    row, drafts, logits = DraftRow(slot, tokens[1:], 0, hidden_states), [], []
    for index in range(count):
        result = session.draft_step([row])
        drafts.append(int(result.logits[0].argmax()))
        logits.append(result.logits[0])
        row = DraftRow(slot, drafts[-1:], len(tokens) - 1 + index, result.hidden_states[-1:])
    return drafts, torch.stack(logits)


class Sequences:
    """Several sequences in one session, moved forward with drafts that are accepted at random."""

    def __init__(self, engine, lengths, prefill_chunk=16):
        self.engine = engine
        self.session = Session(engine, prefill_chunk=prefill_chunk)
        self.drafter = MtpDrafter(self.session)
        self.choose = random.Random(3)
        self.tokens = {}
        self.logits = []
        run = self.session.draft_step
        self.session.draft_step = lambda rows: self.recorded(run(rows), rows)
        for length in lengths:
            slot = self.session.allocate()
            prompt = [self.choose.randrange(300) for _ in range(length)]
            self.tokens[slot] = []
            for count in self.session.prefill_plan(prompt):
                self.run(slot, prompt[:count], count)
                prompt = prompt[count:]
            self.tokens[slot].append(self.choose.randrange(300))

    def recorded(self, result, rows):
        self.logits += [(row.slot, logits) for row, logits in zip(rows, result.logits, strict=True)]
        return result

    def run(self, slot, window, accepted):
        """A window whose first `accepted` tokens stand."""
        result = self.session.step([Row(slot, window, "none")])
        if len(window) <= self.session.settings.max_window:
            self.session.advance({slot: accepted})
        self.drafter.observe([Committed(slot, window[:accepted], result.row_hidden_states(0)[:accepted])])
        self.tokens[slot] += window[:accepted]

    def draft_and_compare(self, counts):
        requests = [DraftRequest(slot, self.tokens[slot], count) for slot, count in counts.items() if count]
        self.logits = []
        drafts = self.drafter.draft(requests)
        for request, draft in zip(requests, drafts, strict=True):
            expected, logits = draft_from_scratch(self.engine, request.tokens, request.max_tokens)
            ours = torch.stack([value for slot, value in self.logits if slot == request.slot])
            torch.testing.assert_close(ours, logits, **CLOSE)
            assert draft.tokens == expected
            assert draft.probs is None
        return {request.slot: draft.tokens for request, draft in zip(requests, drafts, strict=True)}

    def verify(self, slot, drafts):
        """Some of the drafts stand; then a token that the model might have chosen instead."""
        window = [self.tokens[slot][-1], *drafts]
        self.tokens[slot].pop()
        accepted = 1 + self.choose.randrange(len(window))
        self.run(slot, window, accepted)
        self.tokens[slot].append(self.choose.randrange(300))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_equal_those_from_scratch(tiny_engine, layout):
    """Prompts of one token, one chunk and several; ragged draft lengths, some of them zero for several turns."""
    sequences = Sequences(tiny_engine(layout), (1, 5, 50))
    for turn in range(8):
        counts = {slot: (turn * 5 + slot) % 4 for slot in sequences.tokens}
        drafts = sequences.draft_and_compare(counts)
        for slot in sequences.tokens:
            sequences.verify(slot, drafts.get(slot, []))


def test_many_tokens_between_two_drafts(tiny_engine):
    """A sequence that was not drafted for a while has its hidden states worked off in between."""
    sequences = Sequences(tiny_engine("qwen"), (20,))
    for _ in range(9):
        sequences.verify(0, [1, 2, 3])
        assert sum(map(len, sequences.drafter._slots[0].hidden_states)) <= 5
    sequences.draft_and_compare({0: 3})


def test_a_draft_that_is_asked_for_again(tiny_engine):
    sequences = Sequences(tiny_engine("super"), (9,))
    first = sequences.draft_and_compare({0: 3})
    assert sequences.draft_and_compare({0: 3}) == first
    # Sampled anew, the last token may be another one.
    sequences.tokens[0][-1] = (sequences.tokens[0][-1] + 1) % 300
    sequences.draft_and_compare({0: 2})
    sequences.verify(0, first[0])
    sequences.draft_and_compare({0: 3})


@pytest.mark.parametrize("drafted", [False, True])
def test_snapshots_follow_forks_and_blobs(tiny_engine, drafted):
    sequences = Sequences(tiny_engine("nano"), (30,))
    if drafted:
        sequences.draft_and_compare({0: 2})
    snapshot = sequences.drafter.snapshot(0)
    copies = [sequences.session.fork(0), sequences.session.load(sequences.session.save(0))]
    for copy in copies:
        sequences.drafter.restore(copy, snapshot)
        sequences.tokens[copy] = [*sequences.tokens[0][:-1], sequences.choose.randrange(300)]
    for _ in range(3):
        drafts = sequences.draft_and_compare(dict.fromkeys(sequences.tokens, 3))
        for slot in sequences.tokens:
            sequences.verify(slot, drafts[slot])


def test_a_released_slot_starts_anew(tiny_engine):
    engine = tiny_engine("nano")
    sequences = Sequences(engine, (30,))
    sequences.draft_and_compare({0: 3})
    sequences.drafter.release(0)
    sequences.session.free(0)
    slot = sequences.session.allocate()
    assert slot == 0
    sequences.tokens[slot] = []
    sequences.run(slot, [5, 6, 7], 3)
    sequences.tokens[slot].append(9)
    sequences.draft_and_compare({slot: 3})


def test_an_engine_without_a_head(tiny_engine):
    engine = tiny_engine("nano")
    bare = replace(engine, networks={"main": engine.networks["main"]})
    with pytest.raises(ValueError, match="no draft head"):
        MtpDrafter(Session(bare, slots=1))


def test_prompts_go_through_the_head_together(tiny_engine):
    """One call of the head per step of the model, however many prompts are read; what it learns is the same."""
    engine = tiny_engine("nano")
    prompts = [[(7 * index + i) % 300 for i in range(70)] for index in range(4)]
    session = Session(engine, slots=4, prefill_chunk=16)
    calls, run = [], session.draft_step
    session.draft_step = lambda rows: calls.append(sorted(row.slot for row in rows)) or run(rows)
    scheduler = Scheduler(session, MtpDrafter(session))
    requests = [scheduler.submit(Request.create(session, prompt, 20, end_tokens=())) for prompt in prompts]
    for _ in range(4):
        scheduler.step()
    assert calls == [[0, 1, 2, 3]] * 4
    while scheduler.step():
        pass
    for request, prompt in zip(requests, prompts, strict=True):
        single = Session(engine, slots=1, prefill_chunk=16)
        alone = Scheduler(single, MtpDrafter(single))
        same = alone.submit(Request.create(single, prompt, 20, end_tokens=()))
        while alone.step():
            pass
        assert (request.generated, request.calls) == (same.generated, same.calls)
