"""Commands that take an engine directory take one of plans, with a stand-in for TensorRT."""

from __future__ import annotations

import json

from click.testing import CliRunner

from replayssm.runtime.requests import Request
from replayssm.runtime.serving import make_loop
from replayssm.scripts.cli import main

SMALL = {"max_batch_size": 2, "max_seq_len": 96, "max_draft_len": 1}


def run(*arguments):
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.stdout


def test_generate_and_bench(plan_engine, tmp_path):
    engine, module = plan_engine("qwen", **SMALL)
    place = ("--engine", engine.directory, "--device", "cpu")
    output = run("generate", *place, "--prompt", "The state", "--max-new-tokens", 5, "--ignore-eos", "--json")
    assert len(json.loads(output)["token_ids"]) == 5
    data, report = tmp_path / "data", tmp_path / "report"
    sizes = ("--num-requests", 3, "--input-mean", 9, "--output-mean", 4)
    run("bench", "prepare-dataset", "--engine", engine.directory, "--output", data, "token-norm-dist", *sizes)
    run("bench", "throughput", *place, "--dataset", data, "--draft", "mtp", "--warmup", 0, "--report-json", report)
    found = json.loads(report.read_text())
    assert found["request_info"]["num_requests"] == 3
    assert found["world_info"]["max_batch_size"] == 2
    contexts = [context for built in module.engines for context in built.contexts]
    assert sum(context.runs for context in contexts) > 10, "plans ran"


def test_a_server_loop(plan_engine):
    engine, _ = plan_engine("nano", **SMALL)
    loop = make_loop(engine, 2)
    scheduler = loop.scheduler
    requests = [Request.create(scheduler.session, [3, 4, 5 + n], 4, end_tokens=()) for n in range(3)]
    for request in requests:
        scheduler.submit(request)
    while scheduler.step():
        pass
    assert [len(request.generated) for request in requests] == [4, 4, 4]


def test_choices_of_the_target_reach_the_plans(plan_module, tiny_checkpoint, tmp_path):
    """`build --alias --prefill-plan`, and a refusal where they mean nothing."""
    place = ("--checkpoint", tiny_checkpoint("nano"), "--max-seq-len", 64)
    choices = ("--alias", "bound", "--prefill-plan")
    run("build", *place, "--output", tmp_path / "plans", "--target", "tensorrt", "--dtype", "float16", *choices)
    described = json.loads((tmp_path / "plans" / "plans.json").read_text())
    assert (described["alias"], described["prefill_plan"]) == ("bound", True)
    assert described["networks"]["main"]["prefill_file"] == "plans/main-prefill.plan"
    result = CliRunner().invoke(main, list(map(str, ("build", *place, "--output", tmp_path / "torch", *choices))))
    assert result.exit_code == 2
    assert "--alias and --prefill-plan are choices of the tensorrt target, not of torch" in result.stderr
    assert not (tmp_path / "torch").exists()
