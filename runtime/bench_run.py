"""Runs a data set through a scheduler and takes the times."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TextIO

from replayssm.runtime.bench_data import Sample
from replayssm.runtime.errors import InferenceError
from replayssm.runtime.requests import Request
from replayssm.runtime.sampling import SamplingParams
from replayssm.runtime.scheduler import Scheduler
from replayssm.runtime.session import Session, check_token_ids


@dataclass(frozen=True)
class Record:
    """One request. Times are seconds on one clock; iterations are its steps that gave tokens, the first included."""

    task_id: int
    input_tokens: int
    tokens: list[int]
    start: float
    first: float
    end: float
    iterations: int

    @property
    def output_tokens(self) -> int:
        return len(self.tokens)

    @property
    def latency(self) -> float:
        return self.end - self.start

    @property
    def ttft(self) -> float:
        return self.first - self.start

    @property
    def tpot(self) -> float | None:
        """Mean seconds of a token behind the first; None where there is none."""
        return (self.end - self.first) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def check_samples(samples: Sequence[Sample], session: Session) -> None:
    """ValueError for a sample that the engine has no room or no tokens for."""
    limit = session.settings.max_seq_len
    for sample in samples:
        if len(sample.input_ids) + sample.output_tokens > limit:
            raise ValueError(
                f"task {sample.task_id} has {len(sample.input_ids)} + {sample.output_tokens} tokens, but a sequence "
                f"has at most {limit}: shorten the data set, or {session.engine.how_to_lengthen}"
            )
        try:
            check_token_ids(sample.input_ids, session.engine.vocab_size)
        except ValueError as error:
            raise ValueError(f"task {sample.task_id}: {error}: prepare the data set for this engine") from error


def run_samples(
    scheduler: Scheduler,
    samples: Sequence[Sample],
    concurrency: int = -1,
    params: SamplingParams | None = None,
    end_tokens: Sequence[int] = (),
    on_end: Callable[[Record], None] | None = None,
    iteration_log: TextIO | None = None,
) -> list[Record]:
    """Run all samples, at most `concurrency` of them at the same time (-1: all are submitted at once).

    Raises ValueError before anything runs for a sample that the engine has no room for, InferenceError if one fails.
    """
    session = scheduler.session
    check_samples(samples, session)
    waiting = deque(
        (sample, Request.create(session, sample.input_ids, sample.output_tokens, params, end_tokens=end_tokens))
        for sample in samples
    )
    running: list[tuple[Sample, Request]] = []
    records = []
    while waiting or running:
        while waiting and (concurrency < 0 or len(running) < concurrency):
            running.append(waiting.popleft())
            scheduler.submit(running[-1][1])
        _step(scheduler, iteration_log)
        for pair in [pair for pair in running if pair[1].finish_reason is not None]:
            running.remove(pair)
            records.append(_record(*pair))
            if on_end is not None:
                on_end(records[-1])
    return records


def _step(scheduler: Scheduler, log: TextIO | None) -> None:
    before, started = replace(scheduler.stats), time.perf_counter()
    scheduler.step()
    if log is not None:
        entry = {
            "iter": scheduler.stats.steps,
            "latency_ms": (time.perf_counter() - started) * 1e3,
            "prompt_tokens": scheduler.stats.prompt_tokens - before.prompt_tokens,
            "generated_tokens": scheduler.stats.generated_tokens - before.generated_tokens,
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
        }
        log.write(json.dumps(entry) + "\n")


def _record(sample: Sample, request: Request) -> Record:
    if request.error is not None:
        raise InferenceError(f"task {sample.task_id}: {request.error}")
    return Record(
        sample.task_id,
        len(request.prompt),
        request.generated,
        request.submitted,
        request.first,
        request.last,
        request.calls + 1,
    )
