"""`PlanCheck` with a stand-in for TensorRT: sound plans pass, and every way of going wrong is found."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from replayssm.builders.checkpoint import Checkpoint
from replayssm.builders.models import build_networks
from replayssm.builders.targets import tensorrt
from replayssm.builders.weight_shapes import quantizable_modules
from replayssm.plugins.manifest import Limits
from replayssm.plugins.settings import ReplaySettings
from replayssm.runtime import plan_check
from replayssm.runtime.engine import Engine
from replayssm.runtime.findings import relative_error
from replayssm.runtime.operator_check import Calls, check_operators, isolate, random_weights
from replayssm.runtime.plan_check import PlanCheck, state_copies
from replayssm.runtime.plans import PlanRuntime

SMALL = {"buffer_len": 4, "max_draft_len": 1, "max_batch_size": 2, "max_seq_len": 120}
TEXT = [[72, 101, 108, 108, 111, 44, 32, 119, 111, 114, 108, 100]]


@pytest.fixture(autouse=True)
def _few_calls(monkeypatch):
    monkeypatch.setattr(plan_check, "LEAK_CALLS", 9)


def oracle_of(engine, directory, change=lambda name, weight: weight):
    checkpoint = Checkpoint.open(directory)
    traced = build_networks(checkpoint.config, checkpoint.module_format, "float16")
    weights = {name: change(name, recipe.load(checkpoint.tensor)) for name, recipe in traced.weight_plan.items()}
    return Engine(engine.directory, replace(engine.manifest, target="torch"), engine.networks, weights)


def failures(check):
    return {finding.name for finding in check.run() if finding.passed is False}


@pytest.mark.parametrize(("layout", "target"), [("qwen", "tensorrt"), ("nano", "tensorrt-rtx")])
def test_sound_plans_pass(plan_engine, tiny_checkpoint, layout, target):
    engine, _ = plan_engine(layout, target, **SMALL)
    check = PlanCheck(engine, "cpu", oracle_of(engine, tiny_checkpoint(layout)), TEXT)
    findings = {finding.name: finding for finding in check.run()}
    assert not [finding for finding in findings.values() if finding.passed is False]
    skipped = [name for name, finding in findings.items() if finding.passed is None]
    assert skipped == (["aliasing"] if target == "tensorrt-rtx" else [])
    for name in ("model, random prompts", "model, text prompts"):
        measured = findings[name].measured
        # fp16 logits: a few roundings of 2^-11, far from the bound, which grows with the network.
        assert measured["relative_error"] < 0.004 < measured["bound"]
        assert measured["greedy_agreement"] > 0.9
    assert check.session.free_slots == 2


MODEL = {"model, random prompts", "model, text prompts"}


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        ("copy", {"aliasing"}),
        ("detach", {"state in place", *MODEL}),
        ("drift", {"repeated windows", *MODEL}),
        ("scribble", {"state in place", "repeated windows"}),
        ("rows", {"batches", *MODEL}),
        ("leak", {"memory"}),
    ],
)
def test_faults_are_found(plan_engine, tiny_checkpoint, monkeypatch, fault, found):
    """found: what must fail at least; copies and leaks leave results right, so nothing else may."""
    engine, module = plan_engine("nano", **SMALL)
    monkeypatch.setattr(PlanRuntime, "used_bytes", lambda self: module.leaked)
    module.faults.add(fault)
    failed = failures(PlanCheck(engine, "cpu", oracle_of(engine, tiny_checkpoint("nano")), TEXT))
    assert failed >= found
    if fault in ("copy", "leak"):
        assert failed == found


@pytest.mark.parametrize("part", ["in_proj", "dt_bias", "conv1d.weight"])
def test_a_plan_of_other_weights_is_found(plan_engine, tiny_checkpoint, part):
    """One tensor of the model, off by a fifth."""
    engine, _ = plan_engine("nano", **SMALL)
    changed = []

    def change(name, weight):
        if part in name and not changed:
            changed.append(name)
            return (weight.float() * 1.2).to(weight.dtype)
        return weight

    check = PlanCheck(engine, "cpu", oracle_of(engine, tiny_checkpoint("nano"), change))
    check.load()
    finding = check.model("model", check.prompts["random prompts"])
    assert changed
    assert finding.passed is False
    assert finding.measured["relative_error"] > 3 * finding.measured["bound"]


def test_without_a_checkpoint_the_rest_is_checked(plan_engine):
    engine, module = plan_engine("nano", **SMALL)
    findings = {finding.name: finding.passed for finding in PlanCheck(engine, "cpu").run()}
    assert {name for name, passed in findings.items() if passed is None} == {*MODEL, "draft head"}
    assert all(passed is not False for passed in findings.values())
    module.faults.add("drift")
    assert "repeated windows" in failures(PlanCheck(engine, "cpu"))


def test_plans_that_do_not_load_end_the_check(plan_engine):
    engine, module = plan_engine("nano", **SMALL)
    module.plans.clear()
    (finding,) = PlanCheck(engine, "cpu").run()
    assert finding.passed is False
    assert "EngineDirectoryError: tensorrt 11.4.0 does not take" in finding.detail


@pytest.mark.parametrize(
    ("layers", "copies"),
    [
        ([("plugin", ["x", "s"], ["y", "s.out"])], 0),
        ([("Reformat", ["s"], ["c"]), ("plugin", ["x", "c"], ["y", "s.out"])], 1),
        ([("plugin", ["x", "s"], ["y", "c"]), ("Reformat", ["c"], ["s.out"])], 1),
        ([("plugin", ["x", "s"], ["y", "s.out"]), ("other", ["s"], ["z"])], 1),
        ([("fused", ["x"], ["y"])], 1),
    ],
)
def test_copies_around_a_plugin(layers, copies):
    described = [
        {"Name": name, "Inputs": [{"Name": n} for n in inputs], "Outputs": [{"Name": n} for n in outputs]}
        for name, inputs, outputs in layers
    ]
    assert len(state_copies(described, {"s.out": "s"})) == copies


def test_relative_error_is_the_worst_rows():
    expected = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    assert relative_error(expected, expected) == 0
    assert relative_error(expected + torch.tensor([[0.0, 0.5], [0.0, 0.0]]), expected) == pytest.approx(0.1)
    assert relative_error(torch.full((2, 2), torch.nan), expected) == float("inf")
    assert relative_error(torch.zeros(0, 5), torch.zeros(0, 5)) == 0


def test_every_operator_is_isolated_once(tiny_checkpoint):
    checkpoint = Checkpoint.open(tiny_checkpoint("qwen_moe"))
    traced = build_networks(checkpoint.config, checkpoint.module_format, "float16")
    networks = {"main": traced.main, "mtp": traced.mtp}
    alone = isolate(networks)
    for network in alone.values():
        network.validate()
    assert {network.nodes[-1].op for network in alone.values()} == {
        n.op for net in networks.values() for n in net.nodes
    }
    moes = [network for network in alone.values() if network.nodes[-1].op == "moe"]
    assert moes
    assert all(network.nodes[0].op == "route_softmax" for network in moes), "expert numbers come from their router"
    assert len(alone) < sum(len(network.nodes) for network in networks.values()) / 2
    weights = random_weights(moes[0], 0)
    assert set(weights) == set(moes[0].weights)


def test_random_calls_are_of_every_kind(tiny_engine):
    engine = tiny_engine("nano", dtype="float16")
    settings, network = engine.manifest.replay, engine.networks["main"]
    calls = Calls(settings, 3, 40, seed=1)
    lengths, slots = set(), set()
    for _ in range(40):
        inputs = calls.inputs(network, torch.device("cpu"))
        assert len(inputs["token_ids"]) == int(inputs["window_lens"].sum()) <= 40
        assert 1 <= len(inputs["logits_indices"]) <= len(inputs["token_ids"])
        ends = inputs["seq_lens"] + inputs["window_lens"]
        assert int(ends.max()) <= settings.max_seq_len
        lengths |= set(inputs["window_lens"].tolist())
        slots |= set(inputs["state_batch_indices"].tolist())
    assert slots == {-1, 0, 1, 2}
    assert {0, 1, 2, 3, 4} <= lengths
    assert max(lengths) > settings.max_window


@pytest.mark.parametrize("module_format", ["w4a16_nvfp4", "nvfp4", "fp8"])
def test_quantized_operators_stay_within_their_bound(tiny_checkpoint, plan_module, tmp_path, module_format):
    """Projections and experts in every format, with the activations that the recipe quantizes."""
    config = Checkpoint.open(tiny_checkpoint("qwen_moe")).config
    formats = dict.fromkeys(quantizable_modules(config), module_format)
    network = build_networks(config, formats, "bfloat16", mtp=False).main
    alone = isolate({"main": network})
    chosen = {name: alone[name] for name in alone if name.endswith(("linear", "moe"))}
    replay = ReplaySettings(max_seq_len=64, max_window=2)
    options = tensorrt.PlanOptions(Limits(2, 64, 1), replay, arch=100)
    weights = {name: random_weights(network, 1) for name, network in chosen.items()}
    every = {key: weight for held in weights.values() for key, weight in held.items()}
    tensorrt.write_plans(tmp_path, chosen, every.__getitem__, options)
    runtime = PlanRuntime(tmp_path, "tensorrt", torch.device("cpu"))
    findings = list(check_operators(chosen, dict.fromkeys(chosen, every), runtime, replay, 2))
    assert len(findings) == len(chosen) > 3
    assert not [finding.detail for finding in findings if not finding.passed]
    assert any(len(finding.measured) and finding.measured["relative_error"] > 0 for finding in findings)
