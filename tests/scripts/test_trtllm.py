"""`replayssm trtllm-module` and `export-trtllm`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from replayssm.scripts import cli

ROOT = Path(__file__).resolve().parents[2]
STANDIN = ROOT / "tests" / "integrations" / "standin"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRTLLM")}
    return subprocess.run(
        [sys.executable, "-c", "from replayssm.scripts.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        env=clean | environment,
        check=False,
    )


def test_module_is_a_package_directory():
    result = CliRunner().invoke(cli.main, ["trtllm-module"])
    path = Path(result.stdout.strip())
    assert result.stdout == f"{path}\n"
    assert path.name == "replayssm_trtllm"
    assert (path / "__init__.py").is_file()


def test_check_without_tensorrt_llm():
    result = run("trtllm-module", "--check")
    assert result.returncode == 2
    assert result.stderr.startswith("error: replayssm_trtllm is loaded by TensorRT-LLM")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "replay is registered for NemotronHForCausalLM"),
        ({"TRTLLM_REPLAYSSM": "0"}, "replay is not active here"),
    ],
)
def test_check_with_the_stand_in(environment, expected):
    path = os.pathsep.join([str(STANDIN), os.environ.get("PYTHONPATH", "")])
    result = run("trtllm-module", "--check", PYTHONPATH=path, **environment)
    assert expected in result.stdout + result.stderr
    assert (result.returncode == 0) == (not environment)


def test_export(tiny_checkpoint, tmp_path):
    arguments = ["export-trtllm", "--checkpoint", str(tiny_checkpoint("qwen")), "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(cli.main, [*arguments, "--max_batch_size", "8"], catch_exceptions=False)
    assert result.exit_code == 0
    assert f"trtllm-serve {tmp_path}/out --config {tmp_path}/out/trtllm.yaml" in result.stdout
    assert '--custom_module_dirs "$(replayssm trtllm-module)"' in result.stdout
    assert "times less)" in result.stdout
    assert "A step at batch 8 with 1,024 tokens a sequence moves" in result.stdout
    assert "max_batch_size: 8" in (tmp_path / "out" / "trtllm.yaml").read_text()


def test_export_of_more_tokens_than_the_model_has_positions(tiny_checkpoint, tmp_path):
    arguments = ["export-trtllm", "--checkpoint", str(tiny_checkpoint("qwen")), "--output", str(tmp_path / "out")]
    result = CliRunner().invoke(cli.main, [*arguments, "--max-seq-len", "2049"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--max-seq-len 2049 is more than the model was made for: 2048 positions" in result.stderr
    assert not (tmp_path / "out").exists()
