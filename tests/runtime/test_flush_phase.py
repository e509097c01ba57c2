"""Staggered flushes (design rule 10): of a batch admitted together, at most 2 / L of the rows fold in a step."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from replayssm.runtime.flush_phase import FlushPhases, next_history
from replayssm.runtime.generation import generate
from replayssm.runtime.requests import Request
from replayssm.runtime.scheduler import Scheduler
from replayssm.runtime.session import Session

BUFFER_LEN, ROWS, LIMIT = 8, 24, 6


def checkpoints(session):
    """Checkpoint position of every slot, as the first recurrent layer holds it."""
    state = next(s for s in session.states.values() if "checkpoint_position" in s.tensors)
    return state["checkpoint_position"].flatten(1)[:, 0].tolist()


@pytest.mark.parametrize("layout", ["nano", "qwen"])
@pytest.mark.parametrize("max_draft_len", [0, 3])
@pytest.mark.parametrize("prompts", ["equal", "different"])
def test_a_batch_admitted_together_does_not_flush_together(tiny_engine, layout, max_draft_len, prompts):
    """Counted where it happens, in the layers' own checkpoint positions. Equal prompts leave equal tails."""
    choose = random.Random(3)
    texts = [[choose.randrange(300) for _ in range(9)] for _ in range(ROWS)]
    texts = [texts[0]] * ROWS if prompts == "equal" else texts
    engine = tiny_engine(layout, max_batch_size=ROWS, max_draft_len=max_draft_len)
    session = Session(engine, prefill_chunk=8)
    scheduler = Scheduler(session)
    requests = [scheduler.submit(Request.create(session, text, 3 * BUFFER_LEN, end_tokens=())) for text in texts]
    most, steps = 0, 0
    while len(scheduler.running) == ROWS or not steps:
        decoding = [request.slot for request in scheduler.running if not request.plan]
        before = checkpoints(session)
        scheduler.step()
        steps += 1
        after = checkpoints(session)
        most = max(most, sum(before[slot] != after[slot] for slot in decoding))
        for request in scheduler.running:  # the scheduler's own count is the layers' one
            if not request.plan:
                assert request.history == request.fed - after[request.slot]
    assert 0 < most <= LIMIT
    # Everybody began within one cycle: the tail of the last waited for less than L steps.
    assert min(request.generated_count for request in requests) >= 2 * BUFFER_LEN
    while scheduler.step():
        pass
    alone = generate(Session(engine, 1, prefill_chunk=8), texts[:1], 3 * BUFFER_LEN, eos_token_ids=())[0].token_ids
    assert requests[0].generated == alone
    if prompts == "equal":
        assert all(request.generated == alone for request in requests)


@given(st.integers(1, 16), st.lists(st.integers(1, 6), min_size=1, max_size=80))
@example(3, [4, 1])  # a tail longer than L folds at once
def test_any_batch_is_spread_within_one_cycle(buffer_len, waiting):
    """A model of the steps: rows of one token a step, tails of any length, whoever is held back asks again."""
    histories, rows = [], len(waiting)
    limit = max(1, 2 * rows // buffer_len)
    for step in range(4 * buffer_len):
        phases = FlushPhases(histories, rows, buffer_len)
        started, held = [], []
        for tail in waiting:
            (started if phases.admit(tail) else held).append(tail)
        flushing = sum(history > 0 and history + 1 > buffer_len for history in histories)
        assert flushing <= limit
        histories = [next_history(history, 1, buffer_len) + 1 for history in histories] + started
        waiting = held
        assert step < buffer_len - 1 or not waiting
        assert not waiting or histories  # so that a step always moves on


def test_nobody_waits_longer_than_a_cycle(tiny_engine, monkeypatch):
    """Where drafts stand in lockstep there may never be room; a tail then runs all the same."""
    monkeypatch.setattr(FlushPhases, "admit", lambda *arguments: False)
    session = Session(tiny_engine("nano"), 4, prefill_chunk=8)
    scheduler = Scheduler(session)
    requests = [scheduler.submit(Request.create(session, [1, 2, 3, index], 30, end_tokens=())) for index in range(4)]
    for _ in range(BUFFER_LEN + 2):  # a first chunk, L steps of waiting, the tail
        scheduler.step()
    assert all(not request.plan for request in requests)


def test_drafts_that_stand_make_room():
    """Rows that take two tokens a step fold twice as often, whatever is done: twice as many may fold together."""
    phases = [FlushPhases([], 24, BUFFER_LEN, pace) for pace in (1.0, 2.0)]
    assert [sum(each.admit(1) for _ in range(24)) for each in phases] == [6, 12]


def test_the_plain_recurrence_holds_nobody_back():
    phases = FlushPhases([0] * 5, 5, 0)
    assert all(phases.admit(1) for _ in range(20))
