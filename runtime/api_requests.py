"""From the bodies of calls to requests of the scheduler: encoding, limits, sampling, grammars and parsers."""

from __future__ import annotations

import copy
import secrets
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from replayssm.runtime.api_errors import ApiError
from replayssm.runtime.api_schema import ChatBody, GenerationBody
from replayssm.runtime.chat_format import ChatFormat, detect
from replayssm.runtime.logits_processor import LogitRules, LogitsProcessor
from replayssm.runtime.metrics import PREFIX
from replayssm.runtime.requests import Request
from replayssm.runtime.sampling import SamplingParams
from replayssm.runtime.session import Session, check_token_ids
from replayssm.runtime.structured import Grammars
from replayssm.runtime.text import encode_chat, encode_text


@dataclass(frozen=True)
class ServerOptions:
    """What the server answers to.

    model: the name that clients use. api_key: what /v1 wants as bearer token; None wants none.
    timeout_s: of a request, waiting included; None sets no limit. max_body_bytes: of a request's body.
    max_choices: sequences of one call, prompts times n. chat_template: in place of the checkpoint's.
    metrics_prefix: of the names at /metrics.
    tool_parser, reasoning_parser: names of `chat_format`, "auto" for what the chat template writes, None for none.
    """

    model: str
    api_key: str | None = None
    timeout_s: float | None = None
    max_body_bytes: int = 8 << 20
    max_choices: int = 128
    metrics_prefix: str = PREFIX
    chat_template: str | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None


def _unsupported(name: str, message: str) -> ApiError:
    return ApiError(message, name, "unsupported_value")


class RequestMaker:
    """Makes requests for one session. Raises ApiError or ValueError for what the server was not started with."""

    def __init__(self, session: Session, options: ServerOptions) -> None:
        self.session, self.options = session, options
        self.tokenizer = session.engine.tokenizer
        # The engine's thread decodes with one tokenizer, calls encode with the other, one at a time.
        self._encoder = copy.deepcopy(self.tokenizer)
        self._encoding = threading.Lock()
        self._end_tokens = session.engine.end_token_ids
        self._grammars = Grammars(self.tokenizer, session.engine.vocab_size, self._end_tokens)
        self.format = self._chat_format()

    def encode(self, prompt: str | list[int]) -> list[int]:
        """Token ids of a prompt, which may be token ids already."""
        if not isinstance(prompt, str):
            return prompt
        with self._encoding:
            return encode_text(self._encoder, prompt)

    def encode_chat(self, body: ChatBody) -> list[int]:
        """Token ids of a chat up to where the answer begins."""
        template = self._template
        if not template:
            raise ValueError("the checkpoint has no chat template: use /v1/completions, or serve with --chat-template")
        messages, tools = [message.for_template() for message in body.messages], body.usable_tools
        if tools and self.format.tool_parser is None:
            if self.options.tool_parser == "auto":
                raise _unsupported(
                    "tools",
                    "the model's chat template shows no format of tool calls that is known here: name one with "
                    "--tool-parser if the model has one, or ask without tools",
                )
            raise _unsupported(
                "tools", "this server parses no tool calls: start it with --tool-parser, or ask without tools"
            )
        if tools and "tools" not in template:
            raise _unsupported("tools", "the chat template has no place for tools: ask without them")
        with self._encoding:
            return encode_chat(self._encoder, messages, template, body.template_variables, tools or None)

    def make(
        self, body: GenerationBody, prompts: Sequence[Sequence[int]], max_tokens: int | None, top: int | None
    ) -> list[Request]:
        """One request per prompt and choice. Raises ValueError for what cannot be generated."""
        count = len(prompts) * body.n
        if not 1 <= count <= self.options.max_choices:
            raise ValueError(f"expected 1 to {self.options.max_choices} choices (prompts times n), got {count}")
        first = secrets.randbits(64) if body.seed is None else body.seed
        params = SamplingParams(
            temperature=body.temperature, top_k=max(body.top_k, 0), top_p=body.top_p, min_p=body.min_p
        )
        timeout = self.options.timeout_s
        end_tokens = {*(() if body.ignore_eos else self._end_tokens), *body.stop_token_ids}
        check_token_ids(sorted(end_tokens), self.session.engine.vocab_size)
        dropped = self.format.dropped_tokens if isinstance(body, ChatBody) else None
        return [
            Request.create(
                self.session,
                prompt,
                self.session.settings.max_seq_len if max_tokens is None else max_tokens,
                replace(params, seed=(first + choice) % 2**64),
                end_tokens=sorted(end_tokens),
                tokenizer=self.tokenizer,
                stop=body.stop,
                dropped=dropped if body.skip_special_tokens else frozenset(),
                processor=self._processor(body, prompt, end_tokens),
                logprobs=top,
                deadline=None if timeout is None else time.perf_counter() + timeout,
            )
            for prompt in prompts
            for choice in range(body.n)
        ]

    def _processor(
        self, body: GenerationBody, prompt: Sequence[int], end_tokens: Collection[int]
    ) -> LogitsProcessor | None:
        """What changes the logits of one sequence, if anything does."""
        rules = LogitRules(
            body.presence_penalty,
            body.frequency_penalty,
            body.repetition_penalty,
            body.logit_bias,
            body.min_tokens,
        )
        check_token_ids(rules.logit_bias, self.session.engine.vocab_size)
        wanted, grammar = body.constraint, None
        if wanted is not None:
            try:
                after = self.format.end_of_reasoning(prompt) if isinstance(body, ChatBody) else None
                grammar = self._grammars.make(*wanted, after)
            except ValueError as error:
                name = "response_format" if body.structured_outputs is None else "structured_outputs"
                raise _unsupported(name, str(error)) from error
        elif rules.change_nothing:
            return None
        return LogitsProcessor(prompt, rules, end_tokens, grammar)

    def _chat_format(self) -> ChatFormat:
        engine = self.session.engine
        tools, reasoning = detect(self._template, engine.manifest.model.get("family", ""))
        given = self.options
        return ChatFormat(
            self.tokenizer,
            tools if given.tool_parser == "auto" else given.tool_parser,
            reasoning if given.reasoning_parser == "auto" else given.reasoning_parser,
        )

    @property
    def _template(self) -> str | None:
        template = self.options.chat_template or self._encoder.chat_template
        return template.get("default") if isinstance(template, dict) else template
