"""Prometheus metrics of a server, under the names that vLLM's dashboards ask for behind its prefix `vllm:`.

trtllm-serve writes the same ones for times and requests behind `trtllm_`. What only this server has is named by the
convention: seconds, bytes, and `_total` for counters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from replayssm.runtime.engine_loop import EngineLoop
from replayssm.runtime.requests import Request

PREFIX = "replayssm_"
_COUNTERS = {
    "steps": ("steps", "Steps of the engine"),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens computed"),
    "generation_tokens": ("generated_tokens", "Tokens generated"),
    "decode_calls": ("decode_calls", "Decode and verify windows; generated tokens per window is the acceptance length"),
    "spec_decode_num_draft_tokens": ("drafted_tokens", "Draft tokens proposed"),
    "spec_decode_num_accepted_tokens": ("accepted_tokens", "Draft tokens that stood"),
    "num_preemptions": ("preemptions", "Requests that gave their slot to another"),
    "prefix_cache_hits": ("cached_tokens", "Prompt tokens taken from the prefix cache"),
}
"""Name -> (its count in the scheduler's report, help)."""
_GAUGES = {
    "num_requests_waiting": ("waiting", "Requests without a slot"),
    "num_requests_running": ("running", "Requests in a slot"),
    "slots": ("slots", "Slots of the session"),
    "free_slots": ("free_slots", "Slots without a request"),
    "state_bytes": ("state_bytes", "State of all slots"),
    "num_requests_swapped": ("swapped_requests", "Requests in host memory"),
    "swapped_bytes": ("swapped_bytes", "State of requests in host memory"),
    "prefix_cache_bytes": ("prefix_cache_bytes", "Snapshots in the prefix cache"),
}
_TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_TPOT_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_TOKEN_BUCKETS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_ACCEPTANCE_BUCKETS = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
_LATENCY_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


def check_prefix(prefix: str) -> None:
    """ValueError for a prefix that no metric's name can have."""
    if not re.fullmatch("[a-zA-Z_:][a-zA-Z0-9_:]*", prefix):
        raise ValueError(f"metrics_prefix must be letters, digits, _ and :, and begin with no digit, got {prefix!r}")


class Metrics:
    """Counts and levels of the scheduler, and times per request, labelled with the model's name.

    One per server; `render` is what /metrics returns.
    """

    def __init__(self, loop: EngineLoop, model: str, prefix: str = PREFIX) -> None:
        check_prefix(prefix)
        self._loop, self._model, self._prefix = loop, model, prefix
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._ended = self._counter("request_success", "Requests that ended, by reason", "finished_reason")
        self._refused = self._counter("request_error", "Requests refused, by HTTP status", "http_code")
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", _TTFT_BUCKETS)
        self._tpot = [  # trtllm-serve's name and vLLM's
            self._histogram(f"{name}_per_output_token_seconds", "Mean time of later tokens", _TPOT_BUCKETS)
            for name in ("time", "request_time")
        ]
        self._prefill = self._histogram("request_prefill_time_seconds", "First slot to first token", _TTFT_BUCKETS)
        self._decode = self._histogram("request_decode_time_seconds", "First to last token", _LATENCY_BUCKETS)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of a prompt", _TOKEN_BUCKETS)
        self._generated = self._histogram("request_generation_tokens", "Tokens of an answer", _TOKEN_BUCKETS)
        self._queued = self._histogram("request_queue_time_seconds", "Arrival to first slot", _TTFT_BUCKETS)
        self._acceptance = self._histogram("acceptance_length", "Mean tokens per window", _ACCEPTANCE_BUCKETS)
        self._latency = self._histogram("e2e_request_latency_seconds", "Arrival to last token", _LATENCY_BUCKETS)

    def ended(self, request: Request) -> None:
        """Take note of a request that has ended."""
        self._ended.labels(self._model, request.finish_reason).inc()
        if request.acceptance_length is not None:
            self._acceptance.observe(request.acceptance_length)
        self._prompt.observe(len(request.prompt))
        self._generated.observe(request.generated_count)
        if request.admitted:
            self._queued.observe(request.admitted - request.submitted)
        if request.first:
            self._prefill.observe(request.first - request.admitted)
            self._decode.observe(request.last - request.first)
            self._ttft.observe(request.first - request.submitted)
            self._latency.observe(request.last - request.submitted)
            if request.generated_count > 1:
                for histogram in self._tpot:
                    histogram.observe((request.last - request.first) / (request.generated_count - 1))

    def refused(self, status: int) -> None:
        """Take note of a call that was answered with an error."""
        self._refused.labels(self._model, str(status)).inc()

    def collect(self) -> Iterator[Metric]:
        report = self._loop.scheduler.report()
        counts = {name: (report[key], text) for name, (key, text) in _COUNTERS.items()}
        counts["failed_steps"] = self._loop.failed_steps, "Steps that failed"
        counts["prefix_cache_queries"] = (
            report["prompt_tokens"] + report["cached_tokens"],
            "Prompt tokens looked up in the prefix cache",
        )
        levels = {name: (report[key], text) for name, (key, text) in _GAUGES.items()}
        levels["kv_cache_usage_perc"] = 1 - report["free_slots"] / report["slots"], "Share of slots in use, 0 to 1"
        for kind, values in ((CounterMetricFamily, counts), (GaugeMetricFamily, levels)):
            for name, (value, text) in values.items():
                family = kind(self._prefix + name, text, labels=["model_name"])
                family.add_metric([self._model], value)
                yield family

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(self._prefix + name, text, ["model_name", label], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(self._prefix + name, text, ["model_name"], buckets=buckets, registry=self._registry)
        return made.labels(self._model)
