"""The HTTP application: OpenAI's completions and chat, health and metrics, over an engine loop."""

from __future__ import annotations

import hmac
import logging
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends, FastAPI
from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replayssm.runtime.api_answers import Answers, error_body
from replayssm.runtime.api_body import body_of
from replayssm.runtime.api_call import (
    FAILURES,
    SHUTDOWN_RETRY_S,
    Call,
    CallStream,
    ClientGoneError,
    collect,
    failure,
)
from replayssm.runtime.api_errors import ApiError
from replayssm.runtime.api_requests import RequestMaker, ServerOptions
from replayssm.runtime.api_schema import ChatBody, CompletionBody, GenerationBody, StreamOptions
from replayssm.runtime.chat_format import MessageParser
from replayssm.runtime.engine_loop import EngineLoop, NotServingError
from replayssm.runtime.environment import own_version
from replayssm.runtime.metrics import Metrics
from replayssm.runtime.requests import PromptTooLongError, Request, Update
from replayssm.runtime.scheduler import QueueFullError

logger = logging.getLogger("replayssm.server")
CLIENT_CLOSED_REQUEST = 499
"""Status that only the log sees: the client did not wait for the answer."""
PAGE_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
MAX_STATS_LINES = 256
PAGE = Path(__file__).with_name("dashboard.html")


class Server:
    """Turns bodies into requests and waits for them."""

    def __init__(self, loop: EngineLoop, options: ServerOptions) -> None:
        self.loop = loop
        self.options = options
        self.metrics = Metrics(loop, options.model, options.metrics_prefix)
        self.session = loop.scheduler.session
        self.tokenizer = self.session.engine.tokenizer
        self.maker = RequestMaker(self.session, options)
        self.started = int(time.time())

    async def complete(self, body: CompletionBody, http: HttpRequest) -> Response:
        self.check_model(body.model)
        with _refusing_bad_values(body):
            prompts = [await run_in_threadpool(self.maker.encode, prompt) for prompt in body.prompts]
        return await self._answer("completion", body, prompts, body.max_tokens, body.logprobs, http)

    async def chat(self, body: ChatBody, http: HttpRequest) -> Response:
        self.check_model(body.model)
        with _refusing_bad_values(body):
            prompt = await run_in_threadpool(self.maker.encode_chat, body)
        top = (body.top_logprobs or 0) if body.logprobs else None
        return await self._answer("chat", body, [prompt], body.token_limit, top, http)

    async def _answer(
        self,
        kind: str,
        body: GenerationBody,
        prompts: Sequence[Sequence[int]],
        max_tokens: int | None,
        top: int | None,
        http: HttpRequest,
    ) -> Response:
        with _refusing_bad_values(body):
            requests = await run_in_threadpool(self.maker.make, body, prompts, max_tokens, top)
        parsers: list[MessageParser | None] = []
        max_calls = None
        if isinstance(body, ChatBody):
            parsers = [self.maker.format.parser(request.prompt, body.usable_tools) for request in requests]
            max_calls = None if body.parallel_tool_calls else 1
        answers = Answers(kind, self.options.model, self.tokenizer, body.n, top, parsers, max_calls)
        call = _LoggedCall(self, answers.id, requests)
        if body.stream:
            return CallStream(call, answers, http, body.stream_options or StreamOptions())
        updates = await collect(call, http)
        for request in requests:
            if request.finish_reason in FAILURES:
                status, content, headers = failure(request)
                return JSONResponse(content, status, headers)
        return JSONResponse(answers.whole(requests, updates))

    def stats(self) -> dict[str, Any]:
        """Counts, levels and a line per request, for the page at /. Called in the engine's thread."""
        scheduler, settings = self.loop.scheduler, self.session.settings
        now = time.perf_counter()

        def line(request: Request, place: str) -> dict[str, Any]:
            return {
                "number": request.number,
                "state": place if place != "slot" else "prompt" if request.plan else "decode",
                "slot": request.slot if place == "slot" else None,
                "prompt_tokens": len(request.prompt),
                "done_tokens": request.fed,
                "generated": request.generated_count,
                "max_tokens": request.max_tokens,
                "acceptance_length": request.acceptance_length,
                "ring": request.history if place == "slot" else None,
                "age_s": now - request.submitted,
            }

        waiting = list(scheduler.waiting)[:MAX_STATS_LINES]
        return {
            "time": now,
            "model": self.options.model,
            "buffer_len": settings.buffer_len,
            "draft_len": scheduler.draft_len,
            "max_seq_len": settings.max_seq_len,
            **scheduler.report(),
            "requests": [
                *(line(request, "slot") for request in scheduler.running[:MAX_STATS_LINES]),
                *(line(request, "swapped" if request.swapped else "queue") for request in waiting),
            ],
        }

    @property
    def model(self) -> dict[str, Any]:
        """The one model, as /v1/models lists it."""
        entry = {"id": self.options.model, "object": "model", "created": self.started, "owned_by": "replayssm"}
        return {**entry, "max_model_len": self.session.settings.max_seq_len}

    def check_model(self, name: str | None) -> None:
        """ApiError if a request names another model."""
        if name is not None and name != self.options.model:
            message = f"this server has the model {self.options.model!r}, not {name!r}"
            raise ApiError(message, "model", "model_not_found", 404)


@contextmanager
def _refusing_bad_values(body: GenerationBody) -> Iterator[None]:
    """What the runtime calls a ValueError is a bad request here. Its messages begin with the name of what is wrong."""
    source = "messages" if isinstance(body, ChatBody) else "prompt"
    try:
        yield
    except PromptTooLongError as error:
        raise ApiError(str(error), source, "context_length_exceeded") from error
    except ValueError as error:
        name = str(error).split(" ", 1)[0]
        raise ApiError(str(error), name if name in type(body).model_fields else None, "invalid_value") from error


class _LoggedCall(Call):
    """A call that leaves one log record and one observation per request when it ends."""

    def __init__(self, server: Server, name: str, requests: Sequence[Request]) -> None:
        self._server, self._name = server, name
        super().__init__(server.loop, requests)

    def _post(self, index: int, update: Update) -> None:
        if update.finish_reason is not None:
            request = self.requests[index]
            self._server.metrics.ended(request)
            logger.info("request", extra={"fields": {"id": self._name, "choice": index, **_summary(request)}})
        super()._post(index, update)


def _summary(request: Request) -> dict[str, Any]:
    def since(start: float, end: float) -> float | None:
        return round(end - start, 6) if start and end else None

    return {
        "finish_reason": request.finish_reason,
        "error": request.error,
        "prompt_tokens": len(request.prompt),
        "cached_tokens": request.cached_tokens,
        "completion_tokens": request.generated_count,
        "acceptance_length": request.acceptance_length and round(request.acceptance_length, 3),
        "preemptions": request.preemptions,
        "queue_s": since(request.submitted, request.admitted),
        "ttft_s": since(request.submitted, request.first),
        "total_s": since(request.submitted, request.last),
    }


class _BodyLimit:
    """Refuses bodies above a size, whether they announce it or not."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self._max_bytes:
            response = JSONResponse(error_body(self._message, "invalid_request_error", code="request_too_large"), 413)
            return await response(scope, receive, send)
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise ApiError(self._message, code="request_too_large", status=413)
            return message

        await self._app(scope, counted, send)

    @property
    def _message(self) -> str:
        return f"the body is larger than {self._max_bytes} bytes: send less, or raise the server's --max-request-bytes"


def create_app(loop: EngineLoop, options: ServerOptions) -> FastAPI:
    """The application. Its lifespan starts the loop and stops it."""
    server = Server(loop, options)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop.start()
        yield
        await run_in_threadpool(loop.stop)

    app = FastAPI(title="ReplaySSM", lifespan=lifespan, openapi_url=None)
    app.state.server = server
    app.add_middleware(_BodyLimit, max_bytes=options.max_body_bytes)
    _add_error_handlers(app, server)

    def authorized(http: HttpRequest) -> None:
        given = http.headers.get("authorization", "").removeprefix("Bearer ").encode()
        if options.api_key is not None and not hmac.compare_digest(given, options.api_key.encode()):
            message = "a valid API key is needed: send it as 'Authorization: Bearer KEY'"
            raise ApiError(message, code="invalid_api_key", status=401)

    protected = [Depends(authorized)]

    @app.post("/v1/completions", dependencies=protected)
    async def completions(
        body: Annotated[CompletionBody, Depends(body_of(CompletionBody))], http: HttpRequest
    ) -> Response:
        return await server.complete(body, http)

    @app.post("/v1/chat/completions", dependencies=protected)
    async def chat_completions(body: Annotated[ChatBody, Depends(body_of(ChatBody))], http: HttpRequest) -> Response:
        return await server.chat(body, http)

    @app.get("/v1/models", dependencies=protected)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [server.model]}

    @app.get("/v1/models/{name:path}", dependencies=protected)
    async def model(name: str) -> dict[str, Any]:
        server.check_model(name)
        return server.model

    @app.get("/stats", dependencies=protected)
    async def stats() -> dict[str, Any]:
        return await run_in_threadpool(loop.ask, server.stats)

    @app.get("/")
    async def page() -> Response:
        return FileResponse(PAGE, headers={"Content-Security-Policy": PAGE_POLICY})

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": own_version()}

    @app.get("/health")
    async def health() -> Response:
        if not loop.is_serving:
            raise NotServingError("the server is shutting down")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics")
    @app.get("/prometheus/metrics")  # trtllm-serve's path
    async def metrics() -> Response:
        return Response(server.metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return app


def _add_error_handlers(app: FastAPI, server: Server) -> None:
    def answer(
        status: int, message: str, param: str | None = None, code: str | None = None, retry_after_s: float | None = None
    ) -> JSONResponse:
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            status, "invalid_request_error" if status < 500 else "server_error"
        )
        server.metrics.refused(status)
        headers = {} if retry_after_s is None else {"Retry-After": str(math.ceil(retry_after_s))}
        return JSONResponse(error_body(message, kind, param, code), status, headers)

    @app.exception_handler(ApiError)
    async def refused(http: HttpRequest, error: ApiError) -> Response:
        return answer(error.status, str(error), error.param, error.code)

    @app.exception_handler(StarletteHTTPException)
    async def no_such_path(http: HttpRequest, error: StarletteHTTPException) -> Response:
        return answer(error.status_code, f"{http.method} {http.url.path}: {error.detail}", code="unknown_url")

    @app.exception_handler(QueueFullError)
    async def full(http: HttpRequest, error: QueueFullError) -> Response:
        return answer(429, str(error), code="rate_limit_exceeded", retry_after_s=error.retry_after_s)

    @app.exception_handler(NotServingError)
    async def closing(http: HttpRequest, error: NotServingError) -> Response:
        return answer(503, str(error), code="service_unavailable", retry_after_s=SHUTDOWN_RETRY_S)

    @app.exception_handler(Exception)  # it goes into the log too
    async def failed(http: HttpRequest, error: Exception) -> Response:
        return answer(500, f"the server failed ({type(error).__name__}); its log says where", code="internal_error")

    @app.exception_handler(ClientGoneError)
    async def gone(http: HttpRequest, error: ClientGoneError) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
