"""Formats compared on a model: what is counted, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from replayssm.builders.engine import BuildOptions, build_engine
from replayssm.runtime.engine import Engine
from replayssm.runtime.format_comparison import (
    FORMATS,
    Problem,
    _read_prompts,
    candidates,
    compare,
    is_right,
    read_problems,
)
from replayssm.runtime.format_verdict import answer_notes
from replayssm.runtime.generation import generate
from replayssm.runtime.serving import slot_bytes, slots_that_fit
from replayssm.runtime.session import Session

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """The example model of 128 columns, which has every format."""
    output = tmp_path_factory.mktemp("engine") / "qwen"
    build_engine(ROOT / "examples" / "qwen3.5-tiny", output, BuildOptions(max_batch_size=4, max_seq_len=256))
    return Engine.load(output)


@pytest.fixture(scope="module")
def prompts(engine):
    questions = json.loads((ROOT / "examples" / "questions.json").read_text())
    text = questions["qwen3.5-tiny"]["question"] if "qwen3.5-tiny" in questions else str(questions)
    return [engine.tokenizer(text)["input_ids"][:length] for length in (40, 25, 33)]


def test_counts_against_generation_and_by_hand(engine, prompts):
    """float32 agrees with itself and follows its own greedy output; a 4-bit readout departs a little."""
    names = ("float16-stochastic", "float16-stochastic+nvfp4")
    formats = candidates(engine, names)
    assert list(formats) == ["float32", *names]
    plain = generate(Session(engine, slots=3), prompts, 20, eos_token_ids=engine.end_token_ids)
    texts = [engine.tokenizer.decode(result.token_ids, skip_special_tokens=True) for result in plain]
    problems = [Problem(prompts[0], texts[0]), Problem(prompts[1]), Problem(prompts[2], "never written")]
    heard = []
    exact, half, small = compare(
        engine, problems, formats, slots=2, max_new_tokens=20, progress=lambda *news: heard.append(news)
    )
    assert [news for news in heard if news[1]] == [("", 2), ("", 1)]
    assert heard[:3] == [("prompts", 0), ("token 1 of at most 20", 0), ("token 2 of at most 20", 0)]
    assert ("own texts of float16-stochastic+nvfp4", 0) in heard, "where it chooses other tokens"
    assert exact.tokens == half.tokens == small.tokens == sum(len(result.token_ids) for result in plain)
    assert (exact.disagreement, exact.disagreement_bound, exact.kl) == (0.0, 0.0, 0.0)
    assert (exact.accuracy, exact.difference, exact.difference_bound) == (0.5, 0.0, 0.0)
    # Errors of the state: 2^-11 against some 0.1 of 4 bits, but bf16 activations make 2^-9 of either.
    assert 0 < half.kl < small.kl / 4 < 0.01
    assert half.disagreement_bound >= 3 / half.tokens
    assert exact.state_bytes == 5 * 4 * 128 * 128 * 4 == 2 * half.state_bytes
    assert small.state_bytes == half.state_bytes + 5 * 4 * (128 * 128 * 9 // 16 + 128)
    assert small.traffic_bytes < half.traffic_bytes < exact.traffic_bytes


@pytest.mark.parametrize("chunk", [1, 3])
def test_prompts_are_read_together(engine, prompts, chunk):
    """A chunk of each at a time; chunks of one token are tentative windows. Rows depend on each other by the order of
    sums in products alone, 2^-8 of bf16 activations; a chunk that is lost changes half of all."""
    together = Session(engine, slots=3, prefill_chunk=chunk, graphs=True)
    alone = Session(engine, slots=3, prefill_chunk=chunk)
    prompts = [prompt[: 5 + 3 * i] for i, prompt in enumerate(prompts)]
    slots = [together.allocate() for _ in prompts]
    logits = _read_prompts(together, slots, [Problem(prompt) for prompt in prompts])
    for slot, prompt, ours in zip(slots, prompts, logits, strict=True):
        own = alone.allocate()
        expected = alone.prefill(own, prompt)
        assert together.seq_len(slot) == alone.seq_len(own) == len(prompt)
        assert float((ours - expected).norm() / expected.norm()) < 0.05


def test_admission_follows_the_formats(engine):
    """A slot takes what a session allocates for it, and as much more memory holds as many more slots."""
    sizes = {}
    for name, settings in candidates(engine).items():
        formatted = replace(engine, manifest=replace(engine.manifest, replay=settings))
        size, cache = slot_bytes(formatted)
        assert Session(formatted, slots=2).state_bytes == 2 * size
        assert slots_that_fit(formatted, 3 * size, None) == 3
        sizes[name] = size - cache
    elements = 5 * 4 * 128 * 128
    assert sizes["float32"] - sizes["float16"] == 2 * elements
    assert sizes["float16"] - sizes["float8-stochastic"] == elements - 5 * 4 * 128
    saved = 5 * settings.ring_len * 4 * 128 * 2  # of u, one half instead of two
    assert sizes["float16-stochastic+nvfp4"] - sizes["float16"] == elements * 9 // 16 + 5 * 4 * 128 - saved
    settings = replace(candidates(engine)["float16-stochastic+nvfp4"], readout_layers=((4, "float8"),))
    mixed = replace(engine, manifest=replace(engine.manifest, replay=settings))
    size, cache = slot_bytes(mixed)
    assert size - cache - sizes["float16-stochastic+nvfp4"] == 4 * 128 * 128 * 7 // 16
    session = Session(mixed, slots=2)
    assert session.state_bytes == 2 * size


def test_texts_that_a_limit_ends_are_named(engine, prompts):
    """float32's texts of 3 tokens end by the limit, and where the engine has room for 2 more, by that."""
    names = ("float16-stochastic",)
    problems = [Problem(prompts[0], "never"), Problem(prompts[1])]
    results = compare(engine, problems, candidates(engine, names), max_new_tokens=3)
    assert [(result.answered, result.cut_off, result.out_of_room) for result in results] == [(1, 1, 0)] * 2
    notes = answer_notes(engine, results, 3)
    assert notes[0] == "1 of 1 texts were cut off at 3 tokens, before their answers: raise --max-new-tokens"
    assert "no right answer" in notes[1]
    limit = {"max_seq_len": len(prompts[0]) + 2}
    replay, limits = replace(engine.manifest.replay, **limit), replace(engine.manifest.limits, **limit)
    short = replace(engine, manifest=replace(engine.manifest, replay=replay, limits=limits))
    results = compare(short, problems[:1], candidates(short, names), max_new_tokens=9)
    assert [(result.cut_off, result.out_of_room) for result in results] == [(0, 1)] * 2
    assert "1 of 1 texts were cut off at the engine's max_seq_len 42" in answer_notes(short, results, 9)[0]
    results = compare(engine, problems[1:], candidates(engine, names), max_new_tokens=3)
    assert answer_notes(engine, results, 3) == [], "without answers nothing is lost"


def test_formats_that_do_not_apply_are_left_out(engine):
    """The baseline has no readout copies; a seed of the engine's own format does not stand in the way."""
    manifest = engine.manifest
    baseline = replace(engine, manifest=replace(manifest, replay=replace(manifest.replay, buffer_len=0)))
    assert list(candidates(baseline)) == [name for name in FORMATS if "+" not in name]
    with pytest.raises(ValueError, match=r"no format is left to compare with float32: buffer_len 0"):
        candidates(baseline, ["float16-stochastic+nvfp4"])
    seeded = replace(manifest.replay, state_dtype="float8", state_rounding="stochastic", rounding_seed=5)
    assert candidates(replace(engine, manifest=replace(manifest, replay=seeded)))["float32"].rounding_seed == 0
    with pytest.raises(ValueError, match="unknown format 'int8'; there are float32, float16"):
        candidates(engine, ["int8"])
    with pytest.raises(ValueError, match="have their state format compiled in"):
        candidates(replace(engine, manifest=replace(manifest, target="tensorrt")))


def test_problems_are_read_and_refused_by_line(engine, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(
        '{"prompt": "What is 2 + 2?", "answer": "4"}\n\n{"messages": [{"role": "user", "content": "Hello"}]}\n'
    )
    plain, chat = read_problems(path, engine.tokenizer)
    assert plain == Problem(engine.tokenizer("What is 2 + 2?")["input_ids"], "4")
    assert chat.answer is None
    assert read_problems(path, engine.tokenizer, chat=True, limit=1)[0].prompt != plain.prompt
    for text, message in (
        ("", "holds no problems"),
        ("[1]", "line 1: expected a JSON object"),
        ('{"input_ids": [1], "n": 1}', "line 1: expected either a text prompt or messages.*got the keys input_ids, n"),
        ('{"prompt": "a", "messages": []}', "expected either a text prompt or messages"),
        ('{"prompt": "a", "answer": 4}', "as answer a text or nothing"),
        ('{"prompt": "a"}\n{"prompt"', "line 2 is not JSON .*: expected lines such as .*answer"),
        ('{"prompt": "a"}\n{"prompt": ""}', "line 2: the prompt is empty"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_problems(path, engine.tokenizer)
    with pytest.raises(ValueError, match="a prompt of 255 tokens does not fit the engine's max_seq_len 256"):
        compare(engine, [Problem([5] * 255)], candidates(engine))


@pytest.mark.parametrize(
    ("text", "answer", "right"),
    [
        ("The answer is 42.", "42", True),
        ("The answer is 42.\n", "is 42.", True),
        ("42 is what it was, not 43", "42", False),
        ("", "42", False),
    ],
)
def test_right_answers(text, answer, right):
    assert is_right(text, answer) == right
