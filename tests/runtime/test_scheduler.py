"""The scheduler: whatever arrives, leaves or gives way meanwhile, a request gets the tokens it gets alone."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from replayssm.runtime.draft_engine import EngineDrafter
from replayssm.runtime.draft_length import DraftCosts
from replayssm.runtime.errors import InferenceError
from replayssm.runtime.generation import generate
from replayssm.runtime.logits_processor import LogitRules, LogitsProcessor
from replayssm.runtime.requests import Request
from replayssm.runtime.sampling import SamplingParams
from replayssm.runtime.scheduler import QueueFullError, Scheduler, SchedulerOptions
from replayssm.runtime.serving import with_max_seq_len
from replayssm.runtime.session import Session
from replayssm.runtime.speculation import Draft, MtpDrafter, NgramDrafter

CHUNK = 8
# Drafts cost more in a large batch, so that draft lengths depend on who else is there.
COSTS = DraftCosts((1, 3), ((1.0, 1.05, 1.1, 1.15), (2.0, 2.6, 3.2, 3.8)))
# fp32 differences between batch shapes; test_generation.py derives the number.
FLOAT32_BOUND = 2e-4


def random_prompt(length, seed=0):
    choose = random.Random(1000 * seed + length)
    return [choose.randrange(300) for _ in range(length)]


# Some begin alike for more than one chunk; one repeats itself, so that ngram drafts are proposed.
SHARED = random_prompt(20, seed=9)
PROMPTS = [
    random_prompt(3), random_prompt(37), [7, 8, 9] * 6, [*SHARED, *random_prompt(9)], [*SHARED, *random_prompt(14)],
    [*SHARED, 5], random_prompt(16),
]  # fmt: skip
LENGTHS = [6, 9, 12, 5, 7, 1, 10]


# Some are sampled, one is penalised; drafts that stand by equality change neither.
PARAMS = {1: SamplingParams(temperature=0.7, seed=5), 4: SamplingParams(temperature=1.0, top_k=9, seed=6)}
RULES = {3: LogitRules(presence_penalty=1.0, frequency_penalty=0.5, logit_bias={7: 1.5})}


def make_drafter(name, session, engine=None):
    return {
        "none": lambda: None,
        "ngram": NgramDrafter,
        "mtp": lambda: MtpDrafter(session),
        "engine": lambda: EngineDrafter(engine, session),
    }[name]()


def request_for(session, index, **options):
    processor = LogitsProcessor(PROMPTS[index], RULES[index]) if index in RULES else None
    options = {"end_tokens": (), "params": PARAMS.get(index), "processor": processor, **options}
    return Request.create(session, PROMPTS[index], LENGTHS[index], **options)


@pytest.fixture(scope="module")
def alone(tiny_engine):
    """`alone(layout, **build_options)` -> tokens of every prompt, generated on its own without drafts."""
    known = {}

    def make(layout, **options):
        key = (layout, *sorted(options.items()))
        if key not in known:
            known[key] = []
            for index in range(len(PROMPTS)):
                scheduler = Scheduler(session := Session(tiny_engine(layout, **options), slots=1, prefill_chunk=CHUNK))
                request = scheduler.submit(request_for(session, index))
                while scheduler.step():
                    pass
                known[key].append(request.generated)
        return known[key]

    return make


def interleave(session, drafter, choose, options):
    """Submit every prompt once or twice, and cancel, preempt, time out, refuse and step at random.

    Returns ([(index, request)], the scheduler, how many were refused at first).
    """
    now = [0.0]
    scheduler = Scheduler(session, drafter, options, clock=lambda: now[0])
    todo = [index for index in range(len(PROMPTS)) for _ in range(choose.randrange(1, 3))]
    choose.shuffle(todo)
    requests, refused = [], 0
    while todo or scheduler.has_work:
        for _ in range(choose.randrange(3)):
            if todo:
                index = todo.pop()
                deadline = now[0] + choose.randrange(1, 40) if choose.random() < 0.2 else None
                try:
                    request = scheduler.submit(request_for(session, index, deadline=deadline))
                    requests.append((index, request))
                except QueueFullError:
                    refused += 1
                    todo.insert(0, index)
        if scheduler.running and choose.random() < 0.3:
            scheduler.preempt(choose.choice(scheduler.running))
        if requests and choose.random() < 0.1:
            scheduler.cancel(choose.choice(requests)[1])
        scheduler.step()
        now[0] += 1
        assert session.free_slots == session.slots - len(scheduler.running)
    assert session.free_slots == session.slots
    assert (scheduler.swapped_bytes, scheduler.swapped_requests) == (0, 0)
    return requests, scheduler, refused


def assert_as_alone(requests, expected):
    """Each request has the tokens it has alone, all of them if nobody ended it."""
    for index, request in requests:
        assert request.finish_reason in ("length", "cancelled", "timeout")
        if request.finish_reason == "length":
            assert request.generated == expected[index]
        else:
            assert request.generated == expected[index][: request.generated_count]


@pytest.mark.parametrize("layout", ["nano", "qwen"])
@pytest.mark.parametrize("draft", ["none", "ngram", "mtp", "engine"])
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**20), data=st.data())
def test_any_interleaving_gives_the_tokens_of_a_request_alone(tiny_engine, alone, layout, draft, seed, data):
    """float64, where rounding between batch shapes (some 1e-14) is far below the gaps between logits."""
    buffer_len = data.draw(st.sampled_from([8, 0] if draft == "none" else [8]))
    session = Session(tiny_engine(layout, buffer_len=buffer_len), slots=3, prefill_chunk=CHUNK)
    options = SchedulerOptions(
        max_num_tokens=data.draw(st.sampled_from([20, None])),
        max_queue=data.draw(st.sampled_from([2, None])),
        time_slice=data.draw(st.sampled_from([None, 2])),
        prefix_cache_bytes=data.draw(st.sampled_from([0, 60_000, 1 << 26])),
        draft_costs=data.draw(st.sampled_from([None, COSTS])),
    )
    drafter = make_drafter(draft, session, tiny_engine("nano"))
    requests, _, _ = interleave(session, drafter, random.Random(seed), options)
    assert_as_alone(requests, alone(layout, buffer_len=buffer_len))
    if draft == "engine":
        assert drafter.session.free_slots == 3


@pytest.mark.parametrize("draft", ["mtp", "engine"])
def test_interleavings_meet_everything_at_once(tiny_engine, alone, draft):
    """That what the test above allows does happen: in these runs requests with drafts, some that fall, are preempted,
    start from snapshots, are refused, cancelled and timed out."""
    seen, kinds = Counter(), Counter()
    for seed in range(3):
        session = Session(tiny_engine("nano"), slots=3, prefill_chunk=CHUNK)
        options = SchedulerOptions(time_slice=3, max_queue=2, prefix_cache_bytes=1 << 26)
        drafter = make_drafter(draft, session, tiny_engine("qwen"))
        requests, scheduler, refused = interleave(session, drafter, random.Random(seed), options)
        assert_as_alone(requests, alone("nano"))
        stats = scheduler.stats
        seen.update(
            preempted=stats.preemptions,
            cached=stats.cached_tokens,
            fallen=stats.drafted_tokens - stats.accepted_tokens,
            refused=refused,
        )
        kinds.update(request.finish_reason for _, request in requests)
        kinds["all three"] += sum(bool(r.preemptions and r.cached_tokens and r.drafted) for _, r in requests)
    assert all(seen.values())
    assert all(kinds[name] for name in ("length", "cancelled", "timeout", "all three"))


def test_interleaving_in_float32(tiny_engine, alone, assert_same_tokens):
    engine = tiny_engine("super", dtype="float32")
    expected = alone("super", dtype="float32")
    session = Session(engine, slots=3, prefill_chunk=CHUNK)
    options = SchedulerOptions(time_slice=3, prefix_cache_bytes=1 << 26)
    requests, _, _ = interleave(session, MtpDrafter(session), random.Random(4), options)
    for index, request in requests:
        if index in PARAMS or index in RULES:  # gaps of their logits are not what the rule looks at
            continue
        ours = request.generated
        assert_same_tokens(engine, PROMPTS[index], ours, expected[index][: len(ours)], FLOAT32_BOUND)


@pytest.mark.parametrize("draft", ["none", "ngram", "halves"])
@pytest.mark.parametrize("buffer_len", [8, 0])
def test_interleavings_of_captured_steps(tiny_engine, alone, monkeypatch, draft, buffer_len):
    """Where steps start before the last one was read, cancellation, preemption and ends come too late. halves: drafting
    requests take turns, and rows without a draft run in a step of their own."""
    if draft == "halves":
        draft = "ngram"
        monkeypatch.setattr("replayssm.runtime.step_selection.HALVED_ROWS", 2)
        monkeypatch.setattr("replayssm.runtime.step_selection.TURN_ROWS", 1)
        monkeypatch.setattr("replayssm.runtime.step_selection.GATHERED_ROWS", 1)
        monkeypatch.setattr("replayssm.runtime.program.SPLIT_TOKENS", 1)
    engine = tiny_engine("nano", buffer_len=buffer_len)
    for seed in range(3):
        session = Session(engine, slots=3, prefill_chunk=CHUNK, graphs=True)
        options = SchedulerOptions(max_queue=4, time_slice=5, prefix_cache_bytes=1 << 24)
        requests, scheduler, _ = interleave(session, make_drafter(draft, session), random.Random(seed), options)
        assert_as_alone(requests, alone("nano", buffer_len=buffer_len))
        assert scheduler.stats.preemptions > 0


@pytest.mark.parametrize("buffer_len", [8, 0])
def test_a_step_starts_before_the_last_one_was_read(tiny_engine, alone, buffer_len):
    """Requests end at a token that the next step has already gone past; whoever gets the slot is not disturbed."""
    expected = alone("nano", buffer_len=buffer_len)
    session = Session(tiny_engine("nano", buffer_len=buffer_len), slots=2, prefill_chunk=CHUNK, graphs=True)
    events, start_step = [], session.start_step

    def start(rows, chosen_only):
        events.append("start")
        finish = start_step(rows, chosen_only)
        return lambda: events.append("read") or finish()

    session.start_step = start
    scheduler = Scheduler(session)
    requests = []
    for index in (2, 0, 6, 2, 1):
        tokens = expected[index]
        kept = next((i for i in range(3, len(tokens)) if tokens[i] not in tokens[:i]), len(tokens) - 1)
        request = scheduler.submit(request_for(session, index, end_tokens=[tokens[kept]]))
        requests.append((request, tokens[: kept + 1]))
    while scheduler.step():
        pass
    for request, wanted in requests:
        assert request.generated == wanted
        assert request.acceptance_length == 1.0
    assert session.free_slots == 2
    assert max(len(run) for run in "".join(event[0] for event in events).split("r")) == 2, "two at most, and two"
    assert events.count("start") == events.count("read") == scheduler.stats.steps


@pytest.mark.parametrize(("graphs", "tokens", "least"), [(True, 512, 8), (True, 2 * CHUNK, 1), (False, 512, 1)])
def test_chunks_of_prompts_gather_beside_many_decoding_rows(tiny_engine, alone, monkeypatch, graphs, tokens, least):
    """Where steps are captured, until they have enough tokens; the tokens stay those of a request alone."""
    monkeypatch.setattr("replayssm.runtime.step_selection.GATHERED_ROWS", 2)
    monkeypatch.setattr("replayssm.runtime.step_selection.GATHERED_TOKENS", tokens)
    session = Session(tiny_engine("nano"), slots=5, prefill_chunk=CHUNK, graphs=graphs)
    scheduler, chunk_steps, start_step = Scheduler(session), [], session.start_step

    def seen(rows, *more):
        if any(len(row.tokens) > session.settings.max_window for row in rows):
            chunk_steps.append(scheduler.stats.steps)
        return start_step(rows, *more)

    session.start_step = seen
    long = [scheduler.submit(Request.create(session, PROMPTS[0], 90, end_tokens=())) for _ in range(3)]
    while scheduler.waiting or any(request.plan for request in scheduler.running):
        scheduler.step()
    chunk_steps.clear()
    late = [scheduler.submit(request_for(session, index)) for index in (1, 4)]
    while scheduler.step():
        pass
    assert [request.generated for request in late] == [alone("nano")[index] for index in (1, 4)]
    assert all(request.finish_reason == "length" for request in long)
    assert len(chunk_steps) > 3
    assert min(b - a for a, b in itertools.pairwise(chunk_steps)) == least


def test_drafting_requests_take_turns_in_two_halves(tiny_engine, alone, monkeypatch):
    """A step starts while the other half's is computed; no request is in both, and each gets its own tokens."""
    monkeypatch.setattr("replayssm.runtime.step_selection.HALVED_ROWS", 3)
    session = Session(tiny_engine("nano"), slots=5, prefill_chunk=CHUNK, graphs=True)
    running, together, sizes, start_step = [], [], [], session.start_step
    beside_a_half = False

    def start(rows, chosen_only):
        slots = {row.slot for row in rows}
        finish = start_step(rows, chosen_only)
        running.append(slots)
        together.append(len(running))
        sizes.append(len(rows))
        assert len(running) == 1 or not running[0] & running[1]
        return lambda: running.remove(slots) or finish()

    session.start_step = start
    scheduler = Scheduler(session, NgramDrafter())
    requests = [(2, scheduler.submit(Request.create(session, PROMPTS[2], 40, end_tokens=()))) for _ in range(5)]
    while scheduler.step():
        pass
    assert max(together) == 2
    assert together.count(2) > 10
    assert sizes[10] in (2, 3)
    assert scheduler.stats.accepted_tokens > 0
    tokens = {tuple(request.generated) for _, request in requests}
    assert len(tokens) == 1
    assert list(tokens.pop())[: LENGTHS[2]] == alone("nano")[2]
    # Captured chunks of prompts do not keep the host, so they run beside a half.
    requests = [scheduler.submit(Request.create(session, PROMPTS[2], 40, end_tokens=())) for _ in range(4)]
    while scheduler.step():
        if len(requests) < 8 and scheduler.stats.generated_tokens % 40 > 30 and len(scheduler.running) < 5:
            requests.append(scheduler.submit(request_for(session, 1)))
        if scheduler._started is not None:
            beside_a_half |= any(request.plan and request.plan[0] == CHUNK for request in scheduler._started.requests)
    assert beside_a_half
    assert all(request.generated == alone("nano")[1] for request in requests[4:])
    # Log-probabilities need a step's logits, so nobody takes turns beside such a request.
    together.clear()
    for index in (2, 2, 2, 2):
        scheduler.submit(request_for(session, index))
    scheduler.submit(request_for(session, 2, logprobs=1))
    while scheduler.step():
        pass
    assert max(together) == 1


class SomeDrafter:
    """Drafts for two slots of three, wrong ones mostly: more than half of the rows have some."""

    observes, on_host = False, True

    def draft(self, requests):
        return [Draft([1] * request.max_tokens if request.slot % 3 else []) for request in requests]

    def release(self, slot):
        pass


def test_halves_are_of_rows_with_drafts_or_of_rows_without(tiny_engine, alone, monkeypatch):
    """They alternate, tails of prompts run beside drafts, and nobody waits long."""
    monkeypatch.setattr("replayssm.runtime.step_selection.HALVED_ROWS", 4)
    monkeypatch.setattr("replayssm.runtime.step_selection.TURN_ROWS", 2)
    session = Session(tiny_engine("nano"), slots=6, prefill_chunk=CHUNK, graphs=True)
    scheduler, steps, start_step = Scheduler(session, SomeDrafter()), [], session.start_step

    def start(rows, chosen_only):
        if scheduler._selection.takes_halves(scheduler.running):
            decoding = [row for row in rows if row.logits == "all"]
            tails = [row for row in rows if row.logits == "last" and len(row.tokens) > 1]
            steps.append(({len(row.tokens) > 1 for row in decoding}, len(tails), {row.slot for row in decoding}))
        return start_step(rows, chosen_only)

    session.start_step = start
    requests = [scheduler.submit(Request.create(session, PROMPTS[2], 60, end_tokens=())) for _ in range(5)]
    requests += [scheduler.submit(request_for(session, index)) for index in (1, 4, 1, 6, 3, 4)]
    while scheduler.step():
        assert max((scheduler.stats.steps - r.served for r in scheduler.running if not r.plan), default=0) <= 4
    assert [request.generated for request in requests[5:]] == [alone("nano")[index] for index in (1, 4, 1, 6, 3, 4)]
    assert len({tuple(request.generated) for request in requests[:5]}) == 1
    kinds = [kinds for kinds, _, _ in steps]
    assert kinds.count({True}) > 5 < kinds.count({False})
    assert all(a != b for a, b in itertools.pairwise(kinds) if len(a) == len(b) == 1)
    assert sum(tails for _, tails, _ in steps) > 0 == sum(tails for one, tails, _ in steps if one == {False})


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_a_request_that_ends_while_its_step_runs(tiny_engine, alone, monkeypatch, draft):
    """Its slot goes to another at once, and what the step chose for it changes nothing."""
    monkeypatch.setattr("replayssm.runtime.step_selection.HALVED_ROWS", 2)
    session = Session(tiny_engine("nano"), slots=4, prefill_chunk=CHUNK, graphs=True)
    scheduler = Scheduler(session, make_drafter(draft, session))
    requests = [(index, scheduler.submit(request_for(session, index))) for index in (2, 0, 6, 2, 5, 1, 4)]
    cancelled = 0
    while scheduler.step():
        started = scheduler._started
        running = [] if started is None else [r for r in started.requests if r.finish_reason is None and not r.plan]
        if cancelled < 2 and running:
            scheduler.cancel(running[0])
            cancelled += 1
    assert cancelled == 2
    assert_as_alone(requests, alone("nano"))
    assert sum(request.finish_reason == "length" for _, request in requests) == 5


@pytest.mark.parametrize("graphs", [False, True])
def test_a_sequence_may_fill_its_slot(tiny_engine, graphs):
    """Up to max_seq_len and no step further, also where steps run ahead."""
    engine = with_max_seq_len(tiny_engine("nano"), 20)
    session = Session(engine, slots=1, prefill_chunk=CHUNK, graphs=graphs)
    scheduler = Scheduler(session)
    request = scheduler.submit(Request.create(session, PROMPTS[0], 1000, end_tokens=()))
    while scheduler.step():
        pass
    assert (request.finish_reason, len(request.tokens)) == ("length", 20)


def recorded_logits(session):
    """Every step's logits from now on."""
    logits, step = [], session.step

    def wrapped(rows):
        result = step(rows)
        logits.append(result.logits.clone())
        return result

    session.step = wrapped
    return logits


@pytest.mark.parametrize("layout", ["nano", "qwen"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_preempted_request_continues_bit_identically(tiny_engine, layout, dtype):
    """One row a step, so shapes are equal and logits must be too, to the bit."""
    logits = []
    for every in (None, 1, 3):
        session = Session(tiny_engine(layout, dtype=dtype), slots=2, prefill_chunk=CHUNK)
        logits.append(recorded_logits(session))
        drafter = MtpDrafter(session)
        scheduler = Scheduler(session, drafter)
        request = scheduler.submit(request_for(session, 1))
        steps = 0
        while scheduler.step():
            steps += 1
            if every and steps % every == 0 and request in scheduler.running:
                other = session.allocate() if steps % 2 else None  # so that it comes back to another slot
                scheduler.preempt(request)
                if other is not None:
                    session.free(other)
        assert (request.preemptions > 0) == bool(every)
    for others in logits[1:]:
        assert len(others) == len(logits[0])
        assert all(torch.equal(a, b) for a, b in zip(others, logits[0], strict=True))


@pytest.mark.parametrize("layout", ["nano", "qwen"])
@pytest.mark.parametrize("draft", ["none", "mtp"])
def test_a_cached_prefix_continues_bit_identically(tiny_engine, layout, draft):
    engine = tiny_engine(layout, dtype="bfloat16")
    warm, cold = (Session(engine, slots=2, prefill_chunk=CHUNK) for _ in range(2))
    scheduler = Scheduler(warm, make_drafter(draft, warm), SchedulerOptions(prefix_cache_bytes=1 << 26))
    # The first saves its own last boundary, the second also where both part; the third starts there.
    for index, cached in ((3, 0), (4, 0), (4, 24), (5, 16)):
        request = scheduler.submit(request_for(warm, index, end_tokens=()))
        ours, plain = recorded_logits(warm), recorded_logits(cold)
        while scheduler.step():
            pass
        assert request.cached_tokens == cached
        reference = Scheduler(cold, make_drafter(draft, cold))
        same = reference.submit(request_for(cold, index))
        while reference.step():
            pass
        assert request.generated == same.generated
        skipped = cached // CHUNK
        assert len(ours) == len(plain) - skipped
        assert all(torch.equal(a, b) for a, b in zip(ours, plain[skipped:], strict=True))
    assert scheduler.report()["prefix_cache_hits"] == 2
    assert scheduler.stats.cached_tokens == 40


class WrongDrafter:
    """Drafts that fall, mostly."""

    def __init__(self):
        self.choose = random.Random(3)

    def observe(self, committed):
        pass

    def draft(self, requests):
        return [Draft([self.choose.randrange(300) for _ in range(request.max_tokens)]) for request in requests]

    def release(self, slot):
        pass


class _Operators(TorchDispatchMode):
    """Counts every tensor operator that runs."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("layout", ["nano", "qwen"])
def test_rejection_copies_no_state(tiny_engine, alone, layout):
    """Accepting and rejecting run not one tensor operator, and leave every byte of the state as it is."""
    session = Session(tiny_engine(layout), slots=3, prefill_chunk=CHUNK)
    advance, rejected = session.advance, []

    def state():
        return [tensor.clone() for value in session.states.values() for tensor in value.tensors.values()]

    def checked(accepted):
        before = state()
        with _Operators() as operators:
            advance(accepted)
        assert operators.count == 0
        assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
        rejected.append(True)

    session.advance = checked
    scheduler = Scheduler(session, WrongDrafter())
    requests = [scheduler.submit(request_for(session, index)) for index in range(len(PROMPTS))]
    while scheduler.step():
        pass
    assert [request.generated for request in requests] == alone(layout)
    assert rejected
    assert scheduler.stats.accepted_tokens < scheduler.stats.drafted_tokens / 10


def test_budget_and_fairness(tiny_engine):
    """No step above the budget; whoever decodes has a row in every step; some prompt always moves; a short prompt does
    not wait for a long one that came first."""
    session = Session(tiny_engine("nano"), slots=4, prefill_chunk=CHUNK)
    scheduler = Scheduler(session, WrongDrafter(), SchedulerOptions(max_num_tokens=20))
    steps, step = [], session.step
    session.step = lambda rows: steps.append([(row.slot, len(row.tokens)) for row in rows]) or step(rows)
    long = scheduler.submit(Request.create(session, random_prompt(200), 4, end_tokens=()))
    decoding = [scheduler.submit(Request.create(session, random_prompt(4), 30, end_tokens=())) for _ in range(2)]
    short = scheduler.submit(Request.create(session, random_prompt(9), 3, end_tokens=()))
    while scheduler.has_work:
        before = {request: (request.slot, len(request.plan), request.generated_count) for request in scheduler.running}
        scheduler.step()
        rows = dict(steps[-1])
        assert sum(rows.values()) <= 20
        for slot, chunks, count in before.values():
            assert chunks or count == 0 or slot in rows
        if long in before and before[long][1] > 1:  # the last one may be held back to spread flushes
            assert any(slot in rows for slot, chunks, _ in before.values() if chunks)
        if long.generated_count == 0 and short.finish_reason:
            long.passed = True
    assert long.passed
    assert all(request.finish_reason == "length" for request in (long, short, *decoding))


def test_first_come_first_served_and_time_slices(tiny_engine, alone):
    for time_slice in (None, 4):
        session = Session(tiny_engine("nano"), slots=1, prefill_chunk=CHUNK)
        scheduler = Scheduler(session, None, SchedulerOptions(time_slice=time_slice))
        requests = [scheduler.submit(request_for(session, index)) for index in range(len(PROMPTS))]
        ended = []
        while scheduler.step():
            ended += [request.number for request in requests if request.finish_reason and request.number not in ended]
        assert [request.generated for request in requests] == alone("nano")
        if time_slice is None:
            assert ended == sorted(ended)
        else:
            assert ended[0] == 5 or ended.index(5) < ended.index(1)  # one token overtakes a long prompt
            assert scheduler.stats.preemptions == sum(request.preemptions for request in requests) > 5


def test_swap_memory_is_bounded(tiny_engine):
    session = Session(tiny_engine("nano"), slots=1, prefill_chunk=CHUNK)
    scheduler = Scheduler(session, None, SchedulerOptions(time_slice=1, swap_bytes=0))
    for index in (1, 2):
        scheduler.submit(request_for(session, index))
    while scheduler.step():
        assert scheduler.swapped_bytes == 0
    assert scheduler.stats.preemptions == 0


def test_queue_limit(tiny_engine):
    session = Session(tiny_engine("nano"), slots=1)
    scheduler = Scheduler(session, None, SchedulerOptions(max_queue=2))
    for _ in range(2):
        scheduler.submit(request_for(session, 0))
    with pytest.raises(QueueFullError, match="2 requests are waiting") as error:
        scheduler.submit(request_for(session, 0))
    assert error.value.retry_after_s >= 1
    scheduler.step()
    scheduler.preempt(scheduler.running[0])
    scheduler.submit(request_for(session, 0))  # a swapped request does not take a place in the queue
    while scheduler.step():
        pass


def test_cancellation_everywhere(tiny_engine):
    session = Session(tiny_engine("nano"), slots=1, prefill_chunk=CHUNK)
    scheduler = Scheduler(session)
    updates = []
    prompt, decode, waiting, swapped = (
        scheduler.submit(
            request_for(session, index, on_update=lambda r, u: updates.append((r.number, u.finish_reason)))
        )
        for index in (1, 2, 0, 6)
    )
    scheduler.step()
    assert prompt.plan
    scheduler.cancel(prompt)
    assert session.free_slots == 1
    while not decode.generated_count:
        scheduler.step()
    scheduler.preempt(decode)
    scheduler.cancel(waiting)
    scheduler.cancel(decode)
    assert scheduler.swapped_bytes == 0
    scheduler.cancel(decode)
    while scheduler.step():
        pass
    assert swapped.finish_reason == "length"
    scheduler.cancel(swapped)
    assert swapped.finish_reason == "length"
    assert [number for number, reason in updates if reason == "cancelled"] == [0, 2, 1]
    with pytest.raises(ValueError, match="not submitted"):
        scheduler.cancel(request_for(session, 0))
    with pytest.raises(ValueError, match="only a running request"):
        scheduler.preempt(decode)


def test_timeouts(tiny_engine):
    now = [0.0]
    session = Session(tiny_engine("nano"), slots=1, prefill_chunk=CHUNK)
    scheduler = Scheduler(session, clock=lambda: now[0])
    running, waiting = (scheduler.submit(request_for(session, 2, deadline=deadline)) for deadline in (5.0, 3.0))
    for now[0] in range(1, 8):
        scheduler.step()
    assert (running.finish_reason, waiting.finish_reason) == ("timeout", "timeout")
    assert 0 < running.generated_count < LENGTHS[2]
    assert (waiting.generated, session.free_slots) == ([], 1)


def test_damaged_logits_end_one_request_only(tiny_engine, alone):
    session = Session(tiny_engine("nano"), slots=2, prefill_chunk=CHUNK)
    scheduler = Scheduler(session)
    bad, good = (scheduler.submit(request_for(session, index)) for index in (0, 2))
    step = session.step

    def damaged(rows):
        result = step(rows)
        for index, row in enumerate(rows):
            if row.slot == bad.slot:
                result.logits[result.logits_spans[index]] = float("nan")
        return result

    session.step = damaged
    while scheduler.step():
        pass
    assert (bad.finish_reason, bad.generated) == ("error", [])
    assert "not finite" in bad.error
    assert good.generated == alone("nano")[2]
    session.step = lambda rows: (lambda r: r.logits.fill_(float("nan")) is None or r)(step(rows))
    with pytest.raises(InferenceError, match="not finite"):
        generate(session, [[1, 2]], 3)
    assert session.free_slots == 2


def test_log_probabilities(tiny_engine):
    session = Session(tiny_engine("nano"), slots=1)
    updates = []
    params = SamplingParams(temperature=0.7, seed=1)
    options = {"params": params, "end_tokens": (), "logprobs": 2, "on_update": lambda r, u: updates.append(u)}
    request = Request.create(session, PROMPTS[2], 6, **options)
    scheduler = Scheduler(session, NgramDrafter())
    scheduler.submit(request)
    while scheduler.step():
        pass
    found = [value for update in updates for value in update.logprobs]
    assert [value.token for value in found] == request.generated
    plain = Session(session.engine, slots=1)
    for index, value in enumerate(found):
        logits = plain.prefill(slot := plain.allocate(), [*PROMPTS[2], *request.generated[:index]])
        plain.free(slot)
        expected = logits.float().log_softmax(dim=0)
        assert value.logprob == pytest.approx(float(expected[value.token]), abs=1e-5)
        assert [token for token, _ in value.top] == expected.topk(2).indices.tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_tokens": 10}, "less than the 16 tokens of one prompt chunk"),
        ({"max_queue": 0}, "max_queue must be at least 1"),
        ({"prefix_cache_bytes": -1}, "prefix_cache_bytes must be at least 0"),
        ({"draft_len": 9}, "draft_len must be between 1"),
    ],
)
def test_bad_options(tiny_engine, options, message):
    session = Session(tiny_engine("nano"), slots=3, prefill_chunk=CHUNK)
    with pytest.raises(ValueError, match=message):
        Scheduler(session, NgramDrafter(), SchedulerOptions(**options))
