"""How other projects' verification is called, by stand-ins that take their arguments; what is measured and kept."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import harness
import native_peers
import window_suite

from replayssm.plugins import reference
from replayssm.plugins.contract import GdnGeometry, Mamba2Geometry, ReplaySettings
from replayssm.plugins.state import LayerState, allocate_state

BATCH, WINDOW, SETS = 3, 5, 3
GEOMETRIES = {"mamba2": Mamba2Geometry(4, 16, 8, 2), "gdn": GdnGeometry(2, 4, 8, 16)}
SETTINGS = ReplaySettings(buffer_len=0, max_window=WINDOW)


def int32(values) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.int32)


def walk(geometry, first: torch.Tensor, inputs, constants) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs [tokens, heads, rows], states after every token) of one sequence that starts from a state."""
    state = allocate_state(geometry, SETTINGS, 1, "cpu")
    state["checkpoint"][0] = first
    rows = [int32(v) for v in ([1000], [0], [len(inputs[0])], [0])]
    window = reference.mamba2_window if isinstance(geometry, Mamba2Geometry) else reference.gdn_window
    out = window(*inputs, *constants, state, *rows, 0)
    return out, state["snapshots"][0, : len(out)].clone()


def mamba2(first, x, dt, A, B, C, D, dt_bias) -> tuple[torch.Tensor, torch.Tensor]:
    """`walk` from the operands that all of these kernels take, expanded over a head's rows and columns."""
    tied = (A, A[:, :1, :1]), (dt, dt[..., :1]), (D, D[:, :1]), (dt_bias, dt_bias[:, :1])
    assert all(torch.equal(full, one.expand_as(full)) for full, one in tied)
    constants = torch.log(-A[:, 0, 0]), D[:, 0], dt_bias[:, 0]
    return walk(GEOMETRIES["mamba2"], first, (x, dt[..., 0].bfloat16(), B, C), constants)


def vllm_mamba2(
    state, x, dt, A, B, C, D, dt_bias, dt_softplus, state_batch_indices, dst_state_batch_indices, out,
    num_accepted_tokens, cu_seqlens,
) -> None:  # fmt: skip
    assert dt_softplus
    assert int(state_batch_indices.min()) > 0, "state 0 belongs to nobody"
    for row, accepted in enumerate(num_accepted_tokens.tolist()):
        span = slice(int(cu_seqlens[row]), int(cu_seqlens[row + 1]))
        first = state[int(state_batch_indices[row, accepted - 1])].clone()
        out[span], states = mamba2(first, x[span], dt[span], A, B[span], C[span], D, dt_bias)
        state[dst_state_batch_indices[row].long()] = states


class Launched:
    """A Triton kernel: kernel[grid](...)."""

    def __init__(self, function) -> None:
        self.function = function

    def __getitem__(self, grid):
        assert min(grid) > 0
        return self.function


def sglang_mamba2(
    state, x, dt, dt_bias, A, B, C, D, z, out, slots, pad, buffer, steps, parents, rows, batch, tokens, H, P, N, ratio,
    *others, DISABLE_STATE_UPDATE, num_warps,
) -> None:  # fmt: skip
    assert (z, parents, pad, steps, tokens, ratio) == (None, None, -1, WINDOW, WINDOW, 2)
    assert DISABLE_STATE_UPDATE
    assert tuple(state.shape[1:]) == (H, P, N)
    strides = [t.stride() for t in (state, x, dt, dt_bias, A, B, C, D)]
    assert others[:-3] == (*(s for each in strides for s in each), 0, 0, 0, 0, *out.stride(), 0, 0)
    for row in range(batch):
        out[row], buffer[int(rows[row])] = mamba2(
            state[int(slots[row])], x[row], dt[row], A, B[row], C[row], D, dt_bias
        )


def flashinfer_mamba2(
    state, x, dt, A, B, C, D, dt_bias, dt_softplus, state_batch_indices, out, cache_steps, algorithm="auto",
    disable_state_update=False, intermediate_states_buffer=None, intermediate_state_indices=None,
    dst_state_batch_indices=None, num_accepted_tokens=None, cu_seqlens=None,
) -> None:  # fmt: skip
    assert dt.dtype == D.dtype == dt_bias.dtype
    assert cache_steps == WINDOW
    if cu_seqlens is not None:
        vllm_mamba2(
            state, x, dt, A, B, C, D, dt_bias, dt_softplus, state_batch_indices, dst_state_batch_indices, out,
            num_accepted_tokens, cu_seqlens,
        )  # fmt: skip
        return
    assert dt_softplus
    assert disable_state_update
    for row, slot in enumerate(state_batch_indices.tolist()):
        out[row], intermediate_states_buffer[int(intermediate_state_indices[row])] = mamba2(
            state[slot], x[row], dt[row], A, B[row], C[row], D, dt_bias
        )


def gdn(first, *operands) -> tuple[torch.Tensor, torch.Tensor]:
    *inputs, A_log, dt_bias = operands
    return walk(GEOMETRIES["gdn"], first, inputs, (A_log, dt_bias))


def vllm_gdn(
    q, k, v, a, b, A_log, dt_bias, o, h0, ht, cu_seqlens, ssm_state_indices, num_accepted_tokens, scale, **others
) -> None:
    assert h0 is ht
    assert scale == q.shape[-1] ** -0.5
    assert int(ssm_state_indices.min()) > 0
    assert others["stride_init_state_token"] == h0[0].numel()
    assert others["stride_indices_seq"] == WINDOW
    for row, accepted in enumerate(num_accepted_tokens.tolist()):
        span = slice(int(cu_seqlens[row]), int(cu_seqlens[row + 1]))
        first = h0[int(ssm_state_indices[row, accepted - 1])].clone()
        o[span], states = gdn(first, *(t[span] for t in (q, k, v, a, b)), A_log, dt_bias)
        ht[ssm_state_indices[row].long()] = states


def vllm_fused(
    mixed, a, b, A_log, dt_bias, indices, cu_seqlens, accepted, state, gate, weight, out, scale, eps, activation
) -> None:
    assert activation == "silu"
    H, HV, K, V = 2, 4, 8, 16
    q, k, v = mixed.split([H * K, H * K, HV * V], 1)
    q, k, v = q.unflatten(1, (H, K)), k.unflatten(1, (H, K)), v.unflatten(1, (HV, V))
    vllm_gdn(
        q, k, v, a, b, A_log, dt_bias, out, state, state, cu_seqlens, indices, accepted, scale,
        stride_init_state_token=state[0].numel(), stride_indices_seq=indices.stride(0),
    )  # fmt: skip
    wide = out.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    out.copy_(wide * gate.float() * torch.sigmoid(gate.float()))


def sglang_gdn(
    q, k, v, a, b, A_log, dt_bias, o, h0_source, h0_indices, cu_seqlens, intermediate_states_buffer,
    intermediate_state_indices, cache_steps, retrieve_parent_token_ptr, scale, **others,
) -> None:  # fmt: skip
    assert retrieve_parent_token_ptr is None
    assert cache_steps == WINDOW
    assert scale == q.shape[-1] ** -0.5
    assert others["DISABLE_STATE_UPDATE"]
    assert others["CACHE_INTERMEDIATE_STATES"]
    for row, slot in enumerate(h0_indices.tolist()):
        span = slice(int(cu_seqlens[row]), int(cu_seqlens[row + 1]))
        o[span], states = gdn(h0_source[slot], *(t[span] for t in (q, k, v, a, b)), A_log, dt_bias)
        intermediate_states_buffer[int(intermediate_state_indices[row])] = states


def flashinfer_gdn(
    q, k, v, initial_state, initial_state_indices, A_log, a, dt_bias, b, scale, output, disable_state_update,
    intermediate_states_buffer=None, ssm_state_indices=None,
) -> None:  # fmt: skip
    assert scale == q.shape[-1] ** -0.5
    assert disable_state_update == (ssm_state_indices is None)
    for row, slot in enumerate(initial_state_indices.tolist()):
        operands = (t[row] for t in (q, k, v, a, b))
        output[row], states = gdn(initial_state[slot].clone(), *operands, A_log, dt_bias)
        if ssm_state_indices is None:
            intermediate_states_buffer[row] = states
        else:
            initial_state[ssm_state_indices[row].long()] = states


FUSED_GDN = "fused_sigmoid_gating_delta_rule_update_kernel"
MODULES = {
    "vllm._custom_ops": {},
    "vllm.model_executor.layers.mamba.ops.mamba_ssm": {
        "selective_state_update": vllm_mamba2,
        "override_ssm_config": nullcontext,
    },
    "vllm.third_party.flash_linear_attention.ops.fused_sigmoid_gating": {FUSED_GDN: Launched(vllm_gdn)},
    "sglang.srt.layers.attention.mamba.ops.mamba_ssm": {"_selective_scan_update_kernel": Launched(sglang_mamba2)},
    "sglang.srt.layers.attention.fla.fused_sigmoid_gating_recurrent": {FUSED_GDN: Launched(sglang_gdn)},
    "flashinfer.mamba": {"selective_state_update": flashinfer_mamba2},
    "flashinfer.gdn_decode": {"gated_delta_rule_mtp": flashinfer_gdn},
    "triton": {"cdiv": lambda a, b: -(-a // b)},
}


@pytest.fixture
def projects(monkeypatch) -> None:
    for name, contents in MODULES.items():
        parts = name.split(".")
        for parent in (".".join(parts[: i + 1]) for i in range(len(parts))):
            if parent not in sys.modules or parent in MODULES:
                made = ModuleType(parent)
                made.__path__ = []
                monkeypatch.setitem(sys.modules, parent, made)
                if "." in parent:
                    owner, _, leaf = parent.rpartition(".")
                    monkeypatch.setattr(sys.modules[owner], leaf, made, raising=False)
        vars(sys.modules[name]).update(contents)
    monkeypatch.setattr(torch.ops._C, "fused_gdn_decode_post_conv_mtp", vllm_fused, raising=False)


def layer_of(kind: str) -> SimpleNamespace:
    """What native peers use of a layer, on the CPU."""
    torch.manual_seed(0)
    g, tokens = GEOMETRIES[kind], BATCH * WINDOW
    state = allocate_state(g, SETTINGS, BATCH * SETS, "cpu")
    state["checkpoint"].normal_()
    H = g.state_shape[0]
    keys = (2, 8)
    shapes = ((H, 16), (H,), keys, keys) if kind == "mamba2" else (keys, keys, (H, 16), (H,), (H,))
    constants = [torch.rand(H), torch.rand(H) - 4]
    if kind == "mamba2":
        constants.insert(1, torch.randn(H))
    slots = [int32(range(i * BATCH, (i + 1) * BATCH)) for i in range(SETS)]
    return SimpleNamespace(
        geometry=g, settings=SETTINGS, batch=BATCH, window=WINDOW, sets=SETS, state=state, slots=slots,
        inputs=[torch.randn(tokens, *shape).bfloat16() for shape in shapes], constants=constants,
    )  # fmt: skip


def expected(layer, set_index: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(outputs, states after every token) of a set's rows by the reference; the layer's state stays as it is."""
    tensors = {name: tensor.clone() for name, tensor in layer.state.tensors.items()}
    state = LayerState(layer.geometry, SETTINGS, tensors, torch.zeros(1, dtype=torch.int32))
    rows = [int32(v) for v in ([1000] * BATCH, range(0, BATCH * WINDOW, WINDOW), [WINDOW] * BATCH)]
    window = reference.mamba2_window if layer.geometry.kind == "mamba2" else reference.gdn_window
    out = window(*layer.inputs, *layer.constants, state, *rows, layer.slots[set_index], 0)
    first = set_index * BATCH
    return out, state["snapshots"][first : first + BATCH]


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_every_project_gets_the_layers_operands_and_stores_every_state(projects, kind: str) -> None:
    layer = layer_of(kind)
    out, states = expected(layer)
    before = layer.state["checkpoint"].clone()
    found = list(native_peers.native_peers(layer))
    assert {one.peer.split()[0] for one in found} == {"vllm", "sglang", "flashinfer"}
    assert len({one.name for one in found}) == len(found)
    for one in found:
        layer.state["snapshots"].fill_(torch.nan)
        one.prepare()
        value, wanted = one.launches[0]().float(), one.expected(out).float()
        # Both round the same sums to bf16, of which a few fall on the other side, as log(exp(A_log)) may move them.
        assert (value - wanted).norm() < 2**-8 * wanted.norm(), one.name
        torch.testing.assert_close(one.states, states, rtol=1e-5, atol=1e-5)  # fp32 sums of 1e1
        assert torch.equal(layer.state["checkpoint"], before), "a verification keeps what it started from"


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_each_launch_has_states_of_its_own(projects, kind: str) -> None:
    """Else launches in a row would find their states in the cache."""
    layer = layer_of(kind)
    snapshots = layer.state["snapshots"]
    for one in native_peers.native_peers(layer):
        stored = []
        for launch in one.launches:
            snapshots.fill_(-1.0)
            launch()
            stored.append((snapshots != -1.0).flatten(2).any(-1).flatten())
        assert len(stored) >= SETS - 1
        assert all(int(each.sum()) == BATCH * WINDOW for each in stored), one.name
        assert int(torch.stack(stored).sum(0).max()) == 1, one.name


def test_offsets_of_32_bits_are_not_overrun(projects) -> None:
    layer = layer_of("gdn")
    sglang = [one for one in native_peers.native_peers(layer) if one.peer.startswith("sglang")]
    layer.batch = 2**31 // (WINDOW * layer.state["checkpoint"][0].numel()) + 1
    assert sglang
    assert not list(native_peers._sglang_gdn(layer))


def test_a_broken_project_does_not_hide_the_others(projects, monkeypatch, capsys) -> None:
    def broken(layer):
        raise ValueError("no spec")

    monkeypatch.setattr(native_peers, "_sglang_gdn", broken)
    found = {one.peer.split()[0] for one in native_peers.native_peers(layer_of("gdn"))}
    assert found == {"vllm", "flashinfer"}
    assert "broken: ValueError: no spec" in capsys.readouterr().out


def test_without_other_projects_there_are_no_peers(monkeypatch) -> None:
    for name in ("vllm", "sglang", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, None)
    for kind in GEOMETRIES:
        assert list(native_peers.native_peers(layer_of(kind))) == []


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """measure(*(peer, configuration, microseconds, outputs' error, states' error)) -> (names, result lines)."""
    layer = layer_of("gdn")
    layer.out, states = expected(layer)
    layer.launches = lambda offsets: [lambda: layer.state["snapshots"][:BATCH].copy_(states)]
    layer.step_bytes = lambda histories: 1000.0
    monkeypatch.setattr(window_suite, "Layer", lambda *_: layer)
    monkeypatch.setattr(harness, "environment", lambda: {"gpu": "G", "commit": "c", "date": "2026-01-01T00:00:00"})
    monkeypatch.setattr(window_suite, "time_graph", lambda launches: harness.Timing(launches[0].us, 1.0, 2.0))

    def verification(peer: str, configuration: str, us: float, error: float, state_error: float | None):
        stored = states.clone()  # what a peer before it left there

        def launch() -> torch.Tensor:
            if error < 0:
                raise RuntimeError("does not run here")
            if state_error is not None:
                stored.copy_(states)
                stored[:, -1] *= 1 + state_error
            return layer.out * (1 + error)

        launch.us = us
        return native_peers.Verification(peer, configuration, configuration == "usual", [launch], stored)

    def measure(*cases, only=None):
        made = [verification(*case) for case in cases]
        monkeypatch.setattr(native_peers, "native_peers", lambda _: iter(made))
        results = harness.Results("gdn_window", tmp_path)
        names = window_suite.measure_native_peers(results, "qwen4b", BATCH, WINDOW, {"rmw": 4000.0}, only)
        lines = results.path.read_text().splitlines() if results.path.exists() else []
        return names, [json.loads(line) for line in lines]

    return measure


def test_the_fastest_right_configuration_of_every_peer_is_kept_and_its_usual_one(measured) -> None:
    names, lines = measured(
        ("vllm 1.0 update", "rows 8", 90.0, 1e-3, 1e-4),
        ("vllm 1.0 update", "rows 16", 80.0, 1e-3, 1e-4),
        ("vllm 1.0 update", "rows 32", 70.0, 2e-2, 1e-4),
        ("vllm 1.0 update", "rows 64", 60.0, 1e-3, 1e-2),
        ("vllm 1.0 update", "rows 99", 10.0, 1e-3, float("nan")),
        ("vllm 1.0 update", "stores nothing", 5.0, 1e-3, None),
        ("sglang 1.0 update", "usual", 95.0, 1e-3, 1e-4),
        ("sglang 1.0 update", "rows 16", 94.0, 1e-3, 1e-4),
        ("sglang 1.0 update", "rows 8", 99.0, 1e-3, 1e-4),
        ("flashinfer 1.0 update", "auto", 50.0, -1.0, 0.0),
    )
    assert [(line["variant"], line["is_own_choice"], line["median_us"]) for line in lines] == [
        ("vllm 1.0 update rows 16", False, 80.0),
        ("sglang 1.0 update usual", True, 95.0),
        ("sglang 1.0 update rows 16", False, 94.0),
    ]
    assert names == {line["variant"] for line in lines}
    shared = {"benchmark": "gdn_window", "op": "peer", "geometry": "qwen4b", "batch": BATCH, "window": WINDOW}
    shared |= {"state_dtype": "float32", "readout_dtype": "same", "L": 0, "fill": "flush", "correct": True}
    shared |= {"bytes": 1000, "ceiling_gb_s": 4000.0, "gpu": "G", "commit": "c"}
    assert all(line.items() >= shared.items() for line in lines)


def test_other_batches_repeat_what_was_fastest(measured) -> None:
    cases = [("vllm 1.0 update", f"rows {rows}", float(rows), 1e-3, 1e-4) for rows in (8, 16)]
    names, lines = measured(*cases, only={"vllm 1.0 update rows 16"})
    assert names == {"vllm 1.0 update rows 16"}
    assert len(lines) == 1
