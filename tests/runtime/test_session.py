"""Slots and steps: what a session promises, on all layouts. Engines are in float64 (see conftest.py)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from replayssm.runtime.errors import InferenceError
from replayssm.runtime.session import DraftRow, Row, Session

LAYOUTS = ("nano", "super", "qwen", "qwen_moe")

# float64 matmuls of different batch shapes differ by rounding, some 1e-16 relative per layer; logits are of order 1.
CLOSE = {"rtol": 1e-11, "atol": 1e-11}
"""float64 logits of order 1: sums in another order differ by some 1e-15."""


def random_tokens(count, seed=0):
    choose = random.Random(seed)
    return [choose.randrange(300) for _ in range(count)]


def state_bytes(session, slot):
    """All state of a slot, as bytes."""
    return {
        (name, part): tensor[slot].clone().view(torch.uint8)
        for name, state in session.states.items()
        for part, tensor in state.tensors.items()
    }


def changed_parts(before, after):
    return {key for key in before if not torch.equal(before[key], after[key])}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_way_of_feeding_gives_the_same_logits(tiny_engine, layout):
    """One token at a time, windows of every length, chunks of several sizes, and prefill agree on every position."""
    engine = tiny_engine(layout)
    tokens = random_tokens(61)
    session = Session(engine, slots=1)
    slot = session.allocate()
    plain = torch.cat([session.decode([slot], [token]) for token in tokens])
    assert session.seq_len(slot) == len(tokens)
    session.free(slot)
    window = session.settings.max_window
    for lengths in ([61], [1, 60], [20, 3, 20, 1, 17], [window] * 15 + [1], [window + 1] * 12 + [1]):
        slot, start, logits = session.allocate(), 0, []
        for length in lengths:
            result = session.step([Row(slot, tokens[start : start + length], "all")])
            logits.append(result.row_logits(0))
            if length <= window:
                session.advance({slot: length})
            start += length
            assert session.seq_len(slot) == start
        session.free(slot)
        torch.testing.assert_close(torch.cat(logits), plain, **CLOSE)
    for chunk in (1, 7, 64):
        chunked = Session(engine, slots=1, prefill_chunk=chunk)
        torch.testing.assert_close(chunked.prefill(chunked.allocate(), tokens), plain[-1], **CLOSE)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("buffer_len", [0, 8])
def test_mixed_rows_in_one_step(tiny_engine, layout, buffer_len):
    """Prefill, decode and verify rows together give what each gives alone, and only the rows' slots change."""
    engine = tiny_engine(layout, buffer_len=buffer_len)
    histories = [random_tokens(count, seed=count) for count in (30, 13, 5, 9)]
    windows = [random_tokens(count, seed=100 + count) for count in (20, 1, 4)]
    together, alone = Session(engine, slots=5), Session(engine, slots=5)
    for session in (together, alone):
        for history in histories:
            session.prefill(session.allocate(), history)
    untouched = state_bytes(together, 3)
    rows = [Row(slot, window, "all") for slot, window in enumerate(windows)]
    result = together.step(rows[::-1])
    for index, row in enumerate(rows[::-1]):
        expected = alone.step([row])
        torch.testing.assert_close(result.row_logits(index), expected.row_logits(0), **CLOSE)
        torch.testing.assert_close(result.row_hidden_states(index), expected.row_hidden_states(0), **CLOSE)
        assert result.row_hidden_states(index).shape[0] == len(row.tokens)
    assert changed_parts(untouched, state_bytes(together, 3)) == set()
    assert [together.seq_len(slot) for slot in range(4)] == [50, 13, 5, 9]


def test_which_logits(tiny_engine):
    session = Session(tiny_engine("nano"), slots=3)
    slots = [session.allocate() for _ in range(3)]
    tokens = random_tokens(3)
    rows = [Row(slot, tokens, want) for slot, want in zip(slots, ("all", "none", "last"), strict=True)]
    result = session.step(rows)
    assert [result.row_logits(i).shape[0] for i in range(3)] == [3, 0, 1]
    torch.testing.assert_close(result.row_logits(2)[0], result.row_logits(0)[2], **CLOSE)
    assert session.step([Row(slots[0], tokens, "none")]).logits.shape[0] == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rejected_tokens_never_happened(tiny_engine, layout):
    """Whatever was tried in between, the accepted tokens alone decide what follows; and rejecting copies no state."""
    engine = tiny_engine(layout)
    session, plain = Session(engine, slots=1), Session(engine, slots=1)
    slot, other = session.allocate(), plain.allocate()
    prompt = random_tokens(11)
    session.prefill(slot, prompt)
    plain.prefill(other, prompt)
    choose = random.Random(7)
    for turn in range(25):
        window = random_tokens(1 + choose.randrange(4), seed=turn)
        accepted = 1 + choose.randrange(len(window))
        for _ in range(choose.randrange(2)):
            session.verify({slot: random_tokens(1 + choose.randrange(4), seed=1000 + turn)})
        logits = session.verify({slot: window})[slot]
        before = state_bytes(session, slot)
        session.advance({slot: accepted})
        assert changed_parts(before, state_bytes(session, slot)) == set()
        expected = torch.cat([plain.decode([other], [token]) for token in window[:accepted]])
        torch.testing.assert_close(logits[:accepted], expected, **CLOSE)
    assert session.seq_len(slot) == plain.seq_len(other)


@pytest.mark.parametrize("layout", ["nano", "qwen"])
def test_baseline_rejects_by_snapshots(tiny_engine, layout):
    engine = tiny_engine(layout, buffer_len=0)
    session, plain = Session(engine, slots=2), Session(engine, slots=2)
    slot, other = session.allocate(), plain.allocate()
    session.prefill(slot, random_tokens(9))
    plain.prefill(other, random_tokens(9))
    for turn, accepted in enumerate((1, 4, 2, 3, 1)):
        window = random_tokens(4, seed=turn)
        logits = session.verify({slot: window})[slot]
        session.advance({slot: accepted})
        expected = torch.cat([plain.decode([other], [token]) for token in window[:accepted]])
        torch.testing.assert_close(logits[:accepted], expected, **CLOSE)
    session.verify({slot: random_tokens(2)})
    session.advance({slot: 0})
    token = [5]
    torch.testing.assert_close(session.decode([slot], token), plain.decode([other], token), **CLOSE)
    session.step([Row(slot, [1])])
    with pytest.raises(ValueError, match="call advance first"):
        session.step([Row(slot, [1])])
    with pytest.raises(ValueError, match="expected 1 to 1 accepted tokens, got 0"):
        session.advance({slot: 0})
    session.advance({slot: 1})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_again_is_bit_equal(tiny_engine, layout):
    """Rule 2 of the design, through the whole network, across a flush (buffer_len 8, twelve windows of four)."""
    session = Session(tiny_engine(layout), slots=1)
    slot = session.allocate()
    session.prefill(slot, random_tokens(5))
    for turn in range(12):
        window = random_tokens(4, seed=turn)
        first = session.verify({slot: window})[slot]
        state = state_bytes(session, slot)
        assert torch.equal(session.verify({slot: window})[slot], first)
        assert changed_parts(state, state_bytes(session, slot)) == set()
        session.advance({slot: 3})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("buffer_len", [0, 8])
def test_fork_and_blob_continue_identically(tiny_engine, layout, buffer_len):
    engine = tiny_engine(layout, buffer_len=buffer_len)
    session, elsewhere = Session(engine, slots=4), Session(engine, slots=3)
    elsewhere.prefill(elsewhere.allocate(), random_tokens(40, seed=9))
    session.prefill(session.allocate(), random_tokens(3))
    slot = session.allocate()
    session.prefill(slot, random_tokens(33))
    session.decode([slot], [7])
    fork = session.fork(slot)
    loaded = elsewhere.load(session.save(slot))
    assert (session.seq_len(fork), elsewhere.seq_len(loaded)) == (34, 34)
    assert session.save(fork) == session.save(slot)
    for turn in range(20):
        window = random_tokens(1 + turn % 4, seed=turn)
        results = [
            owner.verify({number: window})[number]
            for owner, number in ((session, slot), (session, fork), (elsewhere, loaded))
        ]
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])
        accepted = 1 + turn % len(window)
        session.advance({slot: accepted, fork: accepted})
        elsewhere.advance({loaded: accepted})


def test_a_fork_is_independent(tiny_engine):
    session = Session(tiny_engine("super"), slots=2)
    slot = session.allocate()
    session.prefill(slot, random_tokens(20))
    before = state_bytes(session, slot)
    fork = session.fork(slot)
    session.prefill(fork, random_tokens(30, seed=3))
    assert changed_parts(before, state_bytes(session, slot)) == set()


def test_slots_are_a_fixed_pool(tiny_engine):
    session = Session(tiny_engine("nano"), slots=2)
    tokens = random_tokens(12)
    first, second = session.allocate(), session.allocate()
    with pytest.raises(ValueError, match="all 2 slots are in use"):
        session.allocate()
    with pytest.raises(ValueError, match="all 2 slots are in use"):
        session.fork(first)
    expected = session.prefill(first, tokens)
    session.free(first)
    assert session.free_slots == 1
    for use in (session.free, session.seq_len, session.save, session.fork, lambda s: session.advance({s: 0})):
        with pytest.raises(ValueError, match=f"slot {first} is not in use"):
            use(first)
    for state in session.states.values():
        for tensor in state.tensors.values():
            if tensor.is_floating_point():
                tensor[first] = float("nan")
    again = session.allocate()
    assert again == first
    assert torch.equal(session.prefill(again, tokens), expected)
    assert session.seq_len(second) == 0


@pytest.mark.parametrize("buffer_len", [0, 8])
def test_warming_up_leaves_no_trace(tiny_engine, buffer_len):
    cold, warm = (Session(tiny_engine("qwen", buffer_len=buffer_len), slots=2) for _ in range(2))
    warm.warm_up()
    assert warm.free_slots == 2
    tokens = random_tokens(14)
    assert torch.equal(warm.prefill(warm.allocate(), tokens), cold.prefill(cold.allocate(), tokens))


def test_load_that_fails_gives_the_slot_back(tiny_engine):
    session = Session(tiny_engine("nano"), slots=1)
    with pytest.raises(ValueError, match="not a state blob"):
        session.load(b"nonsense")
    assert session.free_slots == 1


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least one row"),
        ([Row(0, [1]), Row(0, [2])], "at most one row per slot"),
        ([Row(1, [1])], "slot 1 is not in use"),
        ([Row(-1, [1])], "slot -1 is not in use"),
        ([Row(0, [])], "at least one token"),
        ([Row(0, [10**6])], "outside the vocabulary"),
        ([Row(0, [-1])], "outside the vocabulary"),
        ([Row(0, [1], "some")], "logits must be one of last, all, none"),
        ([Row(0, [1] * 401)], "more than the engine's max_seq_len 400"),
    ],
)
def test_rows_that_cannot_run(tiny_engine, rows, message):
    session = Session(tiny_engine("nano"), slots=2)
    session.allocate()
    with pytest.raises(ValueError, match=message):
        session.step(rows)
    assert session.seq_len(0) == 0
    session.decode([0], [1])


def test_limits_of_a_sequence(tiny_engine):
    session = Session(tiny_engine("nano"), slots=1)
    slot = session.allocate()
    session.prefill(slot, random_tokens(398))
    session.verify({slot: [1, 2]})
    session.advance({slot: 2})
    for call in (lambda: session.decode([slot], [1]), lambda: session.prefill(slot, [1])):
        with pytest.raises(ValueError, match="401 tokens are more than the engine's max_seq_len 400"):
            call()
    with pytest.raises(ValueError, match="max_draft_len"):
        session.verify({slot: [1] * 5})


def test_accepting_more_than_there_was(tiny_engine):
    session = Session(tiny_engine("nano"), slots=1)
    slot = session.allocate()
    session.verify({slot: [1, 2]})
    for count in (3, -1):
        with pytest.raises(ValueError, match=f"expected 0 to 2 accepted tokens, got {count}"):
            session.advance({slot: count})
    with pytest.raises(ValueError, match="tentative window"):
        session.save(slot)
    with pytest.raises(ValueError, match="tentative window"):
        session.fork(slot)
    session.advance({slot: 2})
    with pytest.raises(ValueError, match="expected 0 to 0"):
        session.advance({slot: 1})
    session.prefill(slot, random_tokens(20))
    with pytest.raises(ValueError, match="expected 0 to 0"):
        session.advance({slot: 1})


def test_session_options(tiny_engine):
    engine = tiny_engine("nano")
    assert Session(engine).free_slots == engine.manifest.limits.max_batch_size
    for slots in (0, 9):
        with pytest.raises(ValueError, match="between 1 and the engine's max_batch_size 8"):
            Session(engine, slots=slots)
    with pytest.raises(ValueError, match="prefill_chunk"):
        Session(engine, prefill_chunk=0)
    one, four = Session(engine, slots=1), Session(engine, slots=4)
    assert four.state_bytes == 4 * one.state_bytes


def test_an_operator_that_refuses_a_row_is_reported_once(tiny_engine):
    """A slot whose length lies below its checkpoint cannot occur through the public calls; the device reports it."""
    session = Session(tiny_engine("qwen"), slots=1)
    slot = session.allocate()
    session.prefill(slot, random_tokens(30))
    session._seq_lens[slot] = 2
    with pytest.raises(InferenceError, match="seq_len lies below its checkpoint"):
        session.step([Row(slot, [1])])
    session._seq_lens[slot] = 30
    session.step([Row(slot, [1])])


def test_prefill_plan(tiny_engine):
    """Chunks and then a tail of 1 to max_window tokens that depends on the prompt alone and takes every value."""
    session = Session(tiny_engine("nano"), prefill_chunk=16)
    window = session.settings.max_window
    tails = set()
    for count in range(1, 60):
        tokens = random_tokens(count, seed=count)
        *chunks, tail = session.prefill_plan(tokens)
        assert sum(chunks) + tail == count
        assert all(chunk == 16 for chunk in chunks[:-1])
        assert all(0 < chunk <= 16 for chunk in chunks)
        assert 1 <= tail <= window
        assert session.prefill_plan(list(tokens)) == [*chunks, tail]
        tails.add(tail)
    assert tails == set(range(1, window + 1))


def test_draft_head_is_refused_where_there_is_none(tiny_engine):
    engine = tiny_engine("nano")
    session = Session(engine, slots=1)
    slot = session.allocate()
    hidden_states = torch.zeros(1, engine.manifest.model["hidden_size"], dtype=torch.float64)
    assert session.draft_step([DraftRow(slot, [1], 0, hidden_states)]).logits.shape[0] == 1
    bare = replace(engine, networks={"main": engine.networks["main"]})
    session = Session(bare, slots=1)
    with pytest.raises(ValueError, match="no draft head"):
        session.draft_step([DraftRow(session.allocate(), [1], 0, hidden_states)])
