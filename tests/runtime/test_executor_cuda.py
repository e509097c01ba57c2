"""What the interpreter would do on CUDA, on fake tensors: no device is needed, and waiting for one raises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from replayssm.builders.config import published
from replayssm.builders.models import build_networks
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import allocate_state, torch_dtype
from replayssm.runtime.executor import Executor

LAYERS = {"nano4b": 14, "super120b-nvfp4": 9, "qwen4b": 4, "qwen122b-nvfp4": 4}
"""Leading layers of each published model that hold all of its kinds."""
WITH_HEAD = ("super120b-nvfp4", "qwen4b", "qwen122b-nvfp4")


@pytest.mark.parametrize(
    ("name", "head"), [*((name, "main") for name in LAYERS), *((name, "mtp") for name in WITH_HEAD)]
)
def test_published_networks_run_without_waiting_for_the_device(name, head):
    """Every value has the shape and dtype that tracing inferred; reading a fake value back would raise."""
    config = published(name)
    config = replace(config, layers=config.layers[: LAYERS[name]])
    network = getattr(build_networks(config), head)
    network = replace(network, outputs={value: value for value in network.values})
    sizes = {"T": 6, "B": 2, "R": 3}

    def fake(spec) -> torch.Tensor:
        shape = [sizes.get(size, size) for size in spec.shape]
        return torch.empty(shape, dtype=torch_dtype(spec.dtype), device="cuda:0")

    with FakeTensorMode():
        weights = {weight: fake(spec) for weight, spec in network.weights.items()}
        flag = torch.empty(1, dtype=torch.int32, device="cuda:0")
        settings = ReplaySettings(max_seq_len=64)
        states = {s: allocate_state(spec.geometry, settings, 4, "cuda:0", flag) for s, spec in network.states.items()}
        executor = Executor(network, weights, states, "cuda:0", fuse=False)
        outputs = executor({n: fake(spec) for n, spec in network.inputs.items()})
    for value, spec in network.values.items():
        expected = (tuple(sizes.get(size, size) for size in spec.shape), torch_dtype(spec.dtype), "cuda")
        assert (tuple(outputs[value].shape), outputs[value].dtype, outputs[value].device.type) == expected, value
    assert executor.weight_bytes == sum(w.numel() * w.element_size() for w in weights.values()), "kept packed on CUDA"
