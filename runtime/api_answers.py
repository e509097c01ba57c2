"""Answers of the OpenAI API, whole and in pieces, from what the scheduler reports."""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

from replayssm.runtime.chat_format import MessageParser, Part, ToolCall
from replayssm.runtime.requests import Request, TokenLogprob, Update

LOWEST_LOGPROB = -9999.0
"""What -inf is written as, which JSON cannot."""


class Answers:
    """Shapes the answers to one call.

    kind: "completion" or "chat". n: choices per prompt. top: likeliest tokens to report, None for no logprobs at all.
    parsers: of each choice's text, where it may be more than content. max_calls: tool calls of a choice that are
    kept; None keeps all.
    """

    def __init__(
        self,
        kind: str,
        model: str,
        tokenizer: Any,
        n: int = 1,
        top: int | None = None,
        parsers: Sequence[MessageParser | None] = (),
        max_calls: int | None = None,
    ) -> None:
        self.kind = kind
        self._max_calls = max_calls
        self._calls: Counter[int] = Counter()
        self._parsers = dict(enumerate(parsers))
        self.n = n
        self.id = ("cmpl-" if kind == "completion" else "chatcmpl-") + uuid.uuid4().hex
        self._model = model
        self._tokenizer = tokenizer
        self._created = int(time.time())
        self._top = top
        self._offsets: dict[int, int] = {}

    def whole(self, requests: Sequence[Request], updates: Sequence[Sequence[Update]]) -> dict[str, Any]:
        """The answer to a call without streaming."""
        choices = []
        for index, (request, parts) in enumerate(zip(requests, updates, strict=True)):
            choice: dict[str, Any] = {"index": index, "finish_reason": request.finish_reason}
            if self.kind == "completion":
                choice["text"] = request.text
            else:
                choice["message"] = self._message(index, request.text)
                choice["finish_reason"] = self._finish_reason(index, request.finish_reason)
            choice["logprobs"] = self._logprobs(index, [value for part in parts for value in part.logprobs])
            choices.append(choice)
        name = "text_completion" if self.kind == "completion" else "chat.completion"
        return {**self._head(name), "choices": choices, "usage": self.usage(requests)}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first piece of a streamed choice."""
        if self.kind == "completion":
            return None
        return self._piece({"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None})

    def piece(self, index: int, update: Update) -> dict[str, Any] | None:
        """The next piece of a streamed choice; None where there is nothing to say yet."""
        if not (update.text or update.logprobs or update.finish_reason):
            return None
        choice: dict[str, Any] = {"index": index, "finish_reason": update.finish_reason}
        if self.kind == "completion":
            choice["text"] = update.text
        else:
            choice["delta"] = self._delta(index, self._parse(index, update.text or "", bool(update.finish_reason)))
            choice["finish_reason"] = self._finish_reason(index, update.finish_reason)
            if not (choice["delta"] or update.logprobs or update.finish_reason):
                return None
        choice["logprobs"] = self._logprobs(index, update.logprobs)
        return self._piece(choice)

    def closing(self, requests: Sequence[Request]) -> dict[str, Any]:
        """The last piece where usage was asked for."""
        return {**self._piece(None), "usage": self.usage(requests)}

    def _parse(self, index: int, text: str, ended: bool) -> Part:
        parser = self._parsers.get(index)
        if parser is None:
            return Part(text)
        part = parser.feed(text)
        if ended:
            rest = parser.finish()
            part = Part(part.content + rest.content, part.reasoning + rest.reasoning, (*part.calls, *rest.calls))
        if self._max_calls is not None:
            part.calls = part.calls[: max(self._max_calls - self._calls[index], 0)]
        self._calls[index] += len(part.calls)
        return part

    def _message(self, index: int, text: str) -> dict[str, Any]:
        part = self._parse(index, text, True)
        message: dict[str, Any] = {"role": "assistant", "content": part.content, "refusal": None}
        if part.reasoning:
            message["reasoning_content"] = part.reasoning
        if part.calls:
            message["content"] = part.content or None
            message["tool_calls"] = [_call(call) for call in part.calls]
        return message

    def _delta(self, index: int, part: Part) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        if part.reasoning:
            delta["reasoning_content"] = part.reasoning
        if part.content:
            delta["content"] = part.content
        if part.calls:
            first = self._calls[index] - len(part.calls)
            delta["tool_calls"] = [{"index": first + i, **_call(call)} for i, call in enumerate(part.calls)]
        return delta

    def _finish_reason(self, index: int, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self._calls[index] else reason

    def usage(self, requests: Sequence[Request]) -> dict[str, Any]:
        """Tokens so far of all choices; a prompt counts once."""
        prompts = requests[:: self.n]
        prompt_tokens = sum(len(request.prompt) for request in prompts)
        completion_tokens = sum(request.generated_count for request in requests)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens for request in prompts)},
        }

    def _piece(self, choice: dict[str, Any] | None) -> dict[str, Any]:
        name = "text_completion" if self.kind == "completion" else "chat.completion.chunk"
        return {**self._head(name), "choices": [] if choice is None else [choice]}

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self._created, "model": self._model}

    def _logprobs(self, index: int, values: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self._top is None:
            return None
        if self.kind == "chat":
            return {
                "content": [
                    {
                        **self._entry(value.token, value.logprob),
                        "top_logprobs": [self._entry(token, logprob) for token, logprob in value.top],
                    }
                    for value in values
                ],
                "refusal": None,
            }
        tokens = [self._text(value.token) for value in values]
        offsets = []
        for text in tokens:
            offsets.append(self._offsets.get(index, 0))
            self._offsets[index] = offsets[-1] + len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(value.logprob) for value in values],
            "top_logprobs": [{self._text(token): _finite(logprob) for token, logprob in value.top} for value in values],
            "text_offset": offsets,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._text(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([token])


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _finite(value: float) -> float:
    return value if math.isfinite(value) else LOWEST_LOGPROB
