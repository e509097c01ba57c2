"""What a captured step does around its network: kernels, emulated on the host or on a GPU, against PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from replayssm.plugins import step_ends
from replayssm.plugins.contract import PAD_SLOT_ID

sys.path.append(str(Path(__file__).parent / "emulation"))
from launches import devices, emulated_launches  # noqa: F401

SLOTS = [3, PAD_SLOT_ID, 0, 4]
"""One row without a slot, of five slots."""


def int32(values: list[int], device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def on(device: str, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Copies, because some are updated."""
    return [None if tensor is None else tensor.clone().to(device) for tensor in tensors]


@devices
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("keeps", [True, False])
def test_begin(window: int, keeps: bool, device: str) -> None:
    given = torch.randint(100, (len(SLOTS) * window,))
    given[[0, window, -1]] = step_ends.LAST_CHOSEN  # with windows of 3 the last of these is no first token
    last = torch.arange(1000, 1006) if keeps else None
    arguments = (given, int32([7, 0, 260, 11]), int32(SLOTS), last)
    wanted = step_ends.begin(*arguments)
    first = [1003, 1005] if keeps else [step_ends.LAST_CHOSEN] * 2
    assert wanted[0][[0, window]].tolist() == first
    assert wanted[1].tolist() == [start + place for start in (7, 0, 260, 11) for place in range(window)]
    moved = on(device, *arguments)
    tokens, positions = torch.full_like(moved[0], -9), torch.full_like(moved[0], -9, dtype=torch.int32)
    step_ends.plan_begin(*moved, tokens, positions).run(moved[0].device)
    assert torch.equal(tokens.cpu(), wanted[0])
    assert torch.equal(positions.cpu(), wanted[1])


@devices
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("keeps", [True, False])
def test_end(window: int, keeps: bool, device: str) -> None:
    count = len(SLOTS) * window
    largest = torch.randn(count)
    largest[[1, 2, -1]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    arguments = [
        largest,
        torch.randint(2**40, (count,)),
        int32([64]),
        int32([window, 0, 1, max(1, window - 1)]),
        int32(SLOTS),
        torch.arange(1000, 1006) if keeps else None,
        torch.randint(100, (count,)),
        int32([7, 0, 260, 11]),
    ]
    before, moved = on("cpu", *arguments), on(device, *arguments)
    answer = step_ends.end(*arguments)
    assert answer[:count].tolist() == before[1].tolist()
    assert (answer[count:-1] == 0).nonzero().flatten().tolist() == [1, 2, count - 1]
    assert int(answer[-1]) == 64
    chosen = before[1].view(-1, window)
    if keeps:
        kept = [chosen[2, 0], 1001, 1002, chosen[0, -1], chosen[3, max(1, window - 1) - 1], chosen[1, 0]]
        assert arguments[5].tolist() == [int(value) for value in kept]
    if window == 1:
        assert arguments[7].tolist() == [8, 0, 261, 12]
        assert torch.equal(arguments[6], before[1])
    else:
        assert torch.equal(arguments[6], before[6])
        assert torch.equal(arguments[7], before[7])
    got = torch.full((2 * count + 1,), -9, device=device)
    step_ends.plan_end(*moved, got).run(moved[0].device)
    assert torch.equal(got.cpu(), answer)
    for mine, wanted in zip(moved[5:], arguments[5:], strict=True):
        assert wanted is None or torch.equal(mine.cpu(), wanted)
