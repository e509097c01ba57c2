"""Rules 9 and 10: forks, blobs and staggered flushes."""

from __future__ import annotations

import hashlib
import json
import re

import pytest
import torch
from safetensors import safe_open

from replayssm.plugins import reference
from replayssm.plugins.slot_blob import METADATA_KEY, load_slot, save_slot, stagger_tail

LAYERS = ["mamba2", "gdn", "conv", "attention"]
WINDOW = 4


def model(make_operator, **settings):
    """Operators of a small hybrid, by state name."""
    settings = {"buffer_len": 8, "max_window": WINDOW, "activation_dtype": "bfloat16", "max_seq_len": 300, **settings}
    return {name: make_operator(name, seed=index, **settings) for index, name in enumerate(LAYERS)}


def pools(operators, slots=3):
    return {name: operator.pool(slots) for name, operator in operators.items()}


def advance(operators, states, inputs, slot, begin, end, dice):
    """Run tokens [begin, end) in random windows; outputs by state name."""
    outputs = {name: [] for name in operators}
    while begin < end:
        length = min(dice.randint(1, WINDOW), end - begin)
        for name, operator in operators.items():
            outputs[name].append(operator.window(states[name], inputs[name], slot, begin, begin, length))
            if 2 <= length <= WINDOW:
                reference.commit(states[name], [slot], [length])
        begin += length
    return {name: torch.cat(parts) for name, parts in outputs.items()}


def flags(states) -> int:
    return sum(int(state.error_flag) for state in states.values())


@pytest.fixture
def started(make_operator, dice):
    """started(tokens, **settings) -> (operators, states with a sequence in slot 1, inputs)."""

    def start(tokens: int, **settings):
        operators = model(make_operator, **settings)
        states, inputs = pools(operators), {name: op.inputs(tokens + 60) for name, op in operators.items()}
        if tokens:
            advance(operators, states, inputs, 1, 0, tokens, dice)
        return operators, states, inputs

    return start


MODES = [{}, {"buffer_len": 0}, {"serial_exact": True, "u_format": "exact"}, {"state_dtype": "float16"}]


@pytest.mark.parametrize("settings", MODES)
@pytest.mark.parametrize("tokens", [1, 2, 7, 29, 100])
def test_rule_9_fork_goes_on_like_its_source(started, dice, assert_same, settings, tokens):
    """After copy_slot both sequences give the same bits, and then go separate ways."""
    operators, states, inputs = started(tokens, **settings)
    for state in states.values():
        reference.copy_slot(state, 1, 2)
    rolls = dice.getstate()
    first = advance(operators, states, inputs, 1, tokens, tokens + 50, dice)
    dice.setstate(rolls)
    second = advance(operators, states, inputs, 2, tokens, tokens + 50, dice)
    for name in operators:
        assert_same(first[name], second[name])
    assert flags(states) == 0


@pytest.mark.parametrize("settings", MODES)
@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 29, 100])
def test_rule_9_blob_goes_on_bit_identically(started, make_operator, dice, assert_same, settings, tokens):
    """Saved, loaded into another slot of another pool full of NaN: the same outputs for 50 more tokens."""
    operators, states, inputs = started(tokens, **settings)
    blob = save_slot(states, 1, tokens)
    elsewhere = pools(operators, slots=5)
    assert load_slot(blob, elsewhere, 4) == tokens
    assert save_slot(elsewhere, 4, tokens) == blob
    rolls = dice.getstate()
    expected = advance(operators, states, inputs, 1, tokens, tokens + 50, dice)
    dice.setstate(rolls)
    got = advance(operators, elsewhere, inputs, 4, tokens, tokens + 50, dice)
    for name in operators:
        assert_same(got[name], expected[name])
    assert flags(elsewhere) == 0
    assert save_slot(elsewhere, 4, tokens + 50) == save_slot(states, 1, tokens + 50)


@pytest.mark.parametrize("settings", [{"buffer_len": 32}, *MODES[1:2]])
def test_rule_9_rejected_tokens_are_not_in_a_blob(started, settings):
    """Equal sequences give equal bytes, whatever was tried and rejected."""
    operators, states, _ = started(20, **settings)
    before = save_slot(states, 1, 20)
    for name, operator in operators.items():
        operator.window(states[name], operator.inputs(WINDOW), 1, 20)
    assert save_slot(states, 1, 20) == before
    assert save_slot(states, 1, 21) != before or settings == MODES[1]


def test_rule_9_blob_holds_live_rows_only(started, tmp_path, assert_same):
    """The documented content, in the order of positions, read with nothing but safetensors and json."""
    _, states, inputs = started(29)
    c = int(states["gdn"]["checkpoint_position"][1, 0, 0])
    assert 0 < c < 29
    path = tmp_path / "blob.safetensors"
    path.write_bytes(save_slot(states, 1, 29))
    with safe_open(path, "pt") as file:
        metadata = json.loads(file.metadata()[METADATA_KEY])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert (metadata["version"], metadata["seq_len"]) == (4, 29)
    zeroed = path.read_bytes().replace(metadata["sha256"].encode(), b"0" * 64)
    assert hashlib.sha256(zeroed).hexdigest() == metadata["sha256"]
    assert metadata["layers"]["gdn"]["checkpoint_position"] == c
    assert metadata["layers"]["attention"]["checkpoint_position"] is None
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "mamba2/checkpoint": (6, 5, 7),
        "mamba2/ring_x": (29 - c, 6, 5),
        "mamba2/ring_B": (29 - c, 2, 7),
        "mamba2/ring_dt": (29 - c, 6),
        "gdn/checkpoint": (6, 5, 7),
        "gdn/ring_k": (29 - c, 2, 7),
        "gdn/ring_u": (29 - c, 6, 2, 5),
        "gdn/ring_g": (29 - c, 6),
        "conv/conv_ring": (3, 13),
        "attention/k_cache": (29, 2, 6),
        "attention/v_cache": (29, 2, 6),
    }
    assert_same(tensors["mamba2/ring_x"], inputs["mamba2"][0][c:29])
    assert_same(tensors["conv/conv_ring"], inputs["conv"][0][26:29])
    assert_same(tensors["attention/v_cache"], inputs["attention"][2][:29])


def test_rule_9_blob_before_the_first_fold_has_no_checkpoint(started):
    """c == 0 means S_c = 0; the slot's NaN must not travel."""
    _, states, _ = started(3)
    blob = save_slot(states, 1, 3)
    assert b"checkpoint_position" in blob
    assert b"/checkpoint" not in blob


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"buffer_len": 16}, r"mamba2: the blob's settings say buffer_len = 8, the pool's say 16"),
        ({"max_window": 5}, "max_window"),
        ({"state_dtype": "bfloat16"}, "state_dtype"),
        ({"u_format": "bfloat16"}, "u_format"),
        ({"max_seq_len": 28}, r"29 tokens .* max_seq_len 28"),
    ],
)
def test_blob_refuses_other_settings(started, make_operator, snapshot, assert_same, change, message):
    _, states, _ = started(29)
    blob = save_slot(states, 1, 29)
    other = pools(model(make_operator, **change))
    before = {name: snapshot(state) for name, state in other.items()}
    with pytest.raises(ValueError, match=message):
        load_slot(blob, other, 0)
    for name, state in other.items():
        assert_same(snapshot(state), before[name])


def test_blob_fits_a_pool_with_another_limit(started, make_operator):
    _, states, _ = started(29)
    larger = pools(model(make_operator, max_seq_len=512))
    assert load_slot(save_slot(states, 1, 29), larger, 0) == 29


def test_blob_refuses_other_geometry_layers_versions_and_damage(started, make_operator):
    operators, states, _ = started(29)
    blob = save_slot(states, 1, 29)
    other = {**states, "mamba2": make_operator("mamba2_odd", **operators["mamba2"].settings.__dict__).pool(3)}
    with pytest.raises(ValueError, match="mamba2: the blob's geometry say nheads = 6, the pool's say 7"):
        load_slot(blob, other, 0)
    with pytest.raises(ValueError, match=r"the blob holds layers \[.*\], the pool has \['gdn'\]"):
        load_slot(blob, {"gdn": states["gdn"]}, 0)
    with pytest.raises(ValueError, match=r"version 1, this program reads version 4"):
        load_slot(blob.replace(b'\\"version\\": 4', b'\\"version\\": 1'), states, 0)
    for damaged in (b"", blob[:100], blob[:-1], bytes([blob[0] ^ 1]) + blob[1:], b"[" * 99_999, b"\xff" * 99):
        with pytest.raises(ValueError, match=r"not a state blob|damaged blob"):
            load_slot(damaged, states, 0)
    with pytest.raises(ValueError, match=r"slot must lie in \[0, 3\), got 3"):
        load_slot(blob, states, 3)


def test_any_damage_to_a_blob_is_a_value_error(started, dice, snapshot, assert_same):
    """Flipped bits, cuts, insertions and zeros anywhere: refused, with the slot as it was."""
    _, states, _ = started(29)
    blob = save_slot(states, 1, 29)
    before = {name: snapshot(state) for name, state in states.items()}
    header = 8 + int.from_bytes(blob[:8], "little")
    for trial in range(600):
        # The header is short and holds everything that can confuse a reader: half of the damage goes there.
        position = dice.randrange(header if trial % 2 else len(blob))
        damaged = bytearray(blob)
        kind = trial // 2 % 4
        if kind == 0:
            damaged[position] ^= 1 << dice.randrange(8)
        elif kind == 1:
            del damaged[position : position + dice.randint(1, 9)]
        elif kind == 2:
            damaged[position:position] = dice.randbytes(dice.randint(1, 9))
        else:
            damaged[position : position + 4] = bytes(byte ^ 0x15 for byte in damaged[position : position + 4])
        with pytest.raises(ValueError, match=r"blob|version"):
            load_slot(bytes(damaged), states, 0)
    for name, state in states.items():
        assert_same(snapshot(state), before[name])


def resigned(blob, old, new):
    """A blob whose metadata was changed on purpose, with sizes and SHA-256 that agree."""
    end = 8 + int.from_bytes(blob[:8], "little")
    header = blob[8:end]
    assert old in header
    header = re.sub(rb'(sha256\\": \\")[0-9a-f]{64}', rb"\g<1>" + b"0" * 64, header.replace(old, new, 1))
    header += b" " * (-len(header) % 8)
    unsigned = len(header).to_bytes(8, "little") + header + blob[end:]
    return unsigned.replace(b"0" * 64, hashlib.sha256(unsigned).hexdigest().encode(), 1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'\\"seq_len\\": 29', b'\\"seq_len\\": null'),
        (b'\\"seq_len\\": 29', b'\\"seq_len\\": -1'),
        (b'\\"seq_len\\": 29', b'\\"seq_len\\": 28.5'),
        (b'\\"seq_len\\"', b'\\"length\\"'),
        (b'\\"checkpoint_position\\": null', b'\\"checkpoint_position\\": 5'),
        (b'\\"checkpoint_position\\": null', b'\\"checkpoint_position\\": \\"x\\"'),
        (b'\\"geometry\\": {', b'\\"geometry\\": [], \\"more\\": {'),
        (b'\\"settings\\"', b'\\"setting\\"'),
    ],
)
def test_blob_with_a_digest_and_wrong_content(started, old, new):
    _, states, _ = started(29)
    blob = save_slot(states, 1, 29)
    assert load_slot(resigned(blob, b" ", b" "), states, 0) == 29
    with pytest.raises(ValueError, match="blob"):
        load_slot(resigned(blob, old, new), states, 0)


def test_save_refuses_positions_that_the_slot_cannot_have(started):
    _, states, _ = started(29)
    c = int(states["mamba2"]["checkpoint_position"][1, 0, 0])
    for seq_len in (c - 1, c + 9, 301):
        with pytest.raises(ValueError, match=f"a sequence of {seq_len} tokens"):
            save_slot(states, 1, seq_len)


@pytest.mark.parametrize("max_window", [1, 2, 5, 8, 64])
def test_rule_10_tail_is_a_spread_function_of_the_prompt(dice, max_window):
    """Within its limits, reproducible, sensitive to every token, and even over random prompts."""
    prompts = [[dice.randrange(100_000) for _ in range(dice.randint(1, 100))] for _ in range(4000)]
    tails = [stagger_tail(prompt, max_window) for prompt in prompts]
    assert tails == [stagger_tail(torch.tensor(prompt).tolist(), max_window) for prompt in prompts]
    assert all(1 <= tail <= min(max_window, len(prompt)) for prompt, tail in zip(prompts, tails, strict=True))
    long_tails = [t for p, t in zip(prompts, tails, strict=True) if len(p) >= 64]
    counts = [long_tails.count(value) for value in range(1, max_window + 1)]
    expected = len(long_tails) / max_window
    # Counts of an even spread are binomial: 5 standard deviations happen once in 10^6, and the dice are seeded.
    assert all(abs(count - expected) <= 5 * expected**0.5 for count in counts)
    if max_window > 1:
        prompt = prompts[0] * 3
        assert len({stagger_tail([*prompt[:-1], last], max_window) for last in range(200)}) > 1
        assert len({stagger_tail([first, *prompt[1:]], max_window) for first in range(200)}) > 1


def test_rule_10_known_values():
    """Outputs of a prompt must not change between versions or machines."""
    assert [stagger_tail(range(length), 8) for length in (1, 2, 3, 50, 1000)] == [1, 2, 1, 7, 6]


def test_rule_10_refuses_nothing_to_run():
    with pytest.raises(ValueError, match="expected a prompt"):
        stagger_tail([], 4)
    with pytest.raises(ValueError, match="max_window"):
        stagger_tail([1], 0)


def test_rule_10_admitted_together_they_flush_at_different_steps(make_operator, dice):
    """Prompts of one length, prefilled alike but for their tails: flushes spread over the steps."""
    operator = make_operator("mamba2_single", buffer_len=16, max_window=8, activation_dtype="float32")
    state, rows, length = operator.pool(32), 32, 40
    prompts = [[dice.randrange(1000) for _ in range(length)] for _ in range(rows)]
    for slot, prompt in enumerate(prompts):
        tail = stagger_tail(prompt, 8)
        operator.window(state, operator.inputs(length - tail), slot, 0)
        operator.window(state, operator.inputs(tail), slot, length - tail)
    worst = 0
    for step in range(32):
        before = state["checkpoint_position"][:, 0, 0].clone()
        seq_lens, ones = [length + step] * rows, [1] * rows
        operator.run(state, operator.inputs(rows), seq_lens, list(range(rows)), ones, list(range(rows)))
        worst = max(worst, int((state["checkpoint_position"][:, 0, 0] != before).sum()))
    assert 1 <= worst <= 12
