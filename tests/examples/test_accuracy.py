"""benchmarks/accuracy.py on a shipped checkpoint, through the project's own engine and session."""

import json

import pytest

from benchmarks import accuracy
from tests.examples.conftest import ROOT


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    from replayssm.builders.engine import BuildOptions, build_engine

    folder = tmp_path_factory.mktemp("engines") / "nemotron-h-tiny"
    build_engine(ROOT / "examples" / "nemotron-h-tiny", folder, BuildOptions(max_draft_len=3, max_batch_size=2))
    return folder


@pytest.mark.slow
def test_one_object_on_standard_output(engine, capsys):
    accuracy.main(["--engine", str(engine), "--tier", "easy", "--limit", "2", "--draft", "mtp", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (result["state_dtype"], result["L"], result["draft"]) == ("float32", 16, "mtp")
    (easy,) = result["tiers"]
    assert "correct" not in easy, "answers are judged, in value; no kernel was compared with anything"
    assert (easy["correct_answers"], easy["count"], easy["unfinished"]) == (2, 2, 0)
    assert easy["acceptance_length"] > 2
    assert easy["interval_95"][0] < easy["value"] <= 1


@pytest.mark.parametrize("arguments", [["--limit", "0"], ["--draft-len", "2"], ["--tier", "unknown"]])
def test_bad_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        accuracy.parse(["--engine", "none", *arguments])
    assert "usage" in capsys.readouterr().err


def test_wilson_interval():
    assert accuracy.wilson(1000, 1000) == pytest.approx((0.99617, 1.0), abs=1e-4)
    assert accuracy.wilson(442, 1000) == pytest.approx((0.4115, 0.4729), abs=1e-4)
    assert accuracy.wilson(0, 0) == (0.0, 1.0)
