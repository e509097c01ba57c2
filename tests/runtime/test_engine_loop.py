"""The engine's thread: requests from any thread, nothing lost when it stops or a step fails."""

from __future__ import annotations

import gc
import queue
import threading
import time

import pytest
import torch

from replayssm.runtime.engine_loop import EngineLoop, NotServingError
from replayssm.runtime.errors import RankLostError
from replayssm.runtime.generation import generate
from replayssm.runtime.logits_processor import LogitsProcessor
from replayssm.runtime.requests import Request
from replayssm.runtime.scheduler import QueueFullError, Scheduler, SchedulerOptions
from replayssm.runtime.session import Session
from replayssm.runtime.speculation import MtpDrafter

WAIT_S = 30


@pytest.fixture
def make_loop(tiny_engine):
    """`make_loop(slots, **options)` -> a loop that runs; it is stopped after the test."""
    loops = []

    def make(slots=2, start=True, **options):
        loop = EngineLoop(Scheduler(Session(tiny_engine("nano"), slots), None, SchedulerOptions(**options)))
        loops.append(loop)
        if start:
            loop.start()
        return loop

    yield make
    for loop in loops:
        if loop._thread.is_alive():
            loop.stop()


def request_and_end(loop, prompt=(1, 2, 3), count=5):
    """A request, and a queue that gets its finish reason."""
    ended = queue.Queue()

    def note(_, update):
        if update.finish_reason:
            ended.put(update.finish_reason)

    session = loop.scheduler.session
    return Request.create(session, prompt, count, end_tokens=(), on_update=note), ended


def test_requests_from_many_threads(make_loop, tiny_engine):
    prompts = [[index, index + 1, 7] for index in range(12)]
    expected = [r.token_ids for r in generate(Session(tiny_engine("nano")), prompts, 6, eos_token_ids=())]
    loop, found = make_loop(), {}

    def client(index):
        request, ended = request_and_end(loop, prompts[index], 6)
        loop.submit([request])
        assert ended.get(timeout=WAIT_S) == "length"
        found[index] = request.generated

    threads = [threading.Thread(target=client, args=(index,)) for index in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert [found[index] for index in range(12)] == expected
    assert loop.scheduler.session.free_slots == 2


def test_all_or_none(make_loop):
    loop = make_loop(start=False, max_queue=3)
    loop._thread.start()
    loop.scheduler.step = lambda: time.sleep(0.005)  # nothing is admitted
    first, second = ([request_and_end(loop)[0] for _ in range(2)] for _ in range(2))
    loop.submit(first)
    with pytest.raises(QueueFullError):
        loop.submit(second)
    assert [request.number for request in second] == [-1, -1]
    loop.submit(second[:1])


def test_stop_cancels(make_loop):
    loop = make_loop(slots=1)
    requests = [request_and_end(loop, count=390) for _ in range(2)]
    loop.submit([request for request, _ in requests])
    loop.stop()
    assert [ended.get(timeout=1) for _, ended in requests] == ["cancelled"] * 2
    assert loop.scheduler.session.free_slots == 1
    assert not loop.is_serving
    with pytest.raises(NotServingError):
        loop.submit([request_and_end(loop)[0]])
    loop.stop()


def test_cancel(make_loop):
    loop = make_loop(slots=1)
    requests = [request_and_end(loop, count=390) for _ in range(2)]
    loop.submit([request for request, _ in requests])
    loop.cancel([request for request, _ in requests])
    assert [ended.get(timeout=WAIT_S) for _, ended in requests] == ["cancelled"] * 2
    loop.cancel([requests[0][0]])
    request, ended = request_and_end(loop)
    loop.submit([request])
    assert ended.get(timeout=WAIT_S) == "length"


def test_questions_are_answered_between_steps(make_loop):
    loop = make_loop()
    assert loop.ask(threading.current_thread) is loop._thread
    with pytest.raises(ZeroDivisionError):
        loop.ask(lambda: 1 / 0)
    with pytest.raises(NotServingError, match="did not answer"):
        loop.ask(lambda: time.sleep(0.1), timeout_s=0.01)
    loop.stop()
    with pytest.raises(NotServingError, match="shutting down"):
        loop.ask(lambda: 1)


def test_a_lost_rank_ends_the_loop(make_loop):
    """No later step could succeed, so the loop says that it serves no more."""
    loop = make_loop(slots=1)
    step, done = loop.scheduler.session.step, []

    def lose(rows):
        if len(done) == 2:
            raise RankLostError("rank 1 of 2 ended")
        done.append(rows)
        return step(rows)

    loop.scheduler.session.step = lose
    requests = [request_and_end(loop, count=9) for _ in range(2)]
    loop.submit([request for request, _ in requests])
    for request, ended in requests:
        assert ended.get(timeout=WAIT_S) == "error"
        assert request.error == "rank 1 of 2 ended"
    loop._thread.join(WAIT_S)
    assert not loop.is_serving
    assert loop.scheduler.session.free_slots == 1
    with pytest.raises(NotServingError):
        loop.submit([request_and_end(loop)[0]])


def test_a_failed_step_ends_its_requests_only(make_loop):
    loop = make_loop(slots=1)
    step, failures = loop.scheduler.session.step, [RuntimeError("invalid row")]
    loop.scheduler.session.step = lambda rows: step(rows) if not failures else (_ for _ in ()).throw(failures.pop())
    pairs = [request_and_end(loop) for _ in range(2)]
    loop.submit([request for request, _ in pairs])
    assert [ended.get(timeout=WAIT_S) for _, ended in pairs] == ["error", "length"]
    assert "invalid row" in pairs[0][0].error
    assert loop.failed_steps == 1
    assert loop.is_serving


def test_it_sleeps_while_idle(make_loop):
    loop = make_loop()
    calls, step = [], loop.scheduler.step
    loop.scheduler.step = lambda: calls.append(1) or step()
    request, ended = request_and_end(loop)
    loop.submit([request])
    ended.get(timeout=WAIT_S)
    time.sleep(0.05)
    assert len(calls) <= 8


def test_nothing_is_left_of_requests(tiny_engine):
    """Rounds of requests that end, are cancelled, preempted, drafted for and cached: once caches are full, a round
    leaves no object and no tensor. One request is dozens of objects, so one that stayed would show."""
    session = Session(tiny_engine("nano"), 3, prefill_chunk=8)
    options = SchedulerOptions(time_slice=3, prefix_cache_bytes=1 << 20)
    scheduler = Scheduler(session, MtpDrafter(session), options)

    def round_of_requests():
        for i in range(7):
            processor = LogitsProcessor([i])
            prompt = [i % 3, *range(20), i]
            scheduler.submit(Request.create(session, prompt, 9, end_tokens=(), processor=processor))
        steps = 0
        while scheduler.step():
            steps += 1
            if steps % 7 == 0 and scheduler.running:
                scheduler.cancel(scheduler.running[-1])
        assert session.free_slots == 3

    def held():
        gc.collect()
        objects = gc.get_objects()
        tensors = [value for value in objects if type(value) is torch.Tensor]
        return len(objects), sum(tensor.nbytes for tensor in tensors)

    levels = []
    for _ in range(4):
        round_of_requests()
        levels.append(held())
    assert scheduler.stats.preemptions > 0
    assert scheduler.stats.cached_tokens > 0
    # Lists that grow and caches of the interpreter move the count by a few.
    assert levels[-1][0] - levels[1][0] < 20
    assert levels[-1][1] == levels[1][1]
