"""`export_trtllm`: what TensorRT-LLM reads of a checkpoint directory, and what it is started with."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from replayssm.builders.checkpoint import Checkpoint
from replayssm.builders.config import published
from replayssm.builders.export_trtllm import CONFIG_NAME, GUIDE_NAME, ExportOptions, StepTraffic, export_trtllm
from replayssm.builders.inspection import inspect_model
from replayssm.builders.quantize import QuantizeOptions, quantize_checkpoint
from replayssm.plugins.contract import state_parts
from replayssm.plugins.settings import ReplaySettings


@pytest.fixture(scope="module")
def nvfp4(tiny_checkpoint, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("quantized") / "nano"
    quantize_checkpoint(tiny_checkpoint("nano"), output, QuantizeOptions(calibration_samples=4, calibration_length=32))
    return output


def with_formats(source: Path, target: Path, inline: bool, mixed: bool) -> dict:
    """Copy a quantized checkpoint with its formats declared in another place or form; the declared section."""
    shutil.copytree(source, target)
    section = json.loads((target / "hf_quant_config.json").read_text())["quantization"]
    if mixed:
        modules = sorted(Checkpoint.open(source).formats)
        prefix = Checkpoint.open(source).prefix
        section = {
            "quant_algo": "MIXED_PRECISION",
            "kv_cache_quant_algo": "FP8",
            "quantized_layers": {prefix + name: {"quant_algo": "NVFP4", "group_size": 16} for name in modules},
        }
    config = json.loads((target / "config.json").read_text())
    if inline:
        (target / "hf_quant_config.json").unlink()
        config["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": section["quant_algo"],
            "ignore": section.get("exclude_modules", []),
        }
        if mixed:
            config["quantization_config"]["quantized_layers"] = section["quantized_layers"]
            config["quantization_config"]["kv_cache_scheme"] = {"type": "float", "num_bits": 8}
    else:
        del config["quantization_config"]
        (target / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    (target / "config.json").write_text(json.dumps(config))
    return section


def trtllm_formats(directory: Path) -> tuple[str | None, str | None, dict, list]:
    """(algorithm, of the KV cache, per layer, excluded) as TensorRT-LLM 1.2's load_modelopt_quant_config reads them:
    hf_quant_config.json, and the layers of a mixed checkpoint from quant_cfg.json."""
    section = json.loads((directory / "hf_quant_config.json").read_text())["quantization"]
    layers = {}
    if section["quant_algo"] == "MIXED_PRECISION":
        mixed = json.loads((directory / "quant_cfg.json").read_text())
        layers = mixed["quantized_layers"]
        assert mixed["kv_cache_quant_algo"] == section["kv_cache_quant_algo"]
    return section["quant_algo"], section["kv_cache_quant_algo"], layers, section.get("exclude_modules")


@pytest.mark.parametrize("inline", [False, True], ids=["hf_quant_config", "config"])
@pytest.mark.parametrize("mixed", [False, True], ids=["uniform", "mixed"])
def test_formats_where_every_version_reads_them(nvfp4, tmp_path, inline, mixed):
    section = with_formats(nvfp4, tmp_path / "source", inline, mixed)
    export_trtllm(tmp_path / "source", tmp_path / "out")
    algorithm, cache, layers, excluded = trtllm_formats(tmp_path / "out")
    assert algorithm == section["quant_algo"]
    assert cache == section.get("kv_cache_quant_algo")
    assert layers == section.get("quantized_layers", {})
    if not mixed:
        assert sorted(excluded) == sorted(section["exclude_modules"])
        assert not (tmp_path / "out" / "quant_cfg.json").exists()


def test_weights_are_the_same_files(nvfp4, tmp_path):
    export_trtllm(nvfp4, tmp_path / "out")
    before, after = Checkpoint.open(nvfp4), Checkpoint.open(tmp_path / "out")
    assert before.names == after.names
    assert before.formats == after.formats
    for shard in before.shards:
        copy = tmp_path / "out" / shard.path.name
        assert copy.read_bytes() == shard.path.read_bytes()
        assert os.path.samefile(copy, shard.path)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (nvfp4 / "tokenizer.json").read_bytes()


def test_shards_are_copied_where_links_cannot_be_made(nvfp4, tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError("another file system")

    monkeypatch.setattr(os, "link", refuse)
    export_trtllm(nvfp4, tmp_path / "out")
    assert Checkpoint.open(tmp_path / "out").names == Checkpoint.open(nvfp4).names


@pytest.mark.parametrize("version", ["1.2", "1.3"])
def test_configuration_meets_the_conditions_of_replay(tiny_checkpoint, tmp_path, version):
    options = ExportOptions(version, max_batch_size=32, max_seq_len=512)
    made = export_trtllm(tiny_checkpoint("nano"), tmp_path / "out", options)
    config = yaml.safe_load((tmp_path / "out" / CONFIG_NAME).read_text())
    assert config["max_batch_size"] == config["cuda_graph_config"]["max_batch_size"] == 32
    assert config["max_seq_len"] == 512
    assert config["kv_cache_config"]["enable_block_reuse"] is False
    assert config["scheduler_config"]["capacity_scheduler_policy"] == "GUARANTEED_NO_EVICT"
    assert "speculative_config" not in config
    # 1.2 refuses keys that it does not know.
    expected = {} if version == "1.2" else {"use_kv_cache_manager_v2": False}
    assert {k: v for k, v in config["kv_cache_config"].items() if "v2" in k} == expected
    guide = (tmp_path / "out" / GUIDE_NAME).read_text()
    for command in made.commands.values():
        assert command in guide


def test_rings_are_counted_and_kept_free(tiny_checkpoint, tmp_path):
    options = ExportOptions(max_batch_size=64, tp_size=2, memory_bytes=2**24, buffer_len=8)
    made = export_trtllm(tiny_checkpoint("super"), tmp_path / "out", options)
    config = Checkpoint.open(tiny_checkpoint("super")).config
    settings = ReplaySettings(8, 1, 4096)
    ring = sum(
        part.nbytes
        for layer in config.recurrent_layers
        for part in state_parts(layer.mixer.geometry, settings)
        if part.name.startswith("ring")
    )
    assert made.ring_bytes == ring // 2 * 65
    fraction = yaml.safe_load((tmp_path / "out" / CONFIG_NAME).read_text())["kv_cache_config"][
        "free_gpu_memory_fraction"
    ]
    free = 2**24 - made.inspection.weights["total"] // 2
    assert fraction * free + made.ring_bytes <= 0.9 * free < (fraction + 0.01) * free + made.ring_bytes
    assert made.commands["serve"].startswith("TRTLLM_REPLAYSSM_BUFFER_LEN=8 trtllm-serve ")


def test_estimate_of_a_step(tiny_checkpoint, tmp_path):
    made = export_trtllm(tiny_checkpoint("qwen"), tmp_path / "out", ExportOptions(max_batch_size=8, max_seq_len=512))
    slot, traffic, weights = made.inspection.slot, made.inspection.traffic, made.inspection.weights["total"]
    assert made.step.plain == weights + 8 * (256 * slot.kv_per_token + traffic.plain)
    assert made.step.replay == weights + 8 * (256 * slot.kv_per_token + traffic.replay)
    assert 1 < made.step.speedup < traffic.plain / traffic.replay


def test_table_of_the_guide():
    """docs/trtllm.md quotes the estimate; 2,048 tokens a sequence, L = 16."""
    guide = (Path(__file__).resolve().parents[2] / "docs" / "trtllm.md").read_text()
    models = {
        "Nemotron-3-Nano-4B, bf16": ("nano4b", "checkpoint"),
        "Nemotron-3-Nano-4B, NVFP4": ("nano4b", "nvfp4"),
        "Nemotron-3-Super-120B, NVFP4": ("super120b-nvfp4", "checkpoint"),
        "Qwen3.5-4B, NVFP4": ("qwen4b", "nvfp4"),
        "Qwen3.5-122B, NVFP4": ("qwen122b-nvfp4", "checkpoint"),
    }
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in guide.splitlines())
    rows = [row for row in cells if row[0] in models]
    assert {row[0] for row in rows} == set(models)
    for name, state, *figures in rows:
        model, weights = models[name]
        settings = ReplaySettings(16, 1, 4096, {"fp32": "float32", "bf16": "bfloat16"}[state])
        inspection = inspect_model(published(model), settings, name=model, weights=weights, memory_bytes=2**40)
        for batch, figure in zip((8, 32, 128, 256), figures, strict=True):
            # Quoted with two decimals.
            assert float(figure) == pytest.approx(StepTraffic.of(inspection, batch, 2048).speedup, abs=0.0051)


def test_state_dtype_of_the_config(tiny_checkpoint, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(tiny_checkpoint("nano"), source)
    config = json.loads((source / "config.json").read_text())
    config["mamba_ssm_cache_dtype"] = "float16"
    (source / "config.json").write_text(json.dumps(config))
    for number, (asked, expected) in enumerate([(None, "float16"), ("bfloat16", "bfloat16")]):
        export_trtllm(source, tmp_path / str(number), ExportOptions(state_dtype=asked))
        written = yaml.safe_load((tmp_path / str(number) / CONFIG_NAME).read_text())
        assert written["kv_cache_config"]["mamba_ssm_cache_dtype"] == expected


def test_refusals(tiny_checkpoint, nvfp4, tmp_path):
    source = tiny_checkpoint("nano")
    with pytest.raises(ValueError, match=r"cannot be split over 3 GPUs; choose a --tp-size that divides"):
        export_trtllm(source, tmp_path / "out", ExportOptions(tp_size=3))
    with pytest.raises(ValueError, match=r"no room for TensorRT-LLM's caches: choose a smaller --max-batch-size"):
        export_trtllm(source, tmp_path / "out", ExportOptions(memory_bytes=2**20))
    with pytest.raises(ValueError, match=r"version must be one of 1\.2, 1\.3, 1\.4, got '1\.1'"):
        ExportOptions("1.1")
    quantize_checkpoint(source, tmp_path / "w4a16", QuantizeOptions("nvfp4-w4a16"))
    with pytest.raises(ValueError, match=r"W4A16 NVFP4, a format that TensorRT-LLM has no name for"):
        export_trtllm(tmp_path / "w4a16", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_replaces_only_its_own_output(tiny_checkpoint, nvfp4, tmp_path):
    export_trtllm(nvfp4, tmp_path / "out")
    with pytest.raises(ValueError, match="exists"):
        export_trtllm(nvfp4, tmp_path / "out")
    export_trtllm(tiny_checkpoint("nano"), tmp_path / "out", ExportOptions(overwrite=True))
    assert not (tmp_path / "out" / "hf_quant_config.json").exists()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"'notes\.txt'"):
        export_trtllm(nvfp4, tmp_path / "out", ExportOptions(overwrite=True))
    with pytest.raises(ValueError, match="holds other files, which are never overwritten"):
        export_trtllm(tiny_checkpoint("qwen"), nvfp4, ExportOptions(overwrite=True))
    assert (nvfp4 / "hf_quant_config.json").exists()


def test_warnings_for_old_versions(nvfp4, tmp_path):
    made = export_trtllm(nvfp4, tmp_path / "out", ExportOptions("1.2"))
    assert "Blackwell" in made.warnings[0]
    assert made.warnings[0] in (tmp_path / "out" / GUIDE_NAME).read_text()
