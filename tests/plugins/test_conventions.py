"""The recurrences against transformers' own mixers, which were written by other people.

Everything else in this folder is checked against `reference.recurrence`; a wrong convention there (grouping of
heads, order of q, k, v or x, B, C, scaling, gating) would go unnoticed. transformers computes in fp32, so agreement is
asked for to 2e-5 of the largest output: a few hundred fp32 roundings of sums over at most 120 tokens.
"""

from __future__ import annotations

import pytest
import torch

from replayssm.plugins import reference
from replayssm.plugins.contract import ConvGeometry, GdnGeometry, Mamba2Geometry
from replayssm.plugins.reference import recurrence
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import allocate_state, raise_on_error

nemotron_h = pytest.importorskip("transformers.models.nemotron_h.modeling_nemotron_h")
qwen3_5 = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")

TOKENS = 90
SETTINGS = ReplaySettings(buffer_len=8, max_window=4, activation_dtype="float32", u_format="exact", max_seq_len=1000)


def assert_agrees(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert (got - expected).abs().max() <= 2e-5 * expected.abs().max()


def windows(total: int) -> list[tuple[int, int]]:
    """A prefill, then decode and verify windows: (begin, length)."""
    spans, begin = [], 0
    for length in (30, *[1, 4, 2, 1, 3] * total):
        if begin < total:
            spans.append((begin, min(length, total - begin)))
            begin += length
    return spans


def through_windows(operator, inputs, *states) -> torch.Tensor:
    """Outputs of `operator(parts, rows)` over all tokens in windows, in slot 1."""
    outputs = []
    for begin, length in windows(inputs.shape[0]):
        rows = [torch.tensor([value], dtype=torch.int32) for value in (begin, 0, length, 1)]
        outputs.append(operator(inputs[begin : begin + length], rows))
    for state in states:
        raise_on_error(state.error_flag)
    return torch.cat(outputs)


def capture_norm_input(mixer: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """What the mixer feeds to its gated norm: the output of the recurrence."""
    seen = []
    handle = mixer.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with torch.no_grad():
        mixer(hidden_states)
    handle.remove()
    return seen[0]


@pytest.fixture
def mamba2_mixer():
    """NemotronH's mixer with random weights; its dt clamp, which the published models do not have, removed."""
    from transformers import NemotronHConfig

    config = NemotronHConfig(
        hidden_size=24,
        hybrid_override_pattern="M",
        mamba_num_heads=6,
        mamba_head_dim=5,
        n_groups=3,
        ssm_state_size=7,
        chunk_size=16,
        conv_kernel=4,
    )
    torch.manual_seed(0)
    mixer = nemotron_h.NemotronHMamba2Mixer(config, layer_idx=0).eval()
    mixer.time_step_limit = (0.0, float("inf"))
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if "proj" in name else 0.7))
    return mixer


@pytest.fixture
def gdn_mixer():
    from transformers import Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        hidden_size=24,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=7,
        linear_value_head_dim=5,
        linear_conv_kernel_dim=4,
    )
    torch.manual_seed(0)
    mixer = qwen3_5.Qwen3_5GatedDeltaNet(config, layer_idx=0).eval()
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.3 if "proj" in name else 0.7))
    return mixer


def test_nemotron_mixer(mamba2_mixer):
    """in_proj = [z | x B C | dt]; convolution with bias and silu; heads of a group share B and C."""
    mixer, hidden_states = mamba2_mixer, torch.randn(TOKENS, 24)
    expected = capture_norm_input(mixer, hidden_states[None])[0].view(TOKENS, 6, 5)
    conv = allocate_state(ConvGeometry(mixer.conv_dim, 4), SETTINGS, 2)
    ssm = allocate_state(Mamba2Geometry(nheads=6, headdim=5, dstate=7, ngroups=3), SETTINGS, 2)
    assert ssm.geometry.conv_dim == mixer.conv_dim

    def operator(h, rows):
        with torch.no_grad():
            _, xBC, dt = mixer.in_proj(h).split([30, mixer.conv_dim, 6], dim=-1)
        xBC = reference.causal_conv1d_window(xBC, mixer.conv1d.weight[:, 0], mixer.conv1d.bias, conv, *rows)
        x, B, C = xBC.split([30, 21, 21], dim=-1)
        x, B, C = x.unflatten(-1, (6, 5)), B.unflatten(-1, (3, 7)), C.unflatten(-1, (3, 7))
        return reference.mamba2_window(x, dt, B, C, mixer.A_log, mixer.D, mixer.dt_bias, ssm, *rows, 0)

    assert_agrees(through_windows(operator, hidden_states, conv, ssm), expected)


def test_qwen_mixer(gdn_mixer):
    """in_proj_qkv = [q | k | v]; convolution without bias; value heads h r .. h r + r - 1 share key head h."""
    mixer, hidden_states = gdn_mixer, torch.randn(TOKENS, 24)
    expected = capture_norm_input(mixer, hidden_states[None]).view(TOKENS, 6, 5)
    conv = allocate_state(ConvGeometry(mixer.conv_dim, 4), SETTINGS, 2)
    gdn = allocate_state(GdnGeometry(num_k_heads=2, num_v_heads=6, head_k_dim=7, head_v_dim=5), SETTINGS, 2)
    assert gdn.geometry.conv_dim == mixer.conv_dim

    def operator(h, rows):
        with torch.no_grad():
            qkv, a, b = mixer.in_proj_qkv(h), mixer.in_proj_a(h), mixer.in_proj_b(h)
        qkv = reference.causal_conv1d_window(qkv, mixer.conv1d.weight[:, 0], None, conv, *rows)
        q, k, v = qkv.split([14, 14, 30], dim=-1)
        q, k, v = q.unflatten(-1, (2, 7)), k.unflatten(-1, (2, 7)), v.unflatten(-1, (6, 5))
        return reference.gdn_window(q, k, v, a, b, mixer.A_log, mixer.dt_bias, gdn, *rows, 0)

    assert_agrees(through_windows(operator, hidden_states, conv, gdn), expected)


def test_gdn_recurrence_is_transformers_gated_delta_rule():
    """Outputs and final state ([dk, dv] there) of the judge, token by token, from a random state."""
    torch.manual_seed(1)
    q, k, v = torch.randn(TOKENS, 2, 7), torch.randn(TOKENS, 2, 7), torch.randn(TOKENS, 6, 5)
    a, b, A_log, dt_bias = torch.randn(TOKENS, 6), torch.randn(TOKENS, 6), torch.randn(6), torch.randn(6)
    initial = torch.randn(6, 5, 7)
    expected, final = qwen3_5.torch_recurrent_gated_delta_rule(
        # Older releases expect a key head per value head.
        *(tensor[None] for tensor in (q.repeat_interleave(3, 1), k.repeat_interleave(3, 1), v)),
        g=(-A_log.exp() * torch.nn.functional.softplus(a + dt_bias))[None],
        beta=b.sigmoid()[None],
        initial_state=initial.transpose(1, 2)[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    o, states = recurrence.gdn_recurrence(q, k, v, a, b, A_log, dt_bias, initial)
    assert_agrees(o, expected[0].double())
    assert_agrees(states[-1], final[0].transpose(1, 2).double())


def test_mamba2_recurrence_is_transformers_state_update():
    """Outputs and state of the judge against the decode path, from a random state."""
    torch.manual_seed(1)
    x, dt = torch.randn(40, 6, 5), torch.randn(40, 6)
    B, C = torch.randn(40, 3, 7), torch.randn(40, 3, 7)
    A_log, D, dt_bias = torch.randn(6), torch.randn(6), torch.randn(6)
    state = torch.randn(1, 6, 5, 7)
    y, states = recurrence.mamba2_recurrence(x, dt, B, C, A_log, D, dt_bias, state[0].clone())
    wide = {
        "A": -A_log.exp()[:, None, None].expand(6, 5, 7),
        "D": D[:, None].expand(6, 5),
        "dt_bias": dt_bias[:, None].expand(6, 5),
    }
    for t in range(40):
        out = nemotron_h.mamba2_selective_state_update(
            state,
            x[t][None],
            dt[t][None, :, None].expand(1, 6, 5),
            wide["A"],
            B[t][None],
            C[t][None],
            wide["D"],
            dt_bias=wide["dt_bias"],
            dt_softplus=True,
        )
        assert_agrees(y[t], out[0].double())
    assert_agrees(states[-1], state[0].double())
