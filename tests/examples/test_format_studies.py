"""The studies of state formats: their statistics, their inputs, and one small run of each."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer

from benchmarks import format_accuracy, state_error
from benchmarks.e2e_model import load_model
from examples import tasks
from examples.export import load
from examples.replay import BUFFER_LEN
from examples.replay_decode import ReplayDecoder
from examples.state_formats import StateFormat
from examples.tokenizer import prompt_ids


def test_paired_difference_by_hand():
    """10 gained and 30 lost of 400: -5 points; discordant pairs alone make the variance."""
    ours = [True] * 10 + [False] * 30 + [True] * 360
    theirs = [False] * 10 + [True] * 30 + [True] * 360
    difference, low, high = format_accuracy.paired(ours, theirs)
    assert difference == -0.05
    half = 1.96 * (0.1 - 0.0025) ** 0.5 / 20
    assert (low, high) == (pytest.approx(-0.05 - half), pytest.approx(-0.05 + half))
    assert format_accuracy.paired([True, False], [True, False]) == (0.0, 0.0, 0.0)


def test_accuracy_study_on_two_problems(tmp_path, monkeypatch):
    """Problems through a file, prompts of different lengths, a line per format; the model solves both in each."""
    monkeypatch.setattr(format_accuracy, "GROUPS", ((("easy",), 224),))
    problems, output = tmp_path / "problems.json", tmp_path / "lines.jsonl"
    format_accuracy.main(["--limit", "2", "--write-problems", str(problems)])
    arguments = ["--layout", "qwen3.5-tiny", "--limit", "2", "--problems", str(problems)]
    format_accuracy.main([*arguments, "--formats", "0", "1", "--output", str(output)])
    exact, small = (json.loads(line) for line in output.read_text().splitlines())
    assert (exact["format"], small["format"]) == ("float32", "float16, stochastic, nvfp4 readout")
    assert (exact["correct_answers"], small["correct_answers"], small["difference"]) == (2, 2, 0.0)
    assert exact["same_tokens"] == 1.0
    with pytest.raises(SystemExit):
        format_accuracy.parse(["--layout", "qwen3.5-tiny", "--formats", "3"])


def test_a_line_says_how_u_is_kept() -> None:
    form, args = StateFormat("float16", True, "nvfp4"), SimpleNamespace(simulate=False, commit="c")
    line = format_accuracy.describe("qwen3.5-tiny", form, args)
    assert (line["format"], line["u_format"]) == (f"{form.name}, u in one bf16 number", "bfloat16")
    pair = format_accuracy.describe("qwen3.5-tiny", form._replace(u_source="checkpoint"), args)
    assert (pair["format"], pair["u_format"]) == (f"{form.name}, u from checkpoint", "bfloat16x2")
    args.simulate = True
    assert format_accuracy.describe("qwen3.5-tiny", form, args)["format"] == form.name
    # The study of states keeps it as engines do.
    assert all(own.u_format == format_accuracy.replay_settings(own).u_format for own in (form, StateFormat("float16")))
    source = state_error.synthetic("qwen122b", 16)
    assert [line["u_format"] for line in state_error.lines(source, [form], 16, 16)] == ["bfloat16"]


@pytest.mark.parametrize("name", ["nano4b", "qwen122b", "nemotron-h-tiny", "qwen3.5-tiny"])
def test_state_error_orders_formats(name):
    """fp32 stays at its rounding, 16 bits far below 8, 8 below 4; a readout's error stays out of the checkpoint."""
    tokens = 3 * BUFFER_LEN
    source = state_error.recorded(name, tokens) if "tiny" in name else state_error.synthetic(name, tokens)
    gdn = source.A is None
    formats = [
        StateFormat("float32"),
        StateFormat("float16", True),
        StateFormat("float8", True),
        StateFormat("nvfp4"),
        StateFormat("float16", True, "nvfp4", "checkpoint" if gdn else "readout"),
    ]
    found = state_error.curves(source, formats, tokens, BUFFER_LEN)
    exact, half, eighth, quarter, copied = (found[form] for form in formats)
    assert exact["tokens"] == [16, 32, 48]
    for field in ("state", "output"):
        assert max(exact[field]) < 1e-5
        # The first outputs come before anything is rounded.
        assert exact[field][-1] < half[field][-1] / 10 < eighth[field][-1] / 100
    assert half["state"][-1] < 2e-3
    assert quarter["state"][-1] > 1.5 * eighth["state"][-1]
    # Products of other shapes: a few elements fall to the other side of a rounding boundary.
    assert copied["state"] == pytest.approx(half["state"], rel=1e-2)
    assert copied["output"][-1] > 10 * half["output"][-1]


def test_recorded_inputs_are_the_models_own():
    """The recurrence over what was recorded gives what the model's own scan gives."""
    source = state_error.recorded("nemotron-h-tiny", 40)
    assert source.inputs[0].shape == (5, 40, 8, 64)
    assert source.A.shape == (5, 8)
    x, dt, B, C = source.inputs
    layer = 2
    y = state_error.layers.scans.mamba2_sequential(
        *(tensor[layer : layer + 1] for tensor in (x, dt)),
        source.A[layer],
        *(tensor[layer : layer + 1] for tensor in (B, C)),
        torch.zeros(8),
        torch.zeros(1, 40, dtype=torch.long),
    )
    ours = torch.stack([out[layer] for out, _ in state_error.exact(source, 40)])
    # fp32 against fp64.
    assert (ours - y[0]).abs().max() < 1e-5 * y.abs().max()


def test_engines_and_simulation_answer_alike():
    """Prompts of different lengths, over two flushes. Their bf16 sums run in different orders, so that texts may part
    later on; these do not."""
    folder = format_accuracy.ROOT / "examples" / "qwen3.5-tiny"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [prompt_ids(tokenizer, problem.question) for problem in tasks.held_out("easy", 2)]
    cpu = torch.device("cpu")
    engine = format_accuracy.EngineDecoder(load_model(str(folder), cpu), prompts, 34, 0, cpu)
    simulated = ReplayDecoder(load(folder, folder.name, torch.bfloat16), prompts, 34)
    simulated.prefill()
    for form in (StateFormat("float32"), StateFormat("float16", True, "nvfp4", "checkpoint", ((4, "float8"),))):
        assert engine.decode(form) == simulated.decode(form)
    # e4m3 leaves 20 of 23 bits of a mantissa zero; e2m1 times a scale of e4m3 has more bits.
    low_bits = [bool((layer.core.readout.view(torch.int32) & 0xFFFFF).any()) for layer in simulated.recurrent]
    assert dict(zip(simulated.numbers, low_bits, strict=True)) == {0: True, 1: True, 2: True, 4: False, 5: True}
