"""Rules 1 to 6 of the state record (design section 2), for every operator that they concern."""

from __future__ import annotations

import copy

import pytest
import torch

from replayssm.plugins import reference
from replayssm.plugins.state import LayerState, raise_on_error

RECURRENT = ["mamba2", "mamba2_odd", "gdn", "gdn_odd"]
STATEFUL = ["mamba2", "gdn", "conv", "attention"]


def checkpoint_position(state: LayerState, slot: int) -> int:
    return int(state["checkpoint_position"][slot, 0, 0])


@pytest.mark.parametrize("name", ["mamba2", "mamba2_odd", "gdn", "gdn_odd", "conv"])
def test_rule_1_thousands_of_rejections_need_one_integer(make_operator, dice, name):
    """Random drafts, most of them rejected, over 2,000 tokens: accepted outputs are the recurrence's."""
    operator = make_operator(name, buffer_len=16, max_window=6)
    state, inputs, junk = operator.pool(2), operator.inputs(2000), operator.inputs(1000)
    got = operator.drive(state, inputs, 1, 0, dice, junk)
    expected, _ = operator.judge(inputs)
    assert (got - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("activation", ["float64", "bfloat16"])
def test_rule_1_rejected_tokens_leave_no_trace(make_operator, dice, assert_same, name, activation):
    """Two runs whose rejected tokens differ give the same outputs, bit for bit."""
    operator = make_operator(name, buffer_len=8, max_window=5, activation_dtype=activation)
    inputs = operator.inputs(300)
    outputs = []
    for scale in (1.0, 1e3):
        state, rolls = operator.pool(2), copy.copy(dice)
        rolls.setstate(dice.getstate())
        outputs.append(operator.drive(state, inputs, 0, 0, rolls, [scale * t for t in operator.inputs(150)]))
    assert_same(*outputs)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("activation", ["float64", "bfloat16"])
def test_rule_2_a_step_is_idempotent(make_operator, dice, assert_same, snapshot, name, activation):
    """The same window again gives bit-equal outputs and state, whether or not the first run flushed."""
    operator = make_operator(name, buffer_len=8, max_window=5, activation_dtype=activation, state_dtype="float32")
    state, inputs = operator.pool(1), operator.inputs(250)
    done, flushes = 0, 0
    while done < 240:
        length = dice.randint(1, 5)
        before = checkpoint_position(state, 0) if operator.recurrent and done else 0
        first = operator.window(state, inputs, 0, done, done, length)
        after_first = snapshot(state)
        assert_same(operator.window(state, inputs, 0, done, done, length), first)
        assert_same(snapshot(state), after_first)
        if operator.recurrent:
            flushes += checkpoint_position(state, 0) != before
        done += dice.randint(1, length)
    raise_on_error(state.error_flag)
    assert flushes > 10 or not operator.recurrent


@pytest.mark.parametrize("name", ["mamba2", "gdn"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_rule_2_another_window_in_between(make_operator, name, state_dtype):
    """A window that did not flush, a longer one that did, the first again: equal within the format's rounding."""
    operator = make_operator(
        name, buffer_len=8, max_window=4, activation_dtype="float32", state_dtype=state_dtype, u_format="exact"
    )
    state, inputs, other = operator.pool(1), operator.inputs(8), operator.inputs(4)
    for done in range(6):
        operator.window(state, inputs, 0, done, done, 1)
    first = operator.window(state, inputs, 0, 6, 6, 2)
    operator.window(state, other, 0, 6)
    assert checkpoint_position(state, 0) == 6
    again = operator.window(state, inputs, 0, 6, 6, 2)
    # The fold rounds each element of the state once, relative to itself: at most that much of the largest sum of
    # absolute products, which stays within 4 times the largest output here. fp32: 30 operations round as much each.
    roundoff = {"float32": 30 * 2.0**-24, "bfloat16": 2.0**-8}[state_dtype]
    assert (again - first).abs().max() <= 4 * roundoff * first.abs().max()
    assert not torch.equal(again, first)


@pytest.mark.parametrize("name", STATEFUL)
def test_rule_3_everything_is_in_the_tensors(make_operator, dice, assert_same, name):
    """No cursor outside: a state rebuilt from its tensors before every call goes on bit-identically, in place."""
    operator = make_operator(name, buffer_len=8, max_window=5, activation_dtype="bfloat16")
    inputs, kept = operator.inputs(60), operator.pool(1)
    addresses = [tensor.data_ptr() for tensor in kept.tensors.values()]
    rebuilt, done = operator.pool(1), 0
    while done < 50:
        length = dice.randint(1, 5)
        rebuilt = LayerState.from_flat(
            kept.spec, [t.clone() for t in rebuilt.flat()], torch.zeros(1, dtype=torch.int32)
        )
        assert_same(
            operator.window(rebuilt, inputs, 0, done, done, length),
            operator.window(kept, inputs, 0, done, done, length),
        )
        done += dice.randint(1, length)
    assert [tensor.data_ptr() for tensor in kept.tensors.values()] == addresses


@pytest.mark.parametrize("name", ["mamba2", "gdn"])
@pytest.mark.parametrize(("buffer_len", "max_window"), [(4, 1), (8, 5), (16, 16), (3, 7), (64, 64)])
def test_rule_4_flushes_exactly_when_due(make_operator, dice, name, buffer_len, max_window):
    """c moves to seq_len iff history > 0 and history + window > L, and holds the state of committed tokens alone."""
    operator = make_operator(name, buffer_len=buffer_len, max_window=max_window)
    state, inputs = operator.pool(1), operator.inputs(6 * max(buffer_len, max_window) + max_window)
    _, states = operator.judge(inputs)
    c = done = 0
    exact_fit = False
    while done + max_window <= inputs[0].shape[0]:
        room = buffer_len - (done - c)
        length = room if 1 <= room <= max_window and dice.random() < 0.3 else dice.randint(1, max_window)
        exact_fit |= length == room and done > c
        operator.window(state, inputs, 0, done, done, length)
        if done > c and done - c + length > buffer_len:
            c = done
            error = (state["checkpoint"][0] - states[c - 1]).abs().max()
            assert error <= 1e-12 * states[c - 1].abs().max()
        assert (state["checkpoint_position"] == c).all()
        done += dice.randint(1, length)
    assert c > 0
    assert exact_fit or buffer_len < max_window


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("state_dtype", ["bfloat16", "float16", "float32"])
def test_rule_4_window_reads_the_checkpoint_as_stored(make_operator, assert_same, name, state_dtype):
    """After a flush the window's outputs are those of a sequence that starts from the rounded checkpoint."""
    operator = make_operator(name, buffer_len=6, max_window=3, state_dtype=state_dtype, activation_dtype="float32")
    state, inputs = operator.pool(2), operator.inputs(9)
    for done in (0, 3):
        operator.window(state, inputs, 0, done, done, 3)
    flushed = operator.window(state, inputs, 0, 6, 6, 3)
    assert checkpoint_position(state, 0) == 6
    state["checkpoint"][1] = state["checkpoint"][0]
    reference.set_checkpoint_position(state, [1], [6])
    assert_same(operator.window(state, inputs, 1, 6, 6, 3), flushed)


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("length", [9, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("history", [0, 1, 7])
def test_rule_5_prefill_is_committed_and_folded(make_operator, snapshot, assert_same, name, length, history):
    """Outputs and state are the recurrence's; c = end of the window; the SSM ring is not touched."""
    operator = make_operator(name, buffer_len=8, max_window=8)
    state, inputs = operator.pool(2), operator.inputs(history + length)
    outputs = [operator.window(state, inputs, 1, 0, 0, history)]
    before = snapshot(state)
    outputs.append(operator.window(state, inputs, 1, history, history, length))
    raise_on_error(state.error_flag)
    expected, states = operator.judge(inputs)
    assert (torch.cat(outputs) - expected).abs().max() <= 1e-12 * expected.abs().max()
    if operator.recurrent:
        assert (state["checkpoint_position"][1] == history + length).all()
        assert (state["checkpoint"][1] - states[-1]).abs().max() <= 1e-12 * states[-1].abs().max()
        after = snapshot(state)
        for part in before:
            if part.startswith("ring_"):
                assert_same(after[part], before[part])


@pytest.mark.parametrize("name", ["conv", "conv_short"])
@pytest.mark.parametrize(("max_window", "length"), [(1, 2), (1, 3), (1, 50), (4, 5), (8, 9)])
def test_rule_5_prefill_keeps_the_last_conv_inputs(make_operator, assert_same, name, max_window, length):
    """The ring gets conv_kernel - 1 inputs (or all, if fewer) and decoding goes on from them."""
    operator = make_operator(name, buffer_len=8, max_window=max_window)
    taps = operator.geometry.conv_kernel - 1
    state, inputs = operator.pool(1), operator.inputs(1 + length + 5)
    outputs = [operator.window(state, inputs, 0, 0, 0, 1)]
    ring = state["conv_ring"][0]
    before = ring.clone()
    outputs.append(operator.window(state, inputs, 0, 1, 1, length))
    written = [position % ring.shape[0] for position in range(max(1, 1 + length - taps), 1 + length)]
    assert_same(ring[written], inputs[0][1 : 1 + length][-taps:])
    others = [index for index in range(ring.shape[0]) if index not in written]
    assert_same(ring[others], before[others])
    outputs += [operator.window(state, inputs, 0, p, p, 1) for p in range(1 + length, 6 + length)]
    expected, _ = operator.judge(inputs)
    assert (torch.cat(outputs) - expected).abs().max() <= 1e-12 * expected.abs().max()


@pytest.mark.parametrize("name", [*RECURRENT, "mamba2_tiles", "gdn_tiles", "conv", "attention"])
@pytest.mark.parametrize("length", [1, 3, 20])
@pytest.mark.parametrize("buffer_len", [4, 0])
def test_rule_6_a_fresh_sequence_reads_nothing(make_operator, assert_same, name, length, buffer_len):
    """NaN and nonsense positions in a reused slot change no bit of a sequence that starts in it, up to its flushes."""
    operator = make_operator(name, buffer_len=buffer_len, max_window=3, activation_dtype="bfloat16")
    inputs = operator.inputs(length + 12)
    outputs = []
    for poison in (False, True):
        state = operator.pool(2, poison=poison)
        steps = [operator.window(state, inputs, 1, 0, 0, length)]
        if operator.recurrent and buffer_len:
            assert (state["checkpoint_position"][1] == (length if length > 3 else 0)).all()
        if buffer_len == 0:
            reference.commit(state, [1], [length if length == 3 else 0])
        steps += [operator.window(state, inputs, 1, p, p, 1) for p in range(length, length + 12)]
        raise_on_error(state.error_flag)
        outputs.append(torch.cat(steps))
    assert torch.isfinite(outputs[1]).all()
    assert_same(*outputs)


@pytest.mark.parametrize("name", ["mamba2", "gdn", "conv"])
def test_rule_6_a_rejected_first_window_leaves_the_sequence_fresh(make_operator, assert_same, name):
    operator = make_operator(name, buffer_len=4, max_window=3, activation_dtype="float32")
    state, inputs, other = operator.pool(1), operator.inputs(3), operator.inputs(3)
    first = operator.window(state, inputs, 0, 0)
    operator.window(state, other, 0, 0)
    assert_same(operator.window(state, inputs, 0, 0), first)
