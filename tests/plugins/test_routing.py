"""The router's kernel against its PyTorch form, emulated on the host and, where there is one, on a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from replayssm.plugins import routing
from replayssm.runtime import functional_ops as F

sys.path.append(str(Path(__file__).parent / "emulation"))
from launches import devices, emulated_launches  # noqa: F401

ROUNDING = 2.0**-20
"""Weights are a few fp32 operations away from those of PyTorch, whose exponential differs in the last bits."""


@devices
@pytest.mark.parametrize(("experts", "top_k"), [(512, 22), (40, 32)])
def test_sigmoid_scores_with_a_correction(experts: int, top_k: int, device: str) -> None:
    parts = torch.randn(5, 2 * experts, device=device)
    bias = torch.randn(experts, device=device)
    ids, weights = routing.route(parts, bias, top_k, 5.0, True, parts=2)
    logits = parts.unflatten(1, (2, -1)).sum(1)
    wanted, wanted_weights = F.route_sigmoid(logits, bias, top_k=top_k, scaling=5.0, normalize=True)
    assert torch.equal(ids, wanted)
    assert ((weights - wanted_weights).abs() <= ROUNDING * wanted_weights).all()
    _, scores = routing.route(logits, bias, top_k, 1.0, False)
    assert ((scores - logits.gather(1, ids).sigmoid()).abs() <= ROUNDING).all()


@devices
def test_softmax_of_a_slice_of_a_joined_projection(device: str) -> None:
    """Narrow logits are often equal: then both choices have the same logits, and ours is the lower expert."""
    logits = torch.randn(7, 300, device=device).bfloat16()[:, 12:268]
    ids, weights = routing.route(logits, None, 8)
    wanted, wanted_weights = F.route_softmax(logits, top_k=8)
    chosen = logits.gather(1, ids)
    assert torch.equal(chosen, logits.gather(1, wanted))
    assert ((weights - wanted_weights).abs() <= ROUNDING * wanted_weights).all()
    falls = (chosen[:, :-1] == chosen[:, 1:]) <= (ids[:, :-1] < ids[:, 1:])
    assert falls.all()


@devices
def test_a_token_without_numbers_gets_experts_that_exist(device: str) -> None:
    logits = torch.randn(4, 64, device=device)
    logits[1] = torch.nan
    logits[2, 5:] = torch.nan
    logits[3] = -torch.inf
    logits[3, 7] = torch.inf
    ids, weights = routing.route(logits, torch.zeros(64, device=device), 8)
    assert torch.equal(ids[0], logits[0].sigmoid().topk(8).indices)
    assert ((ids >= 0) & (ids < 64)).all()
    assert all(len(set(row)) == 8 for row in ids.tolist())
    assert set(range(5)) <= set(ids[2].tolist()), "numbers come before NaN"
    assert ids[3, 0] == 7
    assert torch.equal(weights.isnan().any(1).cpu(), torch.tensor([False, True, True, False]))


def test_what_the_kernel_takes() -> None:
    logits = torch.zeros(2, 64)
    assert routing.supports(logits, 22, torch.zeros(64))
    assert not routing.supports(logits, 33, None)
    assert not routing.supports(logits.double(), 2, None)
    assert not routing.supports(logits.T, 2, None)
    assert not routing.supports(logits, 2, torch.zeros(64, dtype=torch.float64))
    assert not routing.supports(torch.zeros(2, 2048), 2, None)
