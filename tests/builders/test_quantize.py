"""`quantize_checkpoint` against modelopt's own quantization and export of the whole model, bit for bit."""

from __future__ import annotations

import copy
import json
import logging
import math
import re
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from replayssm.builders import quantized_output
from replayssm.builders.calibration import calibration_batches
from replayssm.builders.checkpoint import INDEX_NAME, Checkpoint
from replayssm.builders.layer_model import LayerModels
from replayssm.builders.quantize import RECIPES, QuantizeOptions, quantize_checkpoint
from replayssm.builders.random_checkpoint import TINY_CONFIGS, write_random_checkpoint

NAMES = list(TINY_CONFIGS)
SAMPLES, LENGTH = 6, 64
FORMAT = {"nvfp4": "nvfp4", "nvfp4-w4a16": "w4a16_nvfp4", "fp8": "fp8"}


def options(recipe: str, **changes) -> QuantizeOptions:
    return QuantizeOptions(recipe, calibration_samples=SAMPLES, calibration_length=LENGTH, **changes)


@pytest.fixture(scope="module")
def quantized(tiny_checkpoint, tmp_path_factory):
    """`quantized(name, recipe)` -> (output directory, report), made once."""
    made = {}

    def make(name: str, recipe: str):
        if (name, recipe) not in made:
            output = tmp_path_factory.mktemp("quantized") / f"{name}-{recipe}"
            made[name, recipe] = output, quantize_checkpoint(tiny_checkpoint(name), output, options(recipe))
        return made[name, recipe]

    return make


def modelopt_export(source: Path, recipe: str, directory: Path) -> None:
    """What modelopt does on its own, with the whole model in memory."""
    import modelopt.torch.quantization as mtq
    import transformers
    from modelopt.torch.export import export_hf_checkpoint

    config = json.loads((source / "config.json").read_text())
    model_class = getattr(transformers, config["architectures"][0])
    model = model_class.from_pretrained(
        source, dtype=torch.bfloat16, attn_implementation="sdpa", experts_implementation="eager"
    ).eval()
    for module in model.modules():
        if hasattr(module, "time_step_limit"):  # without the clamp that transformers adds and the models do not have
            module.time_step_limit = (0.0, math.inf)
    batches = calibration_batches(source, None, SAMPLES, LENGTH, model.config.get_text_config().vocab_size)

    def loop(converted):
        for batch in batches:
            converted(input_ids=batch, use_cache=False)

    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        recipe_config = copy.deepcopy(getattr(mtq, RECIPES[recipe]))
        model = mtq.quantize(model, recipe_config, None if recipe == "nvfp4-w4a16" else loop)
        export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=directory)
        logging.disable(logging.NOTSET)


@pytest.fixture(scope="module")
def exported(tiny_checkpoint, tmp_path_factory):
    """`exported(name, recipe)` -> directory of modelopt's export, made once."""
    made = {}

    def make(name: str, recipe: str) -> Path:
        if (name, recipe) not in made:
            made[name, recipe] = tmp_path_factory.mktemp("exported")
            modelopt_export(tiny_checkpoint(name), recipe, made[name, recipe])
        return made[name, recipe]

    return make


def repaired(value):
    """modelopt's JSON without the sentinel that leaks into NemotronH's module names (`lm_head.\\0backbone...`)."""
    if isinstance(value, str):
        return re.sub(r"\.\x00[^*]*", "", value)
    if isinstance(value, list):
        return [repaired(item) for item in value]
    if isinstance(value, dict):
        return {repaired(key): repaired(item) for key, item in value.items()}
    return value


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found


def same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    raw = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (first, second)]
    return torch.equal(*raw)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", NAMES)
def test_equals_modelopts_own_export(quantized, exported, name, recipe):
    """Layer by layer on mapped weights gives modelopt's bytes: weights, block scales, shared scales, input scales."""
    ours, theirs = tensors_of(quantized(name, recipe)[0]), tensors_of(exported(name, recipe))
    # transformers drops the draft head and makes up a vision tower.
    assert {key for key in ours if not key.startswith("mtp.")} == {key for key in theirs if "visual." not in key}
    kept = ("A_log", "D", "dt_bias", "mixer.gate.weight", "e_score_correction_bias")
    for key, tensor in theirs.items():
        if key.endswith(kept):  # kept as stored, where modelopt casts them one way or the other
            assert torch.equal(ours[key].to(tensor.dtype), tensor), key
        elif "visual." not in key:
            assert same_bytes(ours[key], tensor), key


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", NAMES)
def test_reader_dequantizes_as_modelopt(quantized, name, recipe):
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor

    output, report = quantized(name, recipe)
    checkpoint = Checkpoint.open(output)
    assert set(checkpoint.formats.values()) == {FORMAT[recipe]}
    assert report.modules == {FORMAT[recipe]: len(checkpoint.formats)}
    for module in checkpoint.formats:
        weight, scale = checkpoint.tensor(f"{module}.weight"), checkpoint.tensor(f"{module}.weight_scale")
        if recipe == "fp8":
            expected = FP8QTensor(weight.shape, torch.float32, weight).dequantize(torch.float32, scale=scale)
        else:
            shape = (*weight.shape[:-1], 2 * weight.shape[-1])
            double_scale = checkpoint.tensor(f"{module}.weight_scale_2")
            expected = NVFP4QTensor(shape, torch.float32, weight).dequantize(
                torch.float32, scale=scale, double_scale=double_scale, block_sizes={-1: 16}
            )
        assert torch.equal(checkpoint.dequantized(module), expected), module


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", NAMES)
def test_config_files_are_modelopts(quantized, exported, name, recipe):
    """Both config files, but for the draft head's exclusion and modelopt's corrupt names."""
    output, export = quantized(name, recipe)[0], exported(name, recipe)
    raw = (output / "hf_quant_config.json").read_text() + (output / "config.json").read_text()
    assert "sentinel" not in raw
    assert "\\u0000" not in raw
    ours, theirs = (json.loads((path / "hf_quant_config.json").read_text()) for path in (output, export))
    theirs = repaired(theirs)
    excluded = set(theirs["quantization"].pop("exclude_modules")) | {"mtp*"}
    if TINY_CONFIGS[name].get("tie_word_embeddings"):
        excluded.add("lm_head")
    assert set(ours["quantization"].pop("exclude_modules")) == excluded
    assert ours == theirs
    ours, theirs = (json.loads((path / "config.json").read_text()) for path in (output, export))
    ours, theirs = ours["quantization_config"], theirs["quantization_config"]
    assert set(ours.pop("ignore")) == excluded
    assert {key: value for key, value in repaired(theirs).items() if key != "ignore"} == ours


DENSE = {
    "nano": {"conv1d", "embeddings", "lm_head"},
    "super": {"conv1d", "embeddings", "lm_head", "gate"},
    "qwen": {"conv1d", "embed_tokens", "in_proj_a", "in_proj_b"},
    "qwen_moe": {"conv1d", "embed_tokens", "lm_head", "in_proj_a", "in_proj_b", "gate", "shared_expert_gate"},
    "qwen_vl": {"conv1d", "embed_tokens", "lm_head", "in_proj_a", "in_proj_b"},
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", NAMES)
def test_exclusions(tiny_checkpoint, quantized, name, recipe):
    checkpoint = Checkpoint.open(quantized(name, recipe)[0])
    matrices = {
        key.removesuffix(".weight")
        for key in checkpoint.names
        if key.endswith(".weight") and len(checkpoint.shape(key)) > 1 and not key.startswith("mtp.")
    }
    dense = matrices - set(checkpoint.formats)
    assert {module.rsplit(".", 1)[-1] for module in dense} == DENSE[name]
    assert all(module.startswith("layers.") for module in checkpoint.formats)


@pytest.mark.parametrize("name", NAMES)
def test_draft_head_is_carried_over(tiny_checkpoint, quantized, name):
    """transformers drops `mtp.*`; the output has it unquantized."""
    source, output = Checkpoint.open(tiny_checkpoint(name)), Checkpoint.open(quantized(name, "nvfp4")[0])
    assert output.config.mtp is not None
    assert output.config.mtp == source.config.mtp
    head = [key for key in source.names if key.startswith("mtp.")]
    assert head == [key for key in output.names if key.startswith("mtp.")]
    for key in head:
        assert same_bytes(output.tensor(key), source.tensor(key)), key


def test_activation_scales_follow_the_calibration_data(tiny_checkpoint, quantized, tmp_path):
    """Other tokens change input scales and nothing else."""
    data = tmp_path / "other.jsonl"
    data.write_text("\n".join(json.dumps({"token_ids": [(7 * i + j) % 500 for j in range(40)]}) for i in range(3)))
    quantize_checkpoint(tiny_checkpoint("super"), tmp_path / "out", options("nvfp4", calibration=data))
    ours, before = tensors_of(tmp_path / "out"), tensors_of(quantized("super", "nvfp4")[0])
    changed = {key for key in ours if not same_bytes(ours[key], before[key])}
    assert changed
    assert all(key.endswith(".input_scale") for key in changed)


def test_weights_are_quantized_from_bf16(tiny_checkpoint, tmp_path):
    """A checkpoint in fp32 gives what its bf16 rounding gives, and keeps its small weights in fp32."""
    source, rounded = tiny_checkpoint("super", dtype="float32"), tmp_path / "rounded"
    shutil.copytree(source, rounded)
    tensors = {key: tensor.bfloat16() for key, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, rounded / "model.safetensors")
    outputs = []
    for directory in (source, rounded):
        outputs.append(tmp_path / f"out{len(outputs)}")
        quantize_checkpoint(directory, outputs[-1], options("nvfp4"))
    first, second = map(tensors_of, outputs)
    kept = {key for key in first if first[key].dtype != second[key].dtype}
    assert {key.rsplit(".", 1)[-1] for key in kept} == {"A_log", "D", "dt_bias", "e_score_correction_bias", "weight"}
    assert {key for key in kept if key.endswith(".weight")} == {
        f"backbone.layers.{index}.mixer.gate.weight" for index in (1, 4)
    } | {"mtp.layers.1.mixer.gate.weight"}
    # The fp32 router may route a token elsewhere, which moves ranges of activations, but never of weights.
    same = [key for key in first if key not in kept and not key.endswith(".input_scale")]
    assert all(same_bytes(first[key], second[key]) for key in same)
    assert json.loads((outputs[0] / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("recipe", RECIPES)
def test_shards_do_not_matter(tiny_checkpoint, quantized, tmp_path, recipe):
    source = tiny_checkpoint("super", max_shard_bytes=400_000)
    quantize_checkpoint(source, tmp_path / "out", options(recipe, max_shard_bytes=200_000))
    ours, single = tensors_of(tmp_path / "out"), tensors_of(quantized("super", recipe)[0])
    assert ours.keys() == single.keys()
    assert all(same_bytes(ours[key], single[key]) for key in ours)
    index = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    assert index["weight_map"].keys() == ours.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in ours.values())
    assert len(list((tmp_path / "out").glob("model-*-of-*.safetensors"))) > 3


def test_fused_experts_give_separate_ones(tiny_checkpoint, quantized, tmp_path):
    source = tmp_path / "fused"
    shutil.copytree(tiny_checkpoint("qwen_moe"), source)
    tensors = load_file(source / "model.safetensors")
    for layer in {key.split(".experts.")[0] for key in tensors if ".experts." in key}:
        parts = {
            name: torch.stack([tensors.pop(f"{layer}.experts.{i}.{name}.weight") for i in range(8)])
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{layer}.experts.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], 1)
        tensors[f"{layer}.experts.down_proj"] = parts["down_proj"]
    save_file(tensors, source / "model.safetensors")
    quantize_checkpoint(source, tmp_path / "out", options("nvfp4"))
    ours, separate = tensors_of(tmp_path / "out"), tensors_of(quantized("qwen_moe", "nvfp4")[0])
    assert ours.keys() == separate.keys()
    assert all(same_bytes(ours[key], separate[key]) for key in ours)


def test_other_files_are_copied_and_code_is_not(tiny_checkpoint, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(tiny_checkpoint("qwen"), source)
    for name in ("generation_config.json", "tokenizer_config.json"):
        (source / name).write_text('{"eos_token_id": 2}')
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "README.md").write_text("bf16 weights, 99 %")
    (source / "modeling_own.py").write_text("raise SystemExit")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_own.Model"}
    (source / "config.json").write_text(json.dumps(config))
    quantize_checkpoint(source, tmp_path / "out", options("fp8"))
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "config.json",
        "hf_quant_config.json",
        "replayssm.json",
        "model.safetensors",
        "tokenizer.json",
        "README.md",
        "ORIGINAL_README.md",
        "generation_config.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "modules fp8" in card
    assert "99 %" not in card
    assert (tmp_path / "out" / "ORIGINAL_README.md").read_text() == "bf16 weights, 99 %"


def test_vision_tower_is_copied(tiny_checkpoint, quantized, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(tiny_checkpoint("qwen_vl"), source)
    tensors = load_file(source / "model.safetensors")
    tower = {"model.visual.blocks.0.proj.weight": torch.randn(8, 24), "model.visual.bias": torch.ones(3).half()}
    save_file({**tensors, **tower}, source / "model.safetensors")
    quantize_checkpoint(source, tmp_path / "out", options("nvfp4-w4a16"))
    ours = tensors_of(tmp_path / "out")
    assert all(same_bytes(ours[key], tensor) for key, tensor in tower.items())
    assert len(ours) == len(tensors_of(quantized("qwen_vl", "nvfp4-w4a16")[0])) + 2


def test_progress_names_stages_and_counts_layers(tiny_checkpoint, tmp_path):
    seen = []
    quantize_checkpoint(tiny_checkpoint("nano"), tmp_path / "out", options("fp8"), lambda *step: seen.append(step))
    layers = [(done, total) for what, done, total in seen if what == "Calibrating and quantizing layers"]
    assert layers == [(index, 6) for index in range(6)]
    assert [what for what, _, _ in seen if "layers" not in what] == [
        "Reading checkpoint",
        "Copying unquantized weights",
        "Checking output",
    ]


@pytest.mark.parametrize("name", ["super", "qwen_moe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_layers_run_on_file_backed_weights(tiny_checkpoint, tmp_path, name, dtype):
    """Every matrix lies in a mapping of a file, the checkpoint's or a scratch file: the kernel can drop its pages."""
    source = tiny_checkpoint(name, dtype=dtype)
    layers = LayerModels(Checkpoint.open(source), tmp_path)
    layer = layers.checkpoint.config.layers[1]
    with layers.loaded(layer) as model:
        mappings = []
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            start, end = (int(part, 16) for part in fields[0].split("-"))
            mappings.append((start, end, fields[5] if len(fields) == 6 else ""))
        files = set()
        for parameter_name, parameter in model.named_parameters():
            address = parameter.data_ptr()
            file = next(path for start, end, path in mappings if start <= address < end)
            assert file.startswith((str(source), str(tmp_path))), parameter_name
            files.add(Path(file).parent == source)
        assert True in files or dtype == "float32"
        assert False in files
    assert list(tmp_path.iterdir()) == []


def test_each_layers_weights_are_gone_before_it_is_written(tiny_checkpoint, tmp_path, monkeypatch):
    """Otherwise scratch files of two layers would fill the disk, and their mappings the address space."""
    mapped = []
    original = quantized_output.QuantizedOutput.write_layer

    def write_layer(self, layer, input_amax):
        mapped.extend(line for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line)
        original(self, layer, input_amax)

    monkeypatch.setattr(quantized_output.QuantizedOutput, "write_layer", write_layer)
    quantize_checkpoint(tiny_checkpoint("super"), tmp_path / "out", options("nvfp4"))
    assert mapped == []


def assert_refused(source: Path, output: Path, message: str, chosen: QuantizeOptions | None = None) -> None:
    """One clear error, and nothing beside what was there."""
    before = sorted(output.parent.iterdir()) if output.parent.exists() else []
    with pytest.raises(ValueError, match=message) as caught:
        quantize_checkpoint(source, output, chosen or options("nvfp4"))
    assert "\n" not in str(caught.value)
    assert (sorted(output.parent.iterdir()) if output.parent.exists() else []) == before


def test_existing_output(tiny_checkpoint, quantized, tmp_path):
    source = tiny_checkpoint("nano")
    output = tmp_path / "out"
    quantize_checkpoint(source, output, options("fp8"))
    content = (output / "model.safetensors").read_bytes()
    assert_refused(source, output, "out exists: choose another, or replace it with --overwrite", options("nvfp4"))
    assert (output / "model.safetensors").read_bytes() == content
    quantize_checkpoint(source, output, options("nvfp4", overwrite=True))
    assert Checkpoint.open(output).config.formats.default == "nvfp4"
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    assert_refused(source, other, "holds other files, which are never overwritten", options("nvfp4", overwrite=True))


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_overwrite_replaces_only_what_quantize_wrote(tiny_checkpoint, tmp_path):
    """Neither another checkpoint, quantized or not, nor a directory that merely looks like one, nor a file beside."""
    source, again = tiny_checkpoint("nano"), options("nvfp4-w4a16", overwrite=True)
    shutil.copytree(tiny_checkpoint("qwen"), tmp_path / "original")
    (tmp_path / "looks").mkdir()
    for name in ("config.json", "hf_quant_config.json", "replayssm.json"):
        (tmp_path / "looks" / name).write_text("{}")
    for name in ("original", "looks"):
        before = contents(tmp_path / name)
        assert_refused(source, tmp_path / name, "holds other files, which are never overwritten", again)
        assert contents(tmp_path / name) == before
    output = tmp_path / "out"
    quantize_checkpoint(source, output, again)
    (output / "thesis.txt").write_text("years of work")
    before = contents(output)
    assert_refused(source, output, "holds 'thesis.txt', which replayssm did not write", again)
    assert contents(output) == before
    (output / "thesis.txt").unlink()
    (output / "model.safetensors").unlink()
    quantize_checkpoint(source, output, again)
    assert Checkpoint.open(output).config.formats.default == "w4a16_nvfp4"


def test_output_around_the_checkpoint(tiny_checkpoint, tmp_path):
    source = tmp_path / "models" / "nano"
    shutil.copytree(tiny_checkpoint("nano"), source)
    (tmp_path / "models" / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "models")
    before = contents(tmp_path)
    for output in (source, tmp_path / "models", tmp_path / "link"):
        assert_refused(source, output, "holds the checkpoint", options("nvfp4-w4a16", overwrite=True))
    assert contents(tmp_path) == before


def test_unusable_sources(quantized, tmp_path):
    assert_refused(quantized("nano", "fp8")[0], tmp_path / "out", "already quantized; give the original checkpoint")
    assert_refused(tmp_path / "missing", tmp_path / "out", "no such directory")


def test_width_that_does_not_fit(tmp_path):
    config = {**TINY_CONFIGS["qwen"], "intermediate_size": 200}
    source = write_random_checkpoint(config, tmp_path / "source")
    message = r"layers\.0\.mlp\.down_proj.*blocks of 16.*\(128, 200\).*--recipe fp8"
    assert_refused(source, tmp_path / "out", message, options("nvfp4-w4a16"))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_damaged_weights(tiny_checkpoint, tmp_path, recipe, bad):
    """Every weight is named, whether it is quantized or copied."""
    quantized_key = "backbone.layers.1.mixer.up_proj.weight"
    copied = ("lm_head.weight", "backbone.embeddings.weight", "backbone.layers.0.mixer.A_log",
              "backbone.layers.1.norm.weight", "mtp.layers.0.enorm.weight")  # fmt: skip
    for key in (quantized_key, *copied):
        message = rf"model\.safetensors: tensor '{re.escape(key)}' holds NaN or infinity"
        if key == quantized_key:
            message = r"layers\.1\.mixer\.up_proj\.weight: the weight holds NaN or inf"
        source = tmp_path / key
        shutil.copytree(tiny_checkpoint("nano"), source)
        tensors = {name: tensor.clone() for name, tensor in load_file(source / "model.safetensors").items()}
        tensors[key].view(-1)[5] = bad
        save_file(tensors, source / "model.safetensors")
        assert_refused(source, tmp_path / "out", message, options(recipe))


def test_full_disk(tiny_checkpoint, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=10**5)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert_refused(tiny_checkpoint("nano"), tmp_path / "out", r"0\.0 GB free, expected the output's")


def test_missing_modelopt(tiny_checkpoint, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "modelopt.torch.quantization", None)
    message = r"modelopt\.torch\.quantization is not installed; pip install '\.\[quantize\]' in the project's folder"
    assert_refused(tiny_checkpoint("nano"), tmp_path / "out", message)


def test_bad_options():
    with pytest.raises(ValueError, match="recipe is 'int4', expected one of nvfp4, nvfp4-w4a16, fp8"):
        QuantizeOptions("int4")
    with pytest.raises(ValueError, match="calibration_samples is 0, expected at least 1"):
        QuantizeOptions(calibration_samples=0)


def test_failure_leaves_nothing(tiny_checkpoint, tmp_path, monkeypatch):
    def fail(self):
        raise OSError("no space left")

    monkeypatch.setattr(quantized_output.QuantizedOutput, "write_rest", fail)
    with pytest.raises(OSError, match="no space"):
        quantize_checkpoint(tiny_checkpoint("nano"), tmp_path / "out", options("nvfp4-w4a16"))
    assert list(tmp_path.iterdir()) == []


_STOP_BEFORE_THE_END = """
import sys, time
from replayssm.builders import quantize, quantized_output

def wait(self):
    print("waiting", file=sys.__stdout__, flush=True)
    time.sleep(600)

quantized_output.QuantizedOutput.write_rest = wait
quantize.quantize_checkpoint(sys.argv[1], sys.argv[2], quantize.QuantizeOptions("nvfp4-w4a16"))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_run_leaves_no_output(tiny_checkpoint, tmp_path, number):
    source, output = tiny_checkpoint("nano"), tmp_path / "out"
    command = [sys.executable, "-c", _STOP_BEFORE_THE_END, str(source), str(output)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert errors == "", "nothing is printed by modelopt, transformers or the signal's end"
    assert not output.exists()
    if number == signal.SIGTERM:
        assert list(tmp_path.iterdir()) == []
    quantize_checkpoint(source, output, options("nvfp4-w4a16"))
    assert list(tmp_path.iterdir()) == [output], "the next run removes what a killed one left"


def test_tokenizer_is_needed_for_text_only(tiny_checkpoint, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(tiny_checkpoint("nano"), source)
    (source / "tokenizer.json").unlink()
    data = tmp_path / "data.jsonl"
    data.write_text('{"token_ids": [1, 2, 3, 4]}')
    assert_refused(source, tmp_path / "out", r"tokenizer\.json: no such file, but calibration text needs the tokenizer")
    quantize_checkpoint(source, tmp_path / "out", options("fp8", calibration=data))
    assert quantize_checkpoint(source, tmp_path / "weights", options("nvfp4-w4a16")).calibration_tokens == 0
    (source / "tokenizer.json").write_text("{}")
    assert_refused(source, tmp_path / "other", "not a tokenizer file")
