"""One HTTP call's requests on their way through the engine's thread."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from replayssm.runtime.api_answers import Answers, error_body
from replayssm.runtime.api_schema import StreamOptions
from replayssm.runtime.engine_loop import EngineLoop
from replayssm.runtime.requests import Request, Update

FAILURES = {
    "timeout": (504, "the request took longer than the server allows", "timeout_error", "timeout"),
    "cancelled": (
        503,
        "the server is shutting down and has ended the request before its answer was complete: send it again",
        "server_error",
        "service_unavailable",
    ),
    "error": (500, "the engine failed", "server_error", "internal_error"),
}
"""finish reason -> (status, message, type, code) of a request that did not end by itself."""
SHUTDOWN_RETRY_S = 5
DONE = "data: [DONE]\n\n"
"""Ends every stream, also behind an error, for clients that wait for it."""


def failure(request: Request) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(status, body, headers) of the answer to a request that ended for one of FAILURES."""
    status, message, kind, code = FAILURES[request.finish_reason]
    headers = {"Retry-After": str(SHUTDOWN_RETRY_S)} if status == 503 else {}
    return status, error_body(request.error or message, kind, code=code), headers


class ClientGoneError(Exception):
    """The client closed the connection."""


class Call:
    """Submits requests and hands out their updates. `close` cancels whatever has not ended."""

    def __init__(self, loop: EngineLoop, requests: Sequence[Request]) -> None:
        """Raises QueueFullError or NotServingError; nothing runs then. Call it inside a running event loop."""
        self.requests = list(requests)
        self._loop = loop
        self._events: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        self._home = asyncio.get_running_loop()
        for index, request in enumerate(self.requests):
            request.on_update = lambda _, update, index=index: self._post(index, update)
        loop.submit(self.requests)

    async def updates(self, http: HttpRequest) -> AsyncIterator[tuple[int, Update]]:
        """(index of the request, update) until all have ended. Raises ClientGoneError at once on a disconnect."""
        gone = asyncio.create_task(_disconnected(http))
        try:
            left = len(self.requests)
            while left:
                event = asyncio.ensure_future(self._events.get())
                await asyncio.wait({event, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not event.done():
                    event.cancel()
                    raise ClientGoneError
                index, update = event.result()
                left -= update.finish_reason is not None
                yield index, update
        finally:
            gone.cancel()

    def close(self) -> None:
        """Cancel what still runs."""
        unfinished = [request for request in self.requests if request.finish_reason is None]
        if unfinished:
            self._loop.cancel(unfinished)

    def _post(self, index: int, update: Update) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has closed: nobody listens any more
            self._home.call_soon_threadsafe(self._events.put_nowait, (index, update))


class CallStream(StreamingResponse):
    """Server-sent events of a call; the call is closed however the response ends."""

    def __init__(self, call: Call, answers: Answers, http: HttpRequest, options: StreamOptions) -> None:
        self._call = call
        self._answers = answers
        super().__init__(
            self._body(http, options), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.close()

    async def _body(self, http: HttpRequest, options: StreamOptions) -> AsyncIterator[str]:
        answers, call = self._answers, self._call
        for index in range(len(call.requests)):
            if (piece := answers.opening(index)) is not None:
                yield _event(piece)
        try:
            async for index, update in call.updates(http):
                if update.finish_reason in FAILURES:
                    yield _event(failure(call.requests[index])[1])
                    yield DONE
                    return
                if (piece := answers.piece(index, update)) is not None:
                    if options.continuous_usage_stats:
                        piece["usage"] = answers.usage(call.requests)
                    yield _event(piece)
        except ClientGoneError:
            return
        if options.include_usage:
            yield _event(answers.closing(call.requests))
        yield DONE


async def collect(call: Call, http: HttpRequest) -> list[list[Update]]:
    """All updates of each request. Raises ClientGoneError."""
    parts: list[list[Update]] = [[] for _ in call.requests]
    try:
        async for index, update in call.updates(http):
            parts[index].append(update)
    finally:
        call.close()
    return parts


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
