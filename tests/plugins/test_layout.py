"""The pieces under the operators: decays, position-independent functions, spans."""

from __future__ import annotations

import math

import pytest
import torch

from replayssm.plugins.reference.layout import (
    Spans,
    aligned,
    decays,
    sigmoid,
    silu,
    softplus,
    tokens_per_boundary,
)
from replayssm.plugins.reference.rows import Row

FP32 = 2.0**-24


def exact_decays(log_decay: torch.Tensor, window: int) -> torch.Tensor:
    """[heads, window, 1 + tokens] in fp64, one exactly rounded sum at a time."""
    tokens, heads = log_decay.shape
    out = torch.zeros(heads, window, 1 + tokens, dtype=torch.float64)
    for head in range(heads):
        for row in range(window):
            last = tokens - window + row
            for source in range(last + 2):
                out[head, row, source] = math.exp(math.fsum(log_decay[source : last + 1, head].tolist()))
    return out


@pytest.mark.parametrize(("tokens", "window"), [(1, 1), (5, 1), (9, 4), (16, 16), (20, 7)])
def test_decays_do_not_cancel(tokens, window):
    """One token that forgets everything (log decay -20,000) must not cost the tokens after it their precision.

    Bound: a sum of n terms of one sign has relative error n u, which the exponential multiplies by the sum's size; 4
    more for the exponential itself. Differences of a running sum would be wrong by 20,000 u = 1e-3 here.
    """
    torch.manual_seed(tokens)
    log_decay = -torch.rand(tokens, 3) * 2
    log_decay[tokens // 2, 1] = -2e4
    log_decay[0, 2] = -torch.inf
    got, expected = decays(log_decay, window), exact_decays(log_decay, window)
    size = -expected.log().clamp(min=-1e3)
    assert ((got - expected).abs() <= FP32 * (tokens * size + 4) * expected + 1e-38).all()


def test_decays_clamp_and_mask():
    """Exponents never exceed 0, and a source behind the window token weighs nothing."""
    got = decays(torch.full((4, 2), 0.5), 2)
    assert (got[:, 0, :4] == 1).all()
    assert (got[:, 0, 4] == 0).all()
    assert (got[:, 1] == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", [softplus, sigmoid, silu])
def test_functions_do_not_depend_on_the_position_in_a_buffer(function, dtype):
    """torch's own softplus, sigmoid and silu differ by an ulp between the body and the tail of a buffer."""
    torch.manual_seed(0)
    x = torch.randn(2000, dtype=dtype) * 8
    whole = function(x)
    for length in (1, 2, 3, 5, 7, 9, 15, 17, 31, 33):
        pieces = torch.cat([function(piece) for piece in x.split(length)])
        assert torch.equal(pieces, whole)


def test_functions_equal_torch():
    """To 8 roundings of fp64, over the whole range, linear parts and infinities included."""
    x = torch.cat((torch.linspace(-800, 800, 16001, dtype=torch.float64), torch.randn(1000, dtype=torch.float64)))
    for own, other in (
        (softplus, torch.nn.functional.softplus),
        (sigmoid, torch.sigmoid),
        (silu, torch.nn.functional.silu),
    ):
        torch.testing.assert_close(own(x), other(x), rtol=8 * 2.0**-53, atol=1e-300)
    assert softplus(torch.tensor(20.5)) == 20.5


def test_spans_repeat_their_last_token_up_to_the_boundary():
    rows = [Row(5, 2, 3, 40, 37, False, False), Row(0, 3, 1, 10, 10, False, False)]
    live = Spans(rows, with_history=True, boundary=4)
    assert live.starts == [0, 8]
    assert live.slots.tolist() == [3] * 8 + [1] * 4
    assert live.positions.tolist() == [37, 38, 39, 40, 41, 41, 41, 41, 10, 11, 12, 12]
    windows = Spans(rows, with_history=False, boundary=4)
    assert windows.tokens.tolist() == [5, 6, 6, 6, 0, 1, 2, 2]
    assert windows.positions.tolist() == [40, 41, 41, 41, 10, 11, 12, 12]
    ring = torch.full((4, 7), -1.0)
    windows.write_ring(ring, torch.arange(8.0))
    assert ring[3].tolist() == [-1, -1, -1, -1, -1, 5, 6]
    assert ring[1].tolist() == [-1, -1, -1, 0, 1, 2, -1]
    assert windows.gather_ring(ring).tolist() == [5, 6, 6, 6, 0, 1, 2, 2]


@pytest.mark.parametrize("elements", [(30, 14), (7680, 1024), (35, 64), (8,), (12, 20)])
def test_boundaries_fill_cache_lines(elements):
    """The fewest tokens whose fp32 rows are whole 64-byte lines in every buffer."""
    tokens = tokens_per_boundary(*elements)
    fits = [n for n in range(1, 17) if all(n * count * 4 % 64 == 0 for count in elements)]
    assert tokens == min(fits)


def test_aligned_copies_only_what_it_must():
    whole = torch.zeros(4, 16)
    assert aligned(whole) is whole
    for view in (torch.arange(33.0)[1:], torch.arange(64.0).view(4, 16)[:, :8]):
        copy = aligned(view)
        assert torch.equal(copy, view)
        assert copy.data_ptr() % 64 == 0
        assert copy.is_contiguous()
