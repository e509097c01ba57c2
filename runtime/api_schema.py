"""Bodies of the OpenAI API that the server takes, checked field by field.

A field that would change the answer and is not supported is an error; fields that cannot (`user`, `metadata`, ...) are
taken and ignored.
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

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
TokenIds = list[Annotated[int, Field(ge=0, strict=True)]]


def _one_of(forms: str) -> WrapValidator:
    """Of a value in one of several forms: one error that names them, instead of one for each."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise ValueError(f"expected {forms}") from None

    return WrapValidator(check)


class StreamOptions(BaseModel):
    include_usage: bool = False


class JsonSchema(BaseModel):
    """A schema that the answer must follow."""

    model_config = ConfigDict(populate_by_name=True)

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_for_its_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("response_format of type json_schema, and no other, has a json_schema")
        return self


class GenerationBody(BaseModel):
    """What both endpoints share.

    top_k, min_p, repetition_penalty, min_tokens, stop_token_ids and ignore_eos go beyond OpenAI's API, under the names
    of trtllm-serve.
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    n: int = Field(1, ge=1)
    temperature: float | None = Field(1.0, ge=0.0, le=100.0)
    top_p: float | None = Field(1.0, gt=0.0, le=1.0)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(None, ge=1)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    presence_penalty: float | None = Field(0.0, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(1.0, gt=0.0, le=100.0)
    logit_bias: dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100.0, le=100.0)]] | None = None
    min_tokens: int = Field(0, ge=0)
    stop_token_ids: TokenIds | None = None
    response_format: ResponseFormat | None = None
    # Ignored.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None

    @field_validator("stop")
    @classmethod
    def _few_stop_strings(cls, value: str | list[str] | None) -> str | list[str] | None:
        strings = [value] if isinstance(value, str) else value or []
        if len(strings) > MAX_STOP_STRINGS or any(not text for text in strings):
            raise ValueError(f"expected up to {MAX_STOP_STRINGS} stop strings, none of them empty")
        return value

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options go with stream: true")
        return self

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionBody(GenerationBody):
    """POST /v1/completions. prompt: text, token ids, or a list of either."""

    prompt: Annotated[
        str | TokenIds | list[str] | list[TokenIds],
        _one_of("text, token ids (integers from 0 on), or a list of texts or of lists of token ids"),
    ]
    max_tokens: int | None = Field(16, ge=1)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    best_of: int | None = None
    echo: bool | None = False
    suffix: str | None = None

    @model_validator(mode="after")
    def _supported(self) -> CompletionBody:
        if self.echo or self.suffix:
            raise ValueError("echo and suffix are not supported: leave them out")
        if self.best_of not in (None, self.n):
            raise ValueError("best_of is not supported: leave it out")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """One prompt per entry; empty for an empty list."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]
        return list(self.prompt)


class TextPart(BaseModel):
    type: Literal["text"]
    text: str


class FunctionCall(BaseModel):
    """arguments: a JSON object as text."""

    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _is_an_object(cls, value: str) -> str:
        try:
            if isinstance(json.loads(value), dict):
                return value
        except ValueError:
            pass
        raise ValueError("the arguments of a tool call must be a JSON object, as text")


class MessageToolCall(BaseModel):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(BaseModel):
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
    # Ignored.
    refusal: str | None = None

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


class Function(BaseModel):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BaseModel):
    """A function that the model may call."""

    type: Literal["function"]
    function: Function


class ChatBody(GenerationBody):
    """POST /v1/chat/completions. Images are not supported. tool_choice: the model decides, or calls none."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> ChatBody:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs go with logprobs: true")
        return self

    @property
    def usable_tools(self) -> list[dict[str, Any]]:
        """The tools that the model is told of."""
        tools = [] if self.tool_choice == "none" else self.tools or []
        return [tool.model_dump(exclude_none=True) for tool in tools]

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
