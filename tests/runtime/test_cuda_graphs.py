"""Captured steps, with the stand-in that runs them uncaptured: buffers, padding, choices and windows are the same.

`test_session_cuda.py` holds what only a GPU can show. Engines are in float64 (conftest.py), where steps of different
shapes agree to some 1e-15 of logits near 1.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from replayssm.plugins.step_ends import LAST_CHOSEN
from replayssm.runtime.cuda_graphs import row_buckets, window_classes
from replayssm.runtime.errors import InferenceError
from replayssm.runtime.generation import generate
from replayssm.runtime.sampling import SamplingBatch, SamplingParams, sample
from replayssm.runtime.session import DraftRow, Row, Session
from replayssm.runtime.speculation import MtpDrafter, NgramDrafter

CLOSE = {"rtol": 1e-11, "atol": 1e-11}
"""float64 logits of order 1: sums in another order differ by some 1e-15."""


pytestmark = pytest.mark.usefixtures("folding_rows_first")


def random_tokens(count: int, seed: int = 0) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(300) for _ in range(count)]


def pair(engine) -> tuple[Session, Session]:
    """Sessions without and with captured steps, three sequences of different lengths in each."""
    sessions = Session(engine), Session(engine, graphs=True)
    for session in sessions:
        for length in (5, 23, 11):
            session.prefill(session.allocate(), random_tokens(length, length))
    return sessions


def test_classes_cover_every_step():
    for slots in (1, 2, 3, 8, 64, 65, 200, 256, 300):
        buckets = row_buckets(slots)
        assert buckets == sorted(set(buckets))
        assert buckets[-1] == slots
        assert all(b - a <= max(a, 64) for a, b in itertools.pairwise(buckets)), "little padding"
    for window in (1, 2, 3, 5, 8, 16):
        classes = window_classes(window)
        assert (classes[0], classes[-1]) == (1, window)
        assert all(2 * a <= b for a, b in itertools.pairwise(classes)), "no two that are nearly the same"


def test_prepared_steps_are_not_captured_again(tiny_engine):
    session = Session(tiny_engine("nano"), graphs=True)
    session._programs["main"].graphs.prepare()
    graphs = session._programs["main"].graphs
    captured = [session.step_graph(rows, window) for rows in (1, 2, 4, 8) for window in (1, 2, 4)]
    assert {key[2] for key in graphs._graphs} == {"greedy", "plain"}
    assert len(graphs._graphs) == 2 * len(captured)
    session._programs["main"].graphs.prepare()
    assert captured == [session.step_graph(rows, window) for rows in (1, 2, 3, 7) for window in (1, 2, 3)]
    # Preparing ran steps of padding rows only.
    assert not any(tensor.any() for state in session.states.values() for tensor in state.tensors.values())
    # Whatever requests do then, unless they filter tokens: no step is captured while they wait.
    session.capture_prompts()
    count = session.captured_steps
    prompts = [random_tokens(length, length) for length in (3, 9, 150, 40, 21, 5, 300, 8, 2)]
    params = [SamplingParams(temperature=0.5 * (i % 2), seed=i) for i in range(len(prompts))]
    generate(session, [prompt + prompt[:30] for prompt in prompts], 12, params, NgramDrafter(), eos_token_ids=())
    assert session.captured_steps == count


@pytest.mark.parametrize("buffer_len", [8, 0])
@pytest.mark.parametrize("layout", ["nano", "qwen"])
def test_captured_steps_equal_eager_ones(tiny_engine, layout, buffer_len):
    """Decode and verify rows of all lengths, flushes, rejections, padding rows, and every choice of logits."""
    plain, captured = pair(tiny_engine(layout, buffer_len=buffer_len))
    choose = random.Random(1)
    for step in range(25):
        slots = choose.sample(range(3), choose.randint(1, 3))
        rows = [
            Row(slot, random_tokens(choose.randint(1, 4), 10 * step + slot), choose.choice(("all", "last", "none")))
            for slot in slots
        ]
        results = [session.step(rows) for session in (plain, captured)]
        assert results[0].chosen is None
        for index, row in enumerate(rows):
            torch.testing.assert_close(results[1].row_logits(index), results[0].row_logits(index), **CLOSE)
            hidden_states = [result.row_hidden_states(index) for result in results]
            assert hidden_states[1].shape[0] == len(row.tokens)
            torch.testing.assert_close(*hidden_states, **CLOSE)
            span = results[1].logits_spans[index]
            assert results[1].chosen.tokens[span] == results[0].row_logits(index).argmax(dim=1).tolist()
            assert all(results[1].chosen.finite[span])
        least = 1 if buffer_len == 0 else 0
        kept = {row.slot: choose.randint(least if len(row.tokens) == 1 else 0, len(row.tokens)) for row in rows}
        for session in (plain, captured):
            session.advance(kept)


@pytest.mark.parametrize("layout", ["nano", "qwen"])
def test_prefill_rows_run_beside_a_captured_step(tiny_engine, layout):
    """Rows of both kinds in any order; spans lead to each row's own outputs, and all rows choose their tokens."""
    plain, captured = pair(tiny_engine(layout))
    params = SamplingParams(temperature=1.2, seed=4)
    for step, wanted in enumerate(("all", "last", "none")):
        rows = [
            Row(1, random_tokens(9, step), wanted, params),
            Row(0, random_tokens(1 + step, step), "all"),
            Row(2, random_tokens(6, 9 + step), "last"),
        ]
        if step == 2:
            rows = [rows[0], rows[2]]
        results = [session.step(rows) for session in (plain, captured)]
        for index, row in enumerate(rows):
            torch.testing.assert_close(results[1].row_logits(index), results[0].row_logits(index), **CLOSE)
            hidden_states = [result.row_hidden_states(index) for result in results]
            torch.testing.assert_close(*hidden_states, **CLOSE)
            span = results[1].logits_spans[index]
            count = span.stop - span.start
            # Of a prefill row the length has grown already.
            first = captured.seq_len(row.slot) + 1 - (count if len(row.tokens) > 4 else 0)
            if count:
                batch = SamplingBatch([row.params or SamplingParams()] * count, range(first, first + count))
                assert results[1].chosen.tokens[span] == sample(results[0].row_logits(index), batch).tolist()
        for session in (plain, captured):
            session.advance({0: 1} if step < 2 else {})
            assert [session.seq_len(slot) for slot in range(3)] == [plain.seq_len(slot) for slot in range(3)]


@pytest.mark.parametrize("buffer_len", [8, 0])
def test_steps_that_start_before_the_last_one_was_read(tiny_engine, buffer_len):
    """The device feeds itself: rows come, go and change places meanwhile, and prompts end in a step of their own."""
    engine = tiny_engine("qwen", buffer_len=buffer_len)
    ahead, plain = Session(engine, graphs=True), Session(engine)
    prompts = [random_tokens(7 + 3 * slot, slot) for slot in range(3)]
    tokens = {}
    for session in (ahead, plain):
        slots = [session.allocate() for _ in prompts]
        session.step([Row(slot, prompts[slot]) for slot in slots])
    choose = random.Random(3)
    expected, finishes = [], []
    for slot in slots:
        tokens[slot] = int(plain.step([Row(slot, [5])]).logits.argmax())
        plain.advance({slot: 1})
    ahead.step([Row(slot, [5]) for slot in slots])
    ahead.advance(dict.fromkeys(slots, 1))
    for _ in range(20):
        rows = choose.sample(slots, choose.randint(1, 3))
        chosen = [int(plain.step([Row(slot, [tokens[slot]])]).logits.argmax()) for slot in rows]
        plain.advance(dict.fromkeys(rows, 1))
        tokens.update(zip(rows, chosen, strict=True))
        expected.append(chosen)
        finishes.append(ahead.start_step([Row(slot, [LAST_CHOSEN]) for slot in rows]))
        ahead.advance(dict.fromkeys(rows, 1))
        if len(finishes) == 2:
            assert finishes.pop(0)().chosen.tokens == expected.pop(0)
    assert finishes.pop()().chosen.tokens == expected.pop()


def test_the_last_choice_of_a_prompt_stays_on_the_device(tiny_engine):
    """Of a prefill row and of a captured one in the same step."""
    plain, captured = pair(tiny_engine("nano"))
    rows = [Row(0, random_tokens(9), "last"), Row(1, [3], "last")]
    following = plain.step(rows).logits.argmax(dim=1).tolist()
    captured.step(rows)
    logits = []
    for session, tokens in ((plain, following), (captured, [LAST_CHOSEN] * 2)):
        session.advance({1: 1})
        logits.append(session.step([Row(slot, [token]) for slot, token in enumerate(tokens)]).logits)
    torch.testing.assert_close(*logits, **CLOSE)


def test_a_last_choice_needs_captured_steps(tiny_engine):
    plain, captured = pair(tiny_engine("nano"))
    assert (plain.can_run_ahead, captured.can_run_ahead) == (False, True)
    with pytest.raises(ValueError, match="token id -1 is outside the vocabulary"):
        plain.step([Row(0, [LAST_CHOSEN])])


@pytest.mark.parametrize("tokens", [[5, LAST_CHOSEN], [LAST_CHOSEN] * 2, [LAST_CHOSEN, *range(8)]])
def test_a_last_choice_is_the_first_token_of_a_captured_row(tokens, tiny_engine):
    """Elsewhere nothing replaces it: it would be looked up in the embedding."""
    _, captured = pair(tiny_engine("nano"))
    with pytest.raises(ValueError, match="token id -1 is outside the vocabulary"):
        captured.step([Row(0, tokens)])


def test_draft_steps_equal_eager_ones(tiny_engine):
    """Rows of several lengths with hidden states of their own, then the recursion of one token a row."""
    sessions = pair(tiny_engine("qwen"))
    hidden_states = torch.randn(6, 128, dtype=torch.float64)
    lengths, first = [3, 1, 2], 0
    rows = []
    for slot, length in enumerate(lengths):
        rows.append(DraftRow(slot, random_tokens(length, slot), 4 + slot, hidden_states[first : first + length]))
        first += length
    for _ in range(3):
        plain, captured = (session.draft_step(rows) for session in sessions)
        torch.testing.assert_close(captured.logits, plain.logits, **CLOSE)
        assert captured.chosen.tokens == plain.logits.argmax(dim=1).tolist()
        following = []
        for index, row in enumerate(rows):
            ours, wanted = captured.row_hidden_states(index), plain.row_hidden_states(index)
            torch.testing.assert_close(ours, wanted, **CLOSE)
            position = row.position + len(row.tokens)
            following.append(DraftRow(row.slot, [captured.chosen.tokens[index]], position, ours[-1:]))
        rows = following


def test_hidden_states_outlive_the_next_step(tiny_engine):
    _, captured = pair(tiny_engine("nano"))
    kept = captured.step([Row(0, [1])]).row_hidden_states(0)
    before = kept.clone()
    captured.step([Row(1, [2])])
    assert torch.equal(kept, before)


@pytest.mark.parametrize("drafts", [None, "ngram", "mtp"])
@pytest.mark.parametrize("layout", ["nano", "qwen"])
def test_generation_gives_the_same_tokens(tiny_engine, layout, drafts):
    """Greedy and sampled requests together, more of them than slots, with stop lengths of their own."""
    engine = tiny_engine(layout)
    prompts = [random_tokens(4 + 7 * i, i) * (2 if drafts else 1) for i in range(5)]
    drafters = {None: lambda session: None, "ngram": lambda session: NgramDrafter(), "mtp": MtpDrafter}
    params = [
        SamplingParams(temperature=0.8 * (i % 2), top_k=20 * (i == 1), top_p=0.9, seed=2**63 + i) for i in range(5)
    ]
    tokens = []
    for graphs in (False, True):
        session = Session(engine, slots=3, graphs=graphs)
        results = generate(session, prompts, 15, params, drafters[drafts](session), eos_token_ids=())
        tokens.append([result.token_ids for result in results])
    assert tokens[0] == tokens[1]
    assert len({tuple(row) for row in tokens[0]}) == 5


def test_sampling_runs_inside_the_step(tiny_engine):
    """Rows of one step with parameters of their own, among them greedy ones; the same as sampling outside."""
    plain, captured = pair(tiny_engine("nano"))
    params = [SamplingParams(temperature=1.5, seed=3), SamplingParams(), SamplingParams(temperature=0.7, min_p=0.05)]
    rows = [Row(i, random_tokens(length, i), "all", params[i]) for i, length in enumerate((1, 2, 1))]
    chosen = captured.step(rows).chosen
    logits = plain.step(rows).logits
    positions = [plain.seq_len(row.slot) + 1 + i for row in rows for i in range(len(row.tokens))]
    owners = [params[0], params[1], params[1], params[2]]
    assert chosen.tokens == sample(logits, SamplingBatch(owners, positions)).tolist()


def test_logits_that_are_not_finite_are_marked_by_row(tiny_engine):
    _, captured = pair(tiny_engine("nano"))
    for name, state in captured.states.items():
        if name.endswith("attention"):
            state["v_cache"][1] = torch.nan
    chosen = captured.step([Row(0, [1]), Row(1, [1]), Row(2, [1])]).chosen
    assert chosen.finite == [True, False, True]


def test_a_refused_row_is_an_error_and_the_next_step_is_not(tiny_engine):
    _, captured = pair(tiny_engine("nano"))
    captured._seq_lens[1] += 300
    with pytest.raises(InferenceError, match="tokens were skipped"):
        captured.step([Row(0, [1]), Row(1, [1])])
    assert captured.step([Row(0, [1])]).chosen.finite == [True]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("buffer_len", [8, 0])
def test_decoding_ahead_equals_decoding(tiny_engine, buffer_len, graphs):
    engine = tiny_engine("qwen", buffer_len=buffer_len, max_draft_len=0)
    ahead, plain = Session(engine, graphs=graphs), Session(engine)
    first = []
    for session in (ahead, plain):
        slots = [session.allocate() for _ in range(3)]
        first = [int(session.prefill(slot, random_tokens(6 + slot, slot)).argmax()) for slot in slots]
    expected, tokens = [], first
    for _ in range(20):
        tokens = plain.decode([0, 1, 2], tokens).argmax(dim=1).tolist()
        expected.append(tokens)
    assert list(ahead.decode_ahead([0, 1, 2], first, 20)) == expected
    assert [ahead.seq_len(slot) for slot in range(3)] == [plain.seq_len(slot) for slot in range(3)]
    # Both go on from there, whatever ran ahead.
    again = [session.decode([0, 1, 2], expected[-1]) for session in (ahead, plain)]
    torch.testing.assert_close(*again, **CLOSE)


@pytest.mark.parametrize("buffer_len", [8, 0])
def test_decoding_ahead_may_stop_early(tiny_engine, buffer_len):
    """What ran ahead and was not wanted never happened."""
    engine = tiny_engine("nano", buffer_len=buffer_len, max_draft_len=0)
    ahead, plain = Session(engine, graphs=True), Session(engine)
    for session in (ahead, plain):
        session.prefill(session.allocate(), random_tokens(13))
    steps = ahead.decode_ahead([0], [7], 30)
    tokens = [next(steps)[0] for _ in range(9)]
    steps.close()
    expected, token = [], 7
    for _ in range(9):
        token = int(plain.decode([0], [token]).argmax())
        expected.append(token)
    assert tokens == expected
    torch.testing.assert_close(*(session.decode([0], [5]) for session in (ahead, plain)), **CLOSE)


def test_decoding_ahead_refuses_what_does_not_fit(tiny_engine):
    session = Session(tiny_engine("nano"), graphs=True)
    slot = session.allocate()
    with pytest.raises(ValueError, match="more than the engine's max_seq_len"):
        next(session.decode_ahead([slot], [1], 401))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        next(session.decode_ahead([slot], [-1], 3))
