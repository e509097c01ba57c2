"""The interpreter: what it refuses, what it keeps and frees, and its options for quantized weights."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from replayssm.builders import functional as F
from replayssm.builders import nvfp4 as encoder
from replayssm.builders.checkpoint import Checkpoint
from replayssm.builders.functional import Graph
from replayssm.builders.models import build_networks
from replayssm.builders.parameters import Parameters
from replayssm.plugins import nvfp4
from replayssm.plugins.network import CALL_INPUTS, Network
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import allocate_state
from replayssm.runtime.executor import Executor
from replayssm.runtime.functional_ops import OPERATORS

VOCAB, HIDDEN = 48, 32


def inputs(tokens: int, slots: list[int] | None = None, seq_len: int = 0) -> dict[str, torch.Tensor]:
    """One row of `tokens` tokens after `seq_len` others."""
    values = {
        "token_ids": torch.arange(3, 3 + tokens),
        "positions": torch.arange(seq_len, seq_len + tokens),
        "seq_lens": [seq_len],
        "window_starts": [0],
        "window_lens": [tokens],
        "state_batch_indices": slots or [0],
        "logits_indices": torch.arange(tokens),
    }
    return {n: torch.as_tensor(values[n], dtype=getattr(torch, dtype)) for n, (dtype, _) in CALL_INPUTS.items()}


def quantized_network(formats: dict[str, str]) -> tuple[Network, dict[str, torch.Tensor]]:
    """Embedding, MLP, experts and a tied head, with the format of each module; and random weights."""
    graph, plan = Graph("main", "float32"), {}
    p = Parameters(graph, lambda module: formats.get(module.split(".")[0], "dense"), plan)
    table = p.linear("embed", VOCAB, HIDDEN)
    x = F.embedding(graph.input("token_ids"), table)
    x = F.add(x, F.linear(F.silu(F.linear(x, p.linear("up", 64, HIDDEN))), p.linear("down", HIDDEN, 64)))
    ids, weights = F.route_softmax(F.linear(x, p.linear("router", 4, HIDDEN)), 2)
    experts = [p.experts("up", 4, 16, HIDDEN), p.experts("down", 4, HIDDEN, 16)]
    x = F.add(x, F.moe(x, ids, weights, experts, "squared_relu"))
    logits = F.linear(F.gather(x, graph.input("logits_indices")), table, output_dtype="float32")
    network = graph.finish(logits=logits, hidden_states=x)

    generator, tensors = torch.Generator().manual_seed(0), {}
    for recipe in plan.values():
        for source in recipe.sources:
            module, _, suffix = source.rpartition(".")
            if suffix == "weight":
                shape = recipe.shape[1:] if recipe.stacked else recipe.shape
                shape = (shape[0], shape[1] * 2) if recipe.dtype == "uint8" else shape
                dense = torch.randn(shape, generator=generator)
                packed = {"uint8": encoder.quantize, "float8_e4m3fn": encoder.quantize_fp8}.get(recipe.dtype)
                values = packed(dense)._asdict() if packed else {"weight": dense}
                tensors |= {f"{module}.{key}": value for key, value in values.items()}
                tensors[f"{module}.input_scale"] = torch.tensor(0.02)
    return network, {name: recipe.load(tensors.__getitem__) for name, recipe in plan.items()}


FORMATS = {
    "nvfp4": {"embed": "w4a16_nvfp4", "up": "nvfp4", "down": "nvfp4", "experts": "nvfp4"},
    "fp8": {"up": "fp8", "down": "fp8", "experts": "fp8"},
    "mixed": {"up": "nvfp4", "down": "fp8", "experts": "w4a16_nvfp4"},
}


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("formats", FORMATS)
def test_unpacking_at_load_changes_no_bit(formats, emulate):
    network, weights = quantized_network(FORMATS[formats])
    outputs = {}
    for unpack in (False, True):
        executor = Executor(
            network, weights, {}, unpack_weights=unpack, emulate_activation_quantization=emulate, unpacked=(kept := {})
        )
        outputs[unpack] = executor(inputs(5))["logits"]
        assert bool(kept) == unpack
        packed = sum(weights[name].nbytes for name in network.weights)
        assert executor.weight_bytes == packed if not unpack else executor.weight_bytes > packed
    assert torch.equal(outputs[False], outputs[True])
    assert network == quantized_network(FORMATS[formats])[0], "the network itself must stay as it was"


def test_unpacking_is_the_default_on_the_cpu():
    network, weights = quantized_network(FORMATS["nvfp4"])
    assert (
        Executor(network, weights, {}).weight_bytes
        > 1.5 * Executor(network, weights, {}, unpack_weights=False).weight_bytes
    )


def test_emulation_rounds_activations():
    network, weights = quantized_network({"up": "nvfp4"})
    x = weights["embed.weight"][inputs(5)["token_ids"]]
    rounded = nvfp4.round_to_nvfp4(x, weights["up.input_scale"])
    up = nvfp4.dequantize(weights["up.weight"], weights["up.weight_scale"], weights["up.weight_scale_2"])
    seen = []
    silu = OPERATORS["silu"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPERATORS, "silu", lambda value: seen.append(value) or silu(value))
        for emulate in (False, True):
            Executor(network, weights, {}, emulate_activation_quantization=emulate)(inputs(5))
    # fp32 sums over 32 elements, within torch's own 1.3e-6.
    torch.testing.assert_close(seen[0], x @ up.T)
    torch.testing.assert_close(seen[1], rounded @ up.T)
    assert not torch.allclose(seen[0], seen[1])


def test_executors_share_unpacked_weights():
    network, weights = quantized_network(FORMATS["nvfp4"])
    unpacked = {}
    Executor(network, weights, {}, unpacked=unpacked)
    kept = dict(unpacked)
    Executor(network, weights, {}, unpacked=unpacked)
    assert unpacked.keys() == kept.keys()
    assert all(unpacked[name] is kept[name] for name in kept)


def test_weights_on_the_cpu_are_not_copied():
    network, weights = quantized_network({})
    executor = Executor(network, weights, {})
    held = {tensor.data_ptr() for tensor in executor._constants if tensor is not None}
    assert held == {tensor.data_ptr() for tensor in weights.values()}


def test_values_are_freed_after_their_last_use(monkeypatch):
    """When the head runs, only its input and the hidden states (an output) are still alive."""
    network, weights = quantized_network({})
    made: list[weakref.ref] = []

    def tracked(function):
        def run(*args, **attributes):
            value = function(*args, **attributes)
            made.extend(weakref.ref(part) for part in (value if isinstance(value, tuple) else (value,)))
            return value

        return run

    alive = []
    for name, function in list(OPERATORS.items()):
        monkeypatch.setitem(OPERATORS, name, tracked(function))
    gather = OPERATORS["gather"]

    def count(*args):
        gc.collect()
        alive.append(sum(reference() is not None for reference in made))
        return gather(*args)

    monkeypatch.setitem(OPERATORS, "gather", count)
    Executor(network, weights, {})(inputs(5))
    assert alive == [1]
    assert len(made) > 8


def test_calls_are_independent():
    network, weights = quantized_network({})
    executor = Executor(network, weights, {})
    first = executor(inputs(5))
    executor(inputs(2))
    assert torch.equal(executor(inputs(5))["logits"], first["logits"])


@pytest.fixture
def nano(tiny_checkpoint):
    """(network, weights, states) of the tiny Nemotron, for 2 slots."""
    checkpoint = Checkpoint.open(tiny_checkpoint("nano", dtype="float32"))
    traced = build_networks(checkpoint.config, checkpoint.module_format, "float32")
    weights = {name: traced.weight_plan[name].load(checkpoint.tensor) for name in traced.main.weights}
    settings = ReplaySettings(activation_dtype="float32", max_seq_len=64, buffer_len=4)
    states = {name: allocate_state(spec.geometry, settings, 2) for name, spec in traced.main.states.items()}
    return traced.main, weights, states


def test_what_does_not_fit_is_refused(nano):
    network, weights, states = nano
    first = next(iter(network.weights))
    with pytest.raises(ValueError, match=f"needs the weight '{first}', which the engine lacks"):
        Executor(network, {name: w for name, w in weights.items() if name != first}, states)
    with pytest.raises(ValueError, match=rf"weight '{first}' is torch.bfloat16 .* needs float32"):
        Executor(network, {**weights, first: weights[first].bfloat16()}, states)
    with pytest.raises(ValueError, match=rf"weight '{first}' is .*\[127, 512\].* do not belong together"):
        Executor(network, {**weights, first: weights[first].T[1:]}, states)
    conv, ssm = list(network.states)[:2]
    with pytest.raises(ValueError, match=f"needs the state '{ssm}', which was not allocated"):
        Executor(network, weights, {name: state for name, state in states.items() if name != ssm})
    with pytest.raises(ValueError, match=f"state '{ssm}' has ConvGeometry.*needs Mamba2Geometry"):
        Executor(network, weights, {**states, ssm: states[conv]})
    incomplete = inputs(3)
    del incomplete["positions"], incomplete["seq_lens"]
    with pytest.raises(ValueError, match="also needs the inputs positions, seq_lens"):
        Executor(network, weights, states)(incomplete)
    unknown = replace(network, nodes=[replace(network.nodes[0], op="convolve"), *network.nodes[1:]])
    with pytest.raises(ValueError, match="operator 'convolve' is unknown; known are embedding"):
        Executor(unknown, weights, states)


def test_a_network_read_back_from_json_runs_the_same(nano):
    network, weights, states = nano
    read = Network.from_json(network.to_json())
    expected = Executor(network, weights, states)(inputs(9, [0]))
    assert torch.equal(Executor(read, weights, states)(inputs(9, [1]))["logits"], expected["logits"])


def test_dynamo_traces_a_step_without_a_break(nano):
    """What torch.compile needs: one graph for a whole step, with the state updated in place."""
    network, weights, states = nano
    eager = Executor(network, weights, states)
    compiled = torch.compile(Executor(network, weights, states).__call__, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for run, slot in ((eager, 0), (compiled, 1)):
            outputs = [run(inputs(7, [slot])), run(inputs(1, [slot], seq_len=7))]
            if slot == 0:
                expected = outputs
    for output, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output["logits"], wanted["logits"], rtol=0, atol=1e-6)
