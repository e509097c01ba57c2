"""What is wrong with a call, in words of our own: what was expected, what came, and OpenAI's names for the kind."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

MAX_SHOWN = 60
"""Characters of a bad value that an error repeats."""

_EXPECTED = {
    "int_type": "an integer",
    "int_parsing": "an integer, as text",
    "int_from_float": "an integer",
    "int_parsing_size": "an integer of fewer digits",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "literal_error": "{expected}",
    "greater_than_equal": "a number of at least {ge:g}",
    "greater_than": "a number above {gt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "less_than": "a number below {lt:g}",
    "too_short": "a list of at least {min_length}",
    "string_too_short": "a string of at least {min_length} characters",
}
"""pydantic's kind of error -> what was expected, with the names of its context."""

_CODES = {
    "greater_than_equal": "below_min_value",
    "greater_than": "below_min_value",
    "less_than_equal": "above_max_value",
    "less_than": "above_max_value",
    "too_short": "empty_array",
    "string_too_short": "empty_string",
    "missing": "missing_required_parameter",
    "extra_forbidden": "unknown_parameter",
    "literal_error": "invalid_value",
    "unsupported_parameter": "unsupported_parameter",
    "unsupported_value": "unsupported_value",
    "unknown_parameter": "unknown_parameter",
}
"""The same -> OpenAI's code."""


class ApiError(Exception):
    """A call that is refused. message: one sentence for people; param, code: OpenAI's, for programs."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.code, self.status = param, code, status


def shown(value: Any) -> str:
    """A value as JSON writes it, cut to MAX_SHOWN characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def explain(error: Mapping[str, Any]) -> ApiError:
    """The refusal that one of pydantic's errors (`ValidationError.errors()`) is."""
    kind, context, got = error["type"], error.get("ctx") or {}, shown(error.get("input"))
    path = _path(error["loc"])
    param = context.get("param") or path or None
    if kind == "missing":
        message = f"{path} is missing: give it in the body"
    elif kind == "extra_forbidden":
        message = f"{path} is unknown: leave it out"
    elif kind == "value_error":
        message = f"{path}: {context['error']}" if path else str(context["error"])
    elif kind in _EXPECTED:
        expected = _EXPECTED[kind].format(**context)
        message = f"{path or 'the body'}: expected {expected}, got {got}"
    else:  # errors of our own (PydanticCustomError), or a kind that only a newer pydantic knows
        message = error["msg"]
    code = _CODES.get(kind, "invalid_type" if kind in _EXPECTED else "invalid_value")
    return ApiError(message, param, code)


def _path(parts: Sequence[str | int]) -> str:
    """("messages", 0, "role") -> messages[0].role"""
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part != "[key]":
            path += f".{part}" if path else str(part)
    return path
