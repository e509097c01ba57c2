"""Bodies of the OpenAI API that the server takes, checked field by field, without conversions.

`api_parameters` says what becomes of parameters that are no fields here, `api_errors` how errors read.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from replayssm.runtime.api_errors import shown
from replayssm.runtime.api_parameters import keep_settings, unsupported

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
ANY_OBJECT = {"type": "object"}
TokenId = Annotated[int, Field(ge=0)]
TokenIds = list[TokenId]


def _one_of(forms: str) -> WrapValidator:
    """Of a value in one of several forms: one error that names them, instead of one for each."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"expected {forms}, got {shown(value)}") from None

    return WrapValidator(check)


class Strict(BaseModel):
    """Takes values of the right type only: no "1" or true for 1. Null is what a field is without it."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        return {name: value for name, value in values.items() if value is not None} if type(values) is dict else values


class StreamOptions(Strict):
    """include_usage: a last piece with the usage. continuous_usage_stats: usage in every piece (vLLM)."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Strict):
    """A schema that the answer must follow."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_for_its_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("response_format of type json_schema, and no other, has a json_schema")
        return self


class StructuredOutputs(Strict):
    """What an answer must be, under vLLM's names: exactly one of a JSON schema, any JSON object, a regular expression
    that all of it matches, and a choice of texts."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = Field(None, min_length=1)
    choice: list[Annotated[str, Field(min_length=1)]] | None = Field(None, min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _schema_from_text(cls, values: Any) -> Any:
        if not isinstance(values, dict) or not isinstance(text := values.get("json"), str):
            return values
        try:
            return {**values, "json": json.loads(text)}
        except (ValueError, RecursionError) as error:
            raise ValueError(f"json must be a JSON schema, as an object or as text: {error}") from error

    @model_validator(mode="after")
    def _exactly_one(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1:
            raise ValueError("expected exactly one of json, json_object, regex, choice")
        return self


class GenerationBody(Strict):
    """What both endpoints share.

    top_k, min_p, repetition_penalty, min_tokens, stop_token_ids, ignore_eos, skip_special_tokens and structured_outputs
    go beyond OpenAI's API, under the names of vLLM and trtllm-serve.
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    n: int = Field(1, ge=1)
    temperature: float = Field(1.0, ge=0.0, le=100.0)
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    seed: int | None = None
    stop: Annotated[str | list[str], _one_of("a string, or a list of strings")] = Field(default_factory=list)
    max_tokens: int | None = Field(None, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    presence_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(1.0, gt=0.0, le=100.0)
    # JSON writes the token ids as text.
    logit_bias: dict[Annotated[TokenId, Field(strict=False)], Annotated[float, Field(ge=-100.0, le=100.0)]] = Field(
        default_factory=dict
    )
    min_tokens: int = Field(0, ge=0)
    stop_token_ids: TokenIds = Field(default_factory=list)
    skip_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="before")
    @classmethod
    def _keep_settings(cls, values: Any) -> Any:
        return keep_settings(values, cls.model_fields) if isinstance(values, dict) else values

    @field_validator("stop")
    @classmethod
    def _few_stop_strings(cls, value: str | list[str]) -> list[str]:
        strings = [value] if isinstance(value, str) else value
        if len(strings) > MAX_STOP_STRINGS or any(not text for text in strings):
            raise ValueError(f"expected up to {MAX_STOP_STRINGS} stop strings, none of them empty, got {shown(value)}")
        return strings

    @model_validator(mode="after")
    def _fit_each_other(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise unsupported("stream_options go with stream: true", "stream_options")
        if self.response_format is not None and self.structured_outputs is not None:
            raise unsupported("structured_outputs and response_format say the same: give one", "structured_outputs")
        return self

    @property
    def constraint(self) -> tuple[str, Any] | None:
        """(kind, what it takes) of the grammar that answers follow, as `structured.Grammars.make` has it."""
        if (chosen := self.structured_outputs) is not None:
            values = {"json": chosen.json_, "regex": chosen.regex, "choice": chosen.choice}
            return next(((kind, value) for kind, value in values.items() if value is not None), ("json", ANY_OBJECT))
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        return "json", ANY_OBJECT if wanted.json_schema is None else wanted.json_schema.schema_


class CompletionBody(GenerationBody):
    """POST /v1/completions. prompt: text, token ids, or a list of either."""

    prompt: Annotated[
        str | TokenIds | list[str] | list[TokenIds],
        _one_of("text, token ids (integers from 0 on), or a list of texts or of lists of token ids"),
    ]
    max_tokens: int = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None

    @model_validator(mode="after")
    def _best_of_all(self) -> CompletionBody:
        if self.best_of not in (None, self.n):
            raise unsupported(
                f"best_of: expected {self.n}, as n, or nothing, got {self.best_of}: all choices are returned", "best_of"
            )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One prompt per entry; empty for an empty list."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return list(self.prompt)


class TextPart(Strict):
    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    """arguments: a JSON object as text."""

    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, value: str) -> str:
        try:
            if isinstance(json.loads(value), dict):
                return value
        except (ValueError, RecursionError):
            pass
        raise ValueError("the arguments of a tool call must be a JSON object, as text")


class MessageToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    """A message. Assistants may have called tools, whose results messages of the role `tool` bring."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        str | list[TextPart] | None,
        _one_of('text, or a list of parts {"type": "text", "text": ...}; images, audio and files are not supported'),
    ] = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    # Ignored: answers of other servers, which come back as messages, have them.
    refusal: str | None = None
    annotations: list[Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _reasoning_by_its_newer_name(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "reasoning" not in values:
            return values
        values = dict(values)
        return {"reasoning_content": values.pop("reasoning"), **values}

    @model_validator(mode="after")
    def _says_something(self) -> Message:
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content is not None):
            raise ValueError("tool_calls and reasoning_content belong to messages of the role assistant")
        if self.content is None and not self.tool_calls:
            raise ValueError("a message needs content, or tool_calls")
        return self

    @property
    def text(self) -> str:
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        return "".join(part.text for part in self.content)

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it: arguments of tool calls as objects."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        for name in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": json.loads(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        return message


class Function(Strict):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class ChatBody(GenerationBody):
    """POST /v1/chat/completions. Images are not supported. tool_choice: the model decides, or calls none.

    reasoning_effort: what chat templates make of it (`template_variables`). parallel_tool_calls: false keeps the first
    of an answer's calls.
    """

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _the_model_chooses(cls, value: Any) -> Any:
        if value not in ("auto", "none"):
            raise unsupported(
                f"tool_choice: expected 'auto' or 'none', got {shown(value)}: no call can be forced here, but "
                "response_format can hold an answer to a JSON schema",
                "tool_choice",
            )
        return value

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise unsupported("top_logprobs go with logprobs: true", "top_logprobs")
        return self

    @property
    def usable_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of."""
        tools = [] if self.tool_choice == "none" else self.tools
        return [tool.model_dump(exclude_none=True) for tool in tools]

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template: the client's own, over what reasoning_effort says."""
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        # Templates of models that can answer without reasoning ask the one or the other.
        effort = {"reasoning_effort": self.reasoning_effort, "enable_thinking": self.reasoning_effort != "none"}
        return {**effort, **self.chat_template_kwargs}
