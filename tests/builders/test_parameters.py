"""Weights by module format, and how each is obtained from checkpoint tensors."""

from __future__ import annotations

import pytest
import torch

from replayssm.builders import nvfp4
from replayssm.builders.functional import Graph
from replayssm.builders.parameters import Parameters, WeightRecipe


def parameters(formats, dtype="bfloat16") -> Parameters:
    return Parameters(Graph("test", dtype), formats if callable(formats) else lambda module: formats, {})


STORED = {
    "dense": {"weight": ("bfloat16", (32, 64))},
    "nvfp4": {
        "weight": ("uint8", (32, 32)),
        "weight_scale": ("float8_e4m3fn", (32, 4)),
        "weight_scale_2": ("float32", ()),
        "input_scale": ("float32", ()),
    },
    "w4a16_nvfp4": {
        "weight": ("uint8", (32, 32)),
        "weight_scale": ("float8_e4m3fn", (32, 4)),
        "weight_scale_2": ("float32", ()),
    },
    "fp8": {"weight": ("float8_e4m3fn", (32, 64)), "weight_scale": ("float32", ()), "input_scale": ("float32", ())},
}
ATTRIBUTES = {
    "dense": {"format": "dense", "activations": None},
    "nvfp4": {"format": "nvfp4", "activations": "nvfp4"},
    "w4a16_nvfp4": {"format": "nvfp4", "activations": None},
    "fp8": {"format": "fp8", "activations": "fp8"},
}


@pytest.mark.parametrize("name", STORED)
def test_stored_tensors_of_a_format(name):
    p = parameters(name) / "layers.0."
    projection = p.linear("up_proj", 32, 64)
    assert projection.attributes == ATTRIBUTES[name]
    stored = {key: (recipe.dtype, recipe.shape) for key, recipe in p.plan.items()}
    assert stored == {f"layers.0.up_proj.{suffix}": spec for suffix, spec in STORED[name].items()}
    assert [value.name for value in projection.values(p.graph)] == list(stored)
    assert all(recipe.sources == (key,) for key, recipe in p.plan.items())

    p = parameters(name) / "mixer"
    p.experts("up_proj", 3, 32, 64)
    stacked = {key: (recipe.dtype, recipe.shape) for key, recipe in p.plan.items()}
    expected = {suffix: (dtype, (3, *shape)) for suffix, (dtype, shape) in STORED[name].items()}
    assert stacked == {f"mixer.experts.up_proj.{suffix}": spec for suffix, spec in expected.items()}
    assert p.plan["mixer.experts.up_proj.weight"].sources == tuple(
        f"mixer.experts.{index}.up_proj.weight" for index in range(3)
    )


@pytest.mark.parametrize("name", STORED)
def test_stacking_gives_the_experts_bytes(name):
    """Pieces are streamed in order: their bytes, one after the other, are the stacked weight's."""
    sources = {}
    for index in range(3):
        dense = torch.randn(32, 64, generator=torch.Generator().manual_seed(index))
        if name == "dense":
            sources[f"experts.{index}.up.weight"] = dense.to(torch.bfloat16)
            continue
        quantized = nvfp4.quantize_fp8(dense) if name == "fp8" else nvfp4.quantize(dense)
        for suffix, tensor in quantized._asdict().items():
            sources[f"experts.{index}.up.{suffix}"] = tensor
        sources[f"experts.{index}.up.input_scale"] = torch.tensor(0.5 + index)
    p = parameters(name)
    p.experts("up", 3, 32, 64)
    for key, recipe in p.plan.items():
        loaded = recipe.load(sources.__getitem__)
        assert (tuple(loaded.shape), str(loaded.dtype)) == (recipe.shape, f"torch.{recipe.dtype}")
        for index, source in enumerate(recipe.sources):
            assert torch.equal(loaded[index].float(), sources[source].float()), key
        pieces = b"".join(piece.view(-1).view(torch.uint8).numpy().tobytes() for piece in recipe.pieces(sources.get))
        assert pieces == loaded.view(-1).view(torch.uint8).numpy().tobytes()
        assert len(pieces) == recipe.nbytes


def test_small_weights_stay_fp32_and_others_take_the_activation_dtype():
    p = parameters("dense")
    p.scalars("norm.weight", 8)
    p.tensor("conv1d.weight", 8, 4)
    p.linear("gate", 4, 8, float32=True)
    p.linear("up", 4, 8)
    dtypes = {name: recipe.dtype for name, recipe in p.plan.items()}
    expected = {"norm.weight": "float32", "gate.weight": "float32"}
    assert dtypes == expected | {"conv1d.weight": "bfloat16", "up.weight": "bfloat16"}
    assert {recipe.dtype for recipe in _plan("float64").values()} == {"float64"}


def _plan(dtype: str) -> dict[str, WeightRecipe]:
    p = parameters("dense", dtype)
    p.scalars("norm.weight", 8)
    p.linear("gate", 4, 8, float32=True)
    return p.plan


def test_a_weight_is_converted_and_squeezed():
    recipe = WeightRecipe(("conv",), "bfloat16", (6, 4))
    source = torch.randn(6, 1, 4)
    assert torch.equal(recipe.load(lambda name: source), source[:, 0].to(torch.bfloat16))


@pytest.mark.parametrize(
    ("dtype", "found", "message"),
    [
        ("bfloat16", torch.zeros(4, 2, dtype=torch.uint8), "is uint8, but its module's format needs bfloat16"),
        ("uint8", torch.zeros(4, 2), "is float32, but its module's format needs uint8"),
        ("float8_e4m3fn", torch.zeros(4, 2, dtype=torch.bfloat16), "is bfloat16, but .* needs float8_e4m3fn"),
        ("bfloat16", torch.zeros(4, 2, dtype=torch.int32), "is int32"),
        ("bfloat16", torch.zeros(4, 3), r"has shape \[4, 3\], expected \[4, 2\]"),
        ("bfloat16", torch.zeros(2, 4), r"has shape \[2, 4\], expected \[4, 2\]"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused(dtype, found, message):
    with pytest.raises(ValueError, match=f"'up.weight' {message}"):
        WeightRecipe(("up.weight",), dtype, (4, 2)).load(lambda name: found)


def test_shared_weights_are_one():
    p = parameters("dense")
    first, again = p.linear("head", 10, 16), p.linear("head", 10, 16)
    assert first == again
    assert len(p.plan) == len(p.graph.network.weights) == 1
    with pytest.raises(ValueError, match=r"'head.weight' is asked for as"):
        p.linear("head", 10, 32)


def test_formats_that_cannot_be_are_refused():
    mixed = parameters(lambda module: "fp8" if ".1." in module else "dense")
    with pytest.raises(ValueError, match=r"experts of 'experts.up' have different formats"):
        mixed.experts("up", 3, 32, 64)
    with pytest.raises(ValueError, match="module 'up' has format 'int4'; expected one of dense, nvfp4"):
        parameters("int4").linear("up", 32, 64)
    with pytest.raises(ValueError, match=r"module 'up': .*16"):
        parameters("nvfp4").linear("up", 32, 60)
