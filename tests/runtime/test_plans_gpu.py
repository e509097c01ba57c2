"""Plans on a GPU with a stand-in for TensorRT: its layers are PyTorch's, its plugins the PTX that an engine embeds.

What a real plan would share with this: the runtime, its streams, graphs and in-place state, and the plugins' kernels.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from replayssm.builders.engine import BuildOptions, build_engine
from replayssm.runtime.engine import Engine
from replayssm.runtime.generation import generate
from replayssm.runtime.plan_check import PlanCheck
from replayssm.runtime.session import Session
from replayssm.runtime.speculation import MtpDrafter

sys.path += [str(Path(__file__).parents[1] / name) for name in ("gpu", "stand_in")]
from embedded_plugins import run_plugin
from tensorrt_stand_in import make_module

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [list(range(3, 60)), [7, 8, 9], list(range(290, 20, -1)), [5] * 30, [11, 250, 3]]
OPTIONS = {"max_batch_size": 4, "max_seq_len": 400, "max_draft_len": 3, "buffer_len": 8, "dtype": "float16"}


@pytest.fixture
def gpu_engine(tiny_checkpoint, tmp_path, monkeypatch):
    module = make_module()
    module.device, module.launch_plugin = "cuda", run_plugin
    monkeypatch.setitem(sys.modules, "tensorrt", module)
    monkeypatch.setitem(sys.modules, "tensorrt.plugin", module.plugin)

    def make(layout, target, **more):
        build_engine(tiny_checkpoint(layout), tmp_path / target, BuildOptions(target, **OPTIONS, **more))
        return Engine.load(tmp_path / target)

    return make


@pytest.mark.parametrize(
    ("layout", "graphs", "prefill_plan"),
    [
        ("nano", False, False),
        ("nano", True, False),
        ("nano", False, True),
        ("qwen", False, False),
        ("qwen", True, True),
    ],
)
def test_a_plan_generates_on_the_gpu(gpu_engine, layout, graphs, prefill_plan):
    """The tokens of the torch target on the CPU. Logits are of size 1 and fp16 rounds to 2^-11: the two may part where
    the two likeliest tokens lie that close, so most prompts must agree to the end and all at the beginning."""
    session = Session(gpu_engine(layout, "tensorrt", prefill_plan=prefill_plan), device="cuda", graphs=graphs)
    oracle = generate(Session(gpu_engine(layout, "torch")), PROMPTS, 12)
    ours = generate(session, PROMPTS, 12, drafter=MtpDrafter(session))
    same = [a.token_ids == b.token_ids for a, b in zip(ours, oracle, strict=True)]
    assert sum(same) >= len(PROMPTS) - 1, [(a.token_ids, b.token_ids) for a, b in zip(ours, oracle, strict=True)]
    assert all(a.token_ids[:3] == b.token_ids[:3] for a, b in zip(ours, oracle, strict=True))


@pytest.mark.parametrize("layout", ["nano", "qwen"])
def test_the_check_passes_on_the_gpu(gpu_engine, layout):
    engine = gpu_engine(layout, "tensorrt")
    check = PlanCheck(engine, "cuda", gpu_engine(layout, "torch"), PROMPTS[:2])
    failed = [(finding.name, finding.detail) for finding in check.run() if finding.passed is False]
    # Other processes may take memory of the same GPU meanwhile.
    failed = [finding for finding in failed if finding[0] != "memory"]
    assert not failed
