"""`replayssm build` through click, with both spellings of its options."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from replayssm.builders.config import read_config
from replayssm.plugins.manifest import read_manifest
from replayssm.scripts.cli import main


def build(*arguments):
    return CliRunner().invoke(main, ["build", *map(str, arguments)])


def test_options_reach_the_engine(tiny_checkpoint, tmp_path):
    result = build(
        *("--checkpoint", tiny_checkpoint("qwen"), "--output", tmp_path / "engine", "--target", "torch"),
        *("--max-batch-size", 3, "--max-seq-len", 100, "--max-draft-len", 2, "--buffer-len", 5),
        *("--state-dtype", "float16", "--readout-dtype", "same", "--dtype", "float32"),
    )
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{tmp_path / 'engine'}: qwen, ")
    manifest = read_manifest(tmp_path / "engine")
    assert (manifest.limits.max_batch_size, manifest.limits.max_seq_len, manifest.limits.max_draft_len) == (3, 100, 2)
    replay = manifest.replay
    assert (replay.buffer_len, replay.state_dtype, replay.activation_dtype) == (5, "float16", "float32")


def test_state_formats_reach_the_engine(tmp_path):
    """The formats of the example model in the engine's manifest; its state is as large as they say."""
    example = Path(__file__).resolve().parents[2] / "examples" / "qwen3.5-tiny"
    result = build(
        *("--checkpoint", example, "--output", tmp_path / "engine", "--max-batch-size", 1, "--max-seq-len", 32),
        *("--state-dtype", "float8", "--state-rounding", "stochastic", "--rounding-seed", 7),
        *("--readout-dtype", "nvfp4", "--u-source", "checkpoint", "--readout-layers", "4=same, 0=same"),
        *("--u-format", "bfloat16"),
    )
    assert (result.exit_code, result.stderr) == (0, "")
    replay = read_manifest(tmp_path / "engine").replay
    assert (replay.state_dtype, replay.state_rounding, replay.rounding_seed) == ("float8", "stochastic", 7)
    assert (replay.readout_dtype, replay.u_source) == ("nvfp4", "checkpoint")
    assert replay.readout_layers == ((0, "same"), (4, "same"))
    assert replay.u_format == "bfloat16"
    assert result.stdout.endswith(", state float8 (stochastic), readout nvfp4 (0=same,4=same)\n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--state-rounding", "stochastic"), "--state-dtype float32 keeps what the flush computes"),
        (("--state-dtype", "float8", "--readout-dtype", "float8"), "reads as many bytes and costs memory"),
        (("--rounding-seed", "3"), "--rounding-seed changes nothing unless --state-rounding is 'stochastic'"),
        (("--u-source", "checkpoint"), "without a readout copy everything reads the checkpoint"),
        (("--buffer-len", "0", "--readout-dtype", "float8"), "a readout copy would be rewritten too"),
        (("--readout-dtype", "float8", "--u-source", "checkpoint"), "is for Gated DeltaNet layers"),
        (("--readout-layers", "x=float8"), "expected a layer's number and one of same, float8, nvfp4, such as"),
        (("--readout-layers", "0"), "such as 0=float8, got '0'"),
        (
            ("--readout-layers", "0=float8,0=same"),
            "error: --readout-layers names layer 0 twice, as float8 and same: keep one",
        ),
        (
            ("--readout-layers", "1=float8"),
            "error: --readout-layers: layer 1 keeps no recurrent state; layers that do: 0, ",
        ),
        (("--readout-layers", ""), "such as 0=float8, got ''"),
        (
            ("--readout-dtype", "float8", "--readout-layers", "0=float8"),
            "layer 0 is 'float8' by --readout-dtype already",
        ),
        (("--readout-dtype", "nvfp4"), "needs state columns in multiples of 32, got 16"),
    ],
)
def test_formats_that_make_no_sense_are_refused(tiny_checkpoint, tmp_path, options, message):
    result = build("--checkpoint", tiny_checkpoint("nano"), "--output", tmp_path / "engine", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_tensorrt_llm_spellings(tiny_checkpoint, tmp_path):
    result = build(
        *("--checkpoint_dir", tiny_checkpoint("nano"), f"--output_dir={tmp_path / 'engine'}"),
        *("--max_batch_size", 2, "--max_seq_len=64", "--max_draft_len", 1),
    )
    assert result.exit_code == 0
    limits = read_manifest(tmp_path / "engine").limits
    assert (limits.max_batch_size, limits.max_seq_len, limits.max_draft_len) == (2, 64, 1)


def test_overwrite(tiny_checkpoint, tmp_path):
    arguments = ("--checkpoint", tiny_checkpoint("nano"), "--output", tmp_path / "engine", "--max-seq-len")
    assert build(*arguments, 32).exit_code == 0
    result = build(*arguments, 64)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "--overwrite" in result.stderr
    assert build(*arguments, 64, "--overwrite").exit_code == 0
    assert read_manifest(tmp_path / "engine").limits.max_seq_len == 64


def test_useless_settings_are_warned_about(tiny_checkpoint, tmp_path):
    result = build(
        *("--checkpoint", tiny_checkpoint("nano"), "--output", tmp_path / "engine"),
        *("--max-draft-len", 7, "--buffer-len", 4),
    )
    assert result.exit_code == 0
    assert "warning: buffer_len 4 is shorter than a verify window of 8 tokens (1 + drafts)" in result.stderr


@pytest.mark.parametrize(
    ("target", "modules"),
    [("tensorrt", ["tensorrt"]), ("tensorrt-rtx", ["tensorrt_rtx", "tensorrt_rtx_bindings"])],
)
def test_missing_package_of_a_target(tiny_checkpoint, tmp_path, monkeypatch, target, modules):
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)
    result = build("--checkpoint", tiny_checkpoint("nano"), "--output", tmp_path / "engine", "--target", target)
    assert result.exit_code == 2
    expected = f"the {target} target needs the package {target}, which is not installed"
    assert result.stderr == f"error: {expected}: pip install '.[{target}]' in the project's folder\n"
    assert list(tmp_path.iterdir()) == []


def test_not_a_checkpoint(tmp_path):
    (tmp_path / "empty").mkdir()
    result = build("--checkpoint", tmp_path / "empty", "--output", tmp_path / "engine")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "config.json" in result.stderr


@pytest.mark.parametrize("command", ["build", "quantize", "export-trtllm"])
def test_engine_in_place_of_its_checkpoint(tiny_checkpoint, tmp_path, command):
    assert build("--checkpoint", tiny_checkpoint("nano"), "--output", tmp_path / "engine").exit_code == 0
    given = ["--checkpoint", tmp_path / "engine", "--output", tmp_path / "out"]
    result = CliRunner().invoke(main, [command, *map(str, given)])
    assert (result.exit_code, result.stdout) == (2, "")
    expected = f"{tmp_path / 'engine'} is an engine directory; give the checkpoint that it was built from"
    assert result.stderr == f"error: {expected}\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["build", "quantize", "export-trtllm"])
def test_output_that_cannot_be_written(tiny_checkpoint, command):
    result = CliRunner().invoke(
        main, [command, "--checkpoint", str(tiny_checkpoint("nano")), "--output", "/proc/nothing/here"]
    )
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "error: cannot write /proc/nothing/here: No such file or directory; choose another output\n"
    )


def test_a_readout_that_no_layer_has_is_refused(tiny_checkpoint, tmp_path):
    source, output = tiny_checkpoint("nano"), tmp_path / "engine"
    layers = [
        layer for layer, kind in enumerate(read_config(source).layers) if kind.mixer and kind.mixer.kind == "mamba2"
    ]
    same = ",".join(f"{layer}=same" for layer in layers)
    result = build("--checkpoint", source, "--output", output, "--readout-dtype", "float8", "--readout-layers", same)
    assert result.exit_code == 2
    assert result.stderr == (
        "error: --readout-layers: all layers are 'same', so the float8 copy would exist nowhere: "
        "leave out --readout-dtype and --readout-layers\n"
    )
