"""Quantized checkpoints of all recipes against transformers with their dequantized weights."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from replayssm.builders.checkpoint import Checkpoint
from replayssm.builders.formats import canonical_name
from replayssm.builders.models import build_networks
from replayssm.builders.quantize import QuantizeOptions, quantize_checkpoint

LAYOUTS = ("nano", "super", "qwen", "qwen_moe", "qwen_vl")
OPERANDS = {"nvfp4": ("nvfp4", "nvfp4"), "nvfp4-w4a16": ("nvfp4", None), "fp8": ("fp8", "fp8")}
PROMPT, LENGTH = 30, 45


def dequantized(quantized: Checkpoint):
    """Replaces parameters of transformers' model, experts of which are fused, by the quantized checkpoint's values."""

    def transform(name: str, parameter: torch.Tensor) -> torch.Tensor:
        module = canonical_name(name).removesuffix(".weight")
        if ".experts." in module:
            layer, projection = module.split(".experts.")
            names = ["gate_proj", "up_proj"] if projection == "gate_up_proj" else [projection]
            experts = range(len(parameter))
            modules = [[f"{layer}.experts.{e}.{name}" for name in names] for e in experts]
            return torch.stack([torch.cat([quantized.dequantized(m) for m in group]) for group in modules])
        if module in quantized.formats:
            return quantized.dequantized(module)
        # Dense tensors too: modelopt rounds what the original keeps in fp32.
        return quantized.tensor(canonical_name(name)) if canonical_name(name) in quantized else parameter

    return transform


@pytest.mark.parametrize("recipe", OPERANDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_float32_agrees_with_dequantized_weights(tiny_checkpoint, make_oracle, tiny_model_of, tmp_path, name, recipe):
    """2e-5 as for unquantized weights: both sides multiply the same fp32 numbers."""
    directory = tmp_path / "quantized"
    source = tiny_checkpoint(name)
    quantize_checkpoint(source, directory, QuantizeOptions(recipe, calibration_samples=2, calibration_length=32))
    model = tiny_model_of(directory)
    ids = torch.randint(3, model.config.vocab_size, (1, LENGTH), generator=torch.Generator().manual_seed(2))
    expected = make_oracle(source, dequantized(model.checkpoint)).logits(ids)[0]

    driver = model.driver("float32", u_format="exact", buffer_len=8)
    outputs = [driver.run([(3, 0, ids[0, :PROMPT])])[0]["logits"]]
    outputs += [driver.run([(3, p, ids[0, p : p + 1])])[0]["logits"] for p in range(PROMPT, LENGTH)]
    assert (torch.cat(outputs).double() - expected).abs().max() < 2e-5

    networks = build_networks(model.config, model.checkpoint.module_format, "float32")
    operands = Counter(
        (operand["format"], operand["activations"])
        for node in networks.main.nodes
        if node.op in ("linear", "moe")
        for operand in node.attributes.get("projections", [node.attributes])
    )
    assert set(operands) == {OPERANDS[recipe], ("dense", None)}
    assert operands[OPERANDS[recipe]] > operands["dense", None] / 2
