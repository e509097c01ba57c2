"""Baseline and serial-exact modes."""

from __future__ import annotations

import pytest
import torch

from replayssm.plugins import reference
from replayssm.plugins.state import allocate_state, raise_on_error

RECURRENT = ["mamba2", "mamba2_odd", "mamba2_ungrouped", "gdn", "gdn_odd", "gdn_ungrouped"]


def pair(make_operator, name, buffer_len=9, max_window=6, **settings):
    """(baseline, serial-exact) operators with the same weights."""
    common = {"max_window": max_window, "u_format": "exact", **settings}
    return (
        make_operator(name, buffer_len=0, **common),
        make_operator(name, buffer_len=buffer_len, serial_exact=True, **common),
    )


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("activation", ["float32", "bfloat16"])
@pytest.mark.parametrize("buffer_len", [1, 4, 9, 64])
def test_serial_exact_equals_baseline(make_operator, dice, assert_same, name, state_dtype, activation, buffer_len):
    """Bit-equal outputs in any windows, with rejected tails, long prefills and flushes at different times."""
    baseline, serial = pair(make_operator, name, buffer_len, state_dtype=state_dtype, activation_dtype=activation)
    plain, replay = baseline.pool(2), serial.pool(2)
    inputs, junk = baseline.inputs(150), baseline.inputs(6)
    done = 0
    while done < 140:
        if dice.random() < 0.1:
            length = accepted = dice.randint(7, 70)
        else:
            length = dice.choice((1, 1, dice.randint(1, 6)))
            accepted = dice.randint(1, length)
        accepted = min(accepted, 150 - done)
        parts = [
            torch.cat((tensor[done : done + accepted], tail[: length - accepted]))
            for tensor, tail in zip(inputs, junk, strict=True)
        ]
        expected = baseline.window(plain, parts, 0, done)
        if 2 <= parts[0].shape[0] <= 6:
            reference.commit(plain, [0], [accepted])
        assert_same(serial.window(replay, parts, 0, done), expected)
        done += accepted
    raise_on_error(plain.error_flag)
    raise_on_error(replay.error_flag)


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_serial_exact_does_not_depend_on_windows(make_operator, dice, assert_same, name, state_dtype):
    """Baseline one token at a time, serial-exact in windows: the same bits, in the flushed state too."""
    baseline, serial = pair(make_operator, name, 8, state_dtype=state_dtype, activation_dtype="bfloat16")
    plain, replay, inputs = baseline.pool(1), serial.pool(1), baseline.inputs(100)
    expected = []
    states = []
    for token in range(100):
        expected.append(baseline.window(plain, inputs, 0, token, token, 1))
        states.append(plain["checkpoint"][0].clone())
    got = serial.drive(replay, inputs, 0, 0, dice, baseline.inputs(20))
    assert_same(got, torch.cat(expected))
    c = int(replay["checkpoint_position"][0, 0, 0])
    assert c > 80
    assert_same(replay["checkpoint"][0], states[c - 1])


@pytest.mark.parametrize("name", RECURRENT)
def test_serial_exact_keeps_the_rules(make_operator, dice, assert_same, snapshot, name):
    """Rules 1 and 2 hold for it: a step, flushing or not, repeated gives the same bits."""
    _, serial = pair(make_operator, name, 8, state_dtype="bfloat16", activation_dtype="float32")
    state, inputs, done = serial.pool(1), serial.inputs(110), 0
    while done < 100:
        length = dice.randint(1, 6)
        first, after = serial.window(state, inputs, 0, done, done, length), snapshot(state)
        assert_same(serial.window(state, inputs, 0, done, done, length), first)
        assert_same(snapshot(state), after)
        done += dice.randint(1, length)


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("max_window", [1, 2, 6])
def test_baseline_equals_recurrence(make_operator, dice, name, max_window):
    """fp64, with commits of random acceptance: 1e-12 as in replay."""
    operator = make_operator(name, buffer_len=0, max_window=max_window)
    state, inputs, junk = operator.pool(3), operator.inputs(150), operator.inputs(6)
    position = 2**20 + 3
    initial = operator.place(state, 1, position)
    outputs, done = [], 0
    while done < 150:
        length = dice.randint(1, max_window)
        accepted = min(dice.randint(1, length), 150 - done)
        parts = [
            torch.cat((t[done : done + accepted], j[: length - accepted])) for t, j in zip(inputs, junk, strict=True)
        ]
        outputs.append(operator.window(state, parts, 1, position + done)[:accepted])
        if length > 1:
            reference.commit(state, torch.tensor([1]), torch.tensor([accepted]))
        done += accepted
    expected, states = operator.judge(inputs, initial)
    assert (torch.cat(outputs) - expected).abs().max() <= 1e-12 * expected.abs().max()
    assert (state["checkpoint"][1] - states[-1]).abs().max() <= 1e-12 * states[-1].abs().max()


@pytest.mark.parametrize("name", ["mamba2", "gdn"])
def test_baseline_verify_leaves_the_checkpoint_until_commit(make_operator, snapshot, assert_same, name):
    operator = make_operator(name, buffer_len=0, max_window=3, activation_dtype="float32")
    state, inputs = operator.pool(2), operator.inputs(6)
    operator.window(state, inputs, 0, 0, 0, 1)
    before = snapshot(state)
    operator.window(state, inputs, 0, 1, 1, 3)
    assert_same(snapshot(state)["checkpoint"], before["checkpoint"])
    reference.commit(state, [0], [0])
    assert_same(snapshot(state)["checkpoint"], before["checkpoint"])
    for accepted in (3, 1, 2):
        reference.commit(state, [0], [accepted])
        assert_same(state["checkpoint"][0], state["snapshots"][0, accepted - 1])
    assert_same(snapshot(state)["checkpoint"][1], before["checkpoint"][1])


def test_commit_checks_its_arguments_and_ignores_other_state(make_operator, snapshot, assert_same):
    state = make_operator("gdn", buffer_len=0, max_window=3).pool(2)
    with pytest.raises(ValueError, match=r"counts in \[0, 3\], got \[4\]"):
        reference.commit(state, [0], [4])
    with pytest.raises(ValueError, match=r"slots must lie in \[0, 2\), got \[2\]"):
        reference.commit(state, [2], [1])
    with pytest.raises(ValueError, match="2 counts"):
        reference.commit(state, [0, 1], [1])
    for name, buffer_len in (("gdn", 4), ("conv", 0), ("attention", 0)):
        state = make_operator(name, buffer_len=buffer_len, max_window=3).pool(2)
        before = snapshot(state)
        reference.commit(state, [0], [2])
        assert_same(snapshot(state), before)


@pytest.mark.parametrize("name", ["mamba2", "gdn"])
@pytest.mark.parametrize("activation", ["float32", "bfloat16"])
def test_replay_and_baseline_agree(make_operator, dice, name, activation):
    """fp32 state: the modes differ by the order of the same roundings.

    Tolerance: outputs are rounded to the activation dtype, so one unit in its last place (2^-7 for bf16), or 1e-5 of
    the largest value in fp32, about 150 roundings.
    """
    replay = make_operator(name, buffer_len=16, max_window=1, activation_dtype=activation)
    baseline = make_operator(name, buffer_len=0, max_window=1, activation_dtype=activation)
    inputs = replay.inputs(200)
    outputs = []
    for operator in (replay, baseline):
        state = operator.pool(1)
        outputs.append(torch.cat([operator.window(state, inputs, 0, t, t, 1) for t in range(200)]).double())
    tolerance = 2.0**-7 * outputs[1].abs() if activation == "bfloat16" else 0
    assert ((outputs[0] - outputs[1]).abs() <= tolerance + 1e-5 * outputs[1].abs().max()).all()


def test_serial_exact_gdn_needs_the_exact_ring(make_operator):
    """A rounded u would make the rebuilt state differ from the baseline's."""
    operator = make_operator("gdn", buffer_len=4, activation_dtype="bfloat16", serial_exact=True)
    with pytest.raises(ValueError, match="choose u_format 'exact'"):
        allocate_state(operator.geometry, operator.settings, 1)
