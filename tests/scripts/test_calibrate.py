"""`replayssm calibrate` through click."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from replayssm.builders.engine import BuildOptions, build_engine
from replayssm.runtime.format_comparison import FORMATS
from replayssm.runtime.layer_comparison import LayerDivergences
from replayssm.scripts.cli import main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "nemotron-h-tiny"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    output = tmp_path_factory.mktemp("engine") / "nemotron"
    build_engine(EXAMPLE, output, BuildOptions(max_batch_size=2, max_seq_len=128))
    return output


def calibrate(*arguments):
    return CliRunner().invoke(main, ["calibrate", *map(str, arguments)])


def test_help_names_every_format(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    shown = " ".join(calibrate("--help").stdout.split())
    named = shown.partition("several times: ")[2].partition("; +")[0].replace(" or ", ", ").split(", ")
    assert named == list(FORMATS)[1:]


def test_table_recommendation_and_json(engine, tmp_path, monkeypatch):
    """Two prompts are too few to clear anything but float32; wide limits clear the smallest format."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "At first Finn owns 143 books.", "answer": "x"}\n{"prompt": "Vera owns 287 books."}\n')
    arguments = ("--engine", engine, "--dataset", data, "--chat", "--max-new-tokens", 6)
    formats = ("--format", "float8-stochastic", "--format", "float16-stochastic+nvfp4")
    monkeypatch.setenv("COLUMNS", "80")
    result = calibrate(*arguments, *formats)
    assert result.exit_code == 0
    assert "recommended: float32, replayssm build --state-dtype float32\n" in result.stdout
    verdict = next(line for line in result.stdout.splitlines() if line.startswith("not float8-stochastic: "))
    assert "too few problems with answers (1) to tell, about 150 or more are needed: accuracy may lose" in verdict
    cut_off = "1 of 1 texts were cut off at 6 tokens, before their answers: raise --max-new-tokens"
    assert f"note: {cut_off}\n" in result.stdout
    table = [line for line in result.stdout.splitlines() if line[:1] in "┏┃┡│├└"]
    assert len(table) > 8
    assert "…" not in result.stdout
    assert max(map(len, table)) <= 80, "whole in the narrowest usual terminal"
    assert "note: 2 problems leave wide intervals" in result.stderr
    monkeypatch.setenv("FORCE_COLOR", "1")
    drawn = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", calibrate(*arguments, *formats).stderr)
    assert "float32 beside float8-stochastic, float16-stochastic+nvfp4\n" in drawn, "a bar, as in a terminal"
    assert re.search(r"━ 0/2 texts, -:--:-- left: \w", drawn)
    monkeypatch.delenv("FORCE_COLOR")
    wide = ("--max-disagreement", 0.999, "--tolerance", 0.999, "--json")
    report = json.loads(calibrate(*arguments[:4], "--limit", 2, "--max-new-tokens", 6, *formats[2:], *wide).stdout)
    assert [entry["name"] for entry in report["formats"]] == ["float32", "float16-stochastic+nvfp4"]
    assert report["problems"] == 2
    assert (report["recommended"], report["formats"][1]["refused"]) == (
        "float32",
        "too few problems with answers (1) to tell, about 4 or more are needed: accuracy may lose 100.0%, "
        "allowed 99.9%, measured +0.0%",
    )
    assert report["notes"][0] == cut_off
    assert [entry["cut_off"] for entry in report["formats"]] == [1, 1]
    data.write_text('{"prompt": "At first Finn owns 143 books."}\n')
    found = LayerDivergences({0: 1.0, 2: 0.0}, 1.5)
    monkeypatch.setattr("replayssm.runtime.layer_comparison.divergences", lambda *arguments, **options: found)
    report = json.loads(calibrate(*arguments, *formats[2:], "--by-layer", *wide).stdout)
    name = "float16-stochastic+nvfp4, float8 in 0"
    assert [entry["name"] for entry in report["formats"]] == ["float32", "float16-stochastic+nvfp4", name]
    assert "--readout-layers" not in report["build_options"]
    layers = {"kl": {"0": 1.0, "2": 0.0}, "kl_all": 1.5, "floor": 0.015, "named": [0]}
    assert report["by_layer"] == {"float16-stochastic+nvfp4": layers}
    note = (
        "float16-stochastic+nvfp4: KL that the 4-bit readout of each layer adds, nats: 0: 1.0e+00, 2: 0.0e+00; of all "
        "layers together 1.5e+00; noise is below 1.5e-02, 1% of that"
    )
    assert report["notes"] == [note]
    assert f"note: {note}\n" in calibrate(*arguments, *formats[2:], "--by-layer").stdout
    report = json.loads(calibrate(*arguments, *formats[2:], *wide).stdout)
    assert report["recommended"] == "float16-stochastic+nvfp4"
    expected = "--state-dtype float16 --state-rounding stochastic --readout-dtype nvfp4"
    assert report["build_options"] == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tolerance", 0), "--tolerance must lie between 0 and 1, got 0.0"),
        (("--slots", 0), "--slots must be at least 1, got 0"),
        (("--format", "int8"), "unknown format 'int8'"),
        (("--format", "float16", "--by-layer"), "--by-layer is about 4-bit readouts, which no format here has: add"),
    ],
)
def test_bad_input_is_one_line(engine, tmp_path, options, message):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "a"}\n')
    result = calibrate("--engine", engine, "--dataset", data, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
