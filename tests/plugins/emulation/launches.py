"""Kernels between matrix products on both devices of a test: emulated on the host and, where there is one, on a GPU."""

import shutil

import pytest
import torch
from emulate import Emulated

from replayssm.plugins import elementwise

emulation = pytest.param("cpu", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="the emulation needs g++"))
gpu = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)
devices = pytest.mark.parametrize("device", [emulation, gpu])


@pytest.fixture(autouse=True)
def emulated_launches(monkeypatch) -> None:
    """Launches on CPU tensors run in the emulation. Import it where they shall."""
    run = elementwise.Launch.run

    def launch(self, device: torch.device) -> None:
        if device.type == "cuda":
            run(self, device)
        else:
            Emulated()._call(self.config, self.arguments, self.blocks_y, self.blocks_z, self.blocks_x)

    monkeypatch.setattr(elementwise.Launch, "run", launch)
