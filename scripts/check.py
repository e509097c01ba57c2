"""`replayssm check`: the plans of an engine against the torch target, on this machine."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

TEXTS = (
    "The state of a sequence is read for every token and rewritten only when its ring is full, which is why",
    "Ella starts the day with 76 keys. Ella finds 50 keys near the farm and buys 27 more. How many keys does she have?",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return",
)
DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.argument("engine", type=DIRECTORY)
@click.option("--checkpoint", type=DIRECTORY, help="What the engine was built from: the whole model is compared too.")
@click.option(
    "--device", default="cuda", show_default=True, type=click.Choice(["cpu", "cuda"]), help="Where the plans run."
)
@click.option("--operators/--no-operators", default=True, show_default=True, help="Build and run each operator alone.")
@click.option("--seed", default=0, show_default=True, help="Of random prompts, weights and windows.")
@click.option(
    "--report",
    type=click.Path(dir_okay=False, path_type=Path),
    default="replayssm-check.json",
    show_default=True,
    help="File for a bug report: every finding with its numbers, the engine's settings and this machine.",
)
def check(engine: Path, checkpoint: Path | None, device: str, operators: bool, seed: int, report: Path) -> None:
    """Compare the plans of ENGINE with the torch target: op by op, and with --checkpoint the whole model.

    Ends with exit code 1 if anything differs by more than rounding. Needs TensorRT and the GPU of the plans.
    """
    import torch

    from replayssm.plugins import tensorrt_ops
    from replayssm.runtime.engine import Engine
    from replayssm.runtime.plan_check import PlanCheck

    loaded = Engine.load(engine)
    if not loaded.has_plans:
        raise ValueError(
            f"{engine} was built for target torch, and check compares plans: build one with `replayssm build --target "
            "tensorrt`"
        )
    tensorrt_ops.load_module(loaded.manifest.target)
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("plans run on a GPU, and torch sees none here (`replayssm doctor` says why)")
    oracle = None if checkpoint is None else _oracle(loaded, checkpoint)
    findings = []
    checks = PlanCheck(loaded, device, oracle, _prompts(loaded), seed)
    for finding in checks.run():
        findings.append(_shown(finding))
    if operators and findings[0].passed:
        for finding in _operators(loaded, oracle, checks.session, seed):
            findings.append(_shown(finding))
    _write(report, loaded, findings)
    failed = [finding.name for finding in findings if finding.passed is False]
    skipped = [finding.name for finding in findings if finding.passed is None]
    if failed:
        click.echo(f"{len(failed)} of {len(findings)} checks failed: {', '.join(failed)}. Report: {report}")
        raise SystemExit(1)
    note = f", not run: {', '.join(skipped)}" if skipped else ""
    click.echo(f"{len(findings) - len(skipped)} checks passed{note}. Report: {report}")


def _shown(finding: Any) -> Any:
    words = {True: ("pass", "green"), False: ("FAIL", "red"), None: ("skip", "yellow")}
    word, colour = words[finding.passed]
    click.echo(f"{click.style(word, fg=colour)}  {finding.name}: {finding.detail}")
    return finding


def _oracle(engine: Any, directory: Path) -> Any:
    """The engine's networks for the torch target, with weights from its checkpoint."""
    from replayssm.builders.checkpoint import Checkpoint
    from replayssm.builders.models import build_networks
    from replayssm.runtime.engine import Engine
    from replayssm.runtime.plans import PlanRuntime

    checkpoint = Checkpoint.open(directory)
    manifest = engine.manifest
    if checkpoint.identity != manifest.checkpoint["identity"]:
        raise ValueError(
            f"{directory} is not the checkpoint that the engine was built from ({manifest.checkpoint['name']}, "
            f"{manifest.checkpoint['identity'][:12]}): give that one"
        )
    traced = build_networks(checkpoint.config, checkpoint.module_format, manifest.replay.activation_dtype)
    networks = {network.name: network for network in (traced.main, traced.mtp) if network is not None}
    if {name: json.dumps(n.to_json()) for name, n in networks.items()} != {
        name: json.dumps(n.to_json()) for name, n in engine.networks.items()
    }:
        raise ValueError("this version makes other networks of the checkpoint than the engine has: build it again")
    weights = {name: recipe.load(checkpoint.tensor, allow_view=True) for name, recipe in traced.weight_plan.items()}
    # Plans for a GPU without the products of a format keep activations as they are.
    emulate = not PlanRuntime.describe(engine.directory).get("unpacked")
    manifest = replace(manifest, target="torch")
    return Engine(engine.directory, manifest, networks, weights, emulate_activation_quantization=emulate)


def _prompts(engine: Any) -> list[list[int]]:
    """Real text, where the engine has a tokenizer."""
    from replayssm.plugins.manifest import EngineDirectoryError
    from replayssm.runtime.text import encode_text

    try:
        tokenizer = engine.tokenizer
    except EngineDirectoryError:
        return []
    return [encode_text(tokenizer, text) for text in TEXTS]


def _operators(engine: Any, oracle: Any, session: Any, seed: int) -> Any:
    """Build a plan for every different operator, with the engine's own choices, and run it."""
    from replayssm.builders.targets.tensorrt import PlanOptions, write_plans, write_rtx_plans
    from replayssm.runtime.findings import Finding, attempt
    from replayssm.runtime.operator_check import check_operators, isolate, random_weights
    from replayssm.runtime.plans import PlanRuntime

    manifest, description = engine.manifest, session.executors["main"].runtime.description
    options = PlanOptions(
        manifest.limits,
        manifest.replay,
        description.get("alias", "declared"),
        description.get("arch", 0),
        tuple(description.get("unpacked", ())),
        description.get("prefill_plan", False),
    )
    write = write_plans if manifest.target == "tensorrt" else write_rtx_plans
    networks = isolate(engine.networks)
    for name, network in networks.items():
        weights = random_weights(network, seed) if oracle is None else oracle.weights
        with tempfile.TemporaryDirectory() as folder:

            def run(name=name, network=network, weights=weights, folder=folder) -> Finding:
                write(Path(folder), {name: network}, weights.__getitem__, options)
                runtime = PlanRuntime(Path(folder), manifest.target, session.device)
                slots = manifest.limits.max_batch_size
                (found,) = check_operators({name: network}, {name: weights}, runtime, manifest.replay, slots, seed)
                return found

            yield attempt(f"operator {name}", run)


def _write(path: Path, engine: Any, findings: list[Any]) -> None:
    """The report, written whole or not at all."""
    import datetime

    from replayssm.runtime.environment import examine
    from replayssm.runtime.plans import PlanRuntime
    from replayssm.scripts.files import write_lines

    manifest = engine.manifest.to_json()
    described = ("model", "quantization", "replay", "limits", "target", "versions", "checkpoint", "kernels")
    content = {
        "passed": not any(finding.passed is False for finding in findings),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "engine": {name: manifest[name] for name in described},
        "plans": PlanRuntime.describe(engine.directory),
        "machine": examine().to_json(),
        "findings": [finding.to_json() for finding in findings],
    }
    write_lines(path, [json.dumps(content, indent=1)])
