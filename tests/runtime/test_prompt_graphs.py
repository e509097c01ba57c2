"""Captured prompt steps, with the stand-in that runs them uncaptured, as in `test_cuda_graphs.py`."""

from __future__ import annotations

import random

import pytest
import torch

from replayssm.runtime import prompt_graphs
from replayssm.runtime.errors import InferenceError
from replayssm.runtime.prompt_graphs import PromptGraphs
from replayssm.runtime.session import Row, Session

CLOSE = {"rtol": 1e-11, "atol": 1e-11}
"""float64 logits near 1, products of other shapes: some 1e-15."""


def random_tokens(count: int, seed: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(300) for _ in range(count)]


def graphs_of(slots: int, max_window: int, most_tokens: int) -> PromptGraphs:
    return PromptGraphs(None, torch.device("cpu"), slots, max_window, most_tokens, None)


@pytest.fixture
def few_tokens(monkeypatch):
    """Graphs of few tokens, so that steps of a small model meet several of them."""
    monkeypatch.setattr(prompt_graphs, "TOKEN_BUCKETS", (8, 16, 32))
    monkeypatch.setattr(prompt_graphs, "TOKENS_PER_ROW", 8)


@pytest.mark.parametrize(("slots", "max_window"), [(1, 1), (4, 4), (256, 5), (300, 1)])
def test_a_graph_holds_every_step(slots, max_window, monkeypatch):
    """Whatever the lengths: all rows are in one part, and its graph has room for their number and their tokens."""
    graphs = graphs_of(slots, max_window, slots * 256)
    monkeypatch.setattr(graphs, "_graph", lambda rows, tokens: (rows, tokens))
    choose = random.Random(slots)
    for _ in range(200):
        longest = choose.choice((max_window + 1, 40, 256))
        lengths = [choose.randint(max_window + 1, longest) for _ in range(choose.randint(1, slots))]
        parts = graphs.parts(lengths)
        assert [index for part in parts for index in part] == list(range(len(lengths)))
        for part in parts:
            rows, tokens = graphs.get(len(part), sum(lengths[index] for index in part))
            assert len(part) <= rows <= slots
            assert sum(lengths[index] for index in part) <= tokens
    assert graphs.parts([7, prompt_graphs.TOKEN_BUCKETS[-1] + 1]) is None


def test_small_sessions_need_few_graphs():
    assert graphs_of(1, 4, 256)._tokens == (128, 256)
    assert graphs_of(1, 4, 60)._tokens == (128,)
    assert graphs_of(64, 4, 64 * 256)._tokens == prompt_graphs.TOKEN_BUCKETS


@pytest.mark.parametrize("buffer_len", [8, 0])
@pytest.mark.parametrize("layout", ["nano", "qwen"])
def test_captured_prompts_equal_eager_ones(tiny_engine, layout, buffer_len, few_tokens):
    """Chunks of all lengths beside decode and verify rows, some in several graphs or too long for all of them."""
    engine = tiny_engine(layout, buffer_len=buffer_len)
    plain, captured = Session(engine), Session(engine, graphs=True)
    slots, _ = ([session.allocate() for _ in range(5)] for session in (plain, captured))
    assert (plain.captures_prompts, captured.captures_prompts) == (False, True)
    choose = random.Random(7)
    first = [{0: 7}, {1: 20, 2: 20, 3: 19}]
    for step in range(12):
        lengths = {slot: choose.choice((1, 3, 5, 6, 11, 20, 33)) for slot in choose.sample(slots, choose.randint(1, 5))}
        rows = []
        for slot, length in (first[step] if step < 2 else lengths).items():
            tokens = random_tokens(length, 10 * step + slot)
            rows.append(Row(slot, tokens, "none" if length > 4 and step != 5 else "last"))
        results = [session.step(rows) for session in (plain, captured)]
        for index, row in enumerate(rows):
            torch.testing.assert_close(*(result.row_logits(index) for result in results), **CLOSE)
            hidden_states = [result.row_hidden_states(index) for result in results]
            assert hidden_states[1].shape[0] == len(row.tokens)
            torch.testing.assert_close(*hidden_states, **CLOSE)
        for session in (plain, captured):
            session.advance({row.slot: 1 for row in rows if len(row.tokens) <= 4})
        assert [captured.seq_len(slot) for slot in slots] == [plain.seq_len(slot) for slot in slots]
    graphs = captured._programs["main"].prompts._graphs
    assert {tokens for _, tokens in graphs} == {8, 16, 32}


def test_prompts_run_in_graphs_only(tiny_engine, few_tokens, monkeypatch):
    """Their operators are not launched one by one, unless somebody wants their logits."""
    session = Session(tiny_engine("nano"), graphs=True)
    slots = [session.allocate() for _ in range(3)]
    eager, program = [], session._programs["main"]
    run = program._eager
    monkeypatch.setattr(program, "_eager", lambda rows, *rest: eager.append(rows) or run(rows, *rest))
    session.step([Row(slot, random_tokens(20, slot), "none") for slot in slots])
    assert not eager
    rows = [Row(slots[0], random_tokens(20, 0), "last"), Row(slots[1], random_tokens(9, 0), "none")]
    session.step(rows)
    assert eager == [rows]


def test_prepared_prompts_are_not_captured_again(tiny_engine, few_tokens):
    session = Session(tiny_engine("nano"), graphs=True)
    session.capture_prompts()
    graphs = session._programs["main"].prompts
    captured = dict(graphs._graphs)
    assert {tokens for _, tokens in captured} == {8, 16, 32}
    slots = [session.allocate() for _ in range(4)]
    for length in (5, 9, 32):
        session.step([Row(slot, random_tokens(length, slot), "none") for slot in slots])
    assert graphs._graphs == captured


def test_a_refused_prompt_is_an_error_and_the_next_step_is_not(tiny_engine):
    session = Session(tiny_engine("nano"), graphs=True)
    slots = [session.allocate() for _ in range(2)]
    session._seq_lens[1] += 380
    with pytest.raises(InferenceError, match="tokens were skipped"):
        session.step([Row(slot, random_tokens(9, slot), "none") for slot in slots])
    session.step([Row(0, random_tokens(9, 3), "none")])
