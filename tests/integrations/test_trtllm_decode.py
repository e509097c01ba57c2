"""The module inside the stand-in: outputs equal those of TensorRT-LLM's per-token kernels, whatever the batches do."""

from __future__ import annotations

import random

import pytest
import torch

EXACT = 2e-6
"""fp32 states and activations: both sides sum the same terms in fp32, in another order; tens of units of 2^-24."""

LONG = 2000


def random_schedule(pair, steps: int, seed: int, chunked: bool = True) -> tuple[float, int]:
    """Random admission, chunked prompts, decoding with padding rows, and endings. (largest difference, decoded)."""
    choose = random.Random(seed)
    waiting, running, prompts = list(range(1, 200)), [], {}
    worst, decoded = 0.0, 0
    for _ in range(steps):
        contexts = []
        while len(running) + len(prompts) < 5 and waiting and choose.random() < 0.4:
            prompts[waiting.pop(0)] = choose.randint(1, 9)
        for request in list(prompts):
            chunk = choose.randint(1, prompts[request]) if chunked else prompts[request]
            contexts.append((request, chunk))
            prompts[request] -= chunk
        decodes = [request for request in running if choose.random() < 0.9]
        padding = 0 if contexts else choose.randint(0, 3)
        if contexts or decodes:
            worst = max(worst, pair.difference(pair.step(contexts, decodes, padding)))
            decoded += len(decodes)
        running += [request for request in prompts if prompts[request] == 0]
        prompts = {request: left for request, left in prompts.items() if left}
        for request in [request for request in running if choose.random() < 0.04]:
            running.remove(request)
            pair.finish(request)
    return worst, decoded


SPELLINGS = ["global", "selective_state_update_func_no_mtp", "selective_state_update_func", "_stp_ssu_func"]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_mamba2_in_all_spellings(pair, spelling):
    served = pair("mamba2", spelling)
    served.step([(500, 3)])
    served.finish(500)
    served.kernel_calls = 0
    worst, decoded = random_schedule(served, 60, seed=1)
    assert worst < EXACT
    assert decoded > 60
    assert served.kernel_calls == 0, "TensorRT-LLM's operator still decodes"


@pytest.mark.parametrize("manager", ["MambaHybridCacheManager", "CppMambaHybridCacheManager"])
@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_managers_with_dense_and_strided_pools(pair, kind, manager):
    served = pair(kind, manager=manager)
    assert served.ours.manager.get_ssm_states(0)[0].is_contiguous()
    strided = not served.ours.manager.get_ssm_states(0).is_contiguous()
    assert strided == manager.startswith("Cpp")
    served.step([(500, 3)])
    served.finish(500)
    served.kernel_calls = 0
    worst, _ = random_schedule(served, 60, seed=2)
    assert worst < EXACT
    assert served.kernel_calls == 0


@pytest.mark.parametrize("passes_z", [False, True])
def test_prompt_and_decode_rows_of_a_gdn_batch_are_parted(pair, passes_z):
    """The chunked kernel reads and writes the pool: decode rows must not reach it."""
    served = pair("gdn")
    for executor in (served.ours, served.theirs):
        for mixer in executor.model.model:
            mixer.passes_z = passes_z
    served.step([(1, 4), (2, 3)])
    for _ in range(5):
        served.step((), [1, 2])
    served.kernel_calls = 0
    rows = served.trtllm.chunk.CALLS
    del rows[:]
    assert served.difference(served.step([(3, 2), (4, 5)], [1, 2])) < EXACT
    layers = len(served.config.layers)
    assert rows == [2] * layers + [4] * layers  # ours, then theirs
    assert served.kernel_calls == 0
    assert served.difference(served.step((), [4, 1, 3, 2])) < EXACT


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_without_lengths_of_the_attention_backend(pair, kind):
    """Our own counter takes the place of kv_lens_cuda."""
    served = pair(kind, with_kv_lens=False)
    assert not hasattr(served.ours.metadata, "kv_lens_cuda")
    worst, decoded = random_schedule(served, 60, seed=3)
    assert worst < EXACT
    assert decoded > 60


@pytest.mark.parametrize("with_kv_lens", [True, False])
def test_reused_slot_does_not_continue_its_old_sequence(pair, with_kv_lens):
    """The new prompt ends exactly where the old sequence would have gone on, which only the prompt itself tells."""
    served = pair("mamba2", slots=1, with_kv_lens=with_kv_lens)
    served.step([(1, 5)])
    for _ in range(7):
        served.step((), [1])
    served.finish(1)
    served.step([(2, 12)])
    for _ in range(20):
        assert served.difference(served.step((), [2])) < EXACT


def test_state_that_arrives_without_a_prompt(pair):
    """A slot that TensorRT-LLM fills by itself: its length is not the one expected, so the pool is what counts."""
    served = pair("mamba2", slots=1)
    served.step([(1, 5)])
    for _ in range(4):
        served.step((), [1])
    for executor in (served.ours, served.theirs):
        torch.manual_seed(7)
        for layer in served.config.layers:
            states = executor.manager.get_ssm_states(layer)
            states[0].copy_(torch.randn(states[0].shape))
        executor.done[1] = 40
    for _ in range(20):
        assert served.difference(served.step((), [1])) < EXACT


def test_padding_rows_leave_other_slots_alone(pair):
    served = pair("mamba2")
    served.step([(1, 3), (2, 6)])
    for _ in range(40):
        assert served.difference(served.step((), [1, 2], padding=4)) < EXACT


def test_inputs_between_flushes_leave_the_pool_behind(pair):
    """The point of it all, and what makes every other test here one: the state is not rewritten for every token."""
    served = pair("mamba2", layers=(0,))
    served.step([(1, 5)])
    written = 0
    before, _ = served.pools(0, 1)
    for _ in range(32):
        served.step((), [1])
        now, current = served.pools(0, 1)
        written += int(not torch.equal(now, before))
        before = now
    assert written == 32 // 16 - 1
    assert (now - current).norm() > 0.01 * current.norm()


def test_buffer_len_of_the_environment(pair, monkeypatch):
    monkeypatch.setenv("TRTLLM_REPLAYSSM_BUFFER_LEN", "4")
    served = pair("gdn", layers=(0,))
    served.step([(1, 5)])
    written, (before, _) = 0, served.pools(0, 1)
    for _ in range(16):
        assert served.difference(served.step((), [1])) < EXACT
        now, _ = served.pools(0, 1)
        written, before = written + int(not torch.equal(now, before)), now
    assert written == 16 // 4 - 1


def test_half_precision_activations(pair):
    """The published models' setting: bf16 activations, fp32 states."""
    served = pair("mamba2", dtype=torch.bfloat16)
    worst, _ = random_schedule(served, 40, seed=4)
    # Two layers, each rounded to bf16 (2^-9) at every projection and operator.
    assert worst < 0.03


@pytest.mark.parametrize("pool_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_long_sequences(trtllm, pair, kind, pool_dtype):
    """Against the same per-token kernel with an fp32 pool, whose own error is far below a 16-bit pool's."""
    sizes = {"layers": (0,), "heads": 2, "groups": 1}
    served = pair(kind, pool_dtype=pool_dtype, **sizes)
    judge = trtllm.executor.PyExecutor(
        served.theirs.model,
        trtllm.managers.MixedMambaHybridCacheManager(served.config, 6, torch.float32),
        served.config,
    )
    errors = torch.zeros(2, dtype=torch.float64)
    worst = 0.0
    for step in range(LONG + 1):
        call = ([(1, 3)], ()) if step == 0 else ((), [1])
        results = served.step(*call)
        truth = judge.step(*call).double()
        worst = max(worst, served.difference(results))
        errors += torch.stack([(result.double() - truth).square().sum() for result in results]) if step else 0
    if pool_dtype == torch.float32:
        assert worst < EXACT
        return
    ours, theirs = errors.sqrt().tolist()
    # Rounding once in 16 tokens instead of at every token: less error, up to the noise of one sequence.
    assert ours < theirs
    # Both stay near the truth, so they stay near each other: a fraction of a 16-bit state's own error.
    assert worst < {torch.float16: 0.02, torch.bfloat16: 0.1}[pool_dtype]
