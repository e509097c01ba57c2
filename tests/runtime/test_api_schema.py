"""Bodies without a server: types, parameters of today's clients, and how errors read."""

from __future__ import annotations

import json
import re
import types
import typing
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from pydantic import BaseModel, ValidationError

from replayssm.runtime.api_body import parse_json
from replayssm.runtime.api_errors import ApiError, explain
from replayssm.runtime.api_parameters import IGNORED, NEUTRAL
from replayssm.runtime.api_schema import ChatBody, CompletionBody

ROOT = Path(__file__).parents[2]
LEAST = {CompletionBody: {"prompt": "a"}, ChatBody: {"messages": [{"role": "user", "content": "a"}]}}
KINDS = pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}


def refusal(kind, body):
    """The error that a body is refused with."""
    with pytest.raises(ValidationError) as error:
        kind.model_validate(body)
    return explain(error.value.errors(include_url=False)[0])


def json_types(annotation):
    """JSON's names for the values that an annotation allows, null aside."""
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return json_types(parts[0])
    if origin in (typing.Union, types.UnionType):
        return set().union(*(json_types(part) for part in parts))
    if origin is typing.Literal:
        return set()
    names = {bool: {"boolean"}, int: {"integer"}, float: {"integer", "number"}, str: {"string"}, dict: {"object"}}
    return {"object"} if issubclass(origin or annotation, BaseModel) else names.get(origin or annotation, set())


@KINDS
def test_every_field_refuses_values_of_other_types_in_words_of_our_own(kind):
    """No conversions: true is no number, "1" is none, 1 is not true. And no error is pydantic's."""
    values = {"boolean": True, "integer": 7, "number": 1.5, "string": "zz", "array": [1.5], "object": {"a": 1}}
    count = 0
    for name, field in kind.model_fields.items():
        for value in [value for json_type, value in values.items() if json_type not in json_types(field.annotation)]:
            error = refusal(kind, {**LEAST[kind], name: value})
            assert error.param.split("[")[0] == name
            assert re.search(r"expected .* got ", str(error)), str(error)
            assert not re.search("[Ii]nput|valid|dictionary", str(error)), str(error)
            count += 1
    assert count > 3 * len(kind.model_fields)


@pytest.mark.parametrize(
    ("kind", "field", "value", "message", "code"),
    [
        (CompletionBody, "temperature", -1, "temperature: expected a number of at least 0, got -1", "below_min_value"),
        (CompletionBody, "top_p", 1.5, "top_p: expected a number of at most 1, got 1.5", "above_max_value"),
        (CompletionBody, "max_tokens", True, "max_tokens: expected an integer, got true", "invalid_type"),
        (CompletionBody, "seed", "7", 'seed: expected an integer, got "7"', "invalid_type"),
        (CompletionBody, "logit_bias", {"1": 200}, "logit_bias.1: expected a number of at most 100, got 200", None),
        (CompletionBody, "logit_bias", {"x": 2}, 'logit_bias.x: expected an integer, as text, got "x"', None),
        (CompletionBody, "stop", ["", "b"], 'up to 16 stop strings, none of them empty, got ["", "b"]', None),
        (CompletionBody, "stop", 5, "stop: expected a string, or a list of strings, got 5", "invalid_value"),
        (CompletionBody, "prompt", [-1], "prompt: expected text, token ids (integers from 0 on), or a list", None),
        (CompletionBody, "temprature", 1, "temprature is no parameter of this endpoint: did you mean temp", None),
        (CompletionBody, "colour", 1, "colour is no parameter of this endpoint: leave it out", "unknown_parameter"),
        (CompletionBody, "echo", True, "echo: expected false or nothing, got true: ", "unsupported_value"),
        (CompletionBody, "best_of", 3, "best_of: expected 1, as n, or nothing, got 3", "unsupported_value"),
        (CompletionBody, "stream_options", {}, "stream_options go with stream: true", "unsupported_value"),
        (CompletionBody, "response_format", {"type": "json_schema"}, "has a json_schema", "invalid_value"),
        (CompletionBody, "structured_outputs", {}, "exactly one of json, json_object, regex, choice", "invalid_value"),
        (CompletionBody, "structured_outputs", {"json": "{"}, "json must be a JSON schema", "invalid_value"),
        (CompletionBody, "guided_json", {}, "guided_json is not supported (use structured_outputs", None),
        (ChatBody, "messages", [], "messages: expected a list of at least 1, got []", "empty_array"),
        (ChatBody, "messages", [{"role": "critic", "content": "x"}],
         "role: expected 'system', 'developer', 'user', 'assistant' or 'tool', got \"critic\"", "invalid_value"),
        (ChatBody, "messages", [{"role": "user"}], "messages[0]: a message needs content, or tool_calls", None),
        (ChatBody, "messages", [{"content": "x"}], "messages[0].role is missing", "missing_required_parameter"),
        (ChatBody, "messages", [{"role": "user", "content": "x", "reasoning_content": "y"}], "belong to", None),
        (ChatBody, "messages", [{"role": "user", "content": [{"type": "image_url"}]}], "images, audio", None),
        (ChatBody, "messages", [{"role": "user", "content": "x", "colour": 1}], "messages[0].colour", None),
        (ChatBody, "tool_choice", "required", "tool_choice: expected 'auto' or 'none', got \"required\"", None),
        (ChatBody, "tool_choice", {"type": "function"}, "no call can be forced here", "unsupported_value"),
        (ChatBody, "top_logprobs", 2, "top_logprobs go with logprobs: true", "unsupported_value"),
        (ChatBody, "modalities", ["text", "audio"], 'modalities: expected ["text"] or nothing', "unsupported_value"),
        (ChatBody, "reasoning_effort", "huge", "reasoning_effort: expected 'none', 'minimal', ", "invalid_value"),
        (ChatBody, "functions", [{"name": "f"}], "use tools and tool_choice", "unsupported_value"),
        (ChatBody, "{}", 1, "{} is no parameter of this endpoint", "unknown_parameter"),
    ],
)  # fmt: skip
def test_errors_say_what_was_expected_what_came_and_how_to_fix_it(kind, field, value, message, code):
    error = refusal(kind, {**LEAST[kind], field: value})
    assert message in str(error)
    assert error.param.startswith(field)
    assert code in (None, error.code)
    assert error.status == 400


def test_a_missing_prompt():
    error = refusal(CompletionBody, {"prompt": None})
    assert (str(error), error.param, error.code) == (
        "prompt is missing: give it in the body", "prompt", "missing_required_parameter"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "it is empty"),
        (b"{", "Expecting property name enclosed in double quotes at character 1"),
        (b"[1]", "expected a JSON object, got [1]"),
        (b'{"temperature": NaN}', "NaN is no number"),
        (b'{"temperature": -Infinity}', "-Infinity is no number"),
        (b'{"temperature": 1e999}', '"1e999" is beyond every number of 64 bits'),
        (b'{"seed": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"prompt": "\xff"}', "byte 12 is not UTF-8"),
        (b'{"a":' + b"[" * 100_000, "more than 128 lists and objects are inside each other"),
        (b'{"a":' * 129 + b"1" + b"}" * 129, "more than 128 lists and objects are inside each other"),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else "",
)
def test_bodies_that_are_not_json(raw, message):
    with pytest.raises(ApiError, match=re.escape(message)) as error:
        parse_json(raw)
    assert error.value.code in ("invalid_json", "invalid_type")


def test_what_is_inside_enough_is_taken():
    raw = b'{"a":' * 126 + b"[" + b"[]," * 500 + b"[]]" + b"}" * 126
    assert parse_json(raw) == json.loads(raw)


@KINDS
def test_null_is_a_parameters_default(kind):
    """Clients in languages without optional arguments send every parameter."""
    names = {*kind.model_fields, *NEUTRAL, *IGNORED} - set(LEAST[kind])
    assert kind.model_validate({**LEAST[kind], **dict.fromkeys(names)}) == kind.model_validate(LEAST[kind])


@pytest.mark.parametrize("name", ["chat", "completions"])
def test_every_parameter_of_openais_client_is_decided(name):
    """A parameter that a newer client has must be honoured, ignored, or refused with a reason."""
    if name == "chat":
        params = pytest.importorskip("openai.types.chat.completion_create_params")
    else:
        params = pytest.importorskip("openai.types.completion_create_params")
    kind = ChatBody if name == "chat" else CompletionBody
    known = {
        parameter
        for variant in ("NonStreaming", "Streaming")
        for parameter in typing.get_type_hints(getattr(params, f"CompletionCreateParams{variant}"))
    }
    assert len(known) > 15
    assert known <= {*kind.model_fields, *IGNORED, *NEUTRAL}


def test_messages_of_openais_client_are_known():
    """What a client's answer becomes when it is sent back, with all that is null in it."""
    pytest.importorskip("openai")
    from openai.types.chat import ChatCompletionMessage

    message = ChatCompletionMessage(role="assistant", content="a", tool_calls=[{**CALL, "type": "function"}])
    first = {**message.model_dump(), "reasoning": "hm", "annotations": []}
    (parsed,) = ChatBody.model_validate({"messages": [first]}).messages
    assert (parsed.content, parsed.reasoning_content, parsed.tool_calls[0].function.name) == ("a", "hm", "f")


@KINDS
def test_ignored_and_neutral_parameters_change_nothing(kind):
    plain = kind.model_validate(LEAST[kind])
    for name in IGNORED:
        assert kind.model_validate({**LEAST[kind], name: {"any": [1]}}) == plain
    for name, (values, _) in NEUTRAL.items():
        assert name not in kind.model_fields
        for value in values:
            assert kind.model_validate({**LEAST[kind], name: value}) == plain
        other = 0 if any(value is False for value in values) else {"no": 1}  # 0 is not false
        error = refusal(kind, {**LEAST[kind], name: other})
        assert (error.param, error.code.split("_")[0]) == (name, "unsupported")
    assert not set(IGNORED) & set(NEUTRAL)


def test_settings_beyond_openais():
    body = CompletionBody.model_validate(
        {"prompt": "a", "structured_outputs": {"json": json.dumps({"type": "string"})}, "stop": "x", "best_of": 1}
    )
    assert (body.constraint, body.stop) == (("json", {"type": "string"}), ["x"])
    for given, expected in (({"regex": "a+"}, ("regex", "a+")), ({"choice": ["a", "b"]}, ("choice", ["a", "b"])),
                            ({"json_object": True}, ("json", {"type": "object"}))):  # fmt: skip
        assert CompletionBody.model_validate({"prompt": "a", "structured_outputs": given}).constraint == expected


@pytest.mark.parametrize(
    ("body", "variables"),
    [
        ({}, {}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"reasoning_effort": "high"}, {"reasoning_effort": "high", "enable_thinking": True}),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
         {"reasoning_effort": "none", "enable_thinking": True}),
    ],
)  # fmt: skip
def test_reasoning_effort_reaches_the_chat_template(body, variables):
    assert ChatBody.model_validate({**LEAST[ChatBody], **body}).template_variables == variables


def test_the_documentation_lists_every_parameter():
    text = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`(\w+)`", text))
    settings = {field.alias or name for kind in (CompletionBody, ChatBody) for name, field in kind.model_fields.items()}
    assert not {*settings, *IGNORED, *NEUTRAL} - listed
