"""A fused network computes what the network computes, with the operators that were meant to disappear gone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from replayssm.builders import functional as F
from replayssm.builders.checkpoint import Checkpoint
from replayssm.builders.config import published
from replayssm.builders.functional import Graph
from replayssm.builders.models import build_networks
from replayssm.builders.parameters import Parameters
from replayssm.builders.weight_shapes import quantizable_modules
from replayssm.plugins.network import CALL_INPUTS
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import allocate_state
from replayssm.runtime import divided_product, fused_operators, fusion
from replayssm.runtime import functional_ops as ops
from replayssm.runtime.executor import Executor

SETTINGS = ReplaySettings(
    buffer_len=4, max_window=3, max_seq_len=64, activation_dtype="float64", state_dtype="float64", u_format="exact"
)


def rows(lengths: list[int], seq_lens: list[int]) -> dict[str, torch.Tensor]:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    values = {
        "token_ids": [(7 * i) % 101 for i in range(sum(lengths))],
        "positions": [base + i for base, length in zip(seq_lens, lengths, strict=True) for i in range(length)],
        "seq_lens": seq_lens,
        "window_starts": starts,
        "window_lens": lengths,
        "state_batch_indices": list(range(len(lengths))),
        "logits_indices": list(range(sum(lengths))),
    }
    return {n: torch.tensor(values[n], dtype=getattr(torch, dtype)) for n, (dtype, _) in CALL_INPUTS.items()}


@pytest.mark.parametrize("layout", ["nano", "super", "qwen", "qwen_moe"])
def test_a_fused_network_gives_the_same_logits(layout, tiny_checkpoint):
    """In float64 joined products and sums in another order differ by some 1e-15 of values near 1."""
    checkpoint = Checkpoint.open(tiny_checkpoint(layout))
    traced = build_networks(checkpoint.config, checkpoint.module_format, "float64")
    for network in (traced.main, traced.mtp):
        outputs = []
        for fuse in (False, True):
            states = {name: allocate_state(spec.geometry, SETTINGS, 2) for name, spec in network.states.items()}
            weights = {name: traced.weight_plan[name].load(checkpoint.tensor) for name in network.weights}
            executor = Executor(network, weights, states, fuse=fuse)
            steps = []
            for call in (rows([5, 7], [0, 0]), rows([3, 1], [5, 7]), rows([1, 1], [7, 8])):
                if "hidden_states" in network.inputs:
                    tokens = call["token_ids"].shape[0]
                    call["hidden_states"] = torch.linspace(-1, 1, tokens * 128, dtype=torch.float64).view(tokens, 128)
                steps.append(executor(call))
            outputs.append(steps)
        for plain, fused in zip(*outputs, strict=True):
            for name in network.outputs:
                assert (plain[name] - fused[name]).abs().max() < 1e-10


@pytest.mark.parametrize(
    ("name", "gone", "joined", "followed"),
    [("nano4b", {"add"}, 4, 42), ("qwen4b", {"add", "silu", "rope", "sigmoid", "multiply"}, 64, 64)],
)
def test_what_a_published_model_becomes(name, gone, joined, followed):
    network = build_networks(published(name), mtp=False).main
    nodes = fusion.fuse(network, network.nodes)
    counts = Counter(node.op for node in nodes)
    before = Counter(node.op for node in network.nodes)
    for op in gone:
        assert before[op], op
        assert counts[op] <= 1, f"{counts[op]} of {before[op]} {op} are left"
    weights = [node.inputs[1] for node in nodes if node.op in ("linear", "linear_add_rms_norm")]
    assert counts["linear_add_rms_norm"] == followed
    assert_is_straight_line_code(network, nodes)
    assert sum(fusion.JOIN in weight for weight in weights) == joined
    parts = [part for weight in weights for part in (fusion.joined_parts(weight, network) or [weight])]
    assert sorted(parts) == sorted(node.inputs[1] for node in network.nodes if node.op == "linear")
    assert_is_straight_line_code(network, nodes)


def assert_is_straight_line_code(network, nodes):
    """Every value is computed once, before it is read, and the network's outputs are among them."""
    known = {*network.inputs, *network.weights}
    for node in nodes:
        for name in node.inputs:
            assert name in known or fusion.joined_parts(name, network), (node.op, name)
        assert not known & set(node.outputs)
        known |= set(node.outputs)
    assert set(network.outputs.values()) <= known


def test_a_sum_that_others_read_stays():
    """x = add(...) feeds the norm and the next addition: both results must survive, in place."""
    network = build_networks(published("nano4b"), mtp=False).main
    add = next(node for node in network.nodes if node.op == "add")
    fused = next(node for node in fusion.fuse(network, network.nodes) if add.outputs[0] in node.outputs)
    assert fused.op == "linear_add_rms_norm"
    assert fused.outputs[0] == add.outputs[0]
    assert sum(add.outputs[0] in node.inputs for node in fusion.fuse(network, network.nodes)) == 1


def test_a_reader_between_a_sum_and_its_norm_still_finds_the_sum():
    graph, plan = Graph("main", "float64"), {}
    p = Parameters(graph, lambda module: "dense", plan)
    x = F.embedding(graph.input("token_ids"), p.linear("embed", 16, 8))
    total = F.add(x, x)
    between = F.silu(total)
    normed = F.rms_norm(total, p.scalars("norm.weight", 8), 1e-5)
    logits = F.linear(F.gather(F.add(between, normed), graph.input("logits_indices")), p.linear("head", 16, 8))
    network = graph.finish(logits=logits, hidden_states=normed)
    nodes = fusion.fuse(network, network.nodes)
    assert "add_rms_norm" in {node.op for node in nodes}
    assert_is_straight_line_code(network, nodes)


def test_an_intermediate_with_another_reader_is_not_swallowed():
    network = build_networks(published("qwen4b"), mtp=False).main
    silu = next(node for node in network.nodes if node.op == "silu")
    kept = replace(network, outputs={**network.outputs, "gate": silu.outputs[0]})
    nodes = fusion.fuse(kept, kept.nodes)
    assert any(node.outputs == silu.outputs for node in nodes)
    assert_is_straight_line_code(kept, nodes)


def test_queries_and_keys_share_a_launch_only_where_they_are_turned_alike():
    network = build_networks(published("qwen4b"), mtp=False).main
    assert "norm_ropes" in {node.op for node in fusion.fuse(network, network.nodes)}
    ropes = [node for node in network.nodes if node.op == "rope"]
    for node in ropes[::2]:
        node.attributes["theta"] *= 2
    nodes = fusion.fuse(network, network.nodes)
    assert Counter(node.op for node in nodes)["norm_rope"] == len(ropes), "each on its own"
    assert "norm_ropes" not in {node.op for node in nodes}


def test_joined_weights_are_kept_once_and_shared(tiny_checkpoint):
    checkpoint = Checkpoint.open(tiny_checkpoint("qwen"))
    traced = build_networks(checkpoint.config, checkpoint.module_format, "float64")
    network = traced.main
    weights = {name: traced.weight_plan[name].load(checkpoint.tensor) for name in network.weights}
    settings = replace(SETTINGS)
    states = {name: allocate_state(spec.geometry, settings, 2) for name, spec in network.states.items()}
    shared: dict[str, torch.Tensor] = {}
    first = Executor(network, weights, states, fuse=True, unpacked=shared)
    kept = dict(shared)
    assert any(fusion.JOIN in name for name in kept)
    assert first.weight_bytes == sum(tensor.nbytes for tensor in weights.values())
    Executor(network, weights, states, fuse=True, unpacked=shared)
    assert all(shared[name] is kept[name] for name in kept)


def packed_experts(checkpoint: Checkpoint):
    """The main network with packed experts and output projections, and its weights: these random, others as stored."""
    formats = {"experts": "w4a16_nvfp4", "out_proj": "nvfp4", "o_proj": "fp8"}

    def format_of(module: str) -> str:
        return next((format for part, format in formats.items() if part in module.split(".")), "dense")

    traced = build_networks(checkpoint.config, format_of, mtp=False)
    generator, weights = torch.Generator().manual_seed(3), {}
    for name in traced.main.weights:
        recipe = traced.weight_plan[name]
        if recipe.dtype == "uint8":
            weights[name] = torch.randint(0, 256, recipe.shape, dtype=torch.uint8, generator=generator)
        elif name.endswith(("scale", "scale_2")):
            scale = torch.rand(recipe.shape, generator=generator) / (16 if recipe.dtype == "float32" else 1)
            weights[name] = scale.to(getattr(torch, recipe.dtype))
        elif recipe.dtype == "float8_e4m3fn":
            weights[name] = torch.randn(recipe.shape, generator=generator).to(torch.float8_e4m3fn)
        else:
            weights[name] = recipe.load(checkpoint.tensor)
    return traced.main, weights


@pytest.mark.parametrize("layout", ["super", "qwen_moe"])
def test_weights_in_the_kernels_tiles_give_the_same_logits(layout, tiny_checkpoint):
    """Without kernels tiles are put back, so all that differs is how products are joined and routers split: bf16
    activations then differ in their last bits, 2^-8, and a handful of layers adds that up."""
    network, weights = packed_experts(Checkpoint.open(tiny_checkpoint(layout)))
    settings = ReplaySettings(buffer_len=4, max_window=3, max_seq_len=64)
    executors, logits = [], []
    for fuse in (False, True):
        states = {name: allocate_state(spec.geometry, settings, 2) for name, spec in network.states.items()}
        executors.append(Executor(network, weights, states, unpack_weights=False, fuse=fuse))
        logits.append(executors[-1](rows([5, 7], [0, 0]))["logits"])
    distance = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert distance < 0.05
    held = executors[1]._unpacked
    tiles = [name for name in held if name.endswith(fusion.TILES)]
    assert {"experts", "out_proj", "o_proj"} <= {part for name in tiles for part in name.split(".")}
    assert not {name.removesuffix(fusion.TILES) for name in tiles} & executors[1]._register_of.keys(), "kept once"
    assert any(name.endswith(fusion.PARTS) for name in held) == (layout == "super")


def test_a_router_is_split_into_two_narrow_parts():
    weight = torch.randn(6, 64)
    parts = fusion.derived("gate.weight" + fusion.PARTS, {"gate.weight": weight}.__getitem__)
    assert (parts.dtype, tuple(parts.shape)) == (torch.bfloat16, (12, 64))
    assert ((parts[:6].double() + parts[6:].double() - weight).abs() <= 2.0**-17 * weight.abs()).all()
    exact = fusion.derived("gate.weight" + fusion.PARTS, {"gate.weight": weight.bfloat16().float()}.__getitem__)
    assert torch.equal(exact[:6].float(), weight.bfloat16().float())
    assert not exact[6:].any()
    assert fusion.derived("gate.weight", {"gate.weight": weight}.__getitem__) is None


def test_products_of_fp8_weights_round_activations_where_the_recipe_does(tiny_checkpoint):
    """As the plain network that emulates the recipe; nothing else of it rounds activations to FP8."""
    network, weights = packed_experts(Checkpoint.open(tiny_checkpoint("qwen_moe")))
    linear = next(node for node in network.nodes if node.attributes.get("activations") == "fp8")
    fused = fusion.fuse(network, network.nodes, fp8_products=True)
    (node,) = (node for node in fused if node.outputs == linear.outputs)
    assert (node.op, node.inputs) == ("fp8_linear", linear.inputs)
    x = torch.randn(3, network.spec(linear.inputs[0]).shape[-1]).bfloat16()
    tensors = [weights[name] for name in linear.inputs[1:]]
    got = fused_operators.fp8_linear(x, *tensors, output_dtype=torch.bfloat16)
    options = {"format": "fp8", "activations": "fp8", "output_dtype": torch.bfloat16}
    assert torch.equal(got, ops.linear(x, *tensors, emulate=True, **options))
    assert not torch.equal(got, ops.linear(x, *tensors, emulate=False, **options))


def test_fp8_projections_are_joined_where_their_scales_are_equal():
    config = published("qwen4b")
    config = replace(config, layers=config.layers[:2])
    network = build_networks(config, dict.fromkeys(quantizable_modules(config), "fp8"), mtp=False).main
    odd = next(name for name in network.weights if name.endswith("up_proj.weight_scale"))
    values = {name: 0.5 if name == odd else 0.25 for name in network.weights if name.endswith("scale")}
    load = lambda name: torch.tensor(values[name])  # noqa: E731
    counts = [
        Counter(node.op for node in fusion.fuse(network, network.nodes, fp8_products=True, load=given))
        for given in (None, load)
    ]
    # Two layers of in_proj_qkv, in_proj_z, out_proj, gate, up and down. Of one layer, gate and up must stay apart.
    assert (counts[0]["fp8_linear"], counts[1]["fp8_linear"]) == (12, 9)
    fused = fusion.fuse(network, network.nodes, fp8_products=True, load=load)
    joined = [node for node in fused if node.op == "fp8_linear" and fusion.JOIN in node.inputs[1]]
    assert not any(odd.removesuffix("_scale") in fusion.joined_parts(node.inputs[1], network) for node in joined)
    assert all(len(node.inputs) == 4 for node in joined)
    assert_is_straight_line_code(network, fused)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dense_experts_in_tiles_keep_their_dtype(dtype, tiny_checkpoint):
    """Tiles are bytes: put back, 16-bit weights must be read as the dtype that they had. Tolerance as above."""
    checkpoint = Checkpoint.open(tiny_checkpoint("qwen_moe"))
    traced = build_networks(checkpoint.config, lambda module: "dense", dtype, mtp=False)
    weights = {name: traced.weight_plan[name].load(checkpoint.tensor) for name in traced.main.weights}
    settings = ReplaySettings(buffer_len=4, max_window=3, max_seq_len=64, activation_dtype=dtype)
    logits = []
    for fuse in (False, True):
        states = {name: allocate_state(spec.geometry, settings, 2) for name, spec in traced.main.states.items()}
        executor = Executor(traced.main, weights, states, unpack_weights=False, fuse=fuse)
        logits.append(executor(rows([5, 7], [0, 0]))["logits"])
    assert any(name.endswith(fusion.TILES) for name in executor._unpacked)
    assert (logits[1] - logits[0]).norm() / logits[0].norm() < 0.05


def test_a_product_is_divided_where_its_tiles_leave_multiprocessors_idle():
    """132 multiprocessors; Qwen3.5-4B's down projection at 256 tokens has 2 x 20 tiles, so 3 parts fit."""
    assert divided_product.product_parts(256, 2560, 9216, 132) == 3
    assert divided_product.product_parts(256, 2560, 4096, 132) == 2, "4096 is no multiple of 3 x 64"
    assert divided_product.product_parts(1280, 2560, 9216, 132) == 1
    assert divided_product.product_parts(65, 128, 64, 132) == 1
    assert divided_product.product_parts(128, 2560, 9216, 132) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_divided_product_and_its_norm():
    """Against float64: the product, the sum and the norm are rounded to bf16 once each, by at most 2^-8 of them."""
    x, weight = (torch.randn(shape, device="cuda").bfloat16() / 16 for shape in ((256, 9216), (640, 9216)))
    y, scale = torch.randn(256, 640, device="cuda").bfloat16(), torch.rand(640, device="cuda")
    assert divided_product.product_parts(256, *weight.shape, divided_product.multiprocessors(x.device)) > 1
    norm = {"eps": 1e-5, "zero_centered": True}
    total, normed = fused_operators.linear_add_rms_norm(x, weight, y, scale, output_dtype=torch.bfloat16, **norm)
    product = x.double() @ weight.double().t()
    wanted = y.double() + product
    # fp32 sums of 9,216 products near 2^-8 lie within 1e-5.
    assert ((total.double() - wanted).abs() <= 1.01 * 2.0**-8 * (product.abs() + wanted.abs()) + 1e-5).all()
    wanted = ops.rms_norm(total.double(), scale.double(), **norm)
    assert ((normed.double() - wanted).abs() <= 1.01 * 2.0**-8 * wanted.abs() + 2.0**-20).all()


def test_results_that_fp8_products_read_are_given_in_fp8():
    """Quantized in place, the product of what the norm gives is that of the norm's 16-bit result, to the bit."""
    config = published("qwen4b")
    config = replace(config, layers=config.layers[:1])
    network = build_networks(config, dict.fromkeys(quantizable_modules(config), "fp8"), mtp=False).main
    scales = lambda name: torch.tensor(0.25)  # noqa: E731
    nodes = fusion.fuse(network, network.nodes, fp8_products=True, load=scales)
    assert_is_straight_line_code(network, nodes)
    narrow = {node.op: node.attributes["wide"] for node in nodes if node.outputs[-1].endswith(fusion.NARROW)}
    # in_proj_a and in_proj_b read the first norm too; the second feeds gate and up alone.
    assert narrow == {"rms_norm": True, "gated_rms_norm": False, "add_rms_norm": False, "silu_multiply": False}
    assert all(node.inputs[0].endswith(fusion.NARROW) for node in nodes if node.op == "fp8_linear")

    x, y, z = (torch.randn(3, 64).bfloat16() for _ in range(3))
    weight, scale = torch.randn(64), torch.tensor(0.02)
    product = [torch.randn(16, 64).to(torch.float8_e4m3fn), torch.tensor(0.1), scale]
    norm = {"eps": 1e-5, "zero_centered": True}
    gated = {"eps": 1e-5, "group_size": 32, "gate_first": False}
    for function, given, attributes in (
        (fused_operators.rms_norm, (x, weight), norm),
        (fused_operators.add_rms_norm, (x, y, weight), norm),
        (fused_operators.gated_rms_norm, (x, z, weight), gated),
        (fused_operators.silu_multiply, (x, y), {}),
        (fused_operators.multiply_sigmoid, (x, y), {}),
        (fused_operators.squared_relu, (x,), {}),
    ):
        results = function(*given, scale, wide=False, **attributes)
        whole = function(*given, **attributes)
        whole = whole[-1] if function is fused_operators.add_rms_norm else whole
        assert results[-2] is None
        got, wanted = (
            fused_operators.fp8_linear(v, *product, output_dtype=torch.bfloat16) for v in (results[-1], whole)
        )
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["super120b-nvfp4", "qwen122b-nvfp4"])
def test_experts_are_multiplied_in_fp8_where_their_recipe_rounds_activations(name):
    """Names of derived weights, and, where no kernel runs, what the experts give with activations of 16 bits."""
    config = published(name)
    config = replace(config, layers=config.layers[:2])
    network = build_networks(config, mtp=False).main
    plain = next(node for node in network.nodes if node.op == "moe")
    nodes = fusion.fuse(network, network.nodes, fp8_experts=True)
    node = next(node for node in nodes if node.op == "moe")
    assert all(projection["format"] == "nvfp4_fp8" for projection in node.attributes["projections"])

    experts, hidden, width = 3, 256, 128
    shapes = [(experts, hidden, width)] * (len(node.attributes["projections"]) - 1) + [(experts, width, hidden)]
    weights, projections = {}, []
    for at, shape in zip(range(3, len(plain.inputs), 4), shapes, strict=True):
        codes = torch.randint(0, 256, (*shape[:2], shape[2] // 2), dtype=torch.uint8)
        scales = (0.5 + torch.rand(*shape[:2], shape[2] // 16)).to(torch.float8_e4m3fn)
        values = (codes, scales, torch.full((experts,), 0.01), torch.rand(experts))
        weights |= dict(zip(plain.inputs[at : at + 4], values, strict=True))
        projections.append({"format": "nvfp4_fp8", "activations": "nvfp4", "tiles": list(shape[1:])})

    def load(given: str) -> torch.Tensor:
        made = fusion.derived(given, weights.__getitem__)
        return weights[given] if made is None else made

    x, ids = torch.randn(5, width).bfloat16(), torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [2, 0]])
    activation, chosen = node.attributes["activation"], torch.rand(5, 2)
    tensors = [load(given) for given in node.inputs[3:]]
    got = fused_operators.moe(x, ids, chosen, *tensors, activation=activation, projections=projections)
    wanted = ops.moe(x, ids, chosen, *(weights[given] for given in plain.inputs[3:]), **plain.attributes)
    assert torch.equal(got, wanted)
    units = [tensor for given, tensor in zip(node.inputs[3:], tensors, strict=True) if "@fp8_unit" in given]
    # The largest input of all experts, or of one, is the largest e4m3 number.
    sources = [weights[given] for given in plain.inputs[3:] if given.endswith("input_scale")]
    assert all(
        torch.equal(unit, source.amax().view(1) * 6) for unit, source in zip(units[:-1], sources[:-1], strict=True)
    )
    assert torch.equal(units[-1], sources[-1] * 6)
