"""Checkpoint directories: what is read, and how little memory it takes."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from replayssm.builders import nvfp4
from replayssm.builders.checkpoint import INDEX_NAME, Checkpoint
from replayssm.builders.config import published_config
from replayssm.builders.random_checkpoint import TINY_CONFIGS, write_random_checkpoint
from replayssm.builders.safetensors_file import plan_shards
from replayssm.builders.weight_shapes import weight_shapes

sys.path.append(str(Path(__file__).parent / "edits"))
from checkpoint_edits import edit_json, rewrite

NAMES = list(TINY_CONFIGS)
SHARD_BYTES = 400_000


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"max_shard_bytes": SHARD_BYTES}])
def test_every_tensor_is_what_safetensors_reads(tiny_checkpoint, name, options):
    directory = tiny_checkpoint(name, **options)
    checkpoint = Checkpoint.open(directory)
    stored = {}
    for path in directory.glob("*.safetensors"):
        stored |= load_file(path)
    assert len(checkpoint.shards) == (1 if not options else len(list(directory.glob("*.safetensors")))) >= 1
    assert set(checkpoint.names) == set(weight_shapes(checkpoint.config))
    assert len(stored) == len(checkpoint.names)
    for tensor_name in checkpoint.names:
        tensor = checkpoint.tensor(tensor_name)
        expected = stored[checkpoint.disk_name(tensor_name)]
        assert tensor.dtype == expected.dtype == getattr(torch, checkpoint.dtype(tensor_name))
        assert tuple(tensor.shape) == checkpoint.shape(tensor_name)
        assert torch.equal(tensor, expected)
    assert "mtp.layers.0.nothing" not in checkpoint
    with pytest.raises(KeyError, match="no tensor 'nothing'"):
        checkpoint.tensor("nothing")


@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_and_writes_the_same_weights(tiny_checkpoint, name, tmp_path):
    """Names and shapes are transformers' own, both ways; only the draft head and the vision tower are one-sided."""
    import transformers

    source = tiny_checkpoint(name)
    model_class = getattr(transformers, TINY_CONFIGS[name]["architectures"][0])
    model, info = model_class.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
    assert not info["mismatched_keys"]
    assert all("visual." in key for key in info["missing_keys"])
    assert all(key.startswith("mtp.") for key in info["unexpected_keys"])
    model.save_pretrained(tmp_path)
    ours, theirs = Checkpoint.open(source), Checkpoint.open(tmp_path)
    assert theirs.config.mtp is None
    assert theirs.config.layers == ours.config.layers
    assert set(ours.names) - set(theirs.names) == {key for key in ours.names if key.startswith("mtp.")}
    assert bool(theirs.extra_names) == (name == "qwen_vl")
    for tensor_name in theirs.names:
        assert torch.equal(theirs.tensor(tensor_name), ours.tensor(tensor_name).float()), tensor_name
    for extra in theirs.extra_names:
        assert theirs.extra_tensor(extra).numel() > 0


def test_prefixes_of_other_writers(copied):
    """The same weights under other prefixes, and embeddings as transformers up to 5.14 named them."""
    directory = copied("nano")
    original = Checkpoint.open(directory)
    expected = {name: original.tensor(name).clone() for name in original.names}
    for prefix in ("model.", "language_model.backbone."):
        rewrite(
            directory,
            lambda tensors, prefix=prefix: [
                tensors.update({prefix + name.removeprefix(old): tensors.pop(name)})
                for name in list(tensors)
                for old in [next((p for p in ("backbone.", "model.") if name.startswith(p)), None)]
                if old
            ],
        )
        checkpoint = Checkpoint.open(directory)
        assert checkpoint.prefix == prefix
        assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in expected.items())
    rewrite(
        directory,
        lambda tensors: tensors.update(
            {"backbone.embedding.weight": tensors.pop("language_model.backbone.embeddings.weight")}
        ),
    )
    assert torch.equal(Checkpoint.open(directory).tensor("embeddings.weight"), expected["embeddings.weight"])


@pytest.mark.parametrize(("name", "first"), [("super", "up_proj"), ("qwen_moe", "gate_up_proj")])
def test_fused_experts_are_read_one_by_one(copied, name, first):
    directory = copied(name)
    separate = Checkpoint.open(directory)
    expected = {key: separate.tensor(key).clone() for key in separate.names}
    shapes = dict(weight_shapes(separate.config))

    def fuse(tensors):
        layers = {key.split(".experts.")[0] for key in tensors if ".experts." in key}
        for layer in layers:
            for fused, projections in ((first, ["gate_proj", "up_proj"]), ("down_proj", ["down_proj"])):
                experts = []
                for expert in range(8):
                    parts = [f"{layer}.experts.{expert}.{projection}.weight" for projection in projections]
                    experts.append(torch.cat([tensors.pop(part) for part in parts if part in tensors]))
                tensors[f"{layer}.experts.{fused}"] = torch.stack(experts)

    rewrite(directory, fuse)
    checkpoint = Checkpoint.open(directory)
    assert set(checkpoint.names) == set(shapes)
    for key, tensor in expected.items():
        assert torch.equal(checkpoint.tensor(key), tensor), key


def test_tied_embeddings_may_be_stored_twice(copied):
    directory = copied("qwen")
    rewrite(directory, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    checkpoint = Checkpoint.open(directory)
    assert "lm_head.weight" not in checkpoint
    assert checkpoint.config.lm_head_name in checkpoint
    assert checkpoint.extra_names == ()


def test_draft_head_that_the_config_does_not_describe_is_kept_apart(copied):
    directory = copied("qwen")
    edit_json(directory / "config.json", lambda config: config.pop("mtp_num_hidden_layers"))
    checkpoint = Checkpoint.open(directory)
    assert checkpoint.config.mtp is None
    assert "mtp.fc.weight" in checkpoint.extra_names
    assert "mtp.fc.weight" not in checkpoint


def test_described_draft_head_without_weights_is_absent(copied):
    directory = copied("super")
    rewrite(directory, lambda tensors: [tensors.pop(key) for key in list(tensors) if key.startswith("mtp.")])
    assert Checkpoint.open(directory).config.mtp is None


def test_identity_covers_configs_and_headers(copied):
    directory = copied("nano")
    identity = Checkpoint.open(directory).identity
    assert Checkpoint.open(directory).identity == identity
    assert len(identity) == 64
    edit_json(directory / "config.json", lambda config: config.update(max_position_embeddings=4096))
    changed = Checkpoint.open(directory).identity
    assert changed != identity
    rewrite(directory, lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].float()}))
    assert Checkpoint.open(directory).identity != changed


def test_views_survive_release_and_the_file_is_untouched_by_writes(copied):
    directory = copied("nano")
    before = (directory / "model.safetensors").read_bytes()
    checkpoint = Checkpoint.open(directory)
    weight = checkpoint.tensor("lm_head.weight")
    copy = weight.clone()
    checkpoint.release()
    assert torch.equal(weight, copy)
    weight[0, 0] += 1
    assert (directory / "model.safetensors").read_bytes() == before


_READ_EVERYTHING = """
import sys
from pathlib import Path
from replayssm.builders.checkpoint import Checkpoint

def resident():
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssFile"))) * 1024

checkpoint = Checkpoint.open(sys.argv[1])
start, peak, total = resident(), 0, 0
for name in checkpoint.names:
    total += checkpoint.tensor(name).view(-1).view(__import__("torch").uint8)[::512].sum().item() >= 0 and 1
    peak = max(peak, resident() - start)
print(peak, sum(checkpoint.nbytes(name) for name in checkpoint.names), total)
"""


def test_memory_does_not_grow_with_what_was_read(tmp_path):
    """720 MB in shards of about 90 MB are read through in a process that never holds more than half of them."""
    config = {**TINY_CONFIGS["nano"], "hybrid_override_pattern": "-" * 8, "hidden_size": 1024}
    config |= {"intermediate_size": 22_000, "num_nextn_predict_layers": 0}
    directory = tmp_path / "wide"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    shapes = _disk_shapes(config)
    plan = plan_shards([(name, 2 * math.prod(shape)) for name, shape in shapes.items()], 91_000_000)
    for file, names in plan.items():
        write_sparse(directory / file, {name: shapes[name] for name in names})
    index = {"weight_map": {name: file for file, names in plan.items() for name in names}}
    (directory / INDEX_NAME).write_text(json.dumps(index))
    assert len(plan) >= 8
    output = subprocess.run(
        [sys.executable, "-c", _READ_EVERYTHING, str(directory)], check=True, capture_output=True, text=True
    ).stdout
    peak, size, tensors = map(int, output.split())
    assert size > 700_000_000
    assert tensors == len(shapes)
    # Pages are given back after every 256 MiB; one more tensor and what the kernel maps around a fault come on top.
    assert peak < 256 * 2**20 + 90_000_000


def write_sparse(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """bf16 zeros that take no space on the disk."""
    header, position = {}, 0
    for name, shape in shapes.items():
        end = position + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, end]}
        position = end
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded)
    os.truncate(path, 8 + len(encoded) + position)


def _disk_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    from replayssm.builders.config import read_config
    from replayssm.builders.random_checkpoint import disk_name

    model = read_config(config)
    return {disk_name(model, name): shape for name, shape in weight_shapes(model).items()}


def test_a_120b_checkpoint_opens_in_seconds_and_little_memory(tmp_path):
    """All 42,683 tensors (247 GB, sparse) of Super-120B in 50 shards are checked, and one expert is read."""
    config = published_config("super120b")
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = _disk_shapes(config)
    plan = plan_shards([(name, 2 * math.prod(shape)) for name, shape in shapes.items()], 5 * 10**9)
    for file, names in plan.items():
        write_sparse(tmp_path / file, {name: shapes[name] for name in names})
    index = {"weight_map": {name: file for file, names in plan.items() for name in names}}
    (tmp_path / INDEX_NAME).write_text(json.dumps(index))
    before = resident_bytes()
    checkpoint = Checkpoint.open(tmp_path)
    assert sum(file.size for file in checkpoint.shards) > 247 * 10**9
    assert checkpoint.tensor("layers.87.mixer.experts.511.down_proj.weight").sum() == 0
    # 42,683 names, shapes and places: about 60 MB of Python objects.
    assert resident_bytes() - before < 150 * 10**6


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) * 1024


def test_random_checkpoints_are_reproducible(tmp_path):
    first = write_random_checkpoint(TINY_CONFIGS["super"], tmp_path / "a", seed=3)
    second = write_random_checkpoint(TINY_CONFIGS["super"], tmp_path / "b", seed=3)
    third = write_random_checkpoint(TINY_CONFIGS["super"], tmp_path / "c", seed=4)
    contents = [(path / "model.safetensors").read_bytes() for path in (first, second, third)]
    assert contents[0] == contents[1] != contents[2]


def test_dequantized_reads_every_format(copied):
    """The three formats beside each other in one checkpoint, as MIXED_PRECISION declares them."""
    directory = copied("nano")
    algorithms = {"layers.0.mixer.in_proj": "NVFP4", "layers.1.mixer.up_proj": "W4A16_NVFP4", "lm_head": "FP8"}
    original = Checkpoint.open(directory)
    weights = {module: original.tensor(f"{module}.weight").clone() for module in algorithms}

    def quantize(tensors):
        for module, algo in algorithms.items():
            disk = module if module == "lm_head" else f"backbone.{module}"
            convert = nvfp4.quantize_fp8 if algo == "FP8" else nvfp4.quantize
            parts = convert(tensors.pop(f"{disk}.weight"))._asdict()
            if algo != "W4A16_NVFP4":
                parts["input_scale"] = torch.tensor([1.0])  # a vector of one is a scalar too
            tensors.update({f"{disk}.{suffix}": tensor for suffix, tensor in parts.items()})

    rewrite(directory, quantize)
    layers = {module: {"quant_algo": algo} for module, algo in algorithms.items()}
    section = {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    checkpoint = Checkpoint.open(directory)
    assert dict(checkpoint.formats) == {
        "layers.0.mixer.in_proj": "nvfp4",
        "layers.1.mixer.up_proj": "w4a16_nvfp4",
        "lm_head": "fp8",
    }
    assert checkpoint.module_format("layers.2.mixer.in_proj") == "dense"
    assert checkpoint.shape("lm_head.input_scale") == ()
    for module, weight in weights.items():
        convert = nvfp4.quantize_fp8 if algorithms[module] == "FP8" else nvfp4.quantize
        restore = nvfp4.dequantize_fp8 if algorithms[module] == "FP8" else nvfp4.dequantize
        assert torch.equal(checkpoint.dequantized(module), restore(*convert(weight)))
    dense = "layers.2.mixer.in_proj"
    assert torch.equal(checkpoint.dequantized(dense), checkpoint.tensor(f"{dense}.weight").float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("lm_head.input_scale"), "weight-only FP8 is not supported"),
        (lambda t: t.pop("lm_head.weight_scale"), "'lm_head.weight_scale' is missing"),
        (lambda t: t.update({"lm_head.weight_scale": torch.ones(512)}), r"has shape \[512\], expected \[\]"),
        (lambda t: t.update({"lm_head.pre_quant_scale": torch.ones(1)}), "unexpected tensor 'lm_head.pre_quant_scale'"),
    ],
)
def test_incomplete_quantized_module(copied, change, message):
    directory = copied("nano")

    def quantize(tensors):
        parts = nvfp4.quantize_fp8(tensors.pop("lm_head.weight"))._asdict()
        tensors.update({f"lm_head.{suffix}": tensor for suffix, tensor in parts.items()})
        tensors["lm_head.input_scale"] = torch.tensor(1.0)
        change(tensors)

    rewrite(directory, quantize)
    section = {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"lm_head": {"quant_algo": "FP8"}}}
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": section}))
    with pytest.raises(ValueError, match=message):
        Checkpoint.open(directory)


def test_kv_cache_scales_are_read(copied):
    directory = copied("nano")
    names = [f"backbone.layers.3.mixer.{part}" for part in ("k_proj.k_scale", "v_proj.v_scale")]
    rewrite(directory, lambda tensors: tensors.update({name: torch.tensor(0.5) for name in names}))
    checkpoint = Checkpoint.open(directory)
    assert checkpoint.tensor("layers.3.mixer.k_proj.k_scale") == 0.5
    assert checkpoint.tensor("layers.3.mixer.v_proj.v_scale") == 0.5
