"""Products with packed weights and mixtures of experts: emulated on the host and, where there is one, on a GPU.

The judge is fp64 over the dequantized weights; tolerances are those of packed_products.assert_close.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from replayssm.plugins import nvrtc, packed_weights, weight_only
from replayssm.plugins.packed_weights import Weight
from replayssm.plugins.weight_only import Form

sys.path.append(str(Path(__file__).parent / "emulation"))
sys.path.append(str(Path(__file__).parents[1] / "gpu"))
from launches import devices, emulated_launches, emulation, gpu  # noqa: F401
from packed_products import UNIT, assert_close, experts_of, weight, wide_moe


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    """What launches write to holds NaN before (integers: -1)."""
    empty = torch.empty

    def poisoned(*args, **options) -> torch.Tensor:
        out = empty(*args, **options)
        return out.fill_(torch.nan if out.is_floating_point() else -1)

    monkeypatch.setattr(weight_only.torch, "empty", poisoned)


@devices
@pytest.mark.parametrize(("format", "dtype"), [("nvfp4", torch.bfloat16), ("fp8", torch.float16)])
def test_dequantize_rounds_once(format: str, dtype: torch.dtype, device: str) -> None:
    held, wide = weight(format, (24, 192), dtype, device)
    got = weight_only.dequantize(held, dtype)
    # The scale of the tensor is multiplied in fp32: where that falls on a tie of the narrow format, rounding may turn.
    assert ((got.double() - wide).abs() <= 1.001 * UNIT[dtype] * wide.abs() + 2.0**-25).all()


SHAPES = {
    "cpu": [(3, 136, 1088)],
    "cuda": [(0, 128, 64), (1, 136, 192), (3, 1024, 2688), (17, 3136, 12544), (257, 264, 640), (1100, 520, 4096)],
}


@pytest.mark.parametrize(
    ("device", "tokens", "out_features", "in_features"),
    [
        pytest.param(device, *shape, marks=param.marks)
        for param, device in ((emulation, "cpu"), (gpu, "cuda"))
        for shape in SHAPES[device]
    ],
)
@pytest.mark.parametrize(("format", "dtype"), [("nvfp4", torch.float16), ("fp8", torch.bfloat16)])
def test_linear(format, dtype, device: str, tokens: int, out_features: int, in_features: int) -> None:
    held, wide = weight(format, (out_features, in_features), dtype, device)
    x = torch.randn(tokens, in_features + 8, device=device).to(dtype)[:, 8:]
    assert weight_only.takes(x)
    wanted, size = x.double() @ wide.T, x.double().abs() @ wide.abs().T
    got = weight_only.linear(x, held, dtype)
    assert_close(got, wanted, size, 1.01 if tokens <= weight_only.DEQUANTIZE_ABOVE else 2)
    exact = weight_only.linear(x, held, torch.float32)
    assert exact.dtype == torch.float32
    bound = 2.0**-18 if tokens <= weight_only.DEQUANTIZE_ABOVE else UNIT[dtype]
    assert ((exact.double() - wanted).abs() <= bound * size + 2.0**-24).all()
    assert torch.equal(got, weight_only.linear(x, held, dtype))


def test_splits_cover_all_columns_and_each_has_work() -> None:
    def splits_of(blocks: int, columns: int) -> int:
        return weight_only.dense_splits(blocks, Weight("nvfp4", torch.empty(0), None, 128, columns))

    for blocks in (1, 7, 32, 131, 132, 133, 5000):
        for columns in (64, 512, 1088, 4096, 12544):
            splits = splits_of(blocks, columns)
            steps = -(-columns // packed_weights.TILE_COLUMNS["nvfp4"])
            share = -(-steps // splits)
            assert share * (splits - 1) < steps <= share * splits, "as the kernel divides them"
    assert splits_of(8, 4096) == 8
    assert splits_of(200, 4096) == 1


@devices
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "tile", "one_block"),
    [(1, 2, 5, 16, True), (9, 1, 2000, 8, True), (29, 3, 7, 16, False), (900, 3, 1200, 8, False)],
)
def test_pairs_are_sorted_by_expert_and_cut_into_tiles(
    tokens, top_k, experts, tile, one_block: bool, device: str, monkeypatch
) -> None:
    if not one_block:
        monkeypatch.setattr(weight_only, "ROUTED_PAIRS", 0)
    ids = torch.rand(tokens, experts, device=device).topk(top_k).indices
    ids[:: 2 if tokens > 1 else 1, 0] = experts - 1
    if tokens > 1:
        ids[1, 0] = experts  # does not exist
        ids[3, 0] = -1
    pairs = ids.numel()
    order = torch.full((pairs,), -1, dtype=torch.int32, device=device)
    tiles = torch.full((weight_only.most_tiles(pairs, experts, tile), 3), -1, dtype=torch.int32, device=device)
    for plan in weight_only.plan_route(ids, experts, tile, order, tiles):
        plan.run(ids.device)
    flat, order, tiles = ids.flatten().tolist(), order.tolist(), tiles.tolist()
    seen = []
    for expert, first, count in tiles:
        if count == 0:
            continue
        assert 0 < count <= tile
        assert [flat[pair] for pair in order[first : first + count]] == [expert] * count
        seen += order[first : first + count]
    assert sorted(seen) == [pair for pair, expert in enumerate(flat) if 0 <= expert < experts]
    empty = [count for _, _, count in tiles].index(0) if [0] in [[c] for _, _, c in tiles] else len(tiles)
    assert all(count == 0 for _, _, count in tiles[empty:]), "nothing behind the last tile"


CASES = {
    "cpu": [(3, 5, 2, 64, 64)],
    "cuda": [
        (1, 64, 6, 1024, 384),
        (3, 6, 2, 192, 128),
        (17, 16, 4, 256, 512),
        (257, 32, 5, 512, 320),
        (300, 3, 3, 256, 64),
    ],
}
"""Tokens, experts, choices, width, hidden width. Of 64 experts most get no token; of 3 all get all."""


moe_cases = pytest.mark.parametrize(
    ("device", "case"),
    [
        pytest.param(device, case, marks=param.marks)
        for param, device in ((emulation, "cpu"), (gpu, "cuda"))
        for case in CASES[device]
    ],
)


FORMATS = {
    "cpu": [("nvfp4", "squared_relu"), ("nvfp4", "swiglu")],
    "cuda": [("nvfp4", "squared_relu"), ("nvfp4", "swiglu"), ("fp8", "swiglu"), ("dense", "swiglu")],
}


@pytest.mark.parametrize(
    ("device", "case", "format", "activation"),
    [
        pytest.param(device, case, *formats, marks=param.marks)
        for param, device in ((emulation, "cpu"), (gpu, "cuda"))
        for case in CASES[device]
        for formats in FORMATS[device]
    ],
)
def test_moe(device: str, case, format: str, activation: str) -> None:
    x, ids, weights, held, wide = experts_of(format, activation, case, device)
    got = weight_only.moe(x, ids, weights, held, activation)
    # Rounded: each projection, the gate, the activation, the expert's result and the output.
    assert_close(got, *wide_moe(x, ids, weights, wide, activation), 6)
    assert torch.equal(got, weight_only.moe(x, ids, weights, held, activation)), "bit-equal again"


@moe_cases
def test_a_token_does_not_depend_on_those_beside_it(device: str, case) -> None:
    x, ids, weights, held, _ = experts_of("nvfp4", "squared_relu", case, device)
    got = weight_only.moe(x, ids, weights, held, "squared_relu")
    assert torch.equal(got[:1], weight_only.moe(x[:1], ids[:1], weights[:1], held, "squared_relu"))
    x[-1] = torch.nan
    bad = weight_only.moe(x, ids, weights, held, "squared_relu")
    assert torch.equal(bad[:-1], got[:-1])
    assert bad[-1].isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tokens", [17, 257])
def test_all_tokens_to_the_same_experts(tokens: int) -> None:
    x, ids, weights, held, wide = experts_of("nvfp4", "squared_relu", (tokens, 4, 2, 64, 64), "cuda")
    ids[:] = torch.tensor([3, 1])
    got = weight_only.moe(x, ids, weights, held, "squared_relu")
    assert_close(got, *wide_moe(x, ids, weights, wide, "squared_relu"), 6)


def test_no_token_is_no_launch() -> None:
    x, ids, weights, held, _ = experts_of("nvfp4", "squared_relu", (1, 4, 2, 64, 64), "cpu")
    assert weight_only.moe(x[:0], ids[:0], weights[:0], held, "squared_relu").shape == (0, 64)
    matrix = Weight("nvfp4", held[0].tiles[0], held[0].scale[0], 64, 64)
    assert weight_only.linear(x[:0], matrix, x.dtype).shape == (0, 64)


def test_what_the_kernels_take() -> None:
    x = torch.zeros(4, 128, dtype=torch.bfloat16)
    assert weight_only.takes(x)
    assert weight_only.takes(x.half())
    assert not weight_only.takes(x.float())
    assert not weight_only.takes(x.unsqueeze(0))
    assert weight_only.takes_weight("nvfp4", 16, 64)
    assert not weight_only.takes_weight("nvfp4", 16, 96)
    assert not weight_only.takes_weight("nvfp4", 12, 128)
    assert not weight_only.takes_weight("int8", 16, 128)


FORMS = {
    "cpu": [Form(True, 4, 1, 3)],
    "cuda": [Form(True, 4, 4, 3), Form(True, 8, 2, 3), Form(False, 4, 2, 4), Form(False, 8, 1, 3)],
}


@devices
def test_forms_of_the_product_give_the_same_bits(device: str) -> None:
    """Tiles that are full or not, with and without Hopper's own instructions."""
    for format in ("nvfp4", "fp8") if device == "cuda" else ("nvfp4",):
        held, wide = weight(format, (136, 320), torch.bfloat16, device)
        for tokens in (9, 30, 61, 127) if device == "cuda" else (9,):
            x = torch.randn(tokens, 320, device=device).bfloat16()
            wanted, size = x.double() @ wide.T, x.double().abs() @ wide.abs().T
            first = None
            for form in FORMS[device]:
                if device == "cuda" and torch.cuda.get_device_capability()[0] != 9 and form.wgmma:
                    pytest.skip("needs Hopper")
                sizes = (16, 32, 64, 128)[: 4 if form.wgmma else 3] if device == "cuda" else (16,)
                for tile_tokens in sizes:
                    out = torch.full((tokens, 136), torch.nan, device=device, dtype=x.dtype)
                    weight_only.plan_gemm(x, held, out, tile_tokens=tile_tokens, form=form).run(x.device)
                    assert_close(out, wanted, size, 1.01)
                    first = out if first is None else first
                    # The emulation sums in an order of its own.
                    assert device == "cpu" or torch.equal(out, first), (form, tile_tokens)


@pytest.mark.parametrize(("arch", "tile_tokens"), [(80, 32), (90, 16), (90, 64)])
def test_compiles_without_spills(arch: int, tile_tokens: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(weight_only, "ASSUMED_ARCH", arch)
    x = torch.zeros(4, 128, dtype=torch.bfloat16)
    order = torch.zeros(8, dtype=torch.int32)
    held, _ = weight("nvfp4", (2, 64, 128), torch.bfloat16, "cpu")
    common = {"order": order, "tiles": order.view(-1, 2), "mode": "gather"}
    plan = weight_only.plan_gemm(x, held, x, gate=held, activation="swiglu", tile_tokens=tile_tokens, **common)
    compiled = nvrtc.compile_kernel(plan.config.kernel, dict(plan.config.defines), arch, cache=tmp_path)
    assert "0 bytes spill stores, 0 bytes spill loads" in compiled.log
    assert "serialized" not in compiled.log, "the tensor cores work by themselves"
