"""On a GPU: the kernels of a captured step follow each other without a gap, as torch.profiler records them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from e2e_model import load_model
from e2e_run import Run, profiled_split

from replayssm.plugins.settings import ReplaySettings

BATCH, WINDOW, LAYERS = 256, 5, 8
LONGEST_GAP_US = 20
"""A kernel of a graph begins 1 us behind the one before; a node that is none (a memset) took 8, and now and then 40."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [1, WINDOW])
@pytest.mark.parametrize("buffer_len", [16, 0], ids=["replay", "plain"])
def test_no_gap_inside_a_step(buffer_len, window):
    """The first layers of the Nano-4B shape and its output head, at the batch that is measured."""
    device = torch.device("cuda", 0)
    model = load_model("nano4b", device, layers=LAYERS)
    settings = ReplaySettings(buffer_len=buffer_len, max_window=window, max_seq_len=256)
    accepted = torch.ones(40, BATCH, dtype=torch.int32)
    run = Run(model, settings, [[1 + b] * 16 for b in range(BATCH)], device, None if window == 1 else accepted)
    for _ in range(8):
        run.step()
    split = profiled_split(run.step, 24, device)
    run.check()
    run.close()
    assert split.kernels > 4 * LAYERS
    assert split.largest_gap_us < LONGEST_GAP_US, split.wide_gaps
