"""Prometheus metrics of a server. Names follow the convention: seconds, bytes, and `_total` for counters."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from replayssm.runtime.engine_loop import EngineLoop
from replayssm.runtime.requests import Request

PREFIX = "replayssm"
_COUNTERS = {
    "steps": "Steps of the engine",
    "prompt_tokens": "Prompt tokens computed",
    "cached_tokens": "Prompt tokens taken from the prefix cache",
    "generated_tokens": "Tokens generated",
    "decode_calls": "Decode and verify windows; generated tokens per window is the acceptance length",
    "drafted_tokens": "Draft tokens proposed",
    "accepted_tokens": "Draft tokens that stood",
    "preemptions": "Requests that gave their slot to another",
    "prefix_cache_hits": "Prompts that began at a snapshot",
    "prefix_cache_misses": "Prompts that began at nothing",
}
_GAUGES = {
    "waiting": "Requests without a slot",
    "running": "Requests in a slot",
    "slots": "Slots of the session",
    "free_slots": "Slots without a request",
    "state_bytes": "State of all slots",
    "swapped_requests": "Requests in host memory",
    "swapped_bytes": "State of requests in host memory",
    "prefix_cache_bytes": "Snapshots in the prefix cache",
}
_TTFT_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_TPOT_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)
_ACCEPTANCE_BUCKETS = (1, 1.25, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
_LATENCY_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class Metrics:
    """Counts and levels of the scheduler, and times per request. One per server; `render` is what /metrics returns."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop = loop
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self.requests = Counter(
            f"{PREFIX}_requests", "Requests that ended, by reason", ["reason"], registry=self._registry
        )
        self.refused = Counter(f"{PREFIX}_refused", "Requests refused, by status", ["status"], registry=self._registry)
        self.ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token", _TTFT_BUCKETS)
        self.tpot = self._histogram("time_per_output_token_seconds", "Mean time of later tokens", _TPOT_BUCKETS)
        self.queued = self._histogram("queue_seconds", "Arrival to first slot", _TTFT_BUCKETS)
        self.acceptance = self._histogram("acceptance_length", "Mean tokens per window", _ACCEPTANCE_BUCKETS)
        self.latency = self._histogram("request_seconds", "Arrival to last token", _LATENCY_BUCKETS)

    def ended(self, request: Request) -> None:
        """Take note of a request that has ended."""
        self.requests.labels(request.finish_reason).inc()
        if request.acceptance_length is not None:
            self.acceptance.observe(request.acceptance_length)
        if request.admitted:
            self.queued.observe(request.admitted - request.submitted)
        if request.first:
            self.ttft.observe(request.first - request.submitted)
            self.latency.observe(request.last - request.submitted)
            if request.generated_count > 1:
                self.tpot.observe((request.last - request.first) / (request.generated_count - 1))

    def collect(self) -> Iterator[Metric]:
        report = self._loop.scheduler.report()
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"{PREFIX}_{name}", text, value=report[name])
        for name, text in _GAUGES.items():
            yield GaugeMetricFamily(f"{PREFIX}_{name}", text, value=report[name])
        yield CounterMetricFamily(f"{PREFIX}_failed_steps", "Steps that failed", value=self._loop.failed_steps)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", text, buckets=buckets, registry=self._registry)
