"""Rules 7 and 8, and what follows from them: a row's result depends on that row alone."""

from __future__ import annotations

import pytest
import torch

from replayssm.plugins.contract import ErrorBit
from replayssm.plugins.reference.rows import interpret_rows
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import LayerState

OPERATORS = ["mamba2", "mamba2_odd", "mamba2_ungrouped", "gdn", "gdn_odd", "conv", "attention"]
WINDOW, LENGTH = 5, 8


def mixed_batch(operator, dice, state: LayerState, sequences: int = 6):
    """Sequences in random slots, some tokens old, and one call's rows: prefill, decode, verify and fresh."""
    slots = dice.sample(range(state.slots), sequences)
    seq_lens = [dice.choice((0, dice.randint(1, 40))) for _ in slots]
    for slot, seq_len in zip(slots, seq_lens, strict=True):
        inputs = operator.inputs(seq_len)
        if seq_len:
            operator.drive(state, inputs, slot, 0, dice, operator.inputs(20), prefill=0.3)
    lengths = [dice.choice((1, 1, dice.randint(1, WINDOW), dice.randint(WINDOW + 1, 80))) for _ in slots]
    return slots, seq_lens, lengths


def packed_starts(dice, lengths: list[int]) -> tuple[list[int], int]:
    """Windows in random order, with gaps that no row owns."""
    starts, end = [0] * len(lengths), dice.randint(0, 3)
    for row in dice.sample(range(len(lengths)), len(lengths)):
        starts[row] = end
        end += lengths[row] + dice.choice((0, 2))
    return starts, end


def clone(state: LayerState) -> LayerState:
    return LayerState.from_flat(state.spec, [t.clone() for t in state.flat()], state.error_flag.clone())


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("activation", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("mode", ["replay", "serial_exact", "baseline"])
def test_row_alone_equals_row_in_a_batch(make_operator, dice, assert_same, snapshot, name, activation, mode):
    """Mixed batches of prefill, decode, verify, fresh, padding and invalid rows: every bit is the row's own."""
    operator = make_operator(
        name,
        buffer_len=0 if mode == "baseline" else LENGTH,
        max_window=WINDOW,
        activation_dtype=activation,
        serial_exact=mode == "serial_exact",
        u_format="exact",
    )
    for _ in range(3):
        state = operator.pool(9)
        if mode == "baseline":
            slots, seq_lens, lengths = [4, 2, 7, 0], [0] * 4, [1, 4, 30, 1]
        else:
            slots, seq_lens, lengths = mixed_batch(operator, dice, state)
        starts, total = packed_starts(dice, lengths)
        inputs = operator.inputs(total + 4)
        alone, expected = clone(state), {}
        for slot, seq_len, start, length in zip(slots, seq_lens, starts, lengths, strict=True):
            expected[start, length] = operator.window(alone, inputs, slot, seq_len, start, length)
        assert int(alone.error_flag) == 0
        # A padding row, an idle row, and rows that name a slot outside the pool or tokens outside the call.
        got = operator.run(
            state,
            inputs,
            [*seq_lens, 3, 5, 0, 0],
            [*starts, total, 0, total, total],
            [*lengths, 2, 0, 2, 9],
            [*slots, -1, slots[0], 9, next(s for s in range(9) if s not in slots)],
        )
        assert int(state.error_flag) == ErrorBit.SLOT_OUT_OF_RANGE | ErrorBit.WINDOW_OUT_OF_RANGE
        unowned = torch.ones(total + 4, dtype=torch.bool)
        for (start, length), output in expected.items():
            assert_same(got[start : start + length], output)
            unowned[start : start + length] = False
        assert_same(got[unowned], torch.zeros_like(got[unowned]))
        assert_same(snapshot(state), snapshot(alone))


@pytest.mark.parametrize("name", OPERATORS)
def test_rule_8_nan_stays_in_its_row(make_operator, dice, assert_same, name):
    """A row whose inputs are NaN, and NaN behind a padding row, change no bit of the other rows."""
    operator = make_operator(name, buffer_len=LENGTH, max_window=WINDOW, activation_dtype="float32")
    state = operator.pool(8)
    slots, seq_lens, lengths = mixed_batch(operator, dice, state)
    starts, total = packed_starts(dice, lengths)
    inputs = operator.inputs(total + 2)
    poisoned = [tensor.clone() for tensor in inputs]
    for tensor in poisoned:
        tensor[starts[2] : starts[2] + lengths[2]] = torch.nan
        tensor[total:] = torch.nan
    rows = ([*seq_lens, 0], [*starts, total], [*lengths, 2], [*slots, -1])
    other = clone(state)
    clean, dirty = operator.run(state, inputs, *rows), operator.run(other, poisoned, *rows)
    own = slice(starts[2], starts[2] + lengths[2])
    assert dirty[own].isnan().any()
    clean[own] = dirty[own] = 0
    assert_same(clean, dirty)
    for part in state.tensors:
        for slot in set(range(8)) - {slots[2]}:
            assert_same(state[part][slot], other[part][slot])


@pytest.mark.parametrize("name", OPERATORS)
def test_rows_outside_the_live_history_are_never_read(make_operator, dice, assert_same, name):
    """Everything that the next call must not read is overwritten with NaN before each call."""
    operator = make_operator(name, buffer_len=LENGTH, max_window=WINDOW, activation_dtype="bfloat16")
    inputs, seq_len = operator.inputs(200), 0
    state, poisoned = operator.pool(2), operator.pool(2)
    while seq_len < 190:
        length = dice.choice((1, WINDOW, dice.randint(1, WINDOW)))
        first = int(state["checkpoint_position"][1, 0, 0]) if operator.recurrent and seq_len else 0
        if operator.kind == "conv":
            first = max(0, seq_len - operator.geometry.conv_kernel + 1)
        live = list(range(first, seq_len))
        for part, tensor in poisoned.tensors.items():
            if part not in ("checkpoint", "checkpoint_position"):
                dead = sorted(set(range(tensor.shape[1])) - {position % tensor.shape[1] for position in live})
                tensor[1, dead] = torch.nan
        if operator.recurrent and first == 0:
            poisoned["checkpoint"][1] = torch.nan
        assert_same(
            operator.window(poisoned, inputs, 1, seq_len, seq_len, length),
            operator.window(state, inputs, 1, seq_len, seq_len, length),
        )
        seq_len += dice.randint(1, length)


@pytest.mark.parametrize("buffer_len", [4, 7, 16, 64])
def test_rule_7_history_and_window_never_share_a_ring_row(buffer_len):
    """A window may be appended before, after or while other blocks read the history."""
    for max_window in range(1, 65):
        settings = ReplaySettings(buffer_len=buffer_len, max_window=max_window)
        longest = max(buffer_len, max_window)
        for first in (0, 2**20 + 12345):
            positions = range(first, first + longest + max_window)
            assert len({position % settings.ring_len for position in positions}) == longest + max_window


@pytest.mark.parametrize("name", ["mamba2_tiles", "gdn_tiles"])
def test_rule_7_every_tile_keeps_its_own_position(make_operator, name):
    """All tiles of all heads hold c after a fresh start, a flush and a prefill."""
    operator = make_operator(name, buffer_len=2, max_window=2, activation_dtype="float32")
    assert operator.geometry.row_tiles > 1
    state, inputs = operator.pool(2), operator.inputs(6)
    for seq_len, length, position in ((0, 1, 0), (1, 2, 1), (2, 3, 5)):
        operator.window(state, inputs, 0, seq_len, seq_len, length)
        assert (state["checkpoint_position"][0] == position).all()
    assert (state["checkpoint_position"][1] == 12345).all()


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(
    ("seq_len", "length", "slot"), [(3, 2, -1), (2**31 - 1, 1, -1), (4, 0, 0), (0, 0, 99), (-7, 0, 1)]
)
def test_rule_8_padding_touches_nothing_and_is_no_error(
    make_operator, snapshot, assert_same, name, seq_len, length, slot
):
    """pad_slot_id or an empty window, whatever the row's other numbers say."""
    operator = make_operator(name, buffer_len=LENGTH, max_window=WINDOW, activation_dtype="float32")
    state = operator.pool(2)
    before = snapshot(state)
    output = operator.run(state, operator.inputs(4), [seq_len], [1], [length], [slot])
    assert_same(output, torch.zeros_like(output))
    assert_same(snapshot(state), before)
    assert int(state.error_flag) == 0


INVALID = {
    # Row (seq_len, start, length, slot) for a pool of 3 slots, 10 tokens, c = 20, L = 8, windows to 5, 100 positions.
    "slot_past_the_pool": ((22, 0, 1, 3), ErrorBit.SLOT_OUT_OF_RANGE),
    "slot_below_padding": ((22, 0, 1, -2), ErrorBit.SLOT_OUT_OF_RANGE),
    "below_the_checkpoint": ((19, 0, 1, 1), ErrorBit.SEQ_LEN_BELOW_CHECKPOINT),
    "negative_seq_len": ((-1, 0, 1, 1), ErrorBit.SEQ_LEN_BELOW_CHECKPOINT),
    "history_never_written": ((29, 0, 1, 1), ErrorBit.HISTORY_OUT_OF_RANGE),
    "window_past_the_tokens": ((22, 8, 3, 1), ErrorBit.WINDOW_OUT_OF_RANGE),
    "window_before_the_tokens": ((22, -1, 3, 1), ErrorBit.WINDOW_OUT_OF_RANGE),
    "negative_window": ((22, 5, -1, 1), ErrorBit.WINDOW_OUT_OF_RANGE),
    "position_past_the_limit": ((99, 0, 2, 2), ErrorBit.POSITION_PAST_LIMIT),
    "int32_end": ((2**31 - 1, 0, 1, 2), ErrorBit.POSITION_PAST_LIMIT | ErrorBit.HISTORY_OUT_OF_RANGE),
}


@pytest.mark.parametrize("case", INVALID)
@pytest.mark.parametrize("name", ["mamba2", "gdn"])
def test_rule_8_invalid_row_is_reported_and_changes_nothing(make_operator, snapshot, assert_same, name, case):
    (seq_len, start, length, slot), flag = INVALID[case]
    operator = make_operator(name, buffer_len=LENGTH, max_window=WINDOW, activation_dtype="float32", max_seq_len=100)
    state = operator.pool(3)
    for place, position in ((1, 20), (2, 95)):
        operator.place(state, place, position)
    earlier = 1 << 10  # a bit that another layer raised before
    state.error_flag |= earlier
    before = snapshot(state)
    output = operator.run(state, operator.inputs(10), [seq_len], [start], [length], [slot])
    assert int(state.error_flag) == flag | earlier
    assert_same(output, torch.zeros_like(output))
    assert_same(snapshot(state), before)


@pytest.mark.parametrize(
    "case", [case for case in INVALID if case not in ("below_the_checkpoint", "history_never_written")]
)
@pytest.mark.parametrize("name", ["conv", "attention"])
def test_rule_8_invalid_rows_of_positional_state(make_operator, snapshot, assert_same, name, case):
    (seq_len, start, length, slot), flag = INVALID[case]
    operator = make_operator(name, buffer_len=LENGTH, max_window=WINDOW, activation_dtype="float32", max_seq_len=100)
    state = operator.pool(3)
    before = snapshot(state)
    output = operator.run(state, operator.inputs(10), [seq_len], [start], [length], [slot])
    assert int(state.error_flag) == flag & ~ErrorBit.HISTORY_OUT_OF_RANGE
    assert_same(output, torch.zeros_like(output))
    assert_same(snapshot(state), before)


def test_history_bound_admits_everything_that_windows_reach(make_operator, dice):
    """The longest legal history is max(L, max_window); no sequence of calls is refused for it."""
    for buffer_len, max_window in ((4, 9), (9, 4), (5, 5), (1, 1)):
        operator = make_operator("mamba2_single", buffer_len=buffer_len, max_window=max_window)
        longest, state = 0, operator.pool(1)
        seq_len = 0
        for _ in range(200):
            length = dice.randint(1, max_window)
            operator.window(state, operator.inputs(length), 0, seq_len)
            assert int(state.error_flag) == 0
            seq_len += length
            longest = max(longest, seq_len - int(state["checkpoint_position"][0, 0, 0]))
        assert longest == max(buffer_len, max_window)


@pytest.mark.parametrize("name", OPERATORS)
def test_strided_inputs_and_strided_slots(make_operator, dice, assert_same, name):
    """Inputs may be columns of a wider tensor and slots may lie apart; no bit depends on it."""
    operator = make_operator(name, buffer_len=LENGTH, max_window=WINDOW, activation_dtype="bfloat16")
    inputs = operator.inputs(120)
    wide = []
    for tensor in inputs:
        holder = torch.full((tensor.shape[0], 2, *tensor.shape[1:], 3), torch.nan, dtype=tensor.dtype)
        holder[:, 1, ..., 1] = tensor
        wide.append(holder[:, 1, ..., 1])
    state = operator.pool(2)
    apart = LayerState.from_flat(
        state.spec, [torch.stack((t, t), dim=1)[:, 0] for t in state.flat()], torch.zeros(1, dtype=torch.int32)
    )
    rolls = [dice.randint(1, WINDOW + 1) for _ in range(20)]
    seq_len = 0
    for length in rolls:
        assert_same(
            operator.window(apart, wide, 1, seq_len, seq_len, length),
            operator.window(state, inputs, 1, seq_len, seq_len, length),
        )
        seq_len += length
    for part in state.tensors:
        assert_same(apart[part], state[part])


def test_interpretation_of_every_kind_of_row(make_operator):
    """Fresh, decode, flush, prefill: the fields of the parsed rows."""
    operator = make_operator("mamba2_single", buffer_len=4, max_window=2)
    state = operator.pool(5)
    for slot, position in ((1, 10), (2, 10), (3, 10)):
        operator.place(state, slot, position)
    columns = ([0, 12, 13, 11, 7], [0, 1, 2, 4, 0], [1, 1, 2, 3, 0], [0, 1, 2, 3, 4])
    rows = interpret_rows(state, 7, *(torch.tensor(column, dtype=torch.int32) for column in columns))
    assert int(state.error_flag) == 0
    assert [(r.slot, r.history, r.length, r.end, r.flush, r.prefill) for r in rows] == [
        (0, 0, 1, 1, False, False),
        (1, 2, 1, 13, False, False),
        (2, 3, 2, 15, True, False),
        (3, 1, 3, 14, False, True),
    ]


@pytest.mark.parametrize("name", OPERATORS)
def test_wrong_arguments_get_one_clear_error(make_operator, name):
    operator = make_operator(name, buffer_len=4, max_window=2, activation_dtype="bfloat16")
    state, inputs = operator.pool(2), operator.inputs(3)
    with pytest.raises(ValueError, match=r"must be \[.*torch.bfloat16, got .*torch.float32"):
        operator.run(state, [tensor.float() for tensor in inputs], [0], [0], [3], [0])
    with pytest.raises(ValueError, match=r"must be \[.*got"):
        operator.run(state, [tensor[..., :-1] for tensor in inputs], [0], [0], [3], [0])
    with pytest.raises(ValueError, match="equally long"):
        operator.run(state, inputs, [0, 0], [0], [3], [0])
    other = make_operator("conv" if name == "attention" else "attention", buffer_len=4, max_window=2).pool(2)
    with pytest.raises(ValueError, match=r"expected the state of a \w+Geometry, got that of a \w+Geometry"):
        operator.run(other, inputs, [0], [0], [3], [0])
