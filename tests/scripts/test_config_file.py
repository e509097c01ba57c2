"""trtllm-serve's YAML keys become options, or one clear error; nothing is dropped silently."""

from __future__ import annotations

import pytest

from replayssm.scripts.config_file import apply_config
from replayssm.scripts.serve import serve

OPTIONS = serve.make_context("serve", []).params


def applied(tmp_path, text, **given):
    path = tmp_path / "config.yml"
    path.write_text(text)
    options = {**OPTIONS, **given}
    before = dict(options)
    result = apply_config(path, options)
    assert options == before
    return {name: value for name, value in result.items() if value != options[name]}


def test_keys_become_options(tmp_path):
    (tmp_path / "engine").mkdir()
    text = f"""
max_batch_size: 4
max_num_tokens: 512
max_seq_len: 1000
tensor_parallel_size: 1
enable_chunked_prefill: true
reasoning_parser: nano-v3
cuda_graph_config: null
kv_cache_config:
  free_gpu_memory_fraction: 0.5
  enable_block_reuse: false
  host_cache_size: 2097152
  mamba_ssm_cache_dtype: auto
speculative_config:
  decoding_type: Draft_Target
  max_draft_len: 2
  speculative_model_dir: {tmp_path / "engine"}
scheduler_config:
  capacity_scheduler_policy: MAX_UTILIZATION
"""
    assert applied(tmp_path, text) == {
        "max_batch_size": 4, "max_num_tokens": 512, "max_seq_len": 1000, "reasoning_parser": "nano-v3",
        "cuda_graphs": False, "free_gpu_memory_fraction": 0.5, "prefix_cache": 0, "swap_memory": 2, "draft": "engine",
        "draft_len": 2, "draft_engine": tmp_path / "engine", "time_slice": 256,
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "draft"), [("MTP", "mtp"), ("NGram", "ngram"), ("mtp", "mtp")])
def test_speculation(tmp_path, kind, draft):
    text = f"speculative_config: {{decoding_type: {kind}, num_nextn_predict_layers: 3}}"
    assert applied(tmp_path, text) == {"draft": draft, "draft_len": 3}


def test_the_file_goes_before_the_command_line(tmp_path):
    assert applied(tmp_path, "max_batch_size: 4\n", max_batch_size=2, max_seq_len=9) == {"max_batch_size": 4}
    policy = "scheduler_config: {capacity_scheduler_policy: %s}"
    assert applied(tmp_path, policy % "MAX_UTILIZATION", time_slice=9) == {}
    assert applied(tmp_path, policy % "GUARANTEED_NO_EVICT", time_slice=9) == {"time_slice": None}
    assert applied(tmp_path, "cuda_graph_config: {max_batch_size: 8}", cuda_graphs=False) == {"cuda_graphs": None}
    assert applied(tmp_path, "") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "expected a mapping of trtllm-serve's keys, got list"),
        ("a: [", "is not YAML"),
        (
            "max_batchsize: 3",
            "'max_batchsize' means nothing here \\(did you mean 'max_batch_size'\\?\\); known are .*max_batch_size",
        ),
        ("foo: 1", "the key 'foo' means nothing here; known are backend, "),
        ("kv_cache_config: {max_tokens: 3}", "the key 'kv_cache_config.max_tokens' means nothing here; known"),
        ("kv_cache_config: {d_type: auto}", "means nothing here \\(did you mean 'kv_cache_config.dtype'\\?\\)"),
        ("kv_cache_confg: {dtype: auto}", "means nothing here \\(did you mean 'kv_cache_config'\\?\\)"),
        ("kv_cache_config: 3", "the key 'kv_cache_config' means nothing here; known"),
        ("max_batch_size: many", "max_batch_size must be of type int, got 'many'"),
        ("max_batch_size: true", "max_batch_size must be of type int, got True"),
        ("reasoning_parser: 3", "reasoning_parser must be of type str"),
        ("pipeline_parallel_size: 2", "pipeline_parallel_size can only be 1 here, got 2"),
        ("kv_cache_config: {dtype: fp8}", "kv_cache_config.dtype can only be 'auto' here"),
        ("kv_cache_config: {free_gpu_memory_fraction: 0}", "must be above 0 and at most 1, got 0"),
        ("speculative_config: {decoding_type: Eagle}", "must be one of MTP, NGram, Draft_Target"),
        ("speculative_config: {speculative_model: /nowhere}", "there is none at /nowhere"),
        ("scheduler_config: {capacity_scheduler_policy: STATIC_BATCH}", "must be one of GUARANTEED_NO_EVICT"),
        ("cuda_graph_config: 7", "must be null"),
    ],
)
def test_what_means_nothing_here(tmp_path, text, message):
    with pytest.raises(ValueError, match=message) as error:
        applied(tmp_path, text)
    assert str(error.value).startswith(str(tmp_path / "config.yml"))
