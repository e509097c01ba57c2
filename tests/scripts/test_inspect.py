"""`replayssm inspect` and `replayssm doctor` as a user calls them."""

from __future__ import annotations

import json
import os

import pytest
from click.testing import CliRunner

from replayssm.builders.engine import BuildOptions, build_engine
from replayssm.plugins.manifest import read_manifest
from replayssm.scripts.cli import main

KEYS = {
    "model", "layers", "state_bytes_per_sequence", "readout_bytes_per_sequence", "ring_bytes_per_sequence",
    "conv_bytes_per_sequence", "kv_bytes_per_token", "weight_bytes", "traffic_bytes_per_token", "max_batch",
}  # fmt: skip


def run(*arguments: str):
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize("name", ["nano4b", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", "qwen4b", "qwen122b"])
def test_json_is_one_object_with_the_published_keys(name: str) -> None:
    result = run("inspect", name, "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report.keys() == KEYS
    assert report["traffic_bytes_per_token"]["replay"] < report["traffic_bytes_per_token"]["plain"]


def test_tables_show_the_same_figures(monkeypatch) -> None:
    monkeypatch.setitem(os.environ, "COLUMNS", "120")
    result = run("inspect", "nano4b", "--readout-dtype", "nvfp4")
    assert "82,575,360" in result.output
    assert "readout copy (nvfp4)" in result.output
    assert "21 mamba2, 17 mlp, 4 attention" in result.output


def test_config_file_is_accepted(tmp_path) -> None:
    from replayssm.builders.config import published_config

    path = tmp_path / "config.json"
    path.write_text(json.dumps(published_config("qwen4b")))
    assert json.loads(run("inspect", str(path), "--json").stdout)["layers"] == {"gdn": 24, "mlp": 32, "attention": 8}
    assert json.loads(run("inspect", str(tmp_path), "--json").stdout)["kv_bytes_per_token"] == 32_768


@pytest.fixture(scope="module")
def engine(tiny_checkpoint, tmp_path_factory):
    formats = {"state_dtype": "float16", "state_rounding": "stochastic", "readout_dtype": "float8"}
    options = BuildOptions(max_batch_size=3, max_seq_len=300, max_draft_len=2, buffer_len=8, **formats)
    output = tmp_path_factory.mktemp("engines") / "qwen"
    build_engine(tiny_checkpoint("qwen"), output, options)
    return output


def test_an_engine_shows_what_its_checkpoint_does_with_its_options(engine, tiny_checkpoint, monkeypatch) -> None:
    """Weights aside, which an engine has in its own layout: norms in fp32."""
    shown = json.loads(run("inspect", str(engine), "--memory", "1GiB", "--reserve", "0B", "--json").stdout)
    options = ("--buffer-len", "8", "--max-draft-len", "2", "--max-seq-len", "300", "--memory", "1GiB")
    options += ("--state-dtype", "float16", "--state-rounding", "stochastic", "--readout-dtype", "float8")
    checkpoint = tiny_checkpoint("qwen")
    expected = json.loads(run("inspect", str(checkpoint), *options, "--reserve", "0B", "--json").stdout)
    assert shown["weight_bytes"] == read_manifest(engine).quantization["weight_bytes"]
    assert shown["model"] == checkpoint.name
    free = 2**30 - shown["weight_bytes"]
    held = sum(shown[f"{name}_bytes_per_sequence"] for name in ("state", "readout", "ring", "conv"))
    positions = free // shown["max_batch"] - held - 300 * shown["kv_bytes_per_token"]
    assert 0 < positions < held / 100, "what fits is counted from the same bytes and a few positions"
    for key in ("model", "weight_bytes", "max_batch"):
        del shown[key], expected[key]
    assert shown == expected
    assert json.loads(run("inspect", str(engine / "config.json"), "--json").stdout)["layers"] == shown["layers"]
    monkeypatch.setitem(os.environ, "COLUMNS", "120")
    assert "The engine runs at most 3 of them at a time" in run("inspect", str(engine)).output


def test_what_an_engine_cannot_be_asked(engine, tmp_path) -> None:
    for option, value in (("--buffer-len", "16"), ("--state-dtype", "float32"), ("--weights", "checkpoint")):
        result = run("inspect", str(engine), option, value)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == (
            f"error: {engine} is an engine, whose {option} was chosen when it was built: leave out {option}, or "
            "inspect the checkpoint\n"
        )
    broken = tmp_path / "engine"
    broken.mkdir()
    (broken / "config.json").write_text((engine / "config.json").read_text().replace("float16", "float17", 1))
    result = run("inspect", str(broken))
    assert "does not match its own sha256" in result.stderr
    assert result.exit_code == 2
    (broken / "config.json").write_text((engine / "config.json").read_text())
    assert run("inspect", str(broken)).stderr == (
        f"error: {broken / 'networks.json'} is missing: rebuild or copy the engine again\n"
    )


def test_a_directory_without_a_config(tmp_path) -> None:
    result = run("inspect", str(tmp_path))
    expected = f"error: {tmp_path / 'config.json'}: no such file; expected the config.json of a Hugging Face checkpoint"
    assert (result.exit_code, result.stderr) == (2, expected + "\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no-such-model",), "neither a path nor a published model"),
        (("qwen4b", "--memory", "much"), "Invalid value for '--memory': 'much' is not a size"),
        (("qwen4b", "--buffer-len", "-1"), "--buffer-len must be an integer between 0 and 4096, got -1"),
        (("qwen4b", "--buffer-len", "1000000000"), "between 0 and 4096, got 1000000000"),
        (("qwen4b", "--buffer-len", "9" * 400), "got 99999999999999999999... (400 characters)"),
        (("qwen4b", "--max-draft-len", "-1"), "--max-draft-len must be >= 0"),
        (("qwen4b", "--acceptance-length", "9"), "between 1 and 1 + draft_len = 5, got 9"),
        (("qwen4b", "--buffer-len", "0", "--readout-dtype", "nvfp4"), "choose --readout-dtype 'same'"),
        (
            ("nano4b", "--readout-dtype", "nvfp4", "--u-source", "checkpoint"),
            "--u-source 'checkpoint' is for Gated DeltaNet layers, and this model has none",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = run("inspect", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_formats_change_sizes_traffic_and_the_batch() -> None:
    """Literal figures of 24 layers of 32 x 128 x 128: 2 and 9/16 bytes an element, a scale for each row."""
    plain = json.loads(run("inspect", "qwen4b", "--json").stdout)
    options = ("--state-dtype", "float16", "--state-rounding", "stochastic", "--readout-dtype", "nvfp4")
    small = json.loads(run("inspect", "qwen4b", *options, "--json").stdout)
    assert small["state_bytes_per_sequence"] == 24 * 32 * 128 * 128 * 2 == plain["state_bytes_per_sequence"] // 2
    assert small["readout_bytes_per_sequence"] == 24 * (32 * 128 * 128 * 9 // 16 + 32 * 128)
    assert small["max_batch"] > plain["max_batch"]
    # A read of 9/16 byte an element instead of 4, of u in the ring half as much.
    assert small["traffic_bytes_per_token"]["replay"] < plain["traffic_bytes_per_token"]["replay"] / 3
    pair = json.loads(run("inspect", "qwen4b", *options, "--u-format", "bfloat16x2", "--json").stdout)
    assert pair["traffic_bytes_per_token"]["replay"] > small["traffic_bytes_per_token"]["replay"]
    both = json.loads(run("inspect", "qwen4b", *options, "--u-source", "checkpoint", "--json").stdout)
    assert both["traffic_bytes_per_token"]["replay"] > 2 * small["traffic_bytes_per_token"]["replay"]


def test_short_buffer_is_reported_as_useless() -> None:
    assert "shorter than a verify window of 5 tokens" in " ".join(
        run("inspect", "qwen4b", "--buffer-len", "2").output.split()
    )


def test_doctor_prints_json_alone() -> None:
    report = json.loads(run("doctor", "--json").stdout)
    assert report["targets"]["torch"]["works"] is True


def test_doctor_tables_name_every_target() -> None:
    output = run("doctor").output
    for name in ("torch", "tensorrt", "tensorrt-rtx", "tensorrt-llm"):
        assert name in output
