"""Networks of the published configs, traced without weights: structure, shapes, state and weight bytes."""

from __future__ import annotations

import math
import time
from collections import Counter

import pytest

from replayssm.builders.config import published, weight_bytes, weight_shapes
from replayssm.builders.models import build_networks
from replayssm.builders.weight_shapes import dense_dtype, quantizable_modules, storage
from replayssm.plugins.contract import state_parts
from replayssm.plugins.network import Network
from replayssm.plugins.settings import ReplaySettings

NEMOTRON = ("nano4b", "super120b", "super120b-nvfp4")
QWEN = ("qwen4b", "qwen122b", "qwen122b-nvfp4")

# Layers of each kind as the models' publishers state them: (recurrent, attention, dense MLP, MoE, draft head's layers).
LAYERS = {"nano4b": (21, 4, 17, 0, 0), "super120b": (40, 8, 0, 40, 2), "qwen4b": (24, 8, 32, 0, 1)}
LAYERS |= {"qwen122b": (36, 12, 0, 48, 1)}
# Operators of one block, without the norm and the residual addition around it.
BLOCK_OPERATORS = {
    "mamba2": {
        "linear": 2,
        "split": 2,
        "reshape": 4,
        "causal_conv1d_window": 1,
        "mamba2_window": 1,
        "gated_rms_norm": 1,
    },
    "gdn": {"linear": 5, "split": 1, "reshape": 4, "causal_conv1d_window": 1, "gdn_window": 1, "gated_rms_norm": 1},
    "nemotron attention": {"linear": 4, "reshape": 4, "attention_window": 1},
    "qwen attention": {
        "linear": 4,
        "reshape": 4,
        "split": 1,
        "rms_norm": 2,
        "rope": 2,
        "attention_window": 1,
        "sigmoid": 1,
        "multiply": 1,
    },
    "nemotron mlp": {"linear": 2, "squared_relu": 1},
    "qwen mlp": {"linear": 3, "silu": 1, "multiply": 1},
    "nemotron moe": {"linear": 5, "route_sigmoid": 1, "moe": 1, "squared_relu": 1, "add": 1},
    "qwen moe": {
        "linear": 5,
        "route_softmax": 1,
        "moe": 1,
        "silu": 1,
        "multiply": 2,
        "sigmoid": 1,
        "add": 1,
    },
}


@pytest.fixture(scope="module", params=[*NEMOTRON, *QWEN])
def traced(request):
    config = published(request.param)
    start = time.perf_counter()
    networks = build_networks(config)
    return request.param, config, networks, time.perf_counter() - start


def test_tracing_is_fast(traced):
    """Super lists 41,100 expert modules; the slowest takes 0.2 s."""
    assert traced[3] < 2


def test_operators(traced):
    name, _, networks, _ = traced
    recurrent, attention, mlp, moe, draft = LAYERS[name.removesuffix("-nvfp4")]
    family, mixer = ("nemotron", "mamba2") if name in NEMOTRON else ("qwen", "gdn")
    expected = Counter({"embedding": 1, "gather": 1, "linear": 1, "rms_norm": 1})
    for count, block in (
        (recurrent, mixer),
        (attention, f"{family} attention"),
        (mlp, f"{family} mlp"),
        (moe, f"{family} moe"),
    ):
        expected += Counter({op: count * times for op, times in BLOCK_OPERATORS[block].items()})
        expected += Counter({"rms_norm": count, "add": count})
    assert Counter(node.op for node in networks.main.nodes) == expected
    assert (networks.mtp is not None) == bool(draft)
    if networks.mtp is not None:
        ops = Counter(node.op for node in networks.mtp.nodes)
        assert (ops["attention_window"], ops["moe"], ops["concat"]) == (1, int(bool(moe)), 1)
        assert list(networks.mtp.states) == ["mtp.layers.0.attention"]


def test_outputs_and_inputs(traced):
    _, config, networks, _ = traced
    for network in (networks.main, networks.mtp):
        if network is None:
            continue
        logits, hidden = (network.spec(network.outputs[name]) for name in ("logits", "hidden_states"))
        assert (logits.dtype, logits.shape) == ("float32", ("R", config.vocab_size))
        assert (hidden.dtype, hidden.shape) == ("bfloat16", ("T", config.hidden_size))
        assert ("hidden_states" in network.inputs) == (network is networks.mtp)
        assert Network.from_json(network.to_json()) == network


def test_every_checkpoint_tensor_is_used_once(traced):
    """Sources of the plan are exactly the tensors that the checkpoint holds, in their shapes."""
    _, config, networks, _ = traced
    quantizable = set(quantizable_modules(config))
    expected = {}
    for name, shape in weight_shapes(config).items():
        module, _, suffix = name.rpartition(".")
        module_format = config.formats.module_format(module) if module in quantizable else "dense"
        stored = storage(shape, module_format) if suffix == "weight" else {suffix: (None, shape)}
        expected |= {f"{module}.{part}": math.prod(part_shape) for part, (_, part_shape) in stored.items()}
    used = [source for recipe in networks.weight_plan.values() for source in recipe.sources]
    assert len(used) == len(set(used))
    assert set(used) == set(expected)
    for name, recipe in networks.weight_plan.items():
        assert math.prod(recipe.shape) == sum(expected[source] for source in recipe.sources), name
        assert recipe.stacked == (".experts." in name)


def test_weight_bytes(traced):
    """As stored, except that norms, A_log, D, dt_bias and Nemotron's router become fp32 and KV scales are left out."""
    _, config, networks, _ = traced
    scales = ("weight_scale", "weight_scale_2", "input_scale")
    widened = sum(
        2 * math.prod(recipe.shape)
        for name, recipe in networks.weight_plan.items()
        if recipe.dtype == "float32" and dense_dtype(config, name) == "bfloat16" and not name.endswith(scales)
    )
    total = sum(recipe.nbytes for recipe in networks.weight_plan.values())
    kv_scales = 8 * len(config.attention_layers) if config.formats.kv_cache else 0
    assert total - widened + kv_scales == weight_bytes(config)["total"]
    assert widened < 0.003 * total


# MiB of recurrent state and bytes of KV cache per token, for one sequence (fp32 state, bf16 cache).
STATE = {"nano4b": (78.75, 16384), "super120b": (160.0, 8192), "qwen4b": (48.0, 32768), "qwen122b": (144.0, 24576)}


def test_state(traced):
    name, _, networks, _ = traced
    mib, kv_bytes = STATE[name.removesuffix("-nvfp4")]
    settings = ReplaySettings(max_seq_len=8)
    parts = [part for spec in networks.main.states.values() for part in state_parts(spec.geometry, settings)]
    assert sum(part.nbytes for part in parts if part.name == "checkpoint") == mib * 2**20
    assert sum(part.nbytes for part in parts if part.name in ("k_cache", "v_cache")) == 8 * kv_bytes
    layers = [spec.layer for spec in networks.main.states.values() if spec.geometry.kind in ("mamba2", "gdn")]
    assert len(set(layers)) == len(layers)
