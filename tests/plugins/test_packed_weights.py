"""The order of packed weights' bytes, and back."""

from __future__ import annotations

import pytest
import torch

from replayssm.plugins import nvfp4, packed_weights
from replayssm.plugins.packed_weights import Weight


def test_words_hold_the_codes_in_the_order_that_the_kernels_say() -> None:
    codes = torch.arange(8, dtype=torch.uint8).repeat(2) + torch.tensor([0] * 8 + [8] * 8, dtype=torch.uint8)
    words = packed_weights.pack_words(nvfp4.pack_nibbles(codes)).view(torch.int32).tolist()
    for word, eight in zip(words, codes.view(2, 8).tolist(), strict=True):
        for code, sign, magnitude in zip(eight, packed_weights.SIGN_BITS, packed_weights.MAGNITUDE_BITS, strict=True):
            assert (word >> sign & 1, word >> magnitude & 7) == (code >> 3, code & 7)


@pytest.mark.parametrize(("format", "columns"), [("nvfp4", 64), ("nvfp4", 384), ("fp8", 192), ("dense", 64)])
@pytest.mark.parametrize("experts", [(), (5,)])
def test_tiles_unpack_to_the_weight(format: str, columns: int, experts: tuple[int, ...], monkeypatch) -> None:
    monkeypatch.setattr(packed_weights, "WORDS_AT_A_TIME", 501)
    monkeypatch.setattr(packed_weights, "PACKED_BYTES", 2 * 40 * columns)
    size = columns * packed_weights.WEIGHT_BITS[format] // 8
    codes = torch.randint(0, 256, (*experts, 40, size), dtype=torch.uint8)
    scale = torch.randint(0, 256, (*experts, 40, columns // 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
    tiles = packed_weights.pack(format, codes, scale if format == "nvfp4" else None)
    back = packed_weights.unpack(Weight(format, tiles, None, 40, columns))
    assert torch.equal(back[0].view(torch.uint8), codes)
    if format == "nvfp4":
        assert torch.equal(back[1].view(torch.uint8), scale.view(torch.uint8))
