"""`replayssm bench` through click: a data set, two runs, a comparison."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from replayssm.builders.engine import BuildOptions, build_engine
from replayssm.scripts.cli import main


@pytest.fixture(scope="module")
def engine(tiny_checkpoint, tmp_path_factory):
    output = tmp_path_factory.mktemp("engines") / "nano"
    build_engine(tiny_checkpoint("nano"), output, BuildOptions(max_batch_size=3, max_seq_len=64, max_draft_len=3))
    return output


def bench(*arguments):
    return CliRunner().invoke(main, ["bench", *map(str, arguments)])


def prepare(engine, path, *arguments):
    return bench("prepare-dataset", "--engine", engine, "--output", path, *arguments)


def test_prepare_run_compare(engine, tmp_path):
    arguments = ("--num-requests", 5, "--input-mean", 12, "--input-stdev", 3, "--output-mean", 6)
    result = prepare(engine, tmp_path / "data", "token-norm-dist", *arguments)
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'data'}: 5 requests\n")
    names = ("report_json", "output_json", "request_json", "iteration_log")
    outputs = [item for name in names for item in (f"--{name}", tmp_path / name)]
    common = ("--engine_dir", engine, "--dataset", tmp_path / "data")
    result = bench("throughput", *common, "--streaming", "--concurrency", 2, "--warmup", 1, *outputs)
    assert result.exit_code == 0, result.stderr
    assert "= PERFORMANCE OVERVIEW" in result.stdout
    report = json.loads((tmp_path / "report_json").read_text())
    assert report["request_info"]["num_requests"] == 5
    assert report["request_info"]["avg_output_length"] == 6
    assert report["world_info"]["max_batch_size"] == 3
    assert [len(entry["output_ids"]) for entry in json.loads((tmp_path / "output_json").read_text())] == [6] * 5
    assert all(entry["decode_iteration"] == 5 for entry in json.loads((tmp_path / "request_json").read_text()))
    assert len((tmp_path / "iteration_log").read_text().splitlines()) == report["replayssm"]["steps"]
    result = bench(
        "latency", *common, "--num-requests", 2, "--draft", "mtp", "--report-json", tmp_path / "latency.json"
    )
    assert result.exit_code == 0, result.stderr
    assert "= DECODING STATISTICS (MTP)" in result.stdout
    report = json.loads((tmp_path / "latency.json").read_text())
    assert (report["request_info"]["num_requests"], report["world_info"]["max_batch_size"]) == (2, 1)
    result = bench("compare", tmp_path / "report_json", tmp_path / "latency.json")
    assert result.exit_code == 0
    assert "output tokens/s" in result.stdout


def test_config_adaptive_drafts_and_plot(engine, tmp_path):
    """Settings from trtllm-bench's YAML; drafts are measured on this machine before the run, and the report says so."""
    arguments = ("--num-requests", 4, "--input-mean", 12, "--output-mean", 12)
    assert prepare(engine, tmp_path / "data", "token-norm-dist", *arguments).exit_code == 0
    (tmp_path / "config.yml").write_text(
        "max_batch_size: 2\nspeculative_config: {decoding_type: NGram, max_draft_len: 2}\n"
    )
    common = ("--engine", engine, "--dataset", tmp_path / "data", "--config", tmp_path / "config.yml")
    for command, name, extra in (("throughput", "a", ("--adaptive-drafts",)), ("latency", "b", ())):
        result = bench(command, *common, "--report-json", tmp_path / f"{name}.json", *extra)
        assert result.exit_code == 0, result.stderr
        assert "of attention cache for 64 tokens" in result.stderr
    first, second = (json.loads((tmp_path / f"{name}.json").read_text()) for name in "ab")
    assert (first["world_info"]["max_batch_size"], second["world_info"]["max_batch_size"]) == (2, 1)
    assert first["decoding_stats"]["mode"] == second["decoding_stats"]["mode"] == "NGRAM"
    assert second["replayssm"]["draft_costs"] is None
    for costs in first["replayssm"]["draft_costs"].values():
        assert len(costs["relative_cost"]) == 3
        assert costs["crossover"] == pytest.approx(costs["relative_cost"][1] - 1)
    pytest.importorskip("matplotlib")
    result = bench("compare", tmp_path / "a.json", tmp_path / "b.json", "--plot", tmp_path / "ratios.png")
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")


def test_uniform_lengths_and_text(engine, tmp_path):
    lengths = ("--input-min", 3, "--input-max", 9, "--output-min", 2, "--output-max", 4)
    assert prepare(engine, tmp_path / "a", "token-unif-dist", "--num-requests", 30, *lengths).exit_code == 0
    values = [json.loads(line) for line in (tmp_path / "a").read_text().splitlines()]
    assert {len(value["input_ids"]) for value in values} == set(range(3, 10))
    assert {value["output_tokens"] for value in values} == {2, 3, 4}
    (tmp_path / "text").write_text("is read\n\nand rewritten\n")
    assert prepare(engine, tmp_path / "b", "text", "--input", tmp_path / "text", "--output-tokens", 3).exit_code == 0
    assert len((tmp_path / "b").read_text().splitlines()) == 2
    (tmp_path / "options").write_text("temperature: 1.0\ntop_k: 5\n")
    arguments = ("--sampler-options", tmp_path / "options", "--eos-id", 2)
    result = bench("throughput", "--engine", engine, "--dataset", tmp_path / "b", "--num-requests", 3, *arguments)
    assert result.exit_code == 0, result.stderr
    assert f"note: {tmp_path / 'b'} holds 2 of the 3 requests of --num-requests" in result.stderr


def test_a_data_set_that_exists_is_kept(engine, tmp_path):
    """Refused before any work; a device is no file to lose."""
    kind = ("token-norm-dist", "--num-requests", 2, "--input-mean", 3, "--output-mean", 3)
    (tmp_path / "data").write_text("made by hand\n")
    message = f"error: the output {tmp_path / 'data'} exists: choose another, or replace it with --overwrite before the"
    texts = ("text", "--input", tmp_path / "data", "--output-tokens", 3)
    for arguments in (kind, texts):
        result = prepare(engine, tmp_path / "data", *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr == f"{message} kind of data set\n"
        assert (tmp_path / "data").read_text() == "made by hand\n"
    result = prepare(engine, tmp_path / "data", "--overwrite", *kind)
    assert result.exit_code == 0, result.stderr
    assert len((tmp_path / "data").read_text().splitlines()) == 2
    assert prepare(engine, "/dev/null", *kind).exit_code == 0


def test_bad_input(engine, tmp_path):
    (tmp_path / "empty").write_text("")
    (tmp_path / "long").write_text('{"task_id": 1, "input_ids": [1], "output_tokens": 64}')
    (tmp_path / "foreign").write_text('{"task_id": 7, "input_ids": [99999], "output_tokens": 2}')
    for name, content in (
        ("options", "heat: 1"),
        ("list", "[1]"),
        ("text", "top_k: many"),
        ("range", "top_p: 3"),
        ("config", "max_batch_sise: 3"),
    ):
        (tmp_path / name).write_text(content)
    data = tmp_path / "long"
    for arguments, message in (
        (("--dataset", tmp_path / "empty"), "holds no requests"),
        (("--dataset", data), "at most 64: shorten the data set, or build the engine with a larger --max-seq-len"),
        (("--dataset", data, "--max-seq-len", 32), "raise --max-seq-len, here up to 64"),
        (("--dataset", tmp_path / "foreign"), "task 7: token id 99999 is outside the vocabulary"),
        (("--dataset", data, "--concurrency", 0), "error: --concurrency must be positive"),
        (
            ("--dataset", data, "--max-batch-size", 9),
            "error: --max-batch-size must be between 1 and",
        ),
        (
            ("--dataset", data, "--sampler-options", tmp_path / "options"),
            "expected a mapping of temperature, top_k, top_p, min_p, seed to numbers, got heat: 1",
        ),
        (("--dataset", data, "--sampler-options", tmp_path / "list"), "to numbers, got '[1]'"),
        (("--dataset", data, "--sampler-options", tmp_path / "text"), "to numbers, got top_k: 'many'"),
        (("--dataset", data, "--sampler-options", tmp_path / "range"), "range: top_p must be in (0, 1], got 3"),
        (
            ("--dataset", data, "--config", tmp_path / "config"),
            "'max_batch_sise' means nothing here (did you mean 'max_batch_size'?)",
        ),
        (("--dataset", data, "--draft", "ngram", "--draft-len", 9), "error: --draft-len must be between 1"),
        (("--dataset", data, "--draft-sampling"), "--draft-sampling means nothing without drafts"),
        (("--dataset", data, "--warmup", -1), "Invalid value for '--warmup'"),
        (("--dataset", data, "--kv-cache-free-gpu-mem-fraction", "nan"), "'nan' is not a finite number"),
        (("--dataset", data, "--eos-id", 99999), "error: --eos-id must be a token id below the engine's "),
        (("--dataset", data, "--max-num-tokens", 9), "error: --max-num-tokens 9 is less"),
        (("--dataset", data, "--report-json", "/proc/a"), "cannot write /proc/a: "),
        (("--dataset", data, "--iteration-log", "/proc/a"), "cannot write /proc/a: "),
        (("--dataset", data, "--output-json", tmp_path / "no" / "a"), f"cannot write {tmp_path / 'no' / 'a'}: "),
    ):
        result = bench("throughput", "--engine", engine, *arguments)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
        assert result.stderr.count("\n") == 1, "memory is described after all refusals"
    (tmp_path / "short").write_text('{"task_id": 1, "input_ids": [1], "output_tokens": 2}')
    outputs = ("--iteration-log", "/dev/full", "--request-json", "/dev/full", "--output-json", tmp_path / "out")
    result = bench("throughput", "--engine", engine, "--dataset", tmp_path / "short", *outputs)
    assert "= PERFORMANCE OVERVIEW" in result.stdout, "a full disk loses nothing that is written elsewhere"
    assert json.loads((tmp_path / "out").read_text())[0]["id"] == 1
    assert result.exit_code == 2
    assert result.stderr.count("cannot write /dev/full: No space left on device; choose another file") == 2
    result = prepare(engine, "/proc/a", "token-norm-dist", "--num-requests", 3, "--input-mean", 3, "--output-mean", 3)
    assert result.stderr == "error: cannot write /proc/a: No such file or directory; choose another file\n"
    result = prepare(
        engine, tmp_path / "a", "token-norm-dist", "--num-requests", 3, "--input-mean", 60, "--output-mean", 5
    )
    assert result.stderr.startswith(
        "error: task 0 would have 60 + 5 tokens, but a sequence of this engine has at most 64:"
    )
    for report in ("report", "other"):
        (tmp_path / report).write_text('{"performance": {}}')
    result = bench("compare", tmp_path / "report", tmp_path / "other", "--plot", tmp_path / "r.xyz")
    assert (result.stdout, result.stderr) == (
        "",
        "error: --plot expects a name that ends in .svg, .png, .pdf, got 'r.xyz'\n",
    )
    for content, message in ((b"\n \n", "holds no prompts: expected one a line"), (b"\xff", "is not UTF-8 text")):
        (tmp_path / "text").write_bytes(content)
        result = prepare(engine, tmp_path / "a", "text", "--input", tmp_path / "text", "--output-tokens", 3)
        assert result.stderr.startswith(f"error: {tmp_path / 'text'} {message}")
    (tmp_path / "folder").mkdir()
    report = {"performance": {"request_throughput_req_s": 2.0}}
    for place in (tmp_path, tmp_path / "folder"):
        (place / "same.json").write_text(json.dumps(report))
    result = bench("compare", tmp_path / "same.json", tmp_path / "folder" / "same.json")
    assert "second / first" in " ".join(result.stdout.split()), "two reports of one name have their paths above"
    result = bench("prepare-dataset", "--output", tmp_path / "a", "text", "--input", data, "--output-tokens", 3)
    assert "Missing option '--engine', before the kind of data set (see " in result.stderr
    lengths = ("--input-min", 9, "--input-max", 3, "--output-min", 2, "--output-max", 4)
    result = prepare(engine, tmp_path / "a", "token-unif-dist", "--num-requests", 3, *lengths)
    assert "--input-min 9 is above --input-max 3" in result.stderr
    assert not (tmp_path / "a").exists()
