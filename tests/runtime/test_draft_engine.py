"""A second engine as the drafter: exact proposals, unchanged output, nothing committed that the target did not take."""

from __future__ import annotations

import random

import pytest
import torch

from replayssm.runtime.draft_engine import EngineDrafter
from replayssm.runtime.generation import generate
from replayssm.runtime.requests import Request
from replayssm.runtime.scheduler import Scheduler, SchedulerOptions
from replayssm.runtime.session import Session
from replayssm.runtime.speculation import DraftRequest


def random_prompts(*lengths):
    choose = random.Random(0)
    return [[choose.randrange(300) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize(("target", "draft"), [("nano", "nano"), ("qwen", "nano"), ("super", "qwen")])
def test_output_is_that_without_drafts(tiny_engine, target, draft):
    """float64, so batch shapes do not move choices. A model that drafts for itself is always right."""
    engine = tiny_engine(target)
    session = Session(engine, slots=2)
    prompts = random_prompts(3, 40, 17)
    plain = generate(session, prompts, 30, eos_token_ids=())
    drafter = EngineDrafter(tiny_engine(draft), session)
    results = generate(session, prompts, 30, drafter=drafter, eos_token_ids=())
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    if target == draft:
        assert [result.acceptance_length for result in results] == [29 / 8] * 3
    assert drafter.session.free_slots == 2


@pytest.mark.parametrize("layout", ["nano", "qwen"])
def test_proposals_are_the_draft_models_continuation(tiny_engine, layout):
    """Whatever the target takes of each draft, or if it goes on without one, the next one is what the draft model says
    about the whole sequence. In float64, and by logits too: a small model's likeliest token seldom depends on a token
    that was rejected."""
    engine = tiny_engine(layout)
    drafter = EngineDrafter(engine, Session(engine, slots=3))
    logits, step = {}, drafter.session.step

    def recorded(rows):
        result = step(rows)
        for row, values in zip(rows, result.logits, strict=False):
            logits.setdefault(row.slot, values)
        return result

    drafter.session.step = recorded
    choose = random.Random(1)
    tokens = dict(enumerate(random_prompts(1, 9, 30)))
    for turn in range(12):
        asked = [slot for slot in tokens if (turn + slot) % 4]
        logits.clear()
        drafts = drafter.draft([DraftRequest(slot, tokens[slot], 1 + (turn + slot) % 3) for slot in asked])
        for slot, draft in zip(asked, drafts, strict=True):
            plain = generate(Session(engine, slots=1), [tokens[slot]], 1 + (turn + slot) % 3, eos_token_ids=())[0]
            assert draft.tokens == plain.token_ids
            alone = Session(engine, slots=1)
            first = logits[drafter._sequences[slot].slot]
            torch.testing.assert_close(first, alone.prefill(alone.allocate(), tokens[slot]), rtol=1e-10, atol=1e-10)
            tokens[slot] += draft.tokens[: choose.randrange(len(draft.tokens) + 1)]
            tokens[slot].append(choose.randrange(300))
        for slot in tokens.keys() - set(asked):  # a step without drafts
            tokens[slot].append(choose.randrange(300))
    drafter.release(1)
    drafter.release(1)
    assert drafter.session.free_slots == 1
    tokens[1] = [5, 6]
    (draft,) = drafter.draft([DraftRequest(1, tokens[1], 2)])
    assert draft.tokens == generate(Session(engine, slots=1), [[5, 6]], 2, eos_token_ids=())[0].token_ids


def test_preemption_and_prefix_reuse(tiny_engine):
    engine = tiny_engine("nano")
    session = Session(engine, slots=2, prefill_chunk=8)
    drafter = EngineDrafter(engine, session)
    scheduler = Scheduler(session, drafter, SchedulerOptions(time_slice=2, prefix_cache_bytes=1 << 24))
    prompts = [[*range(20), index] for index in range(5)]
    requests = [scheduler.submit(Request.create(session, prompt, 12, end_tokens=())) for prompt in prompts]
    while scheduler.step():
        pass
    plain = generate(Session(engine, slots=2), prompts, 12, eos_token_ids=())
    assert [request.generated for request in requests] == [result.token_ids for result in plain]
    assert scheduler.stats.preemptions > 0
    assert scheduler.stats.cached_tokens > 0
    assert drafter.session.free_slots == 2


def test_a_draft_engine_without_windows(tiny_engine):
    """max_draft_len 0: one proposal at a time, in every turn."""
    engine, single = tiny_engine("nano"), tiny_engine("nano", max_draft_len=0)
    session = Session(engine, slots=1)
    (result,) = generate(session, random_prompts(20), 31, drafter=EngineDrafter(single, session), eos_token_ids=())
    assert result.acceptance_length == 2.0


def test_short_draft_engine(tiny_engine):
    """Sequences past the draft engine's max_seq_len get no drafts, and windows longer than its own fewer."""
    target = tiny_engine("nano")
    short = tiny_engine("nano", max_seq_len=24, max_draft_len=1)
    session = Session(target, slots=1)
    drafter = EngineDrafter(short, session)
    prompts = random_prompts(20)
    (result,) = generate(session, prompts, 30, drafter=drafter, eos_token_ids=())
    assert result.token_ids == generate(session, prompts, 30, eos_token_ids=())[0].token_ids
    assert 1.0 < result.acceptance_length < 2.0
    assert drafter.draft([DraftRequest(0, list(range(24)), 3), DraftRequest(0, list(range(25)), 3)])[1].tokens == []


def test_bad_engines(tiny_engine):
    session = Session(tiny_engine("nano"), slots=1)
    with pytest.raises(ValueError, match="buffer_len 0 cannot"):
        EngineDrafter(tiny_engine("nano", buffer_len=0), session)
    other = Session(tiny_engine("nano"), slots=1)
    other.engine = type("Other", (), {"vocab_size": 7})()
    with pytest.raises(ValueError, match="both must come from the same tokenizer"):
        EngineDrafter(tiny_engine("nano"), other)
