"""One clear error, which names the file, for every checkpoint that is damaged, incomplete or refused."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from replayssm.builders.checkpoint import INDEX_NAME, Checkpoint

sys.path.append(str(Path(__file__).parent / "edits"))
from checkpoint_edits import edit_json, rewrite

SHARD_BYTES = 400_000


def damage_truncate(directory):
    path = directory / "model-00002-of-00004.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def damage_header(directory, change):
    path = directory / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = change(data[8 : 8 + length])
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


def shift_offsets(header: bytes) -> bytes:
    """The first tensor claims to start four bytes later: a gap, and the same number of bytes."""
    value = json.loads(header)
    name = min((key for key in value if key != "__metadata__"), key=lambda key: value[key]["data_offsets"][0])
    value[name]["data_offsets"] = [offset + 4 for offset in value[name]["data_offsets"]]
    return json.dumps(value).encode()


def set_entry(header: bytes, name: str, **fields) -> bytes:
    value = json.loads(header)
    value[name] |= fields
    return json.dumps(value).encode()


IN_PROJ = "backbone.layers.0.mixer.in_proj.weight"
SHARDED = {"max_shard_bytes": SHARD_BYTES}
DAMAGES = {
    "truncated shard": (SHARDED, damage_truncate, r"model-00002-of-00004\.safetensors: truncated: \d+ bytes, expected"),
    "longer than its header says": (
        {},
        lambda d: (d / "model.safetensors").open("ab").write(b"xx"),
        "longer than its header says",
    ),
    "missing shard": (
        SHARDED,
        lambda d: (d / "model-00003-of-00004.safetensors").unlink(),
        r"model-00003-of-00004\.safetensors: no such file, but .* says it holds '.*'; copy or download",
    ),
    "missing index": (SHARDED, lambda d: (d / INDEX_NAME).unlink(), r"index\.json: no such file, but model-00001"),
    "empty file": ({}, lambda d: (d / "model.safetensors").write_bytes(b""), "0 bytes, expected a safetensors file"),
    "garbage": ({}, lambda d: (d / "model.safetensors").write_bytes(b"\x80\x04pickle" * 50), "no safetensors file"),
    "LFS pointer": (
        {},
        lambda d: (d / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n"),
        "Git LFS pointer",
    ),
    "header is no JSON": ({}, lambda d: damage_header(d, lambda h: b"x" * len(h)), "header is not valid JSON"),
    "header is a list": ({}, lambda d: damage_header(d, lambda h: b"[]"), "header is no JSON object"),
    "tensor twice in a header": (
        {},
        lambda d: damage_header(d, lambda h: h.replace(b'"lm_head.weight"', b'"backbone.norm_f.weight"')),
        r"lists 'backbone\.norm_f\.weight' twice",
    ),
    "offsets leave a gap": ({}, lambda d: damage_header(d, shift_offsets), "neither overlap nor leave gaps"),
    "shape and bytes disagree": (
        {},
        lambda d: damage_header(d, lambda h: set_entry(h, IN_PROJ, shape=[1, 1])),
        rf"tensor '{IN_PROJ}' has \d+ bytes of data, expected 2 for BF16 \[1, 1\]",
    ),
    "malformed entry": (
        {},
        lambda d: damage_header(d, lambda h: set_entry(h, IN_PROJ, shape="x")),
        f"entry of '{IN_PROJ}' is malformed",
    ),
    "dtype is a list": (
        {},
        lambda d: damage_header(d, lambda h: set_entry(h, IN_PROJ, dtype=[1])),
        rf"tensor '{IN_PROJ}' has dtype \[1\], expected one of",
    ),
    "nested header": ({}, lambda d: damage_header(d, lambda h: b"[" * 200_000), "header is not valid JSON"),
    "index places a tensor in a list": (
        SHARDED,
        lambda d: edit_json(d / INDEX_NAME, lambda i: i["weight_map"].update({IN_PROJ: []})),
        rf"weight_map places '{IN_PROJ}' in \[\], expected the name of a file",
    ),
    "index places a tensor in an object": (
        SHARDED,
        lambda d: edit_json(d / INDEX_NAME, lambda i: i["weight_map"].update({IN_PROJ: {}})),
        rf"weight_map places '{IN_PROJ}' in \{{\}}, expected the name of a file",
    ),
    "unknown dtype": (
        {},
        lambda d: damage_header(d, lambda h: set_entry(h, IN_PROJ, dtype="C64")),
        f"tensor '{IN_PROJ}' has dtype C64, expected one of",
    ),
    "missing tensor": (
        {},
        lambda d: rewrite(d, lambda t: t.pop(IN_PROJ)),
        r"tensor 'layers\.0\.mixer\.in_proj\.weight' is missing, expected bfloat16 or .* \[328, 128\]",
    ),
    "missing head": (
        {},
        lambda d: rewrite(d, lambda t: t.pop("lm_head.weight")),
        "config.json must say tie_word_embeddings: true",
    ),
    "incomplete draft head": (
        {},
        lambda d: rewrite(d, lambda t: t.pop("mtp.layers.0.enorm.weight")),
        "the draft head is incomplete",
    ),
    "wrong shape": (
        {},
        lambda d: rewrite(d, lambda t: t.update({IN_PROJ: t[IN_PROJ][:-8].clone()})),
        rf"model\.safetensors: tensor '{IN_PROJ}' has shape \[320, 128\], expected \[328, 128\] from config\.json",
    ),
    "wrong dtype": (
        {},
        lambda d: rewrite(d, lambda t: t.update({"backbone.norm_f.weight": torch.ones(128, dtype=torch.int32)})),
        r"tensor 'backbone\.norm_f\.weight' is int32, expected bfloat16 or",
    ),
    "unexpected tensor": (
        {},
        lambda d: rewrite(d, lambda t: t.update({"backbone.layers.0.mixer.extra": torch.ones(1)})),
        r"unexpected tensor 'backbone\.layers\.0\.mixer\.extra'",
    ),
    "same weight under two names": (
        {},
        lambda d: rewrite(d, lambda t: t.update({IN_PROJ.replace("backbone", "model"): t[IN_PROJ].clone()})),
        "is the same weight as",
    ),
    "index names another file": (
        SHARDED,
        lambda d: edit_json(
            d / INDEX_NAME, lambda i: i["weight_map"].update({IN_PROJ: "model-00004-of-00004.safetensors"})
        ),
        rf"holds tensor '{IN_PROJ}', which {INDEX_NAME} places in model-00004",
    ),
    "index names a tensor that is nowhere": (
        SHARDED,
        lambda d: edit_json(
            d / INDEX_NAME, lambda i: i["weight_map"].update({"ghost": "model-00001-of-00004.safetensors"})
        ),
        "tensor 'ghost' is missing, but",
    ),
    "index misses a tensor": (
        SHARDED,
        lambda d: edit_json(d / INDEX_NAME, lambda i: i["weight_map"].pop(IN_PROJ)),
        "places nowhere",
    ),
    "index leaves the directory": (
        SHARDED,
        lambda d: edit_json(d / INDEX_NAME, lambda i: i["weight_map"].update({IN_PROJ: "../x.safetensors"})),
        "expected the name of a file of this directory",
    ),
    "empty index": (SHARDED, lambda d: (d / INDEX_NAME).write_text("{}"), "weight_map is missing or empty"),
    "index is no JSON": (SHARDED, lambda d: (d / INDEX_NAME).write_text("{"), "not valid JSON"),
    "stale single file": (
        SHARDED,
        lambda d: save_file({"x": torch.ones(1)}, d / "model.safetensors"),
        "delete whichever of the two is stale",
    ),
    "quantized weights, no declaration": (
        {},
        lambda d: rewrite(d, lambda t: t.update({IN_PROJ: torch.zeros(328, 64, dtype=torch.uint8)})),
        r"module 'layers\.0\.mixer\.in_proj' is stored as w4a16_nvfp4, but the quantization config declares dense",
    ),
    "declaration, no quantized weights": (
        {},
        lambda d: (d / "hf_quant_config.json").write_text(
            json.dumps({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}})
        ),
        r"module 'layers\.0\.mixer\.in_proj' is stored as dense, but the quantization config declares fp8",
    ),
    "no config": ({}, lambda d: (d / "config.json").unlink(), r"config\.json: no such file; expected a Hugging Face"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_clear_error(copied, damage):
    options, apply, message = DAMAGES[damage]
    directory = copied("nano", **options)
    if options:
        assert (directory / "model-00004-of-00004.safetensors").is_file()
    apply(directory)
    with pytest.raises(ValueError, match=message) as caught:
        Checkpoint.open(directory)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("suffix", [".bin", ".pt"])
def test_pickles_are_refused_with_the_way_out(copied, suffix):
    directory = copied("nano")
    (directory / "model.safetensors").rename(directory / f"pytorch_model{suffix}")
    with pytest.raises(ValueError, match=rf"pytorch_model\{suffix}: pickled weights are refused.*save_pretrained"):
        Checkpoint.open(directory)


def test_no_weights_and_no_directory(copied):
    directory = copied("nano")
    (directory / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        Checkpoint.open(directory)
    with pytest.raises(ValueError, match="no such directory"):
        Checkpoint.open(directory / "missing")


@pytest.mark.parametrize(("name", "file"), [("nano", "config.json"), ("nano", "model.safetensors")])
def test_unreadable_file(copied, name, file):
    """A directory where a file is expected, since tests may run as root, who can read anything."""
    directory = copied(name)
    (directory / file).unlink()
    (directory / file).mkdir()
    with pytest.raises(ValueError, match=file.replace(".", r"\.")):
        Checkpoint.open(directory)
