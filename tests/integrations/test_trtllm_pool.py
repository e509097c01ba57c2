"""Whoever reads the state pool between two tokens finds it current, and nobody keeps it alive."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

EXACT = 2e-6
"""As in test_trtllm_decode.py."""


def warnings_of(trtllm) -> list[str]:
    return [line for line in trtllm.lines("warning") if "ReplaySSM" in line]


FULL = 25
"""Steps behind which every row of a ring of 17 has held a token: one too many or too few would count."""


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
@pytest.mark.parametrize("with_kv_lens", [True, False])
def test_prompt_that_continues_a_decoded_sequence(pair, kind, with_kv_lens):
    """The prompt operators start from the pool."""
    served = pair(kind, with_kv_lens=with_kv_lens)
    served.run_some(FULL)
    assert served.stale()
    assert served.difference(served.step([(1, 6)], [2])) < EXACT
    for _ in range(20):
        assert served.difference(served.step((), [2, 1])) < EXACT


def test_prompt_that_continues_a_state_from_elsewhere(pair):
    """The slot's ring belongs to what was there before, which must not be folded into what came."""
    served = pair("mamba2", slots=1)
    served.step([(1, 5)])
    for _ in range(FULL):
        served.step((), [1])
    for executor in (served.ours, served.theirs):
        torch.manual_seed(7)
        for layer in served.config.layers:
            executor.manager.get_ssm_states(layer)[0].copy_(torch.randn(4, 8, 16))
        executor.done[1] = 90
    assert served.difference(served.step([(1, 4)])) < EXACT
    for _ in range(20):
        assert served.difference(served.step((), [1])) < EXACT


def test_mixed_batch_that_cannot_be_parted(trtllm, pair):
    """A version with an argument that we do not know: the chunked kernel reads the decode rows' states."""
    served = pair("gdn")
    served.run_some(FULL)
    assert served.stale()
    for executor in (served.ours, served.theirs):
        for mixer in executor.model.model:
            mixer.unknown_arguments = {"packed_layout": True}
    assert served.difference(served.step([(3, 4)], [1, 2])) < EXACT
    assert not served.stale()
    for _ in range(20):
        assert served.difference(served.step((), [2, 1, 3])) < EXACT
    assert any("a call that this module does not know" in line for line in warnings_of(trtllm))


def test_decode_call_with_an_unknown_argument(trtllm, pair):
    served = pair()
    served.run_some(FULL)
    assert served.stale()
    layer = served.ours.model.model[0]._stp_ssu_func.__self__
    known = layer._is_one_token
    layer._is_one_token = lambda **call: False
    assert served.difference(served.step((), [1, 2])) < EXACT
    assert not served.stale()
    layer._is_one_token = known
    for _ in range(20):
        assert served.difference(served.step((), [2, 1])) < EXACT


@pytest.mark.parametrize("spelling", ["selective_state_update_func", "_stp_ssu_func"])
def test_verify_step(trtllm, pair, spelling):
    """A deployment without speculation has none; if one comes all the same, it reads the pool and leaves it."""
    served = pair(spelling=spelling, layers=(0,))
    served.run_some(FULL)
    assert served.stale()
    buffers = []
    for executor in (served.ours, served.theirs):
        executor.manager.speculative = True
        states = executor.manager.get_ssm_states(0)
        executor.manager.intermediate_ssm = states.new_zeros(2, 4, *states.shape[1:])
        buffers.append(executor.manager.intermediate_ssm)
    results = served.step((), [1, 2], spec_metadata=object(), tokens=4)
    assert served.difference(results) < EXACT
    assert not served.stale()
    torch.testing.assert_close(*buffers, rtol=EXACT, atol=EXACT)
    # All drafts rejected: both go on from the state before them.
    for executor in (served.ours, served.theirs):
        executor.manager.speculative = False
        for request in (1, 2):
            executor.done[request] -= 4
    for _ in range(20):
        assert served.difference(served.step((), [1, 2])) < EXACT


def call_plain_operator(trtllm, served, layer: int) -> None:
    """Let a mixer of ours call TensorRT-LLM's operator as if its code had another name for it."""
    served.ours.model.model[layer]._stp_ssu_func = trtllm.ssu.selective_state_update


def test_mixer_that_never_calls_the_operator(trtllm, pair):
    """The first layer replays a token before the second one shows: then everything is handed back."""
    served = pair()
    call_plain_operator(trtllm, served, layer=1)
    assert served.run_some(1) < EXACT
    assert served.stale()
    assert served.run_more() < EXACT
    for layer in (0, 1):
        for request in (1, 2):
            assert served.difference(tuple(pool.flatten()[None] for pool in served.pools(layer, request))) < EXACT
    (line,) = warnings_of(trtllm)
    assert "stopped, TensorRT-LLM's operators go on: the mixer of layer 1 decodes without the operator" in line


def test_mixer_that_stops_calling_the_operator(trtllm, pair):
    """Its pool is behind by then: nothing but an error will do."""
    served = pair()
    served.run_some(FULL)
    call_plain_operator(trtllm, served, layer=1)
    with pytest.raises(RuntimeError, match="decodes without the operator that this module knows, on states that are"):
        served.step((), [1, 2])


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_weights_that_are_updated_in_place(pair, kind):
    """Reinforcement learning loads new weights into a running deployment, between requests."""
    served = pair(kind)
    served.run_some(FULL)
    for executor in (served.ours, served.theirs):
        with torch.no_grad():
            for mixer in executor.model.model:
                constant = mixer.A if kind == "mamba2" else mixer.A_log
                constant.data.copy_(constant * 0.5)
    for request in (1, 2):
        served.finish(request)
    assert served.run_some(FULL) < EXACT


def test_new_pool(trtllm, pair):
    """The estimate of the memory uses a pool of its own; the real one comes later, with other slots."""
    served = pair()
    served.run_some(FULL)
    for executor in (served.ours, served.theirs):
        executor.manager = trtllm.managers.MixedMambaHybridCacheManager(served.config, 9, torch.float32)
        executor.metadata.kv_cache_manager = executor.manager
        executor.done.clear()
    assert served.run_some() < EXACT
    assert sum("active for 2 recurrent layers" in line for line in trtllm.lines("info")) == 2


@pytest.mark.parametrize("kind", ["mamba2", "gdn"])
def test_pools_are_not_kept_alive(pair, kind):
    """TensorRT-LLM frees the pools of its estimate before it makes the real ones, and C++ pools under their views."""
    served = pair(kind)
    served.run_some(3)
    served.step([(3, 2)], [1])
    executor = served.ours
    watched = [weakref.ref(executor.manager), weakref.ref(executor.manager.ssm_states)]
    executor.manager = executor.metadata.kv_cache_manager = None
    gc.collect()
    assert [watch() for watch in watched] == [None, None]


def test_call_without_a_pool(pair):
    """Warm-ups without a state manager fail in upstream's mixer, with upstream's error."""
    served = pair()
    served.ours.metadata.kv_cache_manager = None
    with pytest.raises(AttributeError, match="NoneType"):
        served.ours.step([(1, 3)])


def test_error_flag_is_raised(pair):
    """An invalid row never passes in silence."""
    served = pair(layers=(0,))
    served.run_some(2)
    layer = served.ours.model.model[0]._stp_ssu_func.__self__
    layer.state.error_flag.fill_(2)
    with pytest.raises(RuntimeError, match=r"ReplaySSM: a row's seq_len lies below its checkpoint"):
        served.run_some(70)
