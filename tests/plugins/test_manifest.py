"""The engine manifest: round trip, and one clear error for everything that must be refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from replayssm.plugins.manifest import (
    MANIFEST_NAME,
    SCHEMA_VERSION,
    EngineDirectoryError,
    EngineManifest,
    FileEntry,
    Limits,
    is_engine_directory,
    read_manifest,
    sha256_file,
    verify_files,
)
from replayssm.plugins.manifest import _body_sha256 as body_sha256
from replayssm.plugins.settings import ReplaySettings

LIMITS = Limits(max_batch_size=4, max_seq_len=128, max_draft_len=3)


def make_manifest(**changes):
    fields = {
        "model": {"name": "tiny", "family": "nemotron_h", "vocab_size": 32, "eos_token_ids": [2]},
        "quantization": {"dense": 3, "nvfp4": 2},
        "replay": ReplaySettings(buffer_len=8, max_window=4, max_seq_len=128),
        "limits": LIMITS,
        "target": "torch",
        "versions": {"torch": "2.13.0"},
        "checkpoint": {"name": "tiny", "identity": "0" * 64},
        "networks": "networks.json",
        "files": (FileEntry("networks.json", 2, "0" * 64),),
    }
    return EngineManifest(**{**fields, **changes})


@pytest.fixture
def engine(tmp_path):
    """A directory with two listed files and their manifest."""
    (tmp_path / "weights").mkdir()
    (tmp_path / "networks.json").write_bytes(b"{}")
    (tmp_path / "weights" / "a.safetensors").write_bytes(bytes(range(256)) * 9)
    files = tuple(
        FileEntry(name, (tmp_path / name).stat().st_size, sha256_file(tmp_path / name))
        for name in ("networks.json", "weights/a.safetensors")
    )
    write(tmp_path, make_manifest(files=files).to_json())
    return tmp_path


def write(directory, body):
    (directory / MANIFEST_NAME).write_text(json.dumps(body))


def resealed(body, **changes):
    """`body` with changes and a matching checksum: what a differently minded writer would produce."""
    body = {**body, **changes}
    return {**body, "sha256": body_sha256(body)}


def test_round_trip(engine):
    manifest = read_manifest(engine)
    verify_files(engine, manifest, "full")
    assert EngineManifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest
    assert manifest.weight_files == ("weights/a.safetensors",)
    assert manifest.limits == LIMITS
    assert manifest.replay.max_window == 1 + LIMITS.max_draft_len
    assert is_engine_directory(engine)


@pytest.mark.parametrize(
    "damage",
    [lambda text: text[: len(text) // 2], lambda text: "", lambda text: text.replace("{", "[", 1), lambda text: "[]"],
    ids=["truncated", "empty", "syntax", "not-an-object"],
)
def test_damaged_manifest_is_refused(engine, damage):
    path = engine / MANIFEST_NAME
    path.write_text(damage(path.read_text()))
    with pytest.raises(EngineDirectoryError, match=r"config\.json"):
        read_manifest(engine)


def test_every_altered_byte_of_the_manifest_is_noticed(engine):
    path = engine / MANIFEST_NAME
    original = path.read_bytes()
    for index in range(len(original)):
        damaged = bytearray(original)
        damaged[index] ^= 1
        path.write_bytes(bytes(damaged))
        with pytest.raises(EngineDirectoryError):
            read_manifest(engine)


def test_newer_schema_says_what_to_do(engine):
    body = read_manifest(engine).to_json()
    write(engine, resealed(body, schema_version=SCHEMA_VERSION + 1, unheard_of={}))
    with pytest.raises(EngineDirectoryError, match=r"schema version 2, this replayssm reads up to 1.*upgrade"):
        read_manifest(engine)
    assert is_engine_directory(engine)


@pytest.mark.parametrize("version", [0, -1, True, "1", None])
def test_senseless_schema_version(engine, version):
    write(engine, resealed(read_manifest(engine).to_json(), schema_version=version))
    with pytest.raises(EngineDirectoryError, match="schema_version"):
        read_manifest(engine)


@pytest.mark.parametrize("field", ["model", "replay", "limits", "files", "networks", "target"])
def test_missing_field_is_named(engine, field):
    body = read_manifest(engine).to_json()
    del body[field]
    write(engine, resealed(body))
    with pytest.raises(EngineDirectoryError, match=field):
        read_manifest(engine)


def test_unknown_and_invalid_fields(engine):
    body = read_manifest(engine).to_json()
    for changes in (
        {"surprise": 1},
        {"replay": {**body["replay"], "surprise": 1}},
        {"replay": {**body["replay"], "state_dtype": "int3"}},
        {"limits": {**body["limits"], "max_batch_size": 0}},
        {"limits": {**body["limits"], "max_draft_len": 5}},
        {"files": [{"name": "networks.json"}]},
        {"files": body["files"] + body["files"][:1]},
        {"networks": "elsewhere.json"},
    ):
        write(engine, resealed(body, **changes))
        with pytest.raises(EngineDirectoryError):
            read_manifest(engine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {}}, "model.name must be text, got None"),
        ({"model": []}, "model must be an object"),
        ({"model": {"name": "a", "vocab_size": None, "eos_token_ids": []}}, "model.vocab_size must be between 1"),
        ({"model": {"name": "a", "vocab_size": 2**40, "eos_token_ids": []}}, "model.vocab_size must be between 1"),
        ({"model": {"name": "a", "vocab_size": True, "eos_token_ids": []}}, "model.vocab_size must be between 1"),
        ({"model": {"name": "a", "vocab_size": 9}}, "model.eos_token_ids must be a list"),
        ({"model": {"name": "a", "vocab_size": 9, "eos_token_ids": [-1]}}, "model.eos_token_ids must be a list"),
        ({"model": {"name": "a", "vocab_size": 9, "eos_token_ids": ["1"]}}, "model.eos_token_ids must be a list"),
        ({"quantization": None}, "quantization must be an object"),
        ({"kernels": []}, "kernels must be an object"),
        ({"target": ["torch"]}, "target must be text"),
        ({"networks": {}}, "networks must be text"),
        (
            {"files": [{"name": "networks.json", "size": "2", "sha256": "0" * 64}]},
            "size of networks.json must",
        ),
        ({"files": [{"name": "networks.json", "size": 2, "sha256": None}]}, "sha256 of networks.json must be 64"),
        ({"files": 3}, "missing or invalid field"),
        ({"files": [3]}, "missing or invalid field"),
        ({"replay": 3}, "missing or invalid field"),
        ({"limits": None}, "missing or invalid field"),
    ],
)
def test_fields_of_the_wrong_type(engine, changes, message):
    write(engine, resealed(read_manifest(engine).to_json(), **changes))
    with pytest.raises(EngineDirectoryError, match=message):
        read_manifest(engine)


@pytest.mark.parametrize("value", [[], None, 1, "yes"])
def test_serial_exact_is_a_flag(engine, value):
    body = read_manifest(engine).to_json()
    write(engine, resealed(body, replay={**body["replay"], "serial_exact": value}))
    with pytest.raises(EngineDirectoryError, match=r"serial_exact must be true or false"):
        read_manifest(engine)


@pytest.mark.parametrize(
    "name",
    ["../outside", "/etc/passwd", "a/../../b", "a//b", "./a", "a\\b", "C:evil", "", ".", "a/", "config.json", 7, None],
)
def test_unsafe_file_names(engine, name):
    body = read_manifest(engine).to_json()
    extra = {"name": name, "size": 0, "sha256": "0" * 64}
    write(engine, resealed(body, files=[*body["files"], extra]))
    with pytest.raises(EngineDirectoryError, match="file name"):
        read_manifest(engine)


def test_files_missing_truncated_altered(engine):
    manifest = read_manifest(engine)
    path = engine / "weights" / "a.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(EngineDirectoryError, match="2303 bytes, the manifest says 2304"):
        verify_files(engine, manifest)
    path.write_bytes(content[:100] + b"\0" + content[101:])
    verify_files(engine, manifest, "size")
    with pytest.raises(EngineDirectoryError, match="SHA-256"):
        verify_files(engine, manifest, "full")
    path.unlink()
    with pytest.raises(EngineDirectoryError, match="missing"):
        verify_files(engine, manifest)
    with pytest.raises(ValueError, match="size, full"):
        verify_files(engine, manifest, "half")


def test_not_an_engine(tmp_path):
    with pytest.raises(EngineDirectoryError, match="not a directory"):
        read_manifest(tmp_path / "absent")
    with pytest.raises(EngineDirectoryError, match=r"has no config\.json"):
        read_manifest(tmp_path)
    write(tmp_path, {"model_type": "nemotron_h"})
    with pytest.raises(EngineDirectoryError, match=r"not an engine manifest.*replayssm build"):
        read_manifest(tmp_path)
    assert not is_engine_directory(tmp_path)


@pytest.mark.parametrize(
    "limits",
    [{"max_batch_size": 0}, {"max_seq_len": 1}, {"max_draft_len": -1}, {"max_seq_len": 8, "max_draft_len": 8}],
)
def test_limits_are_checked(limits):
    with pytest.raises(ValueError, match="max_"):
        Limits(**limits)


def test_needs_no_torch():
    code = "import sys, replayssm.plugins.manifest; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
