"""The rules of the state record for low-precision checkpoints and readout copies."""

from __future__ import annotations

import random

import pytest
import torch
from safetensors.torch import load

from replayssm.plugins import reference
from replayssm.plugins.nvfp4 import decode_packed
from replayssm.plugins.reference.formats import (
    RandomKey,
    load_checkpoint,
    load_readout,
    round_stochastic,
    store_state,
)
from replayssm.plugins.reference.rounding import rounding_bits
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.slot_blob import load_slot, save_slot
from replayssm.plugins.state import LayerState, raise_on_error, set_checkpoint_position

STOCHASTIC = {"state_rounding": "stochastic", "rounding_seed": 11}
FORMATS = {
    "bf16 stochastic": {"state_dtype": "bfloat16", **STOCHASTIC},
    "fp16 stochastic": {"state_dtype": "float16", **STOCHASTIC},
    "fp8": {"state_dtype": "float8"},
    "fp8 stochastic": {"state_dtype": "float8", **STOCHASTIC},
    "fp32, fp8 readout": {"state_dtype": "float32", "readout_dtype": "float8"},
    "fp16 stochastic, nvfp4 readout": {"state_dtype": "float16", "readout_dtype": "nvfp4", **STOCHASTIC},
    "fp8 stochastic, nvfp4 readout, u from checkpoint": {
        "state_dtype": "float8",
        "readout_dtype": "nvfp4",
        "u_source": "checkpoint",
        **STOCHASTIC,
    },
}
EVERY = pytest.mark.parametrize("settings", FORMATS.values(), ids=FORMATS.keys())
OPERATORS = pytest.mark.parametrize("name", ["mamba2_words", "gdn_words"])
COMMON = {"buffer_len": 6, "max_window": 4, "activation_dtype": "bfloat16"}


def start(operator, state: LayerState, slot: int, position: int) -> torch.Tensor:
    """A sequence at `position` with a random state; returns that state before it was stored."""
    S = operator.normal(*operator.geometry.state_shape).float()
    store_state(state, slot, S, RandomKey(0, position))
    set_checkpoint_position(state, [slot], [position])
    return S


def position_of(state: LayerState, slot: int = 0) -> int:
    return int(state["checkpoint_position"][slot, 0, 0])


@EVERY
@OPERATORS
def test_rule_1_rejected_tokens_leave_no_trace(make_operator, dice, assert_same, snapshot, name, settings):
    """Two runs whose rejected tokens differ give the same outputs and the same stored state."""
    operator = make_operator(name, **COMMON, **settings)
    inputs, outputs, states = operator.inputs(120), [], []
    for scale in (1.0, 1e3):
        state, rolls = operator.pool(2), random.Random()
        rolls.setstate(dice.getstate())
        junk = [scale * tensor for tensor in operator.inputs(60)]
        outputs.append(operator.drive(state, inputs, 0, 0, rolls, junk, prefill=0.05))
        states.append({part: bits for part, bits in snapshot(state).items() if not part.startswith("ring_")})
    assert_same(*outputs)
    assert_same(*states)
    assert operator.folds > 10


@EVERY
@OPERATORS
def test_rule_2_a_step_is_idempotent(make_operator, dice, assert_same, snapshot, name, settings):
    """The same window again: equal bits in outputs and state, whether or not the first run flushed."""
    operator = make_operator(name, **COMMON, **settings)
    state, inputs, done, flushes = operator.pool(1), operator.inputs(130), 0, 0
    while done < 120:
        length = dice.randint(1, 4)
        before = position_of(state) if done else 0
        first, after = operator.window(state, inputs, 0, done, done, length), snapshot(state)
        assert_same(operator.window(state, inputs, 0, done, done, length), first)
        assert_same(snapshot(state), after)
        flushes += position_of(state) != before
        done += dice.randint(1, length)
    raise_on_error(state.error_flag)
    assert flushes > 10


@EVERY
@OPERATORS
def test_rule_3_everything_is_in_the_tensors(make_operator, dice, assert_same, name, settings):
    operator = make_operator(name, **COMMON, **settings)
    inputs, kept, rebuilt, done = operator.inputs(50), operator.pool(1), operator.pool(1), 0
    while done < 40:
        length = dice.randint(1, 4)
        copies = [tensor.clone() for tensor in rebuilt.flat()]
        rebuilt = LayerState.from_flat(kept.spec, copies, torch.zeros(1, dtype=torch.int32))
        expected = operator.window(kept, inputs, 0, done, done, length)
        assert_same(operator.window(rebuilt, inputs, 0, done, done, length), expected)
        done += dice.randint(1, length)


@EVERY
@OPERATORS
def test_rule_4_window_reads_what_is_stored(make_operator, assert_same, name, settings):
    """After a flush the outputs are those of a sequence that starts from the stored parts, and of no other."""
    operator = make_operator(name, **COMMON, **settings)
    state, inputs = operator.pool(2), operator.inputs(12)
    for done in (0, 4):
        operator.window(state, inputs, 0, done, done, 4)
    flushed = operator.window(state, inputs, 0, 8, 8, 4)
    assert position_of(state) == 8
    for part, tensor in state.tensors.items():
        if not part.startswith("ring_"):
            tensor[1] = tensor[0]
    assert_same(operator.window(state, inputs, 1, 8, 8, 4), flushed)
    raise_on_error(state.error_flag)


@EVERY
@OPERATORS
def test_outputs_are_the_recurrence_from_the_readout(make_operator, name, settings):
    """A window and its history against fp64 from the dequantised readout (checkpoint, where there is none).

    fp32 activations and an exact u: what is left are fp32 sums of 100 terms, 1e-5 of the largest output. A token's u
    reads the readout too, unless it is told otherwise; then the recurrence has no single initial state.
    """
    if settings.get("u_source") == "checkpoint" and name == "gdn_words":
        settings = {**settings, "u_source": "readout"}
    operator = make_operator(name, **{**COMMON, "activation_dtype": "float32", "u_format": "exact"}, **settings)
    state, position = operator.pool(1), 2**20
    start(operator, state, 0, position)
    inputs = operator.inputs(6)
    got = [
        operator.window(state, inputs, 0, position + done, done, length) for done, length in ((0, 3), (3, 1), (4, 2))
    ]
    assert position_of(state) == position
    expected, _ = operator.judge(inputs, load_readout(state, 0, torch.float64))
    assert (torch.cat(got) - expected).abs().max() <= 1e-5 * expected.abs().max()


@EVERY
@OPERATORS
def test_a_flush_starts_from_the_checkpoint(make_operator, assert_same, name, settings):
    """The stored state is the formats' image of the recurrence from the dequantised checkpoint, to fp32's error."""
    if settings.get("u_source") == "checkpoint" and name == "gdn_words":
        settings = {**settings, "u_source": "readout"}
    operator = make_operator(name, **{**COMMON, "activation_dtype": "float32", "u_format": "exact"}, **settings)
    state, position = operator.pool(1), 1000
    start(operator, state, 0, position)
    inputs = operator.inputs(8)
    checkpoint, readout = load_checkpoint(state, 0, torch.float64), load_readout(state, 0, torch.float64)
    operator.window(state, inputs, 0, position, 0, 4)
    operator.window(state, inputs, 0, position + 4, 4, 4)
    assert position_of(state) == position + 4
    first = [tensor[:4] for tensor in inputs]
    if name == "mamba2_words":
        exact = operator.judge(first, checkpoint)[1][-1]
    else:
        # u comes from the readout, so the two states evolve alike: their difference decays and forgets linearly.
        exact = operator.judge(first, readout)[1][-1]
        a, w = first[3].double(), operator.weights
        g = -torch.exp(w["A_log"].double()) * torch.nn.functional.softplus(a + w["dt_bias"])
        exact = exact + torch.exp(g.sum(0))[:, None, None] * (checkpoint - readout)
    step = {"float32": 2.0**-22, "bfloat16": 2.0**-7, "float16": 2.0**-10, "float8": 2.0**-3}
    error = (load_checkpoint(state, 0, torch.float64) - exact).abs()
    row_largest = exact.abs().amax(-1, keepdim=True)
    relative = step[operator.settings.state_dtype]
    # One step of the format, which the largest element of the row bounds below its subnormals, and fp32's sums.
    subnormal = {"float16": 2.0**-24, "float8": row_largest * 2.0**-16}.get(operator.settings.state_dtype, 0.0)
    assert (error <= relative * exact.abs() + subnormal + 2e-6 * row_largest).all()
    assert operator.settings.state_dtype == "float32" or error.max() > 1e-3 * relative * exact.abs().max()


@EVERY
@OPERATORS
@pytest.mark.parametrize("history", [0, 3])
def test_rule_5_prefill_writes_checkpoint_and_readout(make_operator, assert_same, name, settings, history):
    """Both are what a flush at the same position stores of the same state: bits of the same key, in fp32 sums."""
    operator = make_operator(name, **{**COMMON, "activation_dtype": "float32"}, **settings)
    state, inputs, length = operator.pool(2), operator.inputs(history + 70), 70
    if history:
        operator.window(state, inputs, 1, 0, 0, history)
    operator.window(state, inputs, 1, history, history, length)
    raise_on_error(state.error_flag)
    assert position_of(state, 1) == history + length
    _, states = operator.judge(inputs)
    store_state(state, 0, states[-1].float(), RandomKey(0, history + length))
    for read in (load_checkpoint, load_readout):
        mine, theirs = read(state, 1, torch.float64), read(state, 0, torch.float64)
        # fp32 sums of 73 products differ in their last bits, which moves a few elements across a rounding boundary.
        assert ((mine - theirs).abs() <= 1e-5 * theirs.abs().max()).double().mean() > 0.98
        assert (mine - states[-1]).abs().max() <= 0.2 * states[-1].abs().max()


@EVERY
@OPERATORS
@pytest.mark.parametrize("length", [1, 4, 20])
def test_rule_6_a_fresh_sequence_reads_nothing(make_operator, assert_same, name, settings, length):
    operator = make_operator(name, **COMMON, **settings)
    inputs, outputs = operator.inputs(length + 12), []
    for poison in (False, True):
        state = operator.pool(2, poison=poison)
        steps = [operator.window(state, inputs, 1, 0, 0, length)]
        steps += [operator.window(state, inputs, 1, p, p, 1) for p in range(length, length + 12)]
        raise_on_error(state.error_flag)
        outputs.append(torch.cat(steps))
    assert torch.isfinite(outputs[1]).all()
    assert_same(*outputs)


@EVERY
@OPERATORS
def test_rules_7_and_8_rows_and_slots_do_not_matter(make_operator, dice, assert_same, name, settings):
    """The same sequence alone, and in a batch in another slot among others, padding and NaN: equal bits stored."""
    operator = make_operator(name, **COMMON, **settings)
    inputs, other = operator.inputs(60), operator.inputs(60)
    alone, batch, done = operator.pool(1), operator.pool(4), 0
    while done < 50:
        length = dice.randint(1, 4) if done else 9
        expected = operator.window(alone, inputs, 0, done, done, length)
        packed = [
            torch.cat((b[done : done + length], a[done : done + length])) for a, b in zip(inputs, other, strict=True)
        ]
        rows = ([done, done, 3], [0, length, 0], [length, length, 2], [0, 3, -1])
        assert_same(operator.run(batch, packed, *rows)[length:], expected)
        done += length if done == 0 else dice.randint(1, length)
    raise_on_error(batch.error_flag)
    for part in alone.tensors:
        if not part.startswith("ring_"):
            assert_same(batch[part][3], alone[part][0])


@OPERATORS
@pytest.mark.parametrize("u_source", ["readout", "checkpoint"])
@pytest.mark.parametrize("readout", ["float8", "nvfp4"])
def test_readout_never_enters_the_checkpoint(make_operator, assert_same, name, u_source, readout):
    """A readout replaced by junk before every window changes outputs, and no bit of any later checkpoint.

    Gated DeltaNet: if its u is read from the checkpoint. If it is read from the readout, the junk does get in.
    """
    operator = make_operator(
        name, **COMMON, state_dtype="float16", readout_dtype=readout, u_source=u_source, **STOCHASTIC
    )
    inputs, states, outputs = operator.inputs(80), [operator.pool(1), operator.pool(1)], [[], []]
    kept = [[], []]
    for done in range(0, 80, 2):
        for index, state in enumerate(states):
            if index and done and position_of(state):
                # A valid image of a state three times too large.
                junk = 3 * load_readout(state, 0, torch.float32) + 1
                parts = reference.formats.encode_readout(junk, operator.settings)
                for part, values in parts.items():
                    state[part][0] = values
            outputs[index].append(operator.window(state, inputs, 0, done, done, 2))
            kept[index].append(state["checkpoint"][0].view(torch.int16).clone())
    assert len({position_of(state) for state in states}) == 1
    assert not torch.equal(torch.cat(outputs[0]), torch.cat(outputs[1]))
    same = all(torch.equal(a, b) for a, b in zip(*kept, strict=True))
    assert same == (name == "mamba2_words" or u_source == "checkpoint")


@EVERY
@OPERATORS
def test_same_seed_same_bits_and_another_seed_others(make_operator, assert_same, name, settings):
    """Reruns are bit-equal; another seed, layer or position rounds otherwise, to neighbours of the same state."""
    outcomes = []
    for seed in (11, 11, 12):
        changed = {**settings, **({"rounding_seed": seed} if "state_rounding" in settings else {})}
        operator = make_operator(name, **COMMON, **changed)
        state = operator.pool(1)
        operator.window(state, operator.inputs(40), 0, 0)
        outcomes.append(load_checkpoint(state, 0, torch.float64))
    assert_same(outcomes[0], outcomes[1])
    assert torch.equal(outcomes[0], outcomes[2]) != ("state_rounding" in settings)
    assert (outcomes[0] - outcomes[2]).abs().max() <= 0.13 * outcomes[0].abs().max()


@OPERATORS
def test_checkpoint_and_readout_come_from_the_same_fp32_value(make_operator, assert_same, name):
    """The readout is not an image of the rounded checkpoint, whose error would be added to its own."""
    operator = make_operator(name, **COMMON, **FORMATS["fp8 stochastic, nvfp4 readout, u from checkpoint"])
    state = operator.pool(1)
    S = start(operator, state, 0, 50)
    for of_checkpoint, parts in (
        (False, reference.formats.encode_readout(S, operator.settings)),
        (
            True,
            reference.formats.encode_readout(load_checkpoint(state, 0, S.dtype), operator.settings),
        ),
    ):
        assert torch.equal(parts["readout"], state["readout"][0]) != of_checkpoint


@EVERY
@OPERATORS
@pytest.mark.parametrize("tokens", [3, 40])
def test_rule_9_blobs_go_on_bit_identically(make_operator, dice, assert_same, name, settings, tokens):
    """Saved, loaded into another pool full of NaN, and run on; and a fork by copy_slot."""
    operator = make_operator(name, **COMMON, **settings)
    states, inputs = [operator.pool(2), operator.pool(3)], operator.inputs(tokens + 30)
    operator.drive(states[0], [tensor[:tokens] for tensor in inputs], 0, 0, dice)
    blob = save_slot({name: states[0]}, 0, tokens)
    assert load_slot(blob, {name: states[1]}, 2) == tokens
    reference.copy_slot(states[0], 0, 1)
    outputs = [
        torch.cat([operator.window(state, inputs, slot, p, p, 1) for p in range(tokens, tokens + 30)])
        for state, slot in ((states[0], 0), (states[0], 1), (states[1], 2))
    ]
    assert_same(outputs[0], outputs[1])
    assert_same(outputs[0], outputs[2])
    assert save_slot({name: states[0]}, 0, tokens + 30) == save_slot({name: states[1]}, 2, tokens + 30)


def test_rule_9_blobs_hold_nibbles_in_the_usual_order(make_operator, dice):
    """Byte k of a row holds columns 2 k and 2 k + 1, so that a blob needs no kernel to be read."""
    operator = make_operator("mamba2_words", **COMMON, **FORMATS["fp16 stochastic, nvfp4 readout"])
    state = operator.pool(1)
    operator.drive(state, operator.inputs(40), 0, 0, dice)
    tensors = load(save_slot({"layer": state}, 0, 40))
    values = decode_packed(tensors["layer/readout"]).unflatten(-1, (-1, 16))
    values = (values * tensors["layer/readout_block_scale"].float()[..., None]).flatten(-2)
    expected = load_readout(state, 0, torch.float32)
    assert torch.equal(values * torch.exp2(tensors["layer/readout_scale"].float() - 127)[..., None], expected)


DTYPES = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float8_e4m3fn: 2.0**-3}


@pytest.mark.parametrize("dtype", DTYPES)
def test_stochastic_rounding_is_unbiased(dtype):
    """Mean of 2^20 roundings of numbers between 1 and 2, each at its own fraction f of a step, over positions.

    The mean of n roundings has a standard deviation of at most step / (2 sqrt(n)) = step / 2048. It must lie within 5
    of them: a fair rounding fails once in 1.7 million, a bias of step / 256 (8 of them) passes once in 700. Rounding to
    nearest, whose bias at f is up to half a step, fails at every f but 0 and 1/2.
    """
    step, shape, positions = DTYPES[dtype], (2, 2, 32), 8192
    bits = torch.cat([rounding_bits(shape, 5, 1, torch.arange(i, i + 1024)) for i in range(0, positions, 1024)])
    for fraction in (0.0, 2.0**-6, 0.25, 0.5, 0.71, 1 - 2.0**-6):
        value = torch.full(bits.shape, 1 + 3 * step + fraction * step)
        rounded = round_stochastic(value, bits, dtype).double()
        off = (rounded.mean() - value.double().mean()) / step
        assert abs(off) <= 5 / 2048, fraction
        up = (rounded > value).double().mean()
        assert abs(up - fraction) <= 5 / 2048
    # Neighbours in the row, heads, positions: correlations of n numbers lie within 5 / sqrt(n) of 0.
    centred = bits.double() - 32767.5
    scale = centred.square().mean()
    for a, b in ((centred[..., 1:], centred[..., :-1]), (centred[:, :1], centred[:, 1:]), (centred[1:], centred[:-1])):
        assert abs((a * b).mean() / scale) <= 5 / (a.numel() ** 0.5)


def test_no_drift_of_the_mean_over_100_000_flushes():
    """x <- a x + (1 - a) m from 0, stored in fp16 each time, with a = 1 - 2^-10 and m between 1 and 2.

    Expectations obey the recursion exactly, so after the transient the mean is m. A rounding adds variance of at most
    q^2 / 4 (q = 2^-10), so x has one of at most q^2 / 4 / (1 - a^2) = 2^7 q^2: 0.011 squared. Over 256 elements and
    90,000 steps with a correlation time of 2^10 steps (88 / 2 independent ones), the mean's deviation is at most 1e-4.
    6 of them are allowed. Rounding to nearest stops rising where (m - x) 2^-10 is below half a step: far below m.
    """
    a, m, steps, shape = 1 - 2.0**-10, 1.37, 100_000, (1, 4, 64)
    x, nearest = torch.zeros(shape), torch.zeros(())
    total, counted = torch.zeros(shape, dtype=torch.float64), 0
    for first in range(0, steps, 500):
        for index, bits in enumerate(rounding_bits(shape, 0, 0, torch.arange(first, first + 500))):
            x = round_stochastic(x * a + (1 - a) * m, bits, torch.float16).float()
            nearest = (nearest * a + (1 - a) * m).half().float()
            if first + index >= 10_000 and index % 10 == 0:
                total += x
                counted += 1
    assert abs(float(total.mean()) / counted - m) <= 6 * 1e-4
    assert m - float(nearest) > 0.2


@pytest.mark.parametrize("settings", [FORMATS["fp16 stochastic"], FORMATS["fp8"], FORMATS["fp8 stochastic"]])
@pytest.mark.parametrize("name", ["mamba2_words", "mamba2_odd", "gdn_words", "gdn_odd"])
def test_serial_exact_equals_baseline(make_operator, dice, assert_same, name, settings):
    """A state at position t is rounded with the bits of t in both modes: equal outputs in any windows."""
    common = {**COMMON, "u_format": "exact", **settings}
    baseline = make_operator(name, **{**common, "buffer_len": 0})
    serial = make_operator(name, **common, serial_exact=True)
    plain, replay, inputs, done = baseline.pool(1), serial.pool(1), baseline.inputs(90), 0
    while done < 80:
        length = dice.choice((1, dice.randint(1, 4), 11 if done < 70 else 1))
        expected = baseline.window(plain, inputs, 0, done, done, length)
        accepted = length if length > 4 else dice.randint(1, length)
        if 2 <= length <= 4:
            reference.commit(plain, [0], [accepted])
        assert_same(serial.window(replay, inputs, 0, done, done, length), expected)
        done += accepted
    raise_on_error(plain.error_flag)
    raise_on_error(replay.error_flag)


def test_formats_are_smaller_as_they_promise(make_operator):
    """Bytes of a slot's state, for a row of 64 columns: 2, 1 + 1/64, and 0.5 + 1/16 bytes an element."""
    operator = make_operator("mamba2_words", **COMMON, **FORMATS["fp8 stochastic, nvfp4 readout, u from checkpoint"])
    elements = torch.Size(operator.geometry.state_shape).numel()
    nbytes = {name: tensor.nbytes for name, tensor in operator.pool(1).tensors.items()}
    assert nbytes["checkpoint"] + nbytes["checkpoint_scale"] == elements + elements // 64
    assert nbytes["readout"] + nbytes["readout_block_scale"] == elements * 9 // 16
    assert ReplaySettings().rounding_scalars == ()


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, 7])
def test_formats_are_the_same_bits_on_a_gpu(seed):
    """Every operation of the formats is exact or correctly rounded, so devices agree bit for bit."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    generator = torch.Generator().manual_seed(seed)
    S = torch.randn(4, 80, 128, generator=generator)
    S *= torch.exp2(torch.randint(-40, 20, S.shape, generator=generator).float())
    bits = rounding_bits(tuple(S.shape), seed, 3, 12345)
    assert torch.equal(rounding_bits(tuple(S.shape), seed, 3, 12345, "cuda").cpu(), bits)
    formats = reference.formats
    for here, there in (
        (formats.encode_nvfp4(S), formats.encode_nvfp4(S.cuda())),
        (formats.encode_float8(S), formats.encode_float8(S.cuda())),
        (formats.encode_float8(S, bits), formats.encode_float8(S.cuda(), bits.cuda())),
        ([round_stochastic(S, bits, d) for d in DTYPES], [round_stochastic(S.cuda(), bits.cuda(), d) for d in DTYPES]),
    ):
        for a, b in zip(here, there, strict=True):
            assert torch.equal(a.contiguous().view(torch.uint8), b.cpu().contiguous().view(torch.uint8))
