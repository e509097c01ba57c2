"""Structured output: what is generated under a grammar parses, whatever the model, the drafts and the temperature."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("llguidance")

from replayssm.runtime.logits_processor import LogitsProcessor
from replayssm.runtime.requests import Request
from replayssm.runtime.sampling import SamplingParams
from replayssm.runtime.scheduler import Scheduler, SchedulerOptions
from replayssm.runtime.session import Session
from replayssm.runtime.speculation import MtpDrafter, NgramDrafter
from replayssm.runtime.structured import Grammars

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ella", "Finn"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars(tiny_engine):
    engine = tiny_engine("nano")
    return Grammars(engine.tokenizer, engine.vocab_size, [2])


def generate(session, drafter, grammar, seed, **options):
    params = SamplingParams(temperature=1.0, seed=seed)
    scheduler = Scheduler(session, drafter, SchedulerOptions(**options))
    request = Request.create(
        session,
        [1, 2, 3],
        120,
        params,
        end_tokens=[2],
        tokenizer=session.engine.tokenizer,
        processor=LogitsProcessor([1, 2, 3], grammar=grammar),
    )
    scheduler.submit(request)
    while scheduler.step():
        pass
    return request


@pytest.mark.parametrize("draft", ["none", "ngram", "mtp", "drawn"])
def test_a_random_model_writes_what_the_schema_says(tiny_engine, grammars, draft):
    """A random model at temperature 1 would write nothing of the kind. With drafts, tokens are those without."""
    session = Session(tiny_engine("nano"), slots=1)
    for seed in range(2):
        drafter = {"none": None, "ngram": NgramDrafter(), "mtp": MtpDrafter(session), "drawn": MtpDrafter(session)}[
            draft
        ]
        request = generate(session, drafter, grammars.make("json", SCHEMA), seed, draft_sampling=draft == "drawn")
        value = json.loads(request.text)
        assert request.finish_reason == "stop"
        assert sorted(value) == ["count", "name"]
        assert value["name"] in ("Ella", "Finn")
        assert 0 <= value["count"] <= 99
        if draft in ("ngram", "mtp"):
            plain = generate(session, None, grammars.make("json", SCHEMA), seed)
            assert request.generated == plain.generated


def test_nothing_is_restricted_before_the_reasoning_ends(tiny_engine, grammars):
    tokenizer = tiny_engine("nano").tokenizer
    after = tokenizer("z")["input_ids"][0]
    grammar = grammars.make("json", {"type": "object"}, after)
    brace, other = tokenizer("{")["input_ids"][0], tokenizer("q")["input_ids"][0]
    assert grammar.allowed([other, brace], 3) is None
    assert grammar.accept([other, brace, other]) == 3
    rows = grammar.allowed([other, after, brace, other], 5)
    assert rows[:2].all()
    assert rows[2].nonzero().flatten().tolist() == [brace]  # behind `after`: an object begins
    assert not rows[3, other]
    assert rows[4].all()  # behind a draft that falls
    assert grammar.accept([after, brace]) == 2
    assert not grammar.allowed([], 1)[0, other]


def test_masks_take_nothing_and_the_end_is_where_nothing_may_follow(tiny_engine, grammars):
    tokenizer = tiny_engine("nano").tokenizer
    tokens = tokenizer('{"count":7,"name":"Ella"}')["input_ids"]
    grammar = grammars.make("json", {**SCHEMA, "properties": dict(reversed(SCHEMA["properties"].items()))})
    first = grammar.allowed([], 1)
    together = grammar.allowed(tokens[:-1], len(tokens))
    assert (grammar.allowed([], 1) == first).all()
    for index, token in enumerate(tokens):
        assert bool(together[index, token])
        assert (grammar.allowed([], 1)[0] == together[index]).all()
        assert not grammar.finished
        assert grammar.accept([token]) == 1
    assert grammar.finished
    again = grammars.make("json", {**SCHEMA, "properties": dict(reversed(SCHEMA["properties"].items()))})
    assert again.accept([*tokens, 5, 5]) == len(tokens)  # what stands behind the end is not taken


@pytest.mark.parametrize("schema", [{"type": "nonsense"}, {"$ref": "#/nowhere"}, {"$ref": "#"}])
def test_schemas_that_cannot_be_enforced(grammars, schema):
    with pytest.raises(ValueError, match="the JSON schema cannot be enforced: "):
        grammars.make("json", schema)


def test_whitespace_ends(tiny_engine, grammars):
    """A space or an indented line may stand between two tokens, and a model that likes blanks gets no further."""
    tokenizer = tiny_engine("nano").tokenizer
    brace, space, newline = (tokenizer(text)["input_ids"][0] for text in ("{", " ", "\n"))
    for first, most in ((space, 0), (newline, 16)):
        grammar = grammars.make("json", SCHEMA)
        grammar.accept([brace, first])
        count = 0
        while grammar.allowed([], 1)[0, space]:
            grammar.accept([space])
            count += 1
        assert count == most
        assert not grammar.allowed([], 1)[0, newline]


def test_without_the_library(grammars, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(ValueError, match=r"pip install '.\[serve\]'"):
        grammars.make("json", {})
