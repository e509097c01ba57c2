"""What benchmarks/report.py makes of result lines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import report
import report_headline
import report_kernels
import report_lines
import report_parallel
import report_serving
import report_speculation
import report_steps
import report_summary
import report_vllm


def test_the_page_has_every_section() -> None:
    page = report.render(report_lines.read_lines(report.RESULTS))
    assert "<!--" not in page
    for name in report_lines.NAMES.values():
        assert name in page


def test_a_share_needs_a_ceiling_that_is_one() -> None:
    assert report_lines.share_of(3.0, 4.0) == "75 %"
    assert report_lines.share_of(4.3, 4.0) == "above 100 %"


def decode_line(variant: str, **changes) -> dict:
    line = {
        "benchmark": "e2e_decode_speedup", "op": "decode_step", "geometry": "nano4b", "batch": 512,
        "window": 1, "variant": variant,
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
    text = report_steps.step_table(report_lines.read_lines(tmp_path))
    rows = text.splitlines()[2:]
    assert len(rows) == 1, "the older line of a condition and one without its plain run are left out"
    assert "| 3.00 | 2.00 | **1.50x** (1.40 to 1.60) |  |  |  | 1.55x | 100,000 | yes |" in rows[0]
    split = [
        decode_line(name, split_us={"ssm": us}, gap_us=10.0) for name, us in (("plain", 2990.0), ("replay", 1490.0))
    ]
    assert "| 2.00x |" in report_steps.step_table(split), "kernel times and gaps alone"
    wrong = decode_line("replay", correct=False, logits_distance=0.7)
    assert "**no** (0.700)" in report_steps.step_table([lines[0], wrong])


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
    assert report_steps.beside_peer([*peers, *others], plain, replay) == "1.02x", "others do not rewrite the state"
    assert report_steps.beside_peer(peers[:1], plain, replay) == "1.50x", "a slower one does not"
    assert report_steps.beside_peer([], plain, replay) == ""


def test_vllms_steps_stand_beside_ours_of_the_same_run() -> None:
    far = [decode_line("replay", tokens_per_s=1.0, date=day) for day in ("2026-01-01T10:00", "2026-01-05T10:00")]
    ours = [decode_line(name, tokens_per_s=90000.0, date="2026-01-02T10:01") for name in ("plain", "replay")]
    times = {"median_us": 3200.0, "p10_us": 3000.0, "p90_us": 3200.0}
    theirs = decode_line("vllm 0.33.0 replay", tokens_per_s=60000.0, date="2026-01-02T10:00", **times)
    other = decode_line("replay", batch=1, tokens_per_s=5.0, date="2026-01-02T10:00")
    rows = report_vllm.vllm_table([far[0], *ours, theirs, other, far[1]]).splitlines()[2:]
    assert len(rows) == 1
    assert "| vllm 0.33.0 replay | 3.20 (3.00 to 3.20) |" in rows[0]
    assert rows[0].endswith("| 90,000 | **1.50x** |")


def test_missing_figures_are_said_to_be_missing() -> None:
    assert report_steps.step_table([]) == report_speculation.speculation_table([]) == "*Not measured.*\n"


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
    assert report_lines.model_of(decode_line("replay", layers=21)) == "Nemotron-3-Nano-4B (21 of 42 layers)"
    packed = decode_line("replay", geometry="super120b-nvfp4")
    assert report_lines.model_of(packed) == "Nemotron-3-Super-120B, NVFP4 weights"
    assert "Nemotron-3-Super-120B, NVFP4 weights | 0.98, not run | 1.10, not run | 1.27, not run | 1.67, 1.50 |" in (
        report_steps.batch_table([packed])
    )


def test_a_text_without_a_mark_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "report.md"
    text.write_text(report.TEXT.read_text(encoding="utf-8").replace("<!-- steps -->\n", ""))
    with pytest.raises(ValueError, match="'<!-- steps -->' once"):
        report.render([], text)


def kernel_line(variant: str, us: float, **changes) -> dict:
    return {
        "benchmark": "gdn_window", "op": "gdn_window", "geometry": "qwen4b", "batch": 256, "window": 1,
        "state_dtype": "float32", "readout_dtype": "same", "fill": "desync", "variant": variant, "correct": True,
        "L": 0 if variant == "plain" else 16, "median_us": us, "p10_us": us, "p90_us": us,
        "gpu": "NVIDIA H200", "commit": "c", "date": "2026-01-01", **changes,
    }  # fmt: skip


def test_the_summary_names_the_fastest_peers() -> None:
    low = {"state_dtype": "float16", "state_rounding": "stochastic", "readout_dtype": "nvfp4"}
    lines = [
        kernel_line("ours", 100.0),
        kernel_line("ours", 50.0, **low),
        kernel_line("ours", 1.0, fill="flush"),
        kernel_line("ours", 1.0, state_dtype="float16"),
        kernel_line("plain", 10.0),
        kernel_line("fla 0.6.0 slow", 300.0, op="peer"),
        kernel_line("vllm 0.33.0 rows", 200.0, op="peer"),
        kernel_line("vllm 0.33.0 replay", 150.0, op="replay_peer"),
        kernel_line("ours", 100.0, window=5),
        kernel_line("vllm 0.33.0 fused", 400.0, window=5, op="peer"),
        kernel_line("sglang 0.5.10 update", 500.0, window=5, op="peer"),
        kernel_line("vllm 0.33.0 fused", 300.0, window=5, op="peer", date="2026-01-02"),
    ]
    (row,) = report_summary.kernel_summary(lines).splitlines()[2:]
    assert row == (
        "| Qwen3.5-4B | 100 us | **2.00x** (vLLM 0.33.0) | **1.50x** (vLLM 0.33.0, its replay) | 4.00x | "
        "**4.0x** (vLLM 0.33.0) |  |"
    ), "of another run, 300 us is not compared"
    (wrong,) = report_summary.kernel_summary([lines[0], {**lines[6], "correct": False}]).splitlines()[2:]
    assert wrong == "| Qwen3.5-4B | 100 us |  |  |  |  |  |", "nothing is compared with a wrong result"


def test_the_summary_compares_with_vllm_at_its_fastest() -> None:
    """18 to 27 ms are further apart than 5 %, so the fastest of them counts; 20.0 and 20.1 are not."""
    steps = [decode_line(name, batch=256, p10_us=1.0, p90_us=1.0) for name in ("plain", "replay")]
    apart = decode_line("vllm 0.33.0", batch=256, median_us=2e4, p10_us=1.8e4, p90_us=2.7e4)
    (row,) = report_summary.step_summary([*steps, apart]).splitlines()[2:]
    assert row.startswith("| Nemotron-3-Nano-4B | **1.50x** | **9.00x** (vLLM 0.33.0) |")
    (row,) = report_summary.step_summary([*steps, {**apart, "p10_us": 2e4, "p90_us": 2.01e4}]).splitlines()[2:]
    assert "**10.00x**" in row
    bars = report_headline.step_bars([*steps, apart])["nano4b"]
    assert [bar.kind for bar in bars] == ["peer", "plain", "replay"]
    assert bars[0].varies
    assert report_headline.step_bars(steps) == {}, "a model without a peer is not in the picture"


def test_other_rings_stand_in_the_whole_table_alone() -> None:
    speed = {"gb_s": 3000.0, "ceiling_gb_s": 4000.0, "rmw_ceiling_gb_s": 4000.0, "bytes": 4e8}
    lines = [kernel_line("plain", 120.0, **speed), kernel_line("ours", 50.0, **speed)]
    longer = kernel_line("ours", 40.0, **speed, L=32)
    assert report_kernels.kernel_table([*lines, longer]).splitlines()[2:] == [
        "| Qwen3.5-4B, float32 | decode | 50 | 75 % | 100 | 2.00x | 120 |  |  |",
        "| Qwen3.5-4B, float32, L = 32 | decode | 40 | 75 % | 100 | 2.50x | 120 |  |  |",
    ]
    assert report_summary.kernel_summary([*lines, longer]) == report_summary.kernel_summary(lines)


def test_drafts_are_compared_with_other_verifications_of_their_run() -> None:
    low = {"state_dtype": "float16", "state_rounding": "stochastic", "readout_dtype": "nvfp4"}
    own = [kernel_line("ours", us, window=5, fill=fill, **low) for fill, us in (("desync", 100.0), (8, 50.0))]
    fast, slow = (
        kernel_line(name, us, window=5, op="peer", fill="flush", is_own_choice=own)
        for name, us, own in (("a 1 update rows 8", 900.0, False), ("b 2 update rows 9", 950.4, True))
    )
    slower = {**slow, "variant": "b 2 other", "median_us": 990.0}
    (row,) = report_kernels.native_table([*own, slower, slow, fast]).splitlines()[2:]
    assert row == (
        "| Qwen3.5-4B, float16 and nvfp4 readout | 100.0 | 50.0 | 900 (a 1 update rows 8) | **9.00x** | **18.00x** "
        "| 950 (b 2) |"
    )
    for other in ({"date": "2026-01-02"}, {"correct": False}, {"batch": 1}, {"window": 1}, {"op": "replay_peer"}):
        assert report_kernels.native_table([*own, {**fast, **other}]) == "*Not measured.*\n", other
    (row,) = report_kernels.native_table([own[0], {**own[1], "date": "2026-01-02"}, fast]).splitlines()[2:]
    assert "| 100.0 |  | 900 (a 1 update rows 8) | **9.00x** |  |  |" in row, (
        "the time without a flush is of another run"
    )


def test_the_summary_names_another_batch_where_the_usual_one_was_not_run() -> None:
    spec = {"benchmark": "e2e_spec_decode_throughput", "fill": "desync", "speedup_over_snapshots": 1.4}
    lines = [decode_line("replay-speculation", **spec, batch=batch, speedup=2.0) for batch in (64, 128)]
    (row,) = report_summary.step_summary(lines).splitlines()[2:]
    assert row == "| Nemotron-3-Nano-4B |  |  |  | **1.40x**, batch 128 | **2.00x**, batch 128 |  |"
    low = decode_line("replay-speculation-float16-nvfp4-stochastic", **spec, batch=256, speedup=3.0)
    usual = decode_line("replay-speculation", **spec, batch=256, speedup=2.5)
    (row,) = report_summary.step_summary([*lines, low, usual]).splitlines()[2:]
    assert row == "| Nemotron-3-Nano-4B |  |  |  | **1.40x** (1.40x) | **2.50x** (3.00x) |  |"
