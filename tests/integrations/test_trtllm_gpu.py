"""The module with our CUDA kernels, eagerly and in captured graphs, against the stand-in's per-token operators."""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# Two layers whose outputs and inputs are rounded to bf16 (2^-9) at each of a dozen operators.
TOLERANCE = 0.03

SIZES = {
    "mamba2": {"heads": 8, "groups": 2, "rows": 64, "columns": 128},
    "gdn": {"heads": 4, "groups": 2, "rows": 128, "columns": 128},
}


@pytest.fixture
def cuda_pair(trtllm, pair):
    def make(kind: str, **changes):
        trtllm.root.DEVICE = "cuda"
        return pair(kind, dtype=torch.bfloat16, hidden_size=64, **{**SIZES[kind], **changes})

    return make


def errors_of(served) -> int:
    mixer = served.ours.model.model[0]
    layer = getattr(mixer, "forward_extend", None) or mixer._stp_ssu_func
    return int(layer.__self__.state.error_flag)


@pytest.mark.parametrize(
    ("kind", "manager", "pool_dtype"),
    [
        ("mamba2", "MixedMambaHybridCacheManager", torch.float32),
        ("mamba2", "CppMambaHybridCacheManager", torch.bfloat16),
        ("gdn", "CppMambaHybridCacheManager", torch.float32),
    ],
)
def test_eager(trtllm, cuda_pair, kind, manager, pool_dtype):
    served = cuda_pair(kind, manager=manager, pool_dtype=pool_dtype)
    worst = served.difference(served.step([(1, 5), (2, 9)]))
    served.kernel_calls = 0
    for step in range(60):
        contexts = [(3, 4)] if step == 20 else [(4, 7)] if step == 41 else []
        decodes = [1, 2] + ([3] if 20 < step < 40 else []) + ([4] if step > 41 else [])
        if step == 40:
            served.finish(3)
        worst = max(worst, served.difference(served.step(contexts, decodes, 0 if contexts else step % 3)))
    assert worst < TOLERANCE
    assert served.kernel_calls == 0
    assert errors_of(served) == 0
    assert any("active for 2 recurrent layers" in line for line in trtllm.lines("info"))


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_captured_graphs(cuda_pair, kind):
    """Graphs of two sizes with padding rows, between eager steps with prompts; one slot changes hands."""
    served = cuda_pair(kind, manager="CppMambaHybridCacheManager")
    worst = served.difference(served.step([(1, 5), (2, 9), (3, 2)]))
    running = [1, 2, 3]
    for step in range(90):
        if step == 30:
            served.finish(2)
            # As long as request 2 was: only the prompt tells the slot's new owner from the old one.
            worst = max(worst, served.difference(served.step([(5, 9 + 30)], [1, 3])))
            running = [1, 3, 5]
        if step == 60:
            worst = max(worst, served.difference(served.step([(6, 4), (1, 3)], [5])))
            running = [6, 5, 1, 3]
        size = 4 if step % 7 else 6
        ours = served.ours.replay(running, size)
        theirs = served.theirs.step((), running)
        worst = max(worst, served.difference((ours, theirs)))
    assert worst < TOLERANCE
    assert errors_of(served) == 0
    assert set(served.ours.graphs) == {4, 6}


def test_replay_of_a_graph_changes_only_its_rows(cuda_pair):
    """Slots outside of the batch keep every bit, and the padding slot takes no part."""
    served = cuda_pair("mamba2")
    served.step([(1, 5), (2, 9), (3, 2)])
    served.ours.replay([1, 2, 3], 4)
    manager = served.ours.manager
    bystander = manager.get_ssm_states(0)[manager.slot_of[3]].clone()
    for _ in range(40):
        served.ours.replay([2, 1], 4)
    assert torch.equal(manager.get_ssm_states(0)[manager.slot_of[3]], bystander)
    assert errors_of(served) == 0


def test_rings_that_do_not_fit(trtllm, cuda_pair, monkeypatch):
    served = cuda_pair("mamba2")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (1000, 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device=None: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device=None: 0)
    assert served.difference(served.step([(1, 5)])) < TOLERANCE
    assert served.difference(served.step((), [1])) < TOLERANCE
    (line,) = [line for line in trtllm.lines("warning") if "ReplaySSM" in line]
    assert "lower kv_cache_config.free_gpu_memory_fraction or max_batch_size" in line


def test_sizes_without_a_kernel(trtllm, cuda_pair):
    served = cuda_pair("mamba2", rows=12)
    assert served.difference(served.step([(1, 5)])) < TOLERANCE
    assert served.difference(served.step((), [1])) < TOLERANCE
    (line,) = [line for line in trtllm.lines("warning") if "ReplaySSM" in line]
    assert "no kernel for this model on this GPU" in line
