"""Reports of benchmarks with the groups, keys and headings of trtllm-bench, so that results lie side by side.

Definitions are its own too: output tokens include the first; throughput divides by the time from the first start to
the last end; a request's acceptance length is its output tokens over its iterations, the prompt's included; and the
number of draft tokens is the largest one times the iterations, whatever was proposed.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from replayssm.runtime.bench_run import Record
from replayssm.runtime.environment import own_version
from replayssm.runtime.scheduler import Scheduler
from replayssm.runtime.serving import slot_bytes

PERCENTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
_RULE = "=" * 59


def percentiles(values: Iterable[float]) -> dict[str, float] | None:
    """p50 to p99 (the value at that share of the sorted list), minimum, maximum, average; None for no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    chosen = {name: ordered[min(int(len(ordered) * share), len(ordered) - 1)] for name, share in PERCENTILES.items()}
    return {**chosen, "minimum": ordered[0], "maximum": ordered[-1], "average": sum(ordered) / len(ordered)}


def make_report(
    scheduler: Scheduler,
    records: Sequence[Record],
    *,
    draft: str,
    streaming: bool,
    dataset: Path,
    memory_fraction: float,
) -> dict[str, Any]:
    """All groups of a report."""
    engine, session, costs = scheduler.session.engine, scheduler.session, scheduler.options.draft_costs
    report = {
        "engine": _engine(engine),
        "machine": _machine(),
        "request_info": _request_info(records),
        "world_info": {
            "tp_size": engine.ranks,
            "pp_size": 1,
            "ep_size": None,
            "world_size": engine.ranks,
            "max_batch_size": session.slots,
            "max_num_tokens": scheduler.max_num_tokens,
            "scheduling_policy": "GUARANTEED_NO_EVICT" if scheduler.options.time_slice is None else "MAX_UTILIZATION",
            "kv_cache_percentage": memory_fraction * 100,
            "issue_rate": len(records) / max(max(r.start for r in records) - min(r.start for r in records), 1e-9),
        },
        "performance": _performance(records, engine.ranks),
        "dataset": _dataset(records, dataset),
        "replayssm": {
            "buffer_len": session.settings.buffer_len,
            "state_dtype": session.settings.state_dtype,
            "readout_dtype": session.settings.readout_dtype,
            "readout_layers": dict(session.settings.readout_layers),
            "state_bytes_per_sequence": slot_bytes(engine)[0],
            "prefill_chunk": session.prefill_chunk,
            "steps": scheduler.stats.steps,
            "drafted_tokens": scheduler.stats.drafted_tokens,
            "accepted_tokens": scheduler.stats.accepted_tokens,
            "draft_costs": None if costs is None else costs.to_json(),
        },
    }
    if streaming:
        report["streaming_metrics"] = _streaming(records)
    if draft != "none":
        report["decoding_stats"] = _decoding(records, draft, scheduler.draft_len)
    return report


def _engine(engine: Any) -> dict[str, Any]:
    manifest = engine.manifest
    return {
        "model": manifest.model["name"],
        "model_path": None,
        "engine_dir": str(engine.directory),
        "version": f"replayssm-trt {own_version()}",
        "backend": "Pytorch" if manifest.target == "torch" else "TRT",
        "dtype": manifest.replay.activation_dtype,
        "kv_cache_dtype": manifest.replay.activation_dtype,
        "quantization": _quantization(manifest.quantization.get("weight_bytes_by_dtype", {})),
        "max_sequence_length": manifest.replay.max_seq_len,
    }


def _quantization(weight_bytes: dict[str, int]) -> str | None:
    """The format of quantised weights, by the dtype that only it stores: NVFP4 pairs are uint8."""
    return next((name for dtype, name in (("uint8", "NVFP4"), ("float8_e4m3fn", "FP8")) if dtype in weight_bytes), None)


def _machine() -> dict[str, Any]:
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return {"name": properties.name, "memory.total": properties.total_memory / 2**30, "clocks.mem": None}
    name, memory = platform.processor() or platform.machine(), None
    with contextlib.suppress(OSError):  # not Linux: the processor's name is all there is to say
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
        total = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()[0]
        memory = int(total.split()[1]) / 2**20
    return {"name": f"{name} ({torch.get_num_threads()} threads)", "memory.total": memory, "clocks.mem": None}


def _span(records: Sequence[Record]) -> float:
    return max(record.end for record in records) - min(record.start for record in records)


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def _request_info(records: Sequence[Record]) -> dict[str, Any]:
    return {
        "num_requests": len(records),
        "avg_num_concurrent_requests": sum(record.latency for record in records) / _span(records),
        "avg_input_length": _mean(record.input_tokens for record in records),
        "avg_output_length": _mean(record.output_tokens for record in records),
    }


def _performance(records: Sequence[Record], ranks: int) -> dict[str, Any]:
    span = _span(records)
    inputs, outputs = (sum(getattr(r, name) for r in records) for name in ("input_tokens", "output_tokens"))
    return {
        "total_latency_ms": span * 1e3,
        "avg_request_latency_ms": _mean(record.latency for record in records) * 1e3,
        "request_throughput_req_s": len(records) / span,
        "system_output_throughput_tok_s": outputs / span,
        "system_total_throughput_tok_s": (inputs + outputs) / span,
        "output_throughput_per_user_tok_s": _mean(record.output_tokens / record.latency for record in records),
        "output_throughput_per_gpu_tok_s": outputs / span / ranks,
        "request_latency_percentiles_ms": percentiles(record.latency * 1e3 for record in records),
    }


def _streaming(records: Sequence[Record]) -> dict[str, Any]:
    tpots = [record.tpot for record in records if record.tpot]
    return {
        "token_output_speed_tok_s": _mean(1 / value for value in tpots),
        "avg_ttft_ms": _mean(record.ttft for record in records) * 1e3,
        "avg_tpot_ms": _mean(tpots) * 1e3,
        "tpot_percentiles": percentiles(value * 1e3 for value in tpots),
        "ttft_percentiles": percentiles(record.ttft * 1e3 for record in records),
        "gen_tps_percentiles": percentiles(1 / value for value in tpots),
    }


def _decoding(records: Sequence[Record], draft: str, draft_len: int) -> dict[str, Any]:
    drafted = [draft_len * record.iterations for record in records]
    accepted = [record.output_tokens - record.iterations for record in records]
    return {
        "mode": {"mtp": "MTP", "ngram": "NGRAM", "engine": "DRAFT_TARGET"}[draft],
        "num_draft_tokens_percentiles": percentiles(drafted),
        "num_accepted_draft_tokens_percentiles": percentiles(accepted),
        "draft_acceptance_rate_percentiles": percentiles(a / d for a, d in zip(accepted, drafted, strict=True)),
        "acceptance_length_percentiles": percentiles(r.output_tokens / r.iterations for r in records),
    }


def _dataset(records: Sequence[Record], path: Path) -> dict[str, Any]:
    inputs, outputs = [r.input_tokens for r in records], [r.output_tokens for r in records]
    totals = [a + b for a, b in zip(inputs, outputs, strict=True)]
    return {
        "dataset_path": str(path),
        "num_requests": len(records),
        "isl_stats": percentiles(inputs),
        "osl_stats": percentiles(outputs),
        "seq_len_stats": percentiles(totals),
        "avg_isl": _mean(inputs),
        "avg_osl": _mean(outputs),
        "max_input_length": max(inputs),
        "max_output_length": max(outputs),
        "max_sequence_length": max(totals),
    }


def request_json(record: Record) -> dict[str, Any]:
    """One line of --request-json."""
    return {
        "id": record.task_id,
        "num_input_tokens": record.input_tokens,
        "num_total_output_tokens": record.output_tokens,
        "decode_iteration": record.iterations - 1,
        "start_timestamp": record.start,
        "first_token_timestamp": record.first,
        "end_timestamp": record.end,
        "time_to_first_token_ms": record.ttft * 1e3,
        "end_to_end_latency_ms": record.latency * 1e3,
    }


def text_report(report: dict[str, Any]) -> str:
    """The report for reading."""
    engine, machine, world = report["engine"], report["machine"], report["world_info"]
    info, performance = report["request_info"], report["performance"]
    backend = "PYTORCH BACKEND" if engine["backend"] == "Pytorch" else "ENGINE DETAILS"
    lines = [
        *_heading(backend),
        *(f"{name + ':':<24}{value}" for name, value in (
            ("Model", engine["model"]),
            ("Engine Directory", engine["engine_dir"]),
            ("Version", engine["version"]),
            ("Dtype", engine["dtype"]),
            ("KV Cache Dtype", engine["kv_cache_dtype"]),
            ("Quantization", engine["quantization"]),
            ("Max Sequence Length", engine["max_sequence_length"]),
        )),
        *_heading("MACHINE DETAILS"),
        machine["name"] + ("" if machine["memory.total"] is None else f", memory {machine['memory.total']:.2f} GB"),
        *_heading("REQUEST DETAILS"),
        f"Number of requests:             {info['num_requests']}",
        f"Number of concurrent requests:  {info['avg_num_concurrent_requests']:.4f}",
        f"Average Input Length (tokens):  {info['avg_input_length']:.4f}",
        f"Average Output Length (tokens): {info['avg_output_length']:.4f}",
        *_heading("WORLD + RUNTIME INFORMATION"),
        f"TP Size:                {world['tp_size']}",
        f"PP Size:                {world['pp_size']}",
        f"EP Size:                {world['ep_size']}",
        f"Max Runtime Batch Size: {world['max_batch_size']}",
        f"Max Runtime Tokens:     {world['max_num_tokens']}",
        f"Scheduling Policy:      {world['scheduling_policy']}",
        f"KV Memory Percentage:   {world['kv_cache_percentage']:.2f}%",
        f"Issue Rate (req/sec):   {world['issue_rate']:.4E}",
        "",
        *_heading("PERFORMANCE OVERVIEW"),
        *(f"{name:<50}{performance[key]:.4f}" for name, key in (
            ("Request Throughput (req/sec):", "request_throughput_req_s"),
            ("Total Output Throughput (tokens/sec):", "system_output_throughput_tok_s"),
            ("Total Token Throughput (tokens/sec):", "system_total_throughput_tok_s"),
            ("Total Latency (ms):", "total_latency_ms"),
            ("Average request latency (ms):", "avg_request_latency_ms"),
            ("Per User Output Throughput [w/ ctx] (tps/user):", "output_throughput_per_user_tok_s"),
            ("Per GPU Output Throughput (tps/gpu):", "output_throughput_per_gpu_tok_s"),
        )),
    ]  # fmt: skip
    if "streaming_metrics" in report:
        lines += _streaming_lines(report["streaming_metrics"])
    lines += _breakdown("Request Latency Breakdown (ms)", "Latency", performance["request_latency_percentiles_ms"])
    if "decoding_stats" in report:
        lines += _decoding_lines(report["decoding_stats"])
    dataset = report["dataset"]
    lines += [
        *_heading("DATASET DETAILS"),
        f"Dataset Path:         {dataset['dataset_path']}",
        f"Number of Sequences:  {dataset['num_requests']}",
        "",
        _RULE,
    ]
    return "\n".join(lines)


def _heading(text: str) -> list[str]:
    return [_RULE, f"= {text}", _RULE]


def _breakdown(title: str, tag: str, values: dict[str, float] | None) -> list[str]:
    if values is None:
        return []
    names = ("minimum", "maximum", "average", "p50", "p90", "p95", "p99")
    return ["", f"-- {title}", "", *(f"[{tag}] {name.upper():<7}: {values[name]:.4f}" for name in names)]


def _streaming_lines(values: dict[str, Any]) -> list[str]:
    return [
        f"{'Average time-to-first-token [TTFT] (ms):':<50}{values['avg_ttft_ms']:.4f}",
        f"{'Average time-per-output-token [TPOT] (ms):':<50}{values['avg_tpot_ms']:.4f}",
        f"{'Per User Output Speed (tps/user):':<50}{values['token_output_speed_tok_s']:.4f}",
        *_breakdown("Per-Request Time-per-Output-Token [TPOT] Breakdown (ms)", "TPOT", values["tpot_percentiles"]),
        *_breakdown("Per-Request Time-to-First-Token [TTFT] Breakdown (ms)", "TTFT", values["ttft_percentiles"]),
        *_breakdown(
            "Per-Request Generation Throughput [GTPS] Breakdown (tps/user)", "GTPS", values["gen_tps_percentiles"]
        ),
    ]


def _decoding_lines(values: dict[str, Any]) -> list[str]:
    return [
        "",
        *_heading(f"DECODING STATISTICS ({values['mode']})"),
        *_breakdown("Number of Draft Tokens Details", "DT", values["num_draft_tokens_percentiles"]),
        *_breakdown("Number of Accepted Draft Tokens Details", "ADT", values["num_accepted_draft_tokens_percentiles"]),
        *_breakdown("Draft Acceptance Rate Details", "DAR", values["draft_acceptance_rate_percentiles"]),
        *_breakdown("Acceptance Length Details", "AL", values["acceptance_length_percentiles"]),
    ]
