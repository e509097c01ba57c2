"""Generation: speculation, batching, replay and restarts never change what a request gets."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch

from replayssm.runtime.generation import generate
from replayssm.runtime.sampling import SamplingBatch, SamplingParams, sample
from replayssm.runtime.session import Session
from replayssm.runtime.speculation import Draft, MtpDrafter, NgramDrafter

LAYOUTS = ("nano", "super", "qwen", "qwen_moe")

# Difference of logits in fp32 between batch shapes and between replay and the plain recurrence: activations of these
# models are of order 1 and logits of order 1, fp32 sums of at most 400 terms err by some 1e-6, over 8 layers some 1e-5.
FLOAT32_BOUND = 2e-4
# The same in float64, where the sums err by some 1e-14.
FLOAT64_BOUND = 1e-9


def random_prompts(*lengths, seed=0):
    choose = random.Random(seed)
    return [[choose.randrange(300) for _ in range(length)] for length in lengths]


class ScriptedDrafter:
    """Proposes the known continuation, changed as `kind` says: "right", "wrong", "partly" (the first half is right),
    "random" (each token right with probability 0.6, of random length), or "none"."""

    def __init__(self, outputs, kind):
        self.outputs = {tuple(prompt): output for prompt, output in outputs}
        self.kind = kind
        self.choose = random.Random(5)
        self.released = []

    def observe(self, committed):
        assert all(entry.hidden_states.shape[0] == len(entry.tokens) for entry in committed)

    def draft(self, requests):
        return [Draft(self.propose(list(request.tokens), request.max_tokens)) for request in requests]

    def propose(self, tokens, count):
        size, output = next(
            (len(prompt), output)
            for prompt, output in self.outputs.items()
            if tokens[: len(prompt)] == list(prompt) and tokens[len(prompt) :] == output[: len(tokens) - len(prompt)]
        )
        known = output[len(tokens) - size :][:count]
        wrong = [(token + 1) % 300 for token in known]
        if self.kind == "none":
            return []
        if self.kind == "partly":
            return known[: count // 2] + wrong[count // 2 :]
        if self.kind == "random":
            mixed = [k if self.choose.random() < 0.6 else w for k, w in zip(known, wrong, strict=True)]
            return mixed[: self.choose.randrange(count + 1)]
        return known if self.kind == "right" else wrong

    def release(self, slot):
        self.released.append(slot)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_speculation_gives_the_plain_tokens(tiny_engine, assert_same_tokens, layout, dtype):
    engine = tiny_engine(layout, dtype=dtype)
    session = Session(engine, slots=3)
    prompts = random_prompts(5, 40, 1, 17)
    plain = [result.token_ids for result in generate(session, prompts, 40, eos_token_ids=())]
    lengths = {}
    for kind in ("right", "wrong", "partly", "random", "none"):
        drafter = ScriptedDrafter(zip(prompts, plain, strict=True), kind)
        if dtype == "float32":
            # A first different token would leave the script without a continuation; compare up to there only.
            drafter.propose = forgiving(drafter.propose)
        results = generate(session, prompts, 40, drafter=drafter, eos_token_ids=())
        lengths[kind] = [result.acceptance_length for result in results]
        for prompt, result, expected in zip(prompts, results, plain, strict=True):
            bound = FLOAT64_BOUND if dtype == "float64" else FLOAT32_BOUND
            assert_same_tokens(engine, prompt, result.token_ids, expected, bound)
            assert len(result.token_ids) == 40
    if dtype == "float64":
        # 39 tokens behind the first one: ten windows of four (the last of three), or 39 windows of one.
        assert lengths["right"] == [39 / 10] * 4
        assert lengths["wrong"] == lengths["none"] == [1.0] * 4
        assert all(1.9 < length <= 2.0 for length in lengths["partly"])
        assert all(1.0 < length < 3.9 for length in lengths["random"])


def forgiving(propose):
    def wrapped(tokens, count):
        try:
            return propose(tokens, count)
        except StopIteration:
            return []

    return wrapped


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("drafter", [NgramDrafter, MtpDrafter])
def test_real_drafters_give_the_plain_tokens(tiny_engine, layout, drafter):
    session = Session(tiny_engine(layout), slots=2)
    prompts = [*random_prompts(20, 3), [7, 8, 9] * 5, [4] * 9]
    plain = generate(session, prompts, 30, eos_token_ids=())
    drafts = drafter() if drafter is NgramDrafter else drafter(session)
    results = generate(session, prompts, 30, drafter=drafts, eos_token_ids=())
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    for draft_len in (1, 2):
        drafts = drafter() if drafter is NgramDrafter else drafter(session)
        results = generate(session, prompts, 30, drafter=drafts, draft_len=draft_len, eos_token_ids=())
        assert [result.token_ids for result in results] == [result.token_ids for result in plain]
        assert all(result.acceptance_length <= draft_len + 1 for result in results)


@pytest.mark.parametrize("layout", ["nano", "qwen"])
def test_drafts_keep_sampled_tokens_too(tiny_engine, layout):
    """A draft stands if it is the token that the request's own random numbers choose, so sampling is unchanged."""
    session = Session(tiny_engine(layout), slots=3)
    prompts = random_prompts(9, 2, 30)
    params = [SamplingParams(temperature=0.5, top_k=3, seed=seed) for seed in range(3)]
    plain = generate(session, prompts, 40, params, eos_token_ids=())
    drafter = ScriptedDrafter([(p, r.token_ids) for p, r in zip(prompts, plain, strict=True)], "partly")
    results = generate(session, prompts, 40, params, drafter, eos_token_ids=())
    assert [result.token_ids for result in results] == [result.token_ids for result in plain]
    assert all(result.acceptance_length > 1.9 for result in results)


def test_each_token_is_drawn_at_its_own_position(tiny_engine):
    """A continuation can be redone from any prefix: the draw depends on seed and position alone."""
    engine = tiny_engine("nano")
    prompt, params = random_prompts(21)[0], SamplingParams(temperature=1.0, seed=8)
    tokens = generate(Session(engine, slots=1), [prompt], 8, params, eos_token_ids=())[0].token_ids
    for index, token in enumerate(tokens):
        session = Session(engine, slots=1)
        logits = session.prefill(session.allocate(), [*prompt, *tokens[:index]])
        assert int(sample(logits[None], SamplingBatch([params], [len(prompt) + index]))) == token


class RandomDrafter:
    """Draws from a distribution of its own and says so, which calls for rejection sampling."""

    def __init__(self, vocab, seed):
        self.vocab = vocab
        self.generator = torch.Generator().manual_seed(seed)

    def observe(self, committed):
        pass

    def draft(self, requests):
        drafts = []
        for request in requests:
            noise = torch.randn(request.max_tokens, self.vocab, generator=self.generator)
            probs = (3 * noise).double().softmax(dim=1)
            drafts.append(Draft(torch.multinomial(probs, 1, generator=self.generator).flatten().tolist(), probs))
        return drafts

    def release(self, slot):
        pass


def test_drafts_with_probabilities_keep_the_distribution(tiny_engine):
    """Second and third tokens of 400 requests whose first is fixed by the prompt, with top_k 2: the counts of the two
    possible second tokens lie within 4 standard deviations of the model's probability, and nothing else occurs."""
    engine = tiny_engine("nano")
    session = Session(engine)
    prompt = random_prompts(6)[0]
    logits = session.prefill(session.allocate(), prompt)
    session.free(0)
    first = int(logits.argmax())
    logits = session.prefill(session.allocate(), [*prompt, first])
    session.free(0)
    values, candidates = logits.topk(2)
    expected = float(values.softmax(dim=0)[0])
    count = 400
    params = [SamplingParams(temperature=1.0, top_k=2, seed=seed) for seed in range(count)]
    drafter = RandomDrafter(engine.vocab_size, 0)
    results = generate(session, [prompt] * count, 3, params, drafter, eos_token_ids=())
    seconds = [result.token_ids[1] for result in results if result.token_ids[0] == first]
    assert len(seconds) > 100
    assert set(seconds) == set(candidates.tolist())
    share = seconds.count(int(candidates[0])) / len(seconds)
    assert share == pytest.approx(expected, abs=4 * (expected * (1 - expected) / len(seconds)) ** 0.5)
    assert any(result.acceptance_length > 1 for result in results)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_alone_or_together(tiny_engine, layout):
    """Prompts of different lengths, more of them than slots, in any order: each gets what it gets alone."""
    engine = tiny_engine(layout)
    prompts = random_prompts(1, 33, 7, 2, 300, 12)
    params = [SamplingParams(temperature=0.8 * (index % 2), seed=index) for index in range(6)]
    alone = [
        generate(Session(engine, slots=1), [prompt], 24, row)[0].token_ids
        for prompt, row in zip(prompts, params, strict=True)
    ]
    for slots, order in ((2, [0, 1, 2, 3, 4, 5]), (8, [4, 0, 5, 2, 1, 3])):
        session = Session(engine, slots=slots)
        results = generate(session, [prompts[i] for i in order], 24, [params[i] for i in order])
        assert [result.token_ids for result in results] == [alone[i] for i in order]
        assert session.free_slots == slots


@pytest.mark.parametrize("layout", ["nano", "qwen"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_replay_gives_the_tokens_of_the_plain_recurrence(tiny_engine, assert_same_tokens, layout, dtype):
    """256 tokens for a batch of 8, with buffer_len 16 and 0. Both families."""
    prompts = random_prompts(4, 9, 16, 25, 36, 49, 64, 81)
    engines = {length: tiny_engine(layout, buffer_len=length, dtype=dtype) for length in (16, 0)}
    tokens = {
        length: [result.token_ids for result in generate(Session(engine), prompts, 256, eos_token_ids=())]
        for length, engine in engines.items()
    }
    assert all(len(row) == 256 for row in tokens[16])
    for prompt, ours, plain in zip(prompts, tokens[16], tokens[0], strict=True):
        if dtype == "float64":
            assert ours == plain
        else:
            assert_same_tokens(engines[0], prompt, ours, plain, FLOAT32_BOUND)


@pytest.mark.parametrize("layout", ["nano", "qwen"])
def test_low_precision_engines_generate(tiny_engine, assert_same_tokens, layout):
    """Tokens with drafts equal those without, up to near ties: bfloat16 activations of order 1 err by 2^-9 each, which
    six random layers and a head over 64 channels turn into at most some 0.1 of a logit."""
    prompts = random_prompts(30, 3)
    for options in (
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "state_dtype": "bfloat16"},
        {"dtype": "bfloat16", "u_format": "bfloat16"},
        {"dtype": "float16", "state_dtype": "float16"},
        {"dtype": "float32", "serial_exact": True, "u_format": "exact"},
    ):
        engine = tiny_engine(layout, **options)
        session = Session(engine)
        plain = generate(session, prompts, 20, eos_token_ids=())
        results = generate(session, prompts, 20, drafter=NgramDrafter(), eos_token_ids=())
        for prompt, result, expected in zip(prompts, results, plain, strict=True):
            assert len(result.token_ids) == 20
            assert_same_tokens(engine, prompt, result.token_ids, expected.token_ids, 0.2)


def test_end_tokens(tiny_engine):
    session = Session(tiny_engine("qwen"), slots=1)
    prompt = random_prompts(8)[0]
    tokens = generate(session, [prompt], 20, eos_token_ids=())[0].token_ids
    end = tokens[7]
    stop_at = tokens.index(end) + 1
    for drafter in (None, ScriptedDrafter([(prompt, tokens)], "right")):
        result = generate(session, [prompt], 20, drafter=drafter, eos_token_ids=[end])[0]
        assert result.token_ids == tokens[:stop_at]
        assert result.finish_reason == "stop"
    assert generate(session, [prompt], stop_at, eos_token_ids=[end])[0].finish_reason == "stop"
    assert generate(session, [prompt], stop_at - 1, eos_token_ids=[end])[0].finish_reason == "length"


def test_the_checkpoints_end_tokens_are_the_default(tiny_engine):
    engine = tiny_engine("nano")
    prompt = random_prompts(8)[0]
    tokens = generate(Session(engine, slots=1), [prompt], 20, eos_token_ids=())[0].token_ids
    model = {**engine.manifest.model, "eos_token_ids": [tokens[4]]}
    changed = replace(engine, manifest=replace(engine.manifest, model=model))
    result = generate(Session(changed, slots=1), [prompt], 20)[0]
    assert result.token_ids == tokens[: tokens.index(tokens[4]) + 1]


class LetterTokenizer:
    """Token t is the letter a + t mod 26."""

    def decode(self, tokens, skip_special_tokens):
        return "".join(chr(97 + token % 26) for token in tokens)


def test_text_stop_strings_and_callbacks(tiny_engine):
    session = Session(tiny_engine("nano"), slots=2)
    prompts = random_prompts(8, 5)
    tokens = [result.token_ids for result in generate(session, prompts, 20, eos_token_ids=())]
    text = LetterTokenizer().decode(tokens[0], True)
    stop = text[6:9]
    assert text.find(stop) == 6
    for drafter in (None, ScriptedDrafter(zip(prompts, tokens, strict=True), "right")):
        seen = {0: ([], []), 1: ([], [])}

        def note(index, new, piece, seen=seen):
            seen[index][0].extend(new)
            seen[index][1].append(piece)

        results = generate(
            session,
            prompts,
            20,
            drafter=drafter,
            eos_token_ids=(),
            stop=[stop],
            tokenizer=LetterTokenizer(),
            on_tokens=note,
        )
        assert results[0].text == text[:6]
        assert results[0].token_ids == tokens[0][:9]
        assert results[0].finish_reason == "stop"
        assert results[1].finish_reason == "length"
        for index, result in enumerate(results):
            assert seen[index][0] == result.token_ids
            assert "".join(seen[index][1]) == result.text
    assert generate(session, prompts[:1], 2, eos_token_ids=())[0].text is None


def test_lengths_and_timing(tiny_engine):
    session = Session(tiny_engine("nano"), slots=2)
    begin = time.monotonic()
    short, long = generate(session, random_prompts(390, 10), 30, eos_token_ids=())
    elapsed = time.monotonic() - begin
    assert len(short.token_ids) == 10
    assert short.finish_reason == "length"
    assert len(long.token_ids) == 30
    assert long.timing["prefill_s"] > 0
    assert long.timing["prefill_s"] + long.timing["decode_s"] <= elapsed, "one begins where the other ends"
    assert long.timing["tokens_per_s"] == pytest.approx(29 / long.timing["decode_s"])
    one = generate(session, random_prompts(10), 1, eos_token_ids=())[0]
    assert (one.acceptance_length, one.timing["tokens_per_s"]) == (None, None)
    assert generate(session, [], 5) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [[1], []]}, "prompt 2 of 2 is empty"),
        ({"prompts": "hello"}, "each a list of token ids, .*, got 'hello'"),
        ({"prompts": [[1], "hello"]}, "each a list of token ids"),
        ({"prompts": [1, 2]}, "each a list of token ids, .*, got \\[1, 2\\]"),
        ({"prompts": [[1] * 400]}, "prompt 1 of 1 has 400 tokens, but a sequence has at most 400"),
        ({"prompts": [[1, 10**6]]}, "outside the vocabulary"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"sampling": [SamplingParams()] * 2}, "one SamplingParams per prompt"),
        ({"drafter": NgramDrafter(), "draft_len": 4}, "between 1 and the engine's max_draft_len 3"),
        ({"drafter": NgramDrafter(), "draft_len": 0}, "between 1 and the engine's max_draft_len 3"),
        ({"stop": ["x"]}, "stop strings need a tokenizer"),
        ({"stop": [""], "tokenizer": LetterTokenizer()}, "must not be empty"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(tiny_engine, arguments, message):
    session = Session(tiny_engine("nano"), slots=1)
    session.step = None
    with pytest.raises(ValueError, match=message):
        generate(session, **{"prompts": [[1]], **arguments})
    assert session.free_slots == 1


def test_an_engine_without_drafts(tiny_engine):
    session = Session(tiny_engine("nano", max_draft_len=0), slots=1)
    with pytest.raises(ValueError, match="--max-draft-len"):
        generate(session, [[1]], drafter=NgramDrafter())
    assert len(generate(session, [[1]], 4, eos_token_ids=())[0].token_ids) == 4


def test_a_failure_gives_slots_back(tiny_engine):
    session = Session(tiny_engine("nano"), slots=2)
    drafter = ScriptedDrafter([], "right")
    with pytest.raises(StopIteration):
        generate(session, random_prompts(4, 4, 4), 10, drafter=drafter, eos_token_ids=())
    assert session.free_slots == 2
    assert sorted(drafter.released) == [0, 1]


def test_generation_beside_other_sequences(tiny_engine):
    """Slots that the caller holds stay as they are."""
    session = Session(tiny_engine("nano"), slots=2)
    prompt = random_prompts(9)[0]
    expected = generate(session, [prompt], 5, eos_token_ids=())[0].token_ids
    mine = session.allocate()
    logits = session.prefill(mine, prompt)
    assert int(logits.argmax()) == expected[0]
    generate(session, random_prompts(3, 8, 30, seed=1), 10)
    assert int(session.decode([mine], [expected[0]])[0].argmax()) == expected[1]
    other = session.allocate()
    with pytest.raises(ValueError, match="all 2 slots of the session are in use"):
        generate(session, [prompt], 5)
    session.free(other)
