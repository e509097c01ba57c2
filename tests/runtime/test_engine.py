"""Loading an engine directory, and refusing every damaged one."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from replayssm.plugins.manifest import MANIFEST_NAME, EngineDirectoryError, read_manifest
from replayssm.plugins.manifest import _body_sha256 as body_sha256
from replayssm.runtime.engine import Engine


@pytest.fixture
def copy(tiny_engine, tmp_path):
    """A copy of an engine directory that a test may damage."""
    return shutil.copytree(tiny_engine("nano", dtype="bfloat16").directory, tmp_path / "engine")


def reseal(directory, name, content):
    """Replace a file and make the manifest agree: damage that no checksum shows."""
    (directory / name).write_bytes(content)
    body = read_manifest(directory).to_json()
    for entry in body["files"]:
        if entry["name"] == name:
            entry.update(size=len(content), sha256=hashlib.sha256(content).hexdigest())
    (directory / MANIFEST_NAME).write_text(json.dumps({**body, "sha256": body_sha256(body)}))


def test_load(tiny_engine):
    engine = tiny_engine("super", dtype="bfloat16")
    assert Engine.load(engine.directory, verify="full").weights.keys() == engine.weights.keys()
    assert set(engine.networks) == {"main", "mtp"}
    assert engine.vocab_size == engine.manifest.model["vocab_size"]
    assert engine.eos_token_ids == tuple(engine.manifest.model["eos_token_ids"])
    text = "The state of a sequence"
    assert engine.tokenizer.decode(engine.tokenizer(text)["input_ids"]) == text


def test_weights_are_mapped_from_the_files(tiny_engine):
    """A loaded engine costs no memory of its own: its tensors lie in mappings of the weight files."""
    engine = tiny_engine("nano", dtype="bfloat16")
    with open("/proc/self/maps") as maps:
        mapped = [line.split() for line in maps if "safetensors" in line and str(engine.directory) in line]
    ranges = [tuple(int(x, 16) for x in line[0].split("-")) for line in mapped]
    for weight in engine.weights.values():
        assert any(start <= weight.data_ptr() < end for start, end in ranges)


@pytest.mark.parametrize("verify", ["size", "full"])
def test_truncated_or_missing_file(copy, verify):
    for name in [entry.name for entry in read_manifest(copy).files]:
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(EngineDirectoryError, match=f"{name} has {len(content) // 2} bytes"):
            Engine.load(copy, verify)
        (copy / name).unlink()
        with pytest.raises(EngineDirectoryError, match=f"{name} is missing"):
            Engine.load(copy, verify)
        (copy / name).write_bytes(content)
    Engine.load(copy, verify)


def test_flipped_byte_in_any_file(copy):
    for name in [entry.name for entry in read_manifest(copy).files]:
        content = bytearray((copy / name).read_bytes())
        content[len(content) // 2] ^= 0x10
        (copy / name).write_bytes(bytes(content))
        with pytest.raises(EngineDirectoryError, match=f"{name} does not have the SHA-256"):
            Engine.load(copy, "full")
        content[len(content) // 2] ^= 0x10
        (copy / name).write_bytes(bytes(content))
    Engine.load(copy, "full")


def test_newer_schema_and_foreign_target(copy):
    body = read_manifest(copy).to_json()
    newer = {**body, "schema_version": body["schema_version"] + 1}
    (copy / MANIFEST_NAME).write_text(json.dumps(newer))
    with pytest.raises(EngineDirectoryError, match="upgrade replayssm"):
        Engine.load(copy)
    foreign = {**body, "target": "tensorrt"}
    (copy / MANIFEST_NAME).write_text(json.dumps({**foreign, "sha256": body_sha256(foreign)}))
    with pytest.raises(EngineDirectoryError, match="built for target 'tensorrt'"):
        Engine.load(copy)


def test_contents_that_do_not_belong_together(copy, tiny_engine):
    networks = json.loads((copy / "networks.json").read_text())
    for content, message in (
        (b"{}", "no network 'main'"),
        (b"[1]", "does not hold networks"),
        (b"{", "does not hold networks"),
        (json.dumps({"main": {"name": "main"}}).encode(), "does not hold networks"),
        ((tiny_engine("qwen", dtype="bfloat16").directory / "networks.json").read_bytes(), "has no weight"),
    ):
        reseal(copy, "networks.json", content)
        with pytest.raises(EngineDirectoryError, match=message):
            Engine.load(copy)
    name = next(iter(networks["main"]["weights"]))
    networks["main"]["weights"][name]["shape"][0] += 1
    reseal(copy, "networks.json", json.dumps(networks).encode())
    with pytest.raises(EngineDirectoryError, match=f"weight '{name}'.*its network needs"):
        Engine.load(copy)
    reseal(copy, read_manifest(copy).weight_files[0], b"not safetensors")
    with pytest.raises(EngineDirectoryError, match="not readable as safetensors"):
        Engine.load(copy)


def test_tokenizer_that_is_absent_or_damaged(copy):
    engine = Engine.load(copy)
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(EngineDirectoryError, match=r"tokenizer in .* cannot be loaded"):
        _ = engine.tokenizer
    for path in copy.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(EngineDirectoryError, match="has no tokenizer"):
        _ = replace(engine).tokenizer


def test_loading_imports_neither_transformers_nor_builders(tiny_engine):
    code = (
        "import sys; from replayssm.runtime.engine import Engine; from replayssm.runtime.session import Session\n"
        "Session(Engine.load(sys.argv[1]))\n"
        "sys.exit(any(name.startswith(('transformers', 'replayssm.builders')) for name in sys.modules))"
    )
    directory = str(tiny_engine("nano", dtype="bfloat16").directory)
    assert subprocess.run([sys.executable, "-c", code, directory], check=False).returncode == 0
