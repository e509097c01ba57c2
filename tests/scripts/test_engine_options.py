"""Options of generate, bench and serve that say how a model runs. Ranks: tests/runtime/test_parallel_session.py."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from replayssm.builders.engine import BuildOptions, build_engine
from replayssm.runtime import parallel_session
from replayssm.runtime.engine import Engine
from replayssm.runtime.session import Session
from replayssm.scripts.cli import main
from replayssm.scripts.engine_options import as_asked


@pytest.fixture(scope="module")
def engine(tiny_checkpoint, tmp_path_factory):
    output = tmp_path_factory.mktemp("engines") / "nano"
    build_engine(tiny_checkpoint("nano"), output, BuildOptions(max_batch_size=2, max_seq_len=64))
    return output


@pytest.fixture
def opened(engine, monkeypatch):
    """Engines that sessions of several ranks were asked for; the whole model stands in for them."""
    asked = []

    class Whole(Session):
        def __init__(self, part, *arguments):
            asked.append(part)
            super().__init__(Engine.load(engine), *arguments)
            self.engine = part

        def close(self):
            asked.append("closed")

    monkeypatch.setattr(parallel_session, "ParallelSession", Whole)
    return asked


@pytest.fixture
def dataset(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"task_id": 0, "input_ids": [3, 4, 5, 6], "output_tokens": 6}\n')
    return path


@pytest.mark.parametrize("option", ["--tensor-parallel-size", "--tp_size"])
def test_generate(engine, opened, option):
    plain, shared = (
        CliRunner().invoke(
            main, ["generate", "--engine", str(engine), "--prompt", "abc", "--max-new-tokens", "5", *more]
        )
        for more in ((), (option, "2"))
    )
    assert shared.exit_code == 0, shared.output
    assert shared.stdout == plain.stdout
    assert [(part.rank, part.ranks) for part in opened[:1]] == [(0, 2)]
    assert opened[1:] == ["closed"]


@pytest.mark.parametrize("way", ["--tp", "config"])
def test_bench(engine, opened, dataset, tmp_path, way):
    """Ranks share the memory of this machine, and a report counts them."""
    config = tmp_path / "options.yaml"
    config.write_text("tensor_parallel_size: 2\n")
    more = ["--tp", "2"] if way == "--tp" else ["--config", str(config)]
    arguments = ["--engine", engine, "--dataset", dataset, "--warmup", 0, "--report-json", tmp_path / "report.json"]
    result = CliRunner().invoke(main, ["bench", "throughput", *map(str, arguments), *more])
    assert result.exit_code == 0, result.output
    assert opened[0].ranks == 2
    assert opened[1:] == ["closed"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["world_info"]["tp_size"], report["world_info"]["world_size"]) == (2, 2)
    performance = report["performance"]
    whole = performance["system_output_throughput_tok_s"]
    assert performance["output_throughput_per_gpu_tok_s"] == pytest.approx(whole / 2)


def run(command, engine, dataset, *more):
    arguments = {
        "generate": ["--engine", engine, "--prompt", "abc"],
        "bench": ["throughput", "--engine", engine, "--dataset", dataset],
        "serve": [engine, "--port", 0],
    }[command]
    if command == "serve":
        pytest.importorskip("uvicorn")
        pytest.importorskip("fastapi")
    return CliRunner().invoke(main, [command, *map(str, arguments), *more])


@pytest.mark.parametrize("command", ["generate", "bench", "serve"])
def test_what_does_not_divide_is_one_line(engine, dataset, command):
    result = run(command, engine, dataset, "--tensor-parallel-size", "3")
    assert result.exit_code == 2
    assert (
        "cannot be divided over 3 ranks: the heads of 'layers.0.ssm' must be a multiple of the 3 ranks" in result.stderr
    )
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["generate", "bench", "serve"])
def test_fp8_activations_without_a_gpu_are_one_line(engine, dataset, command):
    result = run(command, engine, dataset, "--fp8-activations")
    assert result.exit_code == 2
    assert "--fp8-activations is for products on a GPU: add --device cuda" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("asked", [True, False])
def test_fp8_activations_reach_every_rank(engine, asked, ranks):
    part = as_asked(Engine.load(engine), "cuda", ranks, asked)
    assert (part.ranks, part.fp8_products, part.fp8_experts) == (ranks, asked, asked)


def test_plans_keep_the_products_they_were_built_with(engine, monkeypatch):
    monkeypatch.setattr(Engine, "has_plans", property(lambda self: True))
    with pytest.raises(ValueError, match="leave out --fp8-activations, or build with --target torch"):
        as_asked(Engine.load(engine), "cuda", 1, True)
