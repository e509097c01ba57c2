"""Benchmarks: data sets in, definitions of the figures, reports out."""

from __future__ import annotations

import io
import itertools
import json

import pytest

from replayssm.runtime.bench_compare import compare, plot, read_report
from replayssm.runtime.bench_data import Sample, random_samples, read_dataset
from replayssm.runtime.bench_report import make_report, percentiles, text_report
from replayssm.runtime.bench_run import Record, run_samples
from replayssm.runtime.engine import Engine
from replayssm.runtime.generation import generate
from replayssm.runtime.scheduler import Scheduler
from replayssm.runtime.session import Session
from replayssm.runtime.speculation import NgramDrafter


def write(path, *lines):
    path.write_bytes(("\n".join(lines) + "\n").encode(errors="surrogateescape"))
    return path


def test_every_form_of_a_line(tmp_path):
    path = write(
        tmp_path / "data",
        '{"task_id": 1, "input_ids": [5, 6], "output_tokens": 3}',
        "",
        '{"task_id": 2, "logits": [7], "output_tokens": 1, "lora_request": null}',
        '{"task_id": 3, "prompt": "ab", "output_tokens": 2}',
    )
    samples = read_dataset(path, lambda text: {"input_ids": [ord(letter) for letter in text]})
    assert samples == [Sample(1, [5, 6], 3), Sample(2, [7], 1), Sample(3, [97, 98], 2)]
    assert read_dataset(path, None, 2) == samples[:2]
    assert read_dataset(write(tmp_path / "again", *(sample.to_line() for sample in samples))) == samples


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON .*: expected lines such as .*task_id"),
        ("\udcff", "line 1 is not JSON .*can't decode byte 0xff"),
        ("[]", "line 1: expected a JSON object such as "),
        ('{"input_ids": [1], "output_tokens": 3}', "expected an integer task_id, got None"),
        ('{"task_id": 1, "input_ids": [1], "output_tokens": 0}', "output_tokens must be at least 1, got 0"),
        ('{"task_id": 1, "input_ids": ["a"], "output_tokens": 1}', "at least one integer"),
        ('{"task_id": 1, "prompt": "a", "output_tokens": 1}', "a prompt and a tokenizer"),
        ('{"task_id": 1, "turns": ["a"], "output_tokens": 1}', "turns is not supported"),
        ("", "holds no requests"),
    ],
)
def test_bad_data(tmp_path, line, message):
    with pytest.raises(ValueError, match=message):
        read_dataset(write(tmp_path / "data", line))


def test_random_samples():
    samples = list(random_samples([3.2, -5, 40], [1.5, 2, 0.1], 12, (2, 3), seed=1))
    assert [(len(sample.input_ids), sample.output_tokens) for sample in samples] == [(4, 2), (1, 2), (40, 1)]
    assert {token for sample in samples for token in sample.input_ids} == set(range(12)) - {2, 3}
    assert samples == list(random_samples([3.2, -5, 40], [1.5, 2, 0.1], 12, (2, 3), seed=1))


SAMPLES = [Sample(10 + index, [index + 1, 7, 8, 9] * (1 + index % 3), 4 + index) for index in range(7)]


def run(engine, concurrency=-1, drafter=None, log=None):
    scheduler = Scheduler(Session(engine, slots=2), drafter)
    ended = []
    records = run_samples(scheduler, SAMPLES, concurrency, on_end=ended.append, iteration_log=log)
    assert records == ended
    return scheduler, sorted(records, key=lambda record: record.task_id)


@pytest.mark.parametrize("concurrency", [-1, 1, 3])
def test_a_run_generates_what_generate_does(tiny_engine, concurrency):
    engine = tiny_engine("nano")
    log = io.StringIO()
    scheduler, records = run(engine, concurrency, NgramDrafter(), log)
    for sample, record in zip(SAMPLES, records, strict=True):
        expected = generate(Session(engine, slots=1), [sample.input_ids], sample.output_tokens, eos_token_ids=())[0]
        assert record.tokens == expected.token_ids
        assert (record.task_id, record.input_tokens) == (sample.task_id, len(sample.input_ids))
        assert record.start <= record.first <= record.end
        assert 1 <= record.iterations <= record.output_tokens
    if concurrency == 1:
        assert all(a.end <= b.start for a, b in itertools.pairwise(records))
    steps = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [step["iter"] for step in steps] == list(range(1, scheduler.stats.steps + 1))
    assert sum(step["generated_tokens"] for step in steps) == sum(sample.output_tokens for sample in SAMPLES)


def test_a_sample_that_does_not_fit_is_refused_first(tiny_engine):
    scheduler = Scheduler(Session(tiny_engine("nano"), slots=1))
    with pytest.raises(ValueError, match=r"task 5 has 399 \+ 2 tokens, but a sequence has at most 400"):
        run_samples(scheduler, [SAMPLES[0], Sample(5, [1] * 399, 2)])
    assert scheduler.stats.steps == 0


def test_percentiles():
    values = percentiles(range(1, 101))
    assert values == {
        "p50": 51, "p90": 91, "p95": 96, "p99": 100, "minimum": 1, "maximum": 100, "average": 50.5
    }  # fmt: skip
    assert set(percentiles([3]).values()) == {3}
    assert percentiles([]) is None


@pytest.fixture
def make(tiny_engine, tmp_path):
    """Makes a report over two hand-made records: 2 tokens in 2 s and 9 tokens in 8 s, 4 iterations of 3 drafts."""
    scheduler = Scheduler(Session(tiny_engine("nano"), slots=2), NgramDrafter())
    records = [Record(0, 10, [1] * 2, 100.0, 101.0, 102.0, 2), Record(1, 30, [1] * 9, 102.0, 106.0, 110.0, 4)]
    options = {"draft": "ngram", "streaming": True, "dataset": tmp_path / "data", "memory_fraction": 0.5}
    return lambda: make_report(scheduler, records, **options)


@pytest.fixture
def report(make):
    return make()


def test_throughput_of_a_gpu_is_its_share(make, monkeypatch):
    monkeypatch.setattr(Engine, "ranks", 2)
    performance = make()["performance"]
    assert performance["output_throughput_per_gpu_tok_s"] == pytest.approx(11 / 10 / 2)
    assert performance["system_output_throughput_tok_s"] == pytest.approx(11 / 10)


def test_definitions(report):
    performance = report["performance"]
    assert performance["total_latency_ms"] == 10_000
    assert performance["request_throughput_req_s"] == pytest.approx(0.2)
    assert performance["system_output_throughput_tok_s"] == pytest.approx(11 / 10)
    assert performance["system_total_throughput_tok_s"] == pytest.approx(51 / 10)
    assert performance["output_throughput_per_user_tok_s"] == pytest.approx((2 / 2 + 9 / 8) / 2)
    assert performance["avg_request_latency_ms"] == pytest.approx(5_000)
    assert report["request_info"]["avg_num_concurrent_requests"] == pytest.approx(1.0)
    streaming = report["streaming_metrics"]
    assert streaming["avg_ttft_ms"] == pytest.approx(2_500)
    assert streaming["avg_tpot_ms"] == pytest.approx((1_000 + 500) / 2)
    assert streaming["gen_tps_percentiles"]["maximum"] == pytest.approx(2.0)
    decoding = report["decoding_stats"]
    assert decoding["num_draft_tokens_percentiles"]["maximum"] == 12
    assert decoding["num_accepted_draft_tokens_percentiles"]["maximum"] == 5
    assert decoding["draft_acceptance_rate_percentiles"]["maximum"] == pytest.approx(5 / 12)
    assert decoding["acceptance_length_percentiles"]["maximum"] == pytest.approx(9 / 4)
    assert report["dataset"]["isl_stats"]["average"] == 20
    json.dumps(report)


def test_keys_and_headings_are_those_of_trtllm_bench(report):
    assert {
        "engine", "machine", "world_info", "request_info", "performance", "streaming_metrics", "decoding_stats",
        "dataset",
    } <= set(report)  # fmt: skip
    assert {
        "model",
        "model_path",
        "engine_dir",
        "version",
        "backend",
        "dtype",
        "kv_cache_dtype",
        "quantization",
    } <= set(report["engine"])
    text = text_report(report)
    for heading in (
        "= PYTORCH BACKEND", "= MACHINE DETAILS", "= WORLD + RUNTIME INFORMATION", "= REQUEST DETAILS",
        "= PERFORMANCE OVERVIEW", "= DECODING STATISTICS (NGRAM)", "= DATASET DETAILS",
    ):  # fmt: skip
        assert f"\n{heading}\n" in f"\n{text}"
    for line in (
        "Total Output Throughput (tokens/sec):             1.1000",
        "Per User Output Throughput [w/ ctx] (tps/user):   1.0625",
        "[TPOT] P50    : 1000.0000",
        "[TTFT] MINIMUM: 1000.0000",
        "[AL] MAXIMUM: 2.2500",
    ):
        assert line in text


def test_compare(report, tmp_path):
    other = json.loads(json.dumps(report))
    other["performance"]["system_output_throughput_tok_s"] *= 2
    other["performance"]["avg_request_latency_ms"] *= 3
    del other["streaming_metrics"]
    lines = {line.label: line for line in compare(report, other)}
    assert (lines["output tokens/s"].ratio, lines["output tokens/s"].better) == (pytest.approx(2.0), True)
    assert (lines["request latency, mean ms"].ratio, lines["request latency, mean ms"].better) == (3.0, False)
    assert lines["requests"].better is None
    assert lines["requests/s"].better is None
    assert "time to first token, mean ms" not in lines
    pytest.importorskip("matplotlib")
    plot(list(lines.values()), ("a", "b"), tmp_path / "ratios.svg")
    assert "output tokens/s" in (tmp_path / "ratios.svg").read_text()
    for content in ("{", "[]", '{"performance": 1}'):
        with pytest.raises(ValueError, match="expected what --report-json wrote"):
            read_report(write(tmp_path / "broken", content))
