"""The simulation of state formats that the accuracy study runs on, against the operators' references."""

from __future__ import annotations

import pytest
import torch

from examples.replay import BUFFER_LEN, GdnCore, Mamba2Core, normalized
from examples.state_formats import StateFormat, Store, float8_value, nvfp4_value
from replayssm.plugins import reference
from replayssm.plugins.contract import GdnGeometry, Mamba2Geometry
from replayssm.plugins.reference.formats import decode_float8, decode_nvfp4, encode_float8, encode_nvfp4
from replayssm.plugins.reference.rounding import rounding_bits
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import allocate_state

MAMBA2, GDN = Mamba2Geometry(4, 6, 64, 2), GdnGeometry(2, 4, 64, 8)
FORMATS = [
    StateFormat("float32"),
    StateFormat("float16"),
    StateFormat("bfloat16", True),
    StateFormat("float8", True),
    StateFormat("float16", True, "nvfp4"),
    StateFormat("float8", True, "nvfp4", "checkpoint"),
    StateFormat("float32", False, "float8"),
]


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(3)


def test_values_are_what_the_formats_store(generator):
    S = torch.randn(3, 2, 8, 64, generator=generator) * torch.exp2(
        torch.randint(-30, 9, (3, 2, 8, 1), generator=generator).float()
    )
    S[0, 0, 0] = 0
    bits = rounding_bits((2, 8, 64), 1, 2, 3)
    assert torch.equal(nvfp4_value(S), decode_nvfp4(*encode_nvfp4(S)))
    assert torch.equal(float8_value(S), decode_float8(*encode_float8(S)))
    assert torch.equal(float8_value(S, bits), decode_float8(*encode_float8(S, bits)))
    with pytest.raises(ValueError, match="no such state: nvfp4, stochastic"):
        Store(StateFormat("nvfp4", True))


def reference_outputs(geometry, form, inputs, weights, tokens):
    """One-token windows of the operator, beginning with a prefill of one token; the state behind them."""
    settings = ReplaySettings(
        buffer_len=BUFFER_LEN,
        state_dtype=form.state,
        state_rounding="stochastic" if form.stochastic else "nearest",
        readout_dtype=form.readout,
        u_source=form.u_source,
        activation_dtype="float32",
    )
    state = allocate_state(geometry, settings, 2)
    operator = reference.mamba2_window if geometry is MAMBA2 else reference.gdn_window
    out = []
    for token in range(tokens):
        rows = [torch.tensor(v, dtype=torch.int32) for v in ([token] * 2, [0, 1], [1, 1], [0, 1])]
        out.append(operator(*(t[:, token] for t in inputs), *weights, state, *rows, 5))
    return torch.stack(out), state


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("geometry", [MAMBA2, GDN], ids=["mamba2", "gdn"])
def test_decoding_is_the_operators(geometry, form, generator):
    """Two sequences over five flushes. The reference folds at L, 2 L, ... too, its fresh checkpoint being exact.

    Both add in fp32 in different orders, so an element near a rounding boundary may fall to the other side: outputs
    then differ by one step of the format in one of many elements, which the tolerance allows.
    """
    tokens, heads = 5 * BUFFER_LEN + 3, geometry.state_shape[0]
    A_log, dt_bias = torch.rand(heads, generator=generator), torch.rand(heads, generator=generator) - 3

    def normal(*shape):
        return torch.randn(2, tokens, *shape, generator=generator)

    fill = torch.zeros(1, dtype=torch.long)
    if geometry is MAMBA2:
        x, dt, B, C = normal(4, 6), normal(4), normal(2, 64), normal(2, 64)
        D = torch.randn(heads, generator=generator)
        expected, state = reference_outputs(geometry, form, (x, dt, B, C), (A_log, D, dt_bias), tokens)
        core = Mamba2Core(2, (4, 2, 6, 64), fill, lambda function: function)
        dt = torch.nn.functional.softplus(dt + dt_bias)
        steps = [(x[:, t], dt[:, t], -A_log.exp(), B[:, t], C[:, t], D) for t in range(tokens)]
    else:
        q, k, v, a, b = normal(2, 64), normal(2, 64), normal(4, 8), normal(4), normal(4)
        expected, state = reference_outputs(geometry, form, (q, k, v, a, b), (A_log, dt_bias), tokens)
        core = GdnCore(2, (4, 2, 8, 64), fill, lambda function: function)
        core.u_from_checkpoint = form.u_source == "checkpoint"
        q, k = normalized(q, torch.float32) * 64**-0.5, normalized(k, torch.float32)
        g = -A_log.exp() * torch.nn.functional.softplus(a + dt_bias)
        steps = [(q[:, t], k[:, t], v[:, t], g[:, t], b[:, t].sigmoid()) for t in range(tokens)]
    store = Store(form)
    core.start(torch.zeros_like(core.checkpoint), store, torch.zeros(geometry.state_shape, dtype=torch.int32))
    got = []
    for token, step in enumerate(steps):
        if token and token % BUFFER_LEN == 0:
            core.flush(store, rounding_bits(geometry.state_shape, 0, 5, token))
            fill.zero_()
        got.append(core.step(*step))
        fill += 1
    step_of_format = {"float32": 0.0, "float16": 2.0**-10, "bfloat16": 2.0**-7, "float8": 2.0**-3}[form.state]
    step_of_format = max(step_of_format, {"same": 0.0, "float8": 2.0**-3, "nvfp4": 0.5}[form.readout])
    error = (torch.stack(got) - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert int(state.error_flag) == 0
    assert error.median() < 2e-5
    assert error.max() < 2e-5 + step_of_format / 8


def test_u_in_one_number_is_the_first_of_the_pair(generator):
    kept = []
    inputs = [torch.randn(1, *shape, generator=generator) for shape in ((2, 64), (2, 64), (4, 8), (4,), (4,))]
    for in_one in (False, True):
        core = GdnCore(1, (4, 2, 8, 64), torch.zeros(1, dtype=torch.long), lambda function: function)
        core.u_in_one_number = in_one
        core.start(torch.zeros_like(core.checkpoint), Store(StateFormat("float32")), torch.zeros(4, 8, 64).int())
        core.step(*inputs[:3], -inputs[3].abs(), inputs[4].sigmoid())
        kept.append(core.values[:, :, 0])
    pair, one = kept
    assert not torch.equal(one, pair)
    assert torch.equal(one, pair.to(torch.bfloat16).float())
