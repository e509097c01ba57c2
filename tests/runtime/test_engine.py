"""Loading an engine directory, and refusing every damaged one."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from replayssm.plugins.manifest import MANIFEST_NAME, EngineDirectoryError, read_manifest
from replayssm.plugins.manifest import _body_sha256 as body_sha256
from replayssm.runtime import network_check
from replayssm.runtime.engine import Engine
from replayssm.runtime.executor import STATEFUL_OPERATORS
from replayssm.runtime.functional_ops import OPERATORS
from replayssm.runtime.session import Session


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


def test_a_flipped_bit_in_a_small_file_shows_at_every_load(copy):
    """Networks and tokenizer say how the engine runs; only weights are compared by size alone."""
    for entry in read_manifest(copy).files:
        content = bytearray((copy / entry.name).read_bytes())
        content[-1] ^= 1
        (copy / entry.name).write_bytes(bytes(content))
        if entry.name.endswith(".safetensors"):
            Engine.load(copy)
        else:
            with pytest.raises(EngineDirectoryError, match=f"{entry.name} does not have the SHA-256"):
                Engine.load(copy)
        content[-1] ^= 1
        (copy / entry.name).write_bytes(bytes(content))


def test_networks_of_another_vocabulary(copy):
    body = read_manifest(copy).to_json()
    body["model"]["vocab_size"] += 1
    (copy / MANIFEST_NAME).write_text(json.dumps({**body, "sha256": body_sha256(body)}))
    with pytest.raises(EngineDirectoryError, match=r"has logits of \d+ tokens, its manifest says \d+"):
        Engine.load(copy)


def node(networks, op):
    return next(node for node in networks["main"]["nodes"] if node["op"] == op)


MALFORMED = {
    "operator is unknown; known are": lambda n: node(n, "mamba2_window").update(op="mamba3_window"),
    "the operator is unknown": lambda n: node(n, "linear").update(op="conv"),
    "the state must have AttentionGeometry": lambda n: node(n, "attention_window").update(
        state=node(n, "mamba2_window")["state"]
    ),
    "must have a state": lambda n: node(n, "mamba2_window").update(state=None),
    "must have no state": lambda n: node(n, "linear").update(state=node(n, "mamba2_window")["state"]),
    "attributes activations, format, output_dtype, got format": lambda n: [
        node(n, "linear")["attributes"].pop(key) for key in ("activations", "output_dtype")
    ],
    "must have the attributes eps, zero_centered, got": lambda n: node(n, "rms_norm")["attributes"].update(more=1),
    "the attribute 'format' cannot be 'int3'": lambda n: node(n, "linear")["attributes"].update(format="int3"),
    "the attribute 'eps' cannot be nan": lambda n: node(n, "rms_norm")["attributes"].update(eps=float("nan")),
    "the attribute 'output_dtype' cannot be": lambda n: node(n, "linear")["attributes"].update(output_dtype="nn"),
    "takes 11 inputs, got 10": lambda n: node(n, "mamba2_window")["inputs"].pop(),
    r"node 1 \(rms_norm\) takes 2 inputs, got 1": lambda n: node(n, "rms_norm")["inputs"].pop(),
    "has no output hidden_states, logits": lambda n: n["main"].update(outputs={}),
    "op of network 'main', node 0 must be a text": lambda n: n["main"]["nodes"][0].update(op=[]),
    "layer of .* must be a whole number": lambda n: next(iter(n["main"]["states"].values())).update(layer="x"),
    "its inputs have the sizes": lambda n: n["main"]["states"][node(n, "mamba2_window")["state"]]["geometry"].update(
        nheads=2**30, ngroups=2**10
    ),
    "must be an integer between 1": lambda n: n["main"]["states"][node(n, "mamba2_window")["state"]]["geometry"].update(
        nheads=10**30
    ),
    "each state must belong to one node": lambda n: n["main"]["states"].update(
        more=n["main"]["states"][node(n, "mamba2_window")["state"]]
    ),
}


@pytest.mark.parametrize("message", MALFORMED)
def test_networks_that_do_not_fit_this_version(copy, message):
    networks = json.loads((copy / "networks.json").read_text())
    MALFORMED[message](networks)
    reseal(copy, "networks.json", json.dumps(networks).encode())
    with pytest.raises(EngineDirectoryError, match=message):
        Engine.load(copy)


def test_every_operator_has_a_rule():
    assert network_check._RULES.keys() == OPERATORS.keys() | STATEFUL_OPERATORS.keys()


def test_any_damage_to_networks_is_an_error_about_the_engine(tiny_engine, tmp_path):
    """Random edits of the networks: the engine loads and runs a token, or one error says to rebuild it."""
    choose = random.Random(0)
    copy = shutil.copytree(tiny_engine("nano", dtype="bfloat16").directory, tmp_path / "engine")
    text = (copy / "networks.json").read_text()
    refused = 0
    for _ in range(150):
        networks = json.loads(text)
        parent = networks
        while True:
            key = choose.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
            if not isinstance(parent[key], (dict, list)) or not parent[key] or choose.random() < 0.1:
                break
            parent = parent[key]
        if choose.random() < 0.2:
            del parent[key]
        else:
            parent[key] = choose.choice([None, [], {}, "x", -1, 0, 3, 2**40, 10**400, True, 0.5, "T", "linear"])
        reseal(copy, "networks.json", json.dumps(networks).encode())
        try:
            Session(Engine.load(copy), slots=1).warm_up()
        except EngineDirectoryError:
            refused += 1
    assert refused > 100


def test_newer_schema_and_foreign_target(copy):
    body = read_manifest(copy).to_json()
    newer = {**body, "schema_version": body["schema_version"] + 1}
    (copy / MANIFEST_NAME).write_text(json.dumps(newer))
    with pytest.raises(EngineDirectoryError, match="upgrade replayssm"):
        Engine.load(copy)
    foreign = {**body, "target": "tpu"}
    (copy / MANIFEST_NAME).write_text(json.dumps({**foreign, "sha256": body_sha256(foreign)}))
    with pytest.raises(EngineDirectoryError, match="built for target 'tpu'"):
        Engine.load(copy)


def test_contents_that_do_not_belong_together(copy, tiny_engine):
    networks = json.loads((copy / "networks.json").read_text())
    for content, message in (
        (b"{}", "no network 'main'"),
        (b"[1]", "does not hold networks.*expected a JSON object, got a list"),
        (b"[" * 100_000, "does not hold networks"),
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
    with pytest.raises(EngineDirectoryError, match=r"/tokenizer\.json or a file beside it is damaged, .* rebuild"):
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


def test_weights_that_may_not_be_read_are_not_called_damaged(tiny_engine, monkeypatch):
    """safetensors says of them that they are missing, and an engine that is whole need not be rebuilt."""
    directory, opened = tiny_engine("nano").directory, Path.open

    def refuses(path, *arguments, **options):
        if path.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuses)
    with pytest.raises(PermissionError):
        Engine.load(directory)
