"""The chunked scans equal the recurrence, values and gradients, across document borders."""

import pytest
import torch

from examples import scans

ROWS, TOKENS = 2, 75


@pytest.fixture
def segment():
    """Borders inside chunks, at chunk edges, and two within one chunk."""
    out = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    out[0, 30:] = 1
    out[0, 33:] = 2
    out[1, 64:] = 1
    return out


def random_input(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def assert_equal_with_gradients(chunked, sequential, inputs):
    """fp64: the two orders of summation differ by rounding alone, far below 1e-11."""
    weight = torch.randn_like(sequential)
    torch.testing.assert_close(chunked, sequential, atol=1e-11, rtol=1e-11)
    ours = torch.autograd.grad((chunked * weight).sum(), inputs)
    theirs = torch.autograd.grad((sequential * weight).sum(), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-11)


@pytest.mark.parametrize("chunk", [8, 16, 128])
def test_mamba2(segment, chunk):
    torch.manual_seed(1)
    heads, p, groups, n = 4, 3, 2, 5
    x = random_input(ROWS, TOKENS, heads, p)
    dt = torch.rand(ROWS, TOKENS, heads, dtype=torch.float64).requires_grad_()
    a = (-torch.rand(heads, dtype=torch.float64)).requires_grad_()
    b, c = random_input(ROWS, TOKENS, groups, n), random_input(ROWS, TOKENS, groups, n)
    inputs = (x, dt, a, b, c, random_input(heads))
    assert_equal_with_gradients(
        scans.mamba2_chunked(*inputs, segment, chunk),
        scans.mamba2_sequential(*inputs, segment),
        inputs,
    )


@pytest.mark.parametrize("chunk", [8, 16, 128])
def test_gdn(segment, chunk):
    torch.manual_seed(2)
    key_heads, heads, dk, dv = 2, 4, 6, 5
    q, k = (random_input(ROWS, TOKENS, key_heads, dk) for _ in range(2))
    v = random_input(ROWS, TOKENS, heads, dv)
    g = (-0.3 * torch.rand(ROWS, TOKENS, heads, dtype=torch.float64)).requires_grad_()
    beta = torch.rand(ROWS, TOKENS, heads, dtype=torch.float64).requires_grad_()
    inputs = (q, k, v, g, beta)
    assert_equal_with_gradients(
        scans.gdn_chunked(*inputs, segment, chunk), scans.gdn_sequential(*inputs, segment), inputs
    )


def test_strong_decay_stays_finite(segment):
    """exp(G_i - G_j) is masked before the exponential: no overflow, no NaN gradient."""
    q, k = (torch.randn(ROWS, TOKENS, 1, 4, requires_grad=True) for _ in range(2))
    v = torch.randn(ROWS, TOKENS, 1, 4)
    g = torch.full((ROWS, TOKENS, 1), -50.0, requires_grad=True)
    out = scans.gdn_chunked(q, k, v, g, torch.full_like(g, 0.9).detach(), segment, 16)
    out.sum().backward()
    assert out.isfinite().all()
    assert g.grad.isfinite().all()
