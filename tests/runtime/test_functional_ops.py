"""Each functional operator against its formula, written out over single tokens and heads.

Compared within torch's own tolerances: 1e-7 in fp64, 1.3e-6 in fp32, for sums over at most 32 elements.
"""

from __future__ import annotations

import math

import pytest
import torch

from replayssm.plugins import nvfp4
from replayssm.runtime import functional_ops as ops

DOUBLE = {"dtype": torch.float64}


def rms(values: torch.Tensor, eps: float) -> torch.Tensor:
    return values / math.sqrt(float(values.pow(2).sum()) / len(values) + eps)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm(zero_centered):
    x, weight = torch.randn(3, 8, **DOUBLE), torch.randn(8, **DOUBLE)
    expected = torch.stack([rms(row, 1e-3) * (weight + zero_centered) for row in x])
    torch.testing.assert_close(ops.rms_norm(x, weight, eps=1e-3, zero_centered=zero_centered), expected)


@pytest.mark.parametrize("shared", [False, True], ids=["whole weight", "shared weight"])
@pytest.mark.parametrize("gate_first", [False, True])
def test_gated_rms_norm(gate_first, shared):
    x, z = torch.randn(3, 12, **DOUBLE), torch.randn(3, 12, **DOUBLE)
    weight = torch.randn(4 if shared else 12, **DOUBLE)
    gate = z / (1 + torch.exp(-z))
    expected = torch.empty_like(x)
    for token in range(3):
        for group in range(3):
            part = slice(4 * group, 4 * group + 4)
            scale = weight if shared else weight[part]
            values = x[token, part] * (gate[token, part] if gate_first else 1)
            expected[token, part] = rms(values, 1e-3) * scale * (1 if gate_first else gate[token, part])
    output = ops.gated_rms_norm(x, z, weight, eps=1e-3, group_size=4, gate_first=gate_first)
    torch.testing.assert_close(output, expected)


def test_norms_round_bfloat16_once():
    """Inside, everything is fp32: the result is the fp32 result, rounded."""
    x, z, weight = torch.randn(64, 32).bfloat16(), torch.randn(64, 32).bfloat16(), torch.randn(32)
    wide = ops.rms_norm(x.float(), weight, eps=1e-5, zero_centered=True)
    assert torch.equal(ops.rms_norm(x, weight, eps=1e-5, zero_centered=True), wide.bfloat16())
    options = {"eps": 1e-5, "group_size": 16, "gate_first": False}
    wide = ops.gated_rms_norm(x.float(), z.float(), weight, **options)
    assert torch.equal(ops.gated_rms_norm(x, z, weight, **options), wide.bfloat16())


def test_rope():
    """Entry i of the first half and of the second are a complex number that turns by position * theta^(-2 i / dim)."""
    x, positions = torch.randn(4, 2, 10, **DOUBLE), torch.tensor([0, 1, 7, 300], dtype=torch.int32)
    output = ops.rope(x, positions, theta=100.0, dim=6)
    for token, position in enumerate(positions.tolist()):
        for i in range(3):
            angle = position * 100.0 ** (-2 * i / 6)
            turned = torch.complex(x[token, :, i], x[token, :, i + 3]) * complex(math.cos(angle), math.sin(angle))
            # The frequency is an fp32 number: 2^-24 of an angle up to 300.
            torch.testing.assert_close(output[token, :, i], turned.real, rtol=0, atol=1e-4)
            torch.testing.assert_close(output[token, :, i + 3], turned.imag, rtol=0, atol=1e-4)
    assert torch.equal(output[..., 6:], x[..., 6:])


@pytest.mark.parametrize("normalize", [False, True])
def test_route_sigmoid(normalize):
    """The bias decides who is chosen, never with what weight."""
    logits, bias = torch.randn(5, 6), 3 * torch.randn(6)
    ids, weights = ops.route_sigmoid(logits, bias, top_k=2, scaling=2.5, normalize=normalize)
    for token in range(5):
        scores = 1 / (1 + torch.exp(-logits[token]))
        chosen = sorted(range(6), key=lambda e: -float(scores[e] + bias[e]))[:2]
        assert set(ids[token].tolist()) == set(chosen)
        total = float(sum(scores[e] for e in chosen)) if normalize else 1.0
        for expert, weight in zip(ids[token].tolist(), weights[token].tolist(), strict=True):
            assert weight == pytest.approx(2.5 * float(scores[expert]) / total, rel=1e-6)


def test_route_softmax():
    logits = torch.randn(5, 6)
    ids, weights = ops.route_softmax(logits.bfloat16(), top_k=3)
    assert weights.dtype == torch.float32
    for token in range(5):
        values = logits[token].bfloat16().float()
        chosen = values.argsort(descending=True)[:3]
        assert ids[token].tolist() == chosen.tolist()
        torch.testing.assert_close(weights[token], values[chosen].softmax(-1))


DENSE = {"format": "dense", "activations": None}
FORMATS = {
    "dense": DENSE,
    "nvfp4": {"format": "nvfp4", "activations": "nvfp4"},
    "w4a16": {"format": "nvfp4", "activations": None},
    "fp8": {"format": "fp8", "activations": "fp8"},
}


def stored(shape: tuple[int, ...], attributes: dict) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Random tensors of a projection in a format, and the dense weight that they mean."""
    experts = shape[:-2]
    if attributes["format"] == "dense":
        weight = torch.randn(shape)
        return [weight], weight
    scale_2 = torch.rand(experts) + 0.5
    if attributes["format"] == "fp8":
        weight = torch.randn(shape).to(torch.float8_e4m3fn)
        tensors, dense = [weight, scale_2], weight.float() * scale_2.reshape(*experts, 1, 1)
    else:
        codes = torch.randint(0, 16, shape, dtype=torch.uint8)
        scale = (torch.rand(*shape[:-1], shape[-1] // 16) + 0.1).to(torch.float8_e4m3fn)
        packed = codes[..., 0::2] | codes[..., 1::2] << 4
        magnitude = torch.tensor(nvfp4.E2M1_VALUES)[(codes & 7).long()] * (1 - 2 * (codes >> 3).float())
        dense = magnitude * (scale.float() * scale_2.reshape(*experts, 1, 1)).repeat_interleave(16, -1)
        tensors = [packed, scale, scale_2]
    return [*tensors, torch.rand(experts) * 0.01 + 0.01] if attributes["activations"] else tensors, dense


@pytest.mark.parametrize("name", FORMATS)
def test_linear(name):
    tensors, dense = stored((8, 32), FORMATS[name])
    x = torch.randn(3, 32)
    output = ops.linear(x, *tensors, **FORMATS[name], output_dtype=torch.float32)
    torch.testing.assert_close(output, x @ dense.T)
    assert ops.linear(x.bfloat16(), *tensors, **FORMATS[name], output_dtype=torch.float32).dtype == torch.float32


@pytest.mark.parametrize("name", ["nvfp4", "fp8"])
def test_linear_emulates_the_rounding_of_activations(name):
    tensors, dense = stored((8, 32), FORMATS[name])
    x = torch.randn(3, 32)
    output = ops.linear(x, *tensors, **FORMATS[name], output_dtype=torch.float32, emulate=True)
    rounded = (nvfp4.round_to_nvfp4 if name == "nvfp4" else nvfp4.round_to_fp8)(x, tensors[-1])
    assert not torch.equal(rounded, x)
    torch.testing.assert_close(output, rounded @ dense.T)


def test_rounding_of_activations():
    """NVFP4: within half a step of e2m1 at its largest value (1/6 of it); FP8: within 2^-4, and saturating."""
    x = torch.randn(7, 48)
    scale = x.abs().max() / (6 * 448)
    rounded = nvfp4.round_to_nvfp4(x, scale)
    blocks, error = x.unflatten(-1, (3, 16)), (rounded - x).unflatten(-1, (3, 16))
    assert (error.abs() <= blocks.abs().amax(-1, keepdim=True) / 6 * 1.1).all()
    assert not torch.equal(rounded, x)
    assert torch.equal(nvfp4.round_to_nvfp4(rounded, scale), rounded)
    assert not nvfp4.round_to_nvfp4(torch.zeros(2, 16), scale).any()
    rounded = nvfp4.round_to_fp8(x, torch.tensor(0.01))
    within = x.abs() <= 4.48
    assert ((rounded - x).abs() <= x.abs() * 2**-4 + 0.01 * 2**-10)[within].all()
    assert nvfp4.round_to_fp8(torch.tensor([9.0]), torch.tensor(0.01)).item() == pytest.approx(4.48)


@pytest.mark.parametrize("at_a_time", [1, 100, 10**6])
@pytest.mark.parametrize("shape", [(24, 32), (3, 24, 32)])
@pytest.mark.parametrize("name", ["nvfp4", "w4a16", "fp8"])
def test_unpacking_in_pieces_gives_the_same_bits(monkeypatch, name, shape, at_a_time):
    monkeypatch.setattr(ops, "UNPACKED_AT_A_TIME", at_a_time)
    (weight, *scales), dense = stored(shape, FORMATS[name])
    unpacked = ops.unpack(weight, scales, FORMATS[name]["format"], torch.bfloat16)
    assert torch.equal(unpacked, ops.dequantize(weight, scales, FORMATS[name]["format"], torch.bfloat16))
    assert torch.equal(unpacked, dense.bfloat16())


@pytest.mark.parametrize("name", ["dense", "w4a16"])
def test_embedding(name):
    tensors, dense = stored((10, 32), FORMATS[name])
    ids = torch.tensor([3, 0, 3, 9])
    assert torch.equal(ops.embedding(ids, *tensors, **FORMATS[name], dtype=torch.float32), dense[ids])


ACTIVATIONS = {"squared_relu": 2, "swiglu": 3}


def moe_case(activation: str, format: str, tokens: int = 9, experts: int = 6, top_k: int = 2):
    """(x, ids, weights, tensors, attributes, expected); expert 4 is never chosen and holds NaN where it can."""
    x = torch.randn(tokens, 32)
    ids = torch.stack([torch.randperm(experts - 1)[:top_k] for _ in range(tokens)])
    ids = torch.where(ids == 4, 5, ids)
    weights = torch.rand(tokens, top_k)
    shapes = [(experts, 16, 32)] * (ACTIVATIONS[activation] - 1) + [(experts, 32, 16)]
    parts = [stored(shape, FORMATS[format]) for shape in shapes]
    expected = torch.zeros(tokens, 32)
    for token in range(tokens):
        for expert, weight in zip(ids[token].tolist(), weights[token], strict=True):
            first, *up = (x[token] @ dense[expert].T for _, dense in parts[:-1])
            hidden = first.clamp(min=0) ** 2 if not up else first * first.sigmoid() * up[0]
            expected[token] += weight * (hidden @ parts[-1][1][expert].T)
    for tensors, _ in parts:
        for tensor in tensors:
            if tensor.dtype == torch.float32:
                tensor[4] = torch.nan
    tensors = [tensor for part, _ in parts for tensor in part]
    return x, ids, weights, tensors, {"activation": activation, "projections": [FORMATS[format]] * len(parts)}, expected


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_moe(activation, format):
    """Sums of 32 products of numbers of order 10: fp32 rounding stays below 1e-5 relative to the largest."""
    x, ids, weights, tensors, attributes, expected = moe_case(activation, format)
    output = ops.moe(x, ids, weights, *tensors, **attributes)
    assert (output - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("pairs_at_a_time", [1, 5, 1000])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_moe_without_waiting_for_the_device(monkeypatch, activation, format, pairs_at_a_time, emulate):
    """The path for CUDA, run here on the CPU, equals the loop over experts."""
    x, ids, weights, tensors, attributes, _ = moe_case(activation, format)
    experts = ops._Experts(tensors, attributes["projections"], activation, emulate)
    monkeypatch.setattr(ops, "GATHERED_EXPERT_BYTES", pairs_at_a_time * experts.dense_bytes)
    gathered = ops._experts_gathered(x, ids, weights, experts)
    in_turn = ops._experts_in_turn(x, ids, weights, experts)
    assert (gathered - in_turn).abs().max() < 1e-5 * in_turn.abs().max()


@pytest.mark.parametrize("path", ["_experts_in_turn", "_experts_gathered"])
def test_a_tokens_sum_does_not_depend_on_its_batch(path):
    """With experts whose products are elementwise, and so exact in any batch, the sums are bit-equal."""

    class Scaling:
        dense_bytes = 1
        factors = torch.randn(7)

        def __call__(self, x, expert):
            factor = self.factors[expert]
            return x * (factor if factor.dim() == 0 else factor[:, None, None])

    x, weights = torch.randn(40, 8), torch.randn(40, 5)
    ids = torch.stack([torch.randperm(7)[:5] for _ in range(40)])
    together = getattr(ops, path)(x, ids, weights, Scaling())
    for token in range(40):
        own = slice(token, token + 1)
        assert torch.equal(getattr(ops, path)(x[own], ids[own], weights[own], Scaling()), together[own])


def test_moe_of_no_tokens():
    x, ids, weights, tensors, attributes, _ = moe_case("swiglu", "dense")
    assert ops.moe(x[:0], ids[:0], weights[:0], *tensors, **attributes).shape == (0, 32)


def test_small_operators():
    x, y = torch.randn(3, 4), torch.randn(3, 1)
    assert torch.equal(ops.OPERATORS["multiply"](x, y), x * y)
    assert torch.equal(ops.squared_relu(x), x.clamp(min=0) ** 2)
    assert [part.shape[1] for part in ops.split(x, sizes=[1, 3])] == [1, 3]
    assert torch.equal(ops.concat(*ops.split(x, sizes=[1, 3])), x)
    assert ops.reshape(x, shape=["T", 2, 2]).shape == (3, 2, 2)
    assert torch.equal(ops.gather(x, torch.tensor([2, 0])), x[[2, 0]])
