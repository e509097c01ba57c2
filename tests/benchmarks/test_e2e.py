"""The end-to-end benchmarks on the CPU: the same code but for events and kernel records, and what their lines say."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import e2e_decode_speedup as decode
import e2e_run
import e2e_spec_decode_throughput as speculation
import e2e_suite as suite
import e2e_tensor_parallel as parallel
import e2e_vllm
import serve_ngram
from e2e_model import load_model
from e2e_results import E2eResults

from replayssm.builders.config import published, weight_bytes
from replayssm.plugins.settings import ReplaySettings
from replayssm.runtime.parallel_processes import Place

CPU = torch.device("cpu")
COMMON = ["--device", "cpu", "--repeats", "1", "--warmup-steps", "0", "--num-steps", "4", "--buffer-len", "4"]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def tiny(tiny_checkpoint) -> Path:
    return tiny_checkpoint("nano")


def test_decode_lines(tiny: Path, tmp_path: Path) -> None:
    options = ["--model", str(tiny), "--batch-size", "3", "--prompt-len", "6", "--output", str(tmp_path / "out.jsonl")]
    plot = tmp_path / "run.svg"
    path = decode.main(
        [*options, *COMMON, "--sessions", "2", "--also", "float16:float8:stochastic", "--plot", str(plot)]
    )
    assert "replay-float16-float8-stochastic" in plot.read_text()
    found = {line["variant"]: line for line in lines(path)}
    assert list(found) == ["plain", "replay", "replay-float16-float8-stochastic"]
    assert all(line["correct"] and not line["random_weights"] for line in found.values())
    assert [line["L"] for line in found.values()] == [0, 4, 4]
    assert found["plain"]["speedup"] == 1.0
    assert found["replay"]["logits_distance"] < 0.1 < found["plain"]["logits_distance_without_context"]
    for line in found.values():
        assert line["tokens_per_s"] == pytest.approx(3e6 / line["median_us"], abs=0.1)  # it has one digit
        assert line["cycles"] == 2, "one of each session"


def test_a_variant_that_lost_its_state_is_not_correct(tiny: Path, tmp_path: Path, monkeypatch) -> None:
    compare = decode.compare

    def damaged(runs, vocab_size):
        for state in runs["replay"].session.states.values():
            if "ring_x" in state.tensors:
                state["ring_x"].zero_()
                state["checkpoint"].zero_()
        return compare(runs, vocab_size)

    monkeypatch.setattr(decode, "compare", damaged)
    options = ["--model", str(tiny), "--batch-size", "2", "--prompt-len", "6", "--output", str(tmp_path / "out.jsonl")]
    assert [line["correct"] for line in lines(decode.main([*options, *COMMON]))] == [True, False]


def test_speculation_lines(tiny: Path, tmp_path: Path) -> None:
    options = ["--model", str(tiny), "--batch-size", "2", "--prompt-len", "6", "--output", str(tmp_path / "out.jsonl")]
    options += ["--draft-len", "3", "--acceptance", "0.5", "--random-weights", "--also", "float16:float8:stochastic"]
    found = {line["variant"]: line for line in lines(speculation.main([*options, *COMMON]))}
    low = "replay-speculation-float16-float8-stochastic"
    assert list(found) == [*speculation.VARIANTS, low]
    assert all(line["correct"] and line["random_weights"] for line in found.values())
    assert [line["window"] for line in found.values()] == [1, 1, 4, 4, 4]
    assert (found[low]["state_dtype"], found[low]["readout_dtype"]) == ("float16", "float8")
    assert found["replay-speculation"]["logits_distance"] < found[low]["logits_distance"]
    assert found["snapshots"]["acceptance_length"] == found["replay-speculation"]["acceptance_length"] > 1
    line = found["replay-speculation"]
    assert line["tokens_per_s"] == pytest.approx(2e6 * line["acceptance_length"] / line["median_us"], rel=1e-3, abs=0.1)
    with pytest.raises(ValueError, match="prompts must be longer than a window of 4"):
        speculation.main([*options, *COMMON, "--prompt-len", "4"])


@pytest.mark.parametrize(("drafts", "variant"), [("ngram", "snapshots"), ("mtp", "replay-speculation")])
def test_natural_acceptance(tiny: Path, tmp_path: Path, drafts: str, variant: str) -> None:
    data = tmp_path / "data.jsonl"
    samples = [{"task_id": i, "input_ids": [5, 6, 7, 8] * 3 + [i], "output_tokens": 6} for i in range(2)]
    data.write_text("\n".join(map(json.dumps, samples)))
    options = ["--model", str(tiny), "--batch-size", "2", "--draft-len", "3", "--output", str(tmp_path / "out.jsonl")]
    options += ["--dataset", str(data), "--drafts", drafts, "--variants", "plain", variant]
    found = {line["variant"]: line for line in lines(speculation.main([*options, *COMMON]))}
    assert list(found) == ["plain", variant]
    assert all(line["correct"] for line in found.values())
    assert [line["drafts"] for line in found.values()] == [None, drafts]
    assert found["plain"]["acceptance_length"] == 1.0 <= found[variant]["acceptance_length"] <= 4
    with pytest.raises(ValueError, match="holds 2 requests, a batch of 3"):
        speculation.main([*options, *COMMON, "--batch-size", "3"])


def test_serving_lines(tiny: Path, tmp_path: Path) -> None:
    """A random model whose head walks cycles accepts what prompt lookup finds in its own text."""
    common = ["--model", str(tiny), "--random-weights", "--device", "cpu", "--batch-size", "3", "--num-steps", "16"]
    common += ["--warmup-steps", "0", "--repeats", "2", "--prompt-len", "24", "--output-len", "16", "--period", "4"]
    found = {}
    for strength in ("0", "8"):
        path = serve_ngram.main([*common, "--copy-strength", strength, "--output", str(tmp_path / strength)])
        found[strength] = {line["variant"]: line for line in lines(path)}
    assert list(found["8"]) == ["plain", "replay", "snapshots-ngram", "replay-ngram"]
    for line in found["8"].values():
        assert (line["steps"], line["random_weights"], line["acceptance_forced"]) == (16, True, None)
        assert (line["correct"], line["captured_meanwhile"]) == (True, 0)
        assert line["value"] == line["tokens_per_s"] > 0
    assert found["8"]["plain"]["acceptance_length"] == 1.0
    for name in ("snapshots-ngram", "replay-ngram"):
        assert found["8"][name]["acceptance_length"] > 3 > 2 > found["0"][name]["acceptance_length"]
    assert found["8"]["replay-ngram"]["speedup_over_snapshots"] > 0
    assert any(line["mixed_steps"] for line in found["8"].values()), "requests end, and others begin"


def test_texts_are_compared_up_to_where_they_part() -> None:
    first = {0: [1, 2, 3, 4], 1: [5, 6], 2: []}
    assert serve_ngram.common_share({0: [1, 2, 9], 1: [5, 6, 7], 2: [1], 3: [1]}, first) == pytest.approx(
        (2 / 3 + 1) / 2
    )


def test_cycles_of_tokens() -> None:
    order = torch.tensor([3, 0, 4, 2, 1, 5, 6])
    behind = serve_ngram.successors(order, 3).tolist()
    assert behind == [4, 5, 1, 0, 3, 2, 6]


def test_forced_acceptance_has_the_stated_probability() -> None:
    options = speculation.parse(["--model", "nano4b", "--acceptance", "0.75", "--draft-len", "4"])
    accepted = speculation.accepted_tokens(2000, 50, options).float()
    assert accepted.min() == 1
    assert accepted.max() == 5
    # 1 + p + p^2 + p^3 + p^4; the mean of 100,000 draws has a standard error below 0.01.
    assert abs(accepted.mean() - sum(0.75**i for i in range(5))) < 0.03


def test_rows_start_at_different_fill_levels(tiny: Path) -> None:
    settings = ReplaySettings(buffer_len=8, max_window=1, max_seq_len=64)
    model = load_model(str(tiny), CPU)
    run = e2e_run.Run(model, settings, [[5, 6, 7]] * 10, CPU)
    run.desynchronise(model.vocab_size, 8)
    assert run.graph.device_inputs["seq_lens"].tolist() == [4 + row % 8 for row in range(10)]
    states = [state for state in run.session.states.values() if "checkpoint_position" in state.tensors]
    assert len(set((4 + torch.arange(10) % 8 - states[0]["checkpoint_position"][:, 0, 0]).tolist())) == 8
    flushes = []
    for _ in range(8):
        before = states[0]["checkpoint_position"][:, 0, 0].clone()
        run.step()
        flushes.append(int((states[0]["checkpoint_position"][:, 0, 0] != before).sum()))
    run.check()
    assert sum(flushes) == 10, "in one cycle of L steps every row flushes once"
    assert max(flushes) <= 2


def test_published_names_get_random_weights_of_their_shape() -> None:
    model = load_model("qwen4b", CPU, layers=1)
    assert (model.name, model.random, model.layers_run, model.layers_total) == ("qwen4b", True, 1, 32)
    name = next(name for name in model.weights if name.endswith("in_proj_a.weight"))
    assert torch.equal(model.weights[name], model.weights[name]), "a weight is the same whenever it is made"
    assert 0.5 < float(model.weights[name].float().std()) * 2560**0.5 < 2
    with pytest.raises(ValueError, match="neither a directory nor a published model"):
        load_model("nowhere", CPU)


def test_random_weights_in_fp8_have_the_deviation_of_dense_ones() -> None:
    """A product's inputs near 1 must give outputs near 1. 2 % would be 30 standard errors of 6.5 million numbers; FP8
    rounds by at most 1/16."""
    model = load_model("qwen4b", CPU, layers=1, weights="fp8")
    name = next(name for name in model.weights if name.endswith("out_proj.weight"))
    weight, scale = model.weights[name], model.weights[name + "_scale"]
    assert weight.dtype == torch.float8_e4m3fn
    deviation = float((weight.float() * scale).std()) * weight.shape[1] ** 0.5
    assert abs(deviation - 1) < 0.02
    dense = [name for name, spec in model.networks["main"].weights.items() if spec.dtype == "bfloat16"]
    assert any("embed" in name for name in dense), "the tied head stays as it is"
    assert model.fp8_elements == 0, "weights alone, unless products are asked for"
    model = load_model("qwen4b", CPU, layers=1, weights="fp8", fp8_products=True)
    # in_proj_qkv and in_proj_z, out_proj, gate, up and down
    assert model.fp8_elements == 2560 * (8192 + 4096 + 4096 + 3 * 9216)
    with pytest.raises(ValueError, match="takes random weights"):
        load_model(str(Path(__file__).parents[2] / "examples" / "qwen3.5-tiny"), CPU, weights="fp8")


@pytest.mark.parametrize("name", ["nano4b", "qwen4b"])
def test_bytes_that_a_step_reads(name: str) -> None:
    """All weights but an embedding that is no output head; two operations per element of the products."""
    model, config = load_model(name, CPU), published(name)
    total = weight_bytes(config, mtp=False)["total"]
    table = 2 * config.vocab_size * config.hidden_size
    expected = total if config.tie_word_embeddings else total - table
    # Norms and other vectors are kept in fp32 by the engine, in bf16 on disk.
    assert expected <= model.step_weight_bytes < 1.001 * expected
    assert 2 * model.product_elements < model.step_weight_bytes < 2.01 * model.product_elements


class FakeVllm:
    """What benchmarks/e2e_vllm.py uses of vLLM: tokens as many as asked for, a second each by a clock of its own."""

    __version__ = "0.0"
    made: ClassVar[dict] = {}
    clock = 0.0

    class SamplingParams:
        def __init__(self, **options) -> None:
            self.options = options

    class LLM:
        def __init__(self, model: str, **options) -> None:
            FakeVllm.made = {**options, "config": json.loads((Path(model) / "config.json").read_text())}

        def generate(self, prompts, params, use_tqdm):
            FakeVllm.clock += params.options["max_tokens"]
            count = params.options["max_tokens"] - (params.options["max_tokens"] == FakeVllm.made.get("short"))
            output = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1] * count)])
            return [output] * len(prompts)


@pytest.fixture
def fake_vllm(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", FakeVllm)
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr(e2e_vllm, "time", SimpleNamespace(perf_counter=lambda: FakeVllm.clock))


def test_vllm_is_driven_as_documented(tmp_path: Path, monkeypatch, fake_vllm) -> None:
    options = ["--model", "qwen4b", "--batch-size", "3", "--num-steps", "5", "--device", "cpu"]
    (line,) = lines(e2e_vllm.main([*options, "--output", str(tmp_path / "out.jsonl")]))
    assert (line["variant"], line["geometry"], line["batch"], line["random_weights"]) == ("vllm 0.0", "qwen4b", 3, True)
    assert (FakeVllm.made["load_format"], FakeVllm.made["max_num_seqs"]) == ("dummy", 3)
    config = FakeVllm.made["config"]
    assert (config["architectures"], config["model_type"]) == (["Qwen3_5ForCausalLM"], "qwen3_5_text"), "no image part"
    assert FakeVllm.made["additional_config"] == {"gdn_prefill_backend": "triton"}, "flashinfer is not here"
    llm = FakeVllm.LLM
    monkeypatch.setattr(FakeVllm, "LLM", lambda **options: (llm(**options), FakeVllm.made.update(short=8))[0])
    with pytest.raises(RuntimeError, match=r"generated \[7\] tokens instead of 8"):
        e2e_vllm.main([*options, "--output", str(tmp_path / "out.jsonl")])


def test_vllms_own_replay_is_a_variant_of_its_own(tmp_path: Path, fake_vllm) -> None:
    options = ["--model", "nano4b", "--batch-size", "2", "--num-steps", "5", "--device", "cpu", "--replay"]
    extra = ["--engine-args", '{"max_num_seqs": 7}', "--output", str(tmp_path / "out.jsonl")]
    (line,) = lines(e2e_vllm.main([*options, *extra]))
    assert (line["variant"], line["L"], line["tokens_per_s"]) == ("vllm 0.0 replay", 16, 2.0)
    made = FakeVllm.made
    assert (made["use_replayssm"], made["replayssm_buffer_len"], made["max_num_seqs"]) == (True, 16, 7)


def test_kernel_records_are_split_by_class_and_launch() -> None:
    def kernel(name: str, begin: float, length: float, launch: int) -> dict:
        return {"cat": "kernel", "name": name, "ts": begin, "dur": length, "args": {"correlation": launch}}

    events = [
        kernel("mamba2_window", 0, 5, 1),
        kernel("nvjet_tst_128", 6, 2, 1),
        kernel("rms_norm", 8, 1, 1),
        kernel("mamba2_window", 500, 7, 2),
        kernel("some_sort", 510, 2, 2),
        {"cat": "cpu_op", "name": "gemm", "ts": 0, "dur": 100},
    ]
    split = e2e_run.kernel_split(events, 2)
    assert split.classes == {"ssm": 6.0, "matmul": 1.0, "elementwise": 0.5, "other": 1.0}
    assert (split.rest_us, split.gap_us, split.largest_gap_us) == (2.5, 2.0, 3.0)
    assert split.wide_gaps == {"mamba2_window -> some_sort": 3.0, "mamba2_window -> nvjet_tst_128": 1.0}
    assert split.idle_us == (1 + 491 + 3) / 2
    with pytest.raises(RuntimeError, match="recorded no kernels"):
        e2e_run.kernel_split([], 1)


def test_suite_goes_on_after_a_failure(tiny: Path, tmp_path: Path, capsys) -> None:
    plan = [
        (decode, f"--model {tiny} --batch-size 1 --prompt-len 1"),
        (decode, f"--model {tiny} --batch-size 1 --prompt-len 4"),
    ]
    output = tmp_path / "out.jsonl"
    assert suite.main(["--output", str(output), *COMMON], plan) == 1
    assert len(lines(output)) == 2
    assert suite.main(["--seconds", "-1", "--output", str(output), *COMMON], plan) == 0
    assert "left out: no time" in capsys.readouterr().out


def test_suite_options_are_those_of_the_scripts() -> None:
    for plan in suite.PLANS.values():
        for script, text in plan:
            assert script.parse(text.split()).model in ("nano4b", "qwen4b")


def test_tensor_parallel_lines(tiny: Path, tmp_path: Path) -> None:
    """A group of this process alone, whose one rank runs both variants: their tokens are the same to the bit."""
    output = tmp_path / "out.jsonl"
    model = ["--model", str(tiny), "--batch-size", "3", "--prompt-len", "6", "--ranks", "1", "--output", str(output)]
    options = parallel.parse([*model, *COMMON])
    place = Place(0, 1, "cpu", str(tmp_path / "store"), 1)
    try:
        rank = parallel.Rank(place, threading.Barrier(1), options)
        rank.measure(3, E2eResults(parallel.BENCHMARK, options))
    finally:
        torch.distributed.destroy_process_group()
    whole, divided = lines(output)
    assert (whole["variant"], divided["variant"], divided["ranks"]) == ("1 gpu", "1 gpu, divided", 1)
    assert all((whole["correct"], divided["correct"], divided["ranks_bit_equal"]))
    assert divided["logits_distance"] == 0.0 < 0.1 < divided["logits_distance_without_context"]
    assert divided["state_bytes"] == whole["state_bytes"]
    assert divided["tokens_per_s"] == pytest.approx(3e6 / divided["median_us"], abs=0.1)


def test_a_rank_of_the_speculation_benchmark(tiny: Path, tmp_path: Path) -> None:
    """A group of this process alone; replay decode in another format stands beside plain."""
    output = tmp_path / "out.jsonl"
    arguments = [
        "--model",
        str(tiny),
        "--batch-size",
        "2",
        "--prompt-len",
        "6",
        "--draft-len",
        "2",
        "--output",
        str(output),
    ]
    arguments += ["--variants", "plain", "snapshots", "--also-replay", "float16:float8:stochastic"]
    try:
        speculation.measure_rank(
            Place(0, 1, "cpu", str(tmp_path / "store"), 1), None, speculation.parse([*arguments, *COMMON])
        )
    finally:
        torch.distributed.destroy_process_group()
    found = {line["variant"]: line for line in lines(output)}
    assert list(found) == ["plain", "snapshots", "replay-float16-float8-stochastic"]
    assert [(line["window"], line["ranks"], line["correct"]) for line in found.values()] == [
        (w, 1, True) for w in (1, 3, 1)
    ]
    with pytest.raises(SystemExit):
        speculation.parse([*arguments, "--ranks", "2", "--dataset", "some.jsonl"])


def test_a_vocabulary_is_cut_like_layers(tiny: Path) -> None:
    assert load_model(str(tiny), CPU, random_weights=True, vocabulary=128).vocab_size == 128
    with pytest.raises(ValueError, match="--vocabulary takes random weights and 1 to 512 tokens, got 128"):
        load_model(str(tiny), CPU, vocabulary=128)


def test_percentile_lies_between_neighbours():
    """A median of two must not be the slower one: it would favour whoever is compared with it."""
    assert e2e_run.percentile([4.0, 1.0], 0.5) == 2.5
    assert e2e_run.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert e2e_run.percentile([7.0], 0.9) == 7.0
