"""Bodies of calls: JSON, and nothing that JSON does not know."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Awaitable, Callable
from email.message import Message
from typing import Any, TypeVar

from fastapi import Request as HttpRequest
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from replayssm.runtime.api_call import ClientGoneError
from replayssm.runtime.api_errors import ApiError, explain, shown

MAX_DEPTH = 128
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
Body = TypeVar("Body", bound=BaseModel)


def body_of(kind: type[Body]) -> Callable[[HttpRequest], Awaitable[Body]]:
    """A dependency that gives an endpoint its body. It raises ApiError, or ClientGoneError where none arrives."""

    async def read(http: HttpRequest) -> Body:
        _check_content_type(http.headers.get("content-type"))
        try:
            raw = await http.body()
        except ClientDisconnect as error:
            raise ClientGoneError from error
        try:
            return kind.model_validate(parse_json(raw))
        except ValidationError as error:
            raise explain(error.errors(include_url=False)[0]) from error

    return read


def _check_content_type(given: str | None) -> None:
    """ApiError for a body that does not say that it is JSON.

    A page of another site could send such a body to a server on this machine, without the browser asking first.
    """
    message = Message()
    message["content-type"] = given or "none/none"
    kind = message.get_content_type()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        got = "none" if given is None else shown(given)
        raise ApiError(
            f"expected a JSON body with the header 'Content-Type: application/json', got the content type {got}: "
            "set the header",
            code="unsupported_content_type",
        )


def parse_json(raw: bytes) -> dict[str, Any]:
    """The object in a body. Raises ApiError for anything else, also for NaN and numbers beyond a double."""
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise _no_json(f"byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise _no_json(f"{error.msg} at character {error.pos}" if raw.strip() else "it is empty") from error
    except RecursionError as error:
        raise _no_json(f"more than {MAX_DEPTH} lists and objects are inside each other") from error
    except ValueError as error:  # Python's limit on the digits of an integer
        raise _no_json("a number has too many digits") from error
    _check_depth(raw, value)
    _check_surrogates(raw, value)
    if not isinstance(value, dict):
        raise ApiError(f"the body: expected a JSON object, got {shown(value)}", code="invalid_type")
    return value


def _check_depth(raw: bytes, value: Any) -> None:
    """ApiError for a value in more than MAX_DEPTH lists and objects, which templates and schemas would recurse into."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return
    level = [value]
    for _ in range(MAX_DEPTH):
        inside = (item.values() if isinstance(item, dict) else item for item in level)
        level = [value for items in inside for value in items if isinstance(value, (dict, list))]
    if level:
        raise _no_json(f"more than {MAX_DEPTH} lists and objects are inside each other")


def _check_surrogates(raw: bytes, value: Any) -> None:
    """ApiError for half a surrogate pair, which JSON can write and no text can hold."""
    if SURROGATE.search(raw) is not None:
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise _no_json("a string has half a surrogate pair, which is no character") from error


def _refuse(name: str) -> None:
    raise _no_json(f"{name} is no number there; give a finite one")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _no_json(f"{shown(text)} is beyond every number of 64 bits; give a smaller one")
    return value


def _no_json(reason: str) -> ApiError:
    return ApiError(f"the body is not JSON: {reason}", code="invalid_json")
