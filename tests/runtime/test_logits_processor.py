"""Penalties, biases and least lengths act as their formulas say, at every position of a window, and on one request."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from replayssm.runtime.choice import choose
from replayssm.runtime.logits_processor import LogitRules, LogitsProcessor
from replayssm.runtime.requests import Request
from replayssm.runtime.sampling import SamplingParams
from replayssm.runtime.scheduler import Scheduler, SchedulerOptions
from replayssm.runtime.session import Session
from replayssm.runtime.speculation import MtpDrafter, NgramDrafter

PROMPT = [3, 1, 4, 1, 5]


def by_formula(logits, prompt, generated, rules, end_tokens=()):
    """Token by token, as the definitions read."""
    changed = logits.double().tolist()
    counts = Counter(generated)
    for token in {*prompt, *generated}:
        factor = 1 / rules.repetition_penalty if changed[token] > 0 else rules.repetition_penalty
        changed[token] *= factor
    for token, count in counts.items():
        changed[token] -= rules.presence_penalty + count * rules.frequency_penalty
    for token, bias in rules.logit_bias.items():
        changed[token] += bias
    for token in end_tokens if len(generated) < rules.min_tokens else ():
        changed[token] = float("-inf")
    return torch.tensor(changed, dtype=torch.float64)


@pytest.mark.parametrize(
    "rules",
    [
        LogitRules(presence_penalty=0.7),
        LogitRules(frequency_penalty=-0.3),
        LogitRules(repetition_penalty=1.8),
        LogitRules(logit_bias={2: 100.0, 3: -4.0}),
        LogitRules(min_tokens=4),
        LogitRules(0.5, 0.25, 0.8, {1: 1.0}, 2),
    ],
)
def test_every_row_follows_the_formula(rules):
    generator = torch.Generator().manual_seed(0)
    processor = LogitsProcessor(PROMPT, rules, [0, 9])
    generated, drafts = [], [1, 7, 7]
    for taken in ([], [7], [1, 1, 8]):
        assert processor.accept(taken) == len(taken)
        generated += taken
        logits = torch.randn(4, 12, generator=generator)
        before = logits.clone()
        changed = processor.process(logits, drafts)
        for row in range(4):
            expected = by_formula(logits[row], PROMPT, [*generated, *drafts[:row]], rules, [0, 9])
            # fp32 against float64 on values below 100: two or three roundings of 2^-24 relative.
            torch.testing.assert_close(changed[row].double(), expected, rtol=0, atol=2e-5)
        assert torch.equal(logits, before)
        assert torch.equal(processor.process(logits, drafts), changed)  # nothing was taken


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"presence_penalty": 2.5}, r"presence_penalty must be in \[-2, 2\]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be a finite number above 0"),
        ({"logit_bias": {3: 101.0}}, "got 101.0 for token 3"),
        ({"min_tokens": -1}, "min_tokens must be at least 0"),
    ],
)
def test_bad_rules(options, message):
    with pytest.raises(ValueError, match=message):
        LogitRules(**options)


def run(session, drafter, rules, params=None, count=24, beside=0, end_tokens=()):
    """A processed request's tokens, with `beside` plain requests in the same steps."""
    scheduler = Scheduler(session, drafter, SchedulerOptions(time_slice=5))
    choose_prompt = random.Random(1)
    request = Request.create(
        session, PROMPT, count, params, end_tokens=end_tokens, processor=LogitsProcessor(PROMPT, rules, end_tokens)
    )
    plain = [
        Request.create(session, [choose_prompt.randrange(300) for _ in range(9)], count, end_tokens=())
        for _ in range(beside)
    ]
    for each in (request, *plain):
        scheduler.submit(each)
    while scheduler.step():
        pass
    return request, plain


@pytest.mark.parametrize("params", [None, SamplingParams(temperature=0.6, seed=5)])
def test_drafts_preemption_and_company_change_nothing(tiny_engine, params):
    """float64 logits become fp32 for the rules on every path alike."""
    engine = tiny_engine("nano")
    rules = LogitRules(1.5, 0.5, 1.3, {7: 2.0})
    alone, _ = run(Session(engine, slots=1), None, rules, params)
    unruled, _ = run(Session(engine, slots=1), None, LogitRules(), params)
    assert alone.generated != unruled.generated
    for drafter in (lambda s: None, lambda s: NgramDrafter(), MtpDrafter):
        session = Session(engine, slots=2)
        request, plain = run(session, drafter(session), rules, params, beside=3)
        assert request.generated == alone.generated
        assert request.preemptions > 0
        for other in plain:
            single = Scheduler(one := Session(engine, slots=1))
            same = single.submit(Request.create(one, other.prompt, other.max_tokens, end_tokens=()))
            while single.step():
                pass
            assert other.generated == same.generated


def test_penalties_biases_and_least_lengths_are_seen_in_the_output(tiny_engine):
    session = Session(tiny_engine("nano"), slots=1)
    never_again, _ = run(
        session, None, LogitRules(logit_bias={}, presence_penalty=2.0, frequency_penalty=2.0), count=40
    )
    plain, _ = run(session, None, LogitRules(), count=40)
    assert len(set(never_again.generated)) > len(set(plain.generated))
    biased, _ = run(session, None, LogitRules(logit_bias={42: 100.0}))
    assert set(biased.generated) == {42}
    end = plain.generated[0]
    short, _ = run(session, None, LogitRules(), end_tokens=[end])
    longer, _ = run(session, None, LogitRules(min_tokens=5), end_tokens=[end])
    assert (short.generated_count, short.finish_reason) == (1, "stop")
    assert longer.generated_count >= 5
    assert end not in longer.generated[:5]


def test_logprobs_are_the_models_own(tiny_engine):
    session = Session(tiny_engine("nano"), slots=1)
    updates = []
    options = {"end_tokens": (), "logprobs": 1, "on_update": lambda r, u: updates.append(u)}
    rules = LogitRules(logit_bias={42: 100.0})
    scheduler = Scheduler(session)
    request = scheduler.submit(Request.create(session, PROMPT, 2, processor=LogitsProcessor(PROMPT, rules), **options))
    while scheduler.step():
        pass
    slot = session.allocate()
    expected = session.prefill(slot, PROMPT).float().log_softmax(dim=0)
    (value, *_) = [value for update in updates for value in update.logprobs]
    assert value.token == request.generated[0] == 42
    assert value.logprob == pytest.approx(float(expected[42]), abs=1e-5), "fp32 of numbers near 6"
    assert value.top[0][0] == int(expected.argmax())


@pytest.mark.parametrize("kind", [ValueError, IndexError])
def test_a_grammar_that_breaks_ends_its_request_only(tiny_engine, kind):
    class Broken:
        finished = False

        def allowed(self, drafts, count):
            raise kind("the grammar cannot go on: too complex")

        def accept(self, tokens):
            return len(tokens)

    session = Session(tiny_engine("nano"), slots=2)
    scheduler = Scheduler(session)
    bad = scheduler.submit(Request.create(session, PROMPT, 5, processor=LogitsProcessor(PROMPT, grammar=Broken())))
    good = scheduler.submit(Request.create(session, PROMPT, 5, end_tokens=()))
    while scheduler.step():
        pass
    assert (bad.finish_reason, bad.error) == ("error", "the grammar cannot go on: too complex")
    assert good.finish_reason == "length"
    assert choose([], [], type("Empty", (), {"logits_spans": (), "chosen": ([], [])})(), []) == []
