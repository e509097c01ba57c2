"""What benchmarks/report.py makes of result lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import report
import report_parallel
import report_serving
import report_vllm

BENCHMARKS = report.ROOT


def test_the_page_has_every_section() -> None:
    page = report.render(report.read_lines(BENCHMARKS / "results"))
    assert "<!--" not in page
    for name in report.NAMES.values():
        assert name in page


def test_a_share_needs_a_ceiling_that_is_one() -> None:
    assert report.share_of(3.0, 4.0) == "75 %"
    assert report.share_of(4.3, 4.0) == "above 100 %"


def decode_line(variant: str, **changes) -> dict:
    line = {
        "benchmark": "e2e_decode_speedup", "geometry": "nano4b", "batch": 512, "window": 1, "variant": variant,
        "L": 0 if variant == "plain" else 16, "layers": 42, "layers_total": 42, "context": [1, 2], "commit": "c",
        "median_us": 3000.0 if variant == "plain" else 2000.0, "speedup": 1.5, "speedup_p10": 1.4, "speedup_p90": 1.6,
        "tokens_per_s": 1e5, "correct": True, "gpu": "NVIDIA H200", "date": "2026-01-01",
        "state_dtype": "float32", "readout_dtype": "same",
    }  # fmt: skip
    return {**line, **changes}


def test_steps_stand_beside_the_published_ones(tmp_path: Path) -> None:
    lines = [decode_line("plain"), decode_line("replay", date="2026-01-02")]
    old = decode_line("replay", median_us=9.0)
    other = decode_line("replay", geometry="qwen4b")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, [*lines, old, other])))
    text = report.step_table(report.read_lines(tmp_path))
    rows = text.splitlines()[2:]
    assert len(rows) == 1, "the older line of a condition and one without its plain run are left out"
    assert "| 3.00 | 2.00 | **1.50x** (1.40 to 1.60) |  |  |  | 1.55x | 100,000 | yes |" in rows[0]
    split = [
        decode_line(name, split_us={"ssm": us}, gap_us=10.0) for name, us in (("plain", 2990.0), ("replay", 1490.0))
    ]
    assert "| 2.00x |" in report.step_table(split), "kernel times and gaps alone"
    wrong = decode_line("replay", correct=False, logits_distance=0.7)
    assert "**no** (0.700)" in report.step_table([lines[0], wrong])


def test_served_variants_stand_beside_each_other() -> None:
    line = {
        "benchmark": "serve_ngram", "op": "serve", "geometry": "nano4b", "batch": 256, "layers": 42, "layers_total": 42,
        "variant": "replay-ngram", "tokens_per_s": 30000.0, "speedup": 2.0, "speedup_over_snapshots": 1.8,
        "acceptance_length": 3.17, "device_decode_share": 0.7, "device_prompt_share": 0.25,
        "same_tokens": 0.9, "correct": True,
    }  # fmt: skip
    text = report_serving.serving_table([line, {**line, "op": "other"}])
    row = "| Nemotron-3-Nano-4B, batch 256 | replay-ngram | 30,000 | 2.00x | 1.80x | 3.17 | 25 % | 5 % | 90 % |"
    assert text.splitlines()[2:] == [row]
    assert "| **40 %** |" in report_serving.serving_table([{**line, "correct": False, "same_tokens": 0.4}])


def test_a_faster_peer_takes_the_place_of_our_plain_kernel() -> None:
    """21 recurrent layers of Nano-4B: a peer of 50 us takes 950 us off a plain step whose state kernels took 2,000."""
    plain, replay = decode_line("plain", ssm_us=2000.0), decode_line("replay")
    peer = {"benchmark": "mamba2_window", "geometry": "nano4b", "batch": 512, "window": 1, "state_dtype": "float32"}
    peer["op"] = "peer"
    peers = [{**peer, "variant": "slow 1.0", "median_us": 99.0}, {**peer, "variant": "fast 1.0", "median_us": 50.0}]
    others = [{**peer, "op": op, "variant": op, "median_us": 1.0} for op in ("mamba2_window", "replay_peer")]
    assert report.beside_peer([*peers, *others], plain, replay) == "1.02x", "others do not rewrite the state"
    assert report.beside_peer(peers[:1], plain, replay) == "1.50x", "a slower one does not"
    assert report.beside_peer([], plain, replay) == ""


def test_vllms_steps_stand_beside_ours_of_the_same_run() -> None:
    far = [decode_line("replay", tokens_per_s=1.0, date=day) for day in ("2026-01-01T10:00", "2026-01-05T10:00")]
    ours = [decode_line(name, tokens_per_s=90000.0, date="2026-01-02T10:01") for name in ("plain", "replay")]
    theirs = decode_line("vllm 0.33.0 replay", tokens_per_s=60000.0, date="2026-01-02T10:00")
    other = decode_line("replay", batch=1, tokens_per_s=5.0, date="2026-01-02T10:00")
    rows = report_vllm.vllm_table([far[0], *ours, theirs, other, far[1]]).splitlines()[2:]
    assert len(rows) == 1
    assert "| vllm 0.33.0 replay |" in rows[0]
    assert rows[0].endswith("| 90,000 | **1.50x** |")


def test_missing_figures_are_said_to_be_missing() -> None:
    assert report.step_table([]) == report.speculation_table([]) == "*Not measured.*\n"


def test_divided_models_stand_beside_the_whole_one_of_their_run() -> None:
    shared = {"benchmark": "e2e_tensor_parallel", "logits_distance_without_context": 1.2}
    one = decode_line("1 gpu", **shared, ranks=1, gpu_memory_bytes=10 << 30, logits_distance=0.0)
    two = decode_line(
        "2 gpus", **shared, ranks=2, gpu_memory_bytes=6 << 30, logits_distance=0.02, median_us=1500.0,
        split_us={"collective": 321.4},
    )  # fmt: skip
    rows = report_parallel.parallel_table([one, two, {**two, "batch": 1}]).splitlines()[2:]
    assert len(rows) == 1, "a line without its whole one says nothing"
    assert "| 2 | 2.00 | 1.50 | **1.50x** (1.40 to 1.60) | 321 | 100,000 | 10.0, 6.0 | 0.020, 1.20 | yes |" in rows[0]


def test_truncated_models_are_named_so() -> None:
    assert report.model_of(decode_line("replay", layers=21)) == "Nemotron-3-Nano-4B (21 of 42 layers)"
    packed = decode_line("replay", geometry="super120b-nvfp4")
    assert report.model_of(packed) == "Nemotron-3-Super-120B, NVFP4 weights"
    assert "Nemotron-3-Super-120B, NVFP4 weights | 0.98, not run | 1.10, not run | 1.27, not run | 1.67, 1.50 |" in (
        report.batch_table([packed])
    )


def test_a_text_without_a_mark_is_refused(monkeypatch, tmp_path: Path) -> None:
    text = (BENCHMARKS / "report.md").read_text(encoding="utf-8")
    (tmp_path / "report.md").write_text(text.replace("<!-- steps -->\n", ""))
    monkeypatch.setattr(report, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="'<!-- steps -->' once"):
        report.render([])
