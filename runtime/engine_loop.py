"""The thread that owns a scheduler, and the door to it for all other threads."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

from replayssm.runtime.errors import RankLostError
from replayssm.runtime.requests import Request
from replayssm.runtime.scheduler import Scheduler

logger = logging.getLogger("replayssm.engine")


class NotServingError(RuntimeError):
    """The loop takes no more requests: it is shutting down, or it has died."""


class EngineLoop:
    """Runs a scheduler's steps in a thread of its own, which sleeps while there is nothing to do.

    Callbacks of requests run in that thread and must return soon. A step that fails ends the requests in it with
    finish_reason "error"; the next ones are served, because an empty slot depends on nothing that was in it.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.failed_steps = 0
        self._wake = threading.Condition()
        self._arrived: deque[Request] = deque()
        self._tasks: deque[Callable[[], None]] = deque()
        self._accepting = True
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="replayssm-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def is_serving(self) -> bool:
        return self._accepting and self._thread.is_alive()

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue all of `requests` or none. Raises QueueFullError or NotServingError."""
        with self._wake:
            if not self.is_serving:
                raise NotServingError("the server is shutting down")
            self.scheduler.check_room(len(self._arrived) + len(requests) - 1)
            self._arrived.extend(requests)
            self._wake.notify()

    def cancel(self, requests: Sequence[Request]) -> None:
        """End requests; those that have ended already stay as they were. Returns before it has happened."""
        self._do(lambda: [self.scheduler.cancel(request) for request in requests])

    def ask(self, question: Callable[[], Any], timeout_s: float = 5.0) -> Any:
        """The answer of `question`, called in the engine's thread between two steps. Raises NotServingError."""
        answer: Future[Any] = Future()

        def task() -> None:
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

        if not self.is_serving:
            raise NotServingError("the server is shutting down")
        self._do(task)
        try:
            return answer.result(timeout_s)
        except FutureTimeoutError as error:
            raise NotServingError(f"the engine did not answer within {timeout_s:.0f} s") from error

    def stop(self) -> None:
        """Take no more requests, cancel those here, and end the thread after its step. May be called again."""
        with self._wake:
            self._accepting, self._stopping = False, True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _do(self, task: Callable[[], None]) -> None:
        with self._wake:
            self._tasks.append(task)
            self._wake.notify()

    def _run(self) -> None:
        try:
            while self._wait():
                try:
                    self.scheduler.step()
                except RankLostError as error:
                    logger.error("the server takes no more requests: %s", error)
                    self.scheduler.close("error", str(error))
                    return
                except Exception as error:
                    self.failed_steps += 1
                    logger.exception("a step failed; its requests end")
                    for request in list(self.scheduler.running):
                        self.scheduler.cancel(request, "error", f"the step failed: {error}")
        finally:
            self._accepting = False
            self._take()
            self.scheduler.close()

    def _wait(self) -> bool:
        """Sleep until there is work, and take what arrived. False when it is time to stop."""
        with self._wake:
            while not (self._stopping or self._arrived or self._tasks or self.scheduler.has_work):
                self._wake.wait()
        self._take()
        return not self._stopping

    def _take(self) -> None:
        with self._wake:
            # Submitted under the lock: a request is always counted, here or in the scheduler's queue.
            while self._arrived:
                self.scheduler.submit(self._arrived.popleft())
            tasks, self._tasks = self._tasks, deque()
        for task in tasks:
            task()
