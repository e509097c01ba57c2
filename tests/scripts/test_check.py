"""`replayssm check` through click, with a stand-in for TensorRT."""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from replayssm.builders.engine import BuildOptions, build_engine
from replayssm.runtime import plan_check
from replayssm.scripts.cli import main

SMALL = {"buffer_len": 4, "max_draft_len": 1, "max_batch_size": 2, "max_seq_len": 120}


@pytest.fixture
def check(tmp_path, monkeypatch):
    """`check(*arguments)` -> (result, report or None)."""
    monkeypatch.setattr(plan_check, "LEAK_CALLS", 3)

    def run(*arguments):
        report = tmp_path / "report.json"
        result = CliRunner().invoke(main, ["check", *map(str, arguments), "--device", "cpu", "--report", str(report)])
        return result, json.loads(report.read_text()) if report.exists() else None

    return run


@pytest.mark.parametrize(("layout", "target"), [("nano", "tensorrt"), ("qwen_moe", "tensorrt-rtx")])
def test_sound_plans_pass_op_by_op_and_as_a_whole(check, plan_engine, tiny_checkpoint, layout, target):
    engine, _ = plan_engine(layout, target, **SMALL)
    result, report = check(engine.directory, "--checkpoint", tiny_checkpoint(layout))
    assert result.exit_code == 0, result.output
    assert "checks passed" in result.stdout.splitlines()[-1]
    assert report["passed"]
    operators = {finding["name"].split("-", 1)[1] for finding in report["findings"] if "operator" in finding["name"]}
    assert operators == {node.op for network in engine.networks.values() for node in network.nodes}
    assert report["engine"]["checkpoint"] == engine.manifest.checkpoint
    assert report["plans"]["compiler"]["version"] == "11.4.0"
    assert {"gpu", "packages"} <= report["machine"].keys()


@pytest.mark.parametrize(("fault", "operator"), [("drift", "mamba2_window"), ("scribble", "attention_window")])
def test_a_mismatch_ends_with_1_and_names_the_operator(check, plan_engine, fault, operator):
    engine, module = plan_engine("nano", **SMALL)
    module.faults.add(fault)
    result, report = check(engine.directory)
    assert result.exit_code == 1
    failed = [finding["name"] for finding in report["findings"] if finding["passed"] is False]
    assert "repeated windows" in failed
    assert [name.split("-")[-1] for name in failed if name.startswith("operator")] == [operator]
    last = result.stdout.splitlines()[-1]
    assert last.startswith(f"{len(failed)} of {len(report['findings'])} checks failed: {failed[0]}, ")
    assert not report["passed"]


@pytest.mark.parametrize("alias", ["declared", "bound"])
def test_copies_are_reported_for_both_alias_modes(check, plan_engine, alias):
    engine, module = plan_engine("nano", alias=alias, **SMALL)
    module.faults.add("copy")
    result, report = check(engine.directory, "--no-operators")
    assert result.exit_code == 1
    (aliasing,) = [finding for finding in report["findings"] if finding["name"] == "aliasing"]
    assert aliasing["measured"]["alias"] == alias
    assert len(aliasing["measured"]["copies"]) == sum(len(n.states) for n in engine.networks.values())
    assert "build with the other --alias" in aliasing["detail"]


def test_a_machine_without_tensorrt_or_gpu(plan_engine, monkeypatch, tmp_path):
    """By default, without a word about devices."""
    engine, _ = plan_engine("nano", **SMALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(main, ["check", str(engine.directory)])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "plans run on a GPU, and torch sees none here" in result.stderr
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    result = CliRunner().invoke(main, ["check", str(engine.directory)])
    expected = "the tensorrt target needs the package tensorrt, which is not installed"
    assert result.stderr == f"error: {expected}: pip install '.[tensorrt]' in the project's folder\n"
    assert not (tmp_path / "replayssm-check.json").exists()


def test_what_cannot_be_checked_is_one_line(check, plan_engine, tiny_checkpoint, tmp_path):
    build_engine(tiny_checkpoint("nano"), tmp_path / "torch", BuildOptions(max_seq_len=64))
    engine, _ = plan_engine("nano", **SMALL)
    for arguments, message in (
        (
            (tmp_path / "torch",),
            "built for target torch, and check compares plans: build one with `replayssm build",
        ),
        (
            (engine.directory, "--checkpoint", tiny_checkpoint("qwen")),
            "is not the checkpoint that the engine was built",
        ),
    ):
        result, report = check(*arguments)
        assert (result.exit_code, report) == (2, None)
        assert result.stderr.count("\n") == 1
        assert message in result.stderr
