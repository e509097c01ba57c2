"""What a chat model's text means: reasoning, answer and tool calls, in the formats of the model families.

Parsing is transformers' (`ResponseParser`); here are the descriptions of the formats, under trtllm-serve's names, and
what happens to text that follows none: it stays visible as content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

THINK, END_THINK, TOOL_CALL, END_TOOL_CALL = "<think>", "</think>", "<tool_call>", "</tool_call>"
TOOL_PARSERS: dict[str, dict[str, Any]] = {
    # One JSON object with name and arguments.
    "qwen3": {"open": TOOL_CALL, "close": END_TOOL_CALL, "content": "json", "content_args": {"allow_non_json": True}},
    # <function=NAME> with a <parameter=KEY> for each argument; Qwen3-Coder, Qwen3.5 and Nemotron-3.
    "qwen3_coder": {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        # Literal ends are known at once; of a pattern at the end of a text more might follow.
        "close": ["</function>\n</tool_call>", "</function></tool_call>"],
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
}
REASONING_PARSERS = {"qwen3": False, "qwen3_5": True, "deepseek-r1": True, "nano-v3": True}
"""Name -> whether an answer begins inside the reasoning unless the prompt has closed it."""
TAIL_TOKENS = 16


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for. arguments: a JSON object as text."""

    name: str
    arguments: str


@dataclass
class Part:
    """What a piece of text added to a message."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


def detect(template: str | None, family: str) -> tuple[str | None, str | None]:
    """(tool parser, reasoning parser) that a chat template of a model family writes; None where it has no such part."""
    template = template or ""
    tools = "qwen3_coder" if "<function=" in template else "qwen3" if TOOL_CALL in template else None
    reasoning = {"nemotron_h": "nano-v3", "qwen3_5": "qwen3_5"}.get(family, "qwen3")
    return tools, reasoning if THINK in template else None


def check_parsers(tokenizer: Any, tool_parser: str | None, reasoning_parser: str | None) -> None:
    """ValueError for a parser that does not exist, or that transformers lacks; None and "auto" are no parser yet."""
    for kind, name, known in (
        ("tool_parser", tool_parser, TOOL_PARSERS),
        ("reasoning_parser", reasoning_parser, REASONING_PARSERS),
    ):
        if name is not None and name != "auto" and name not in known:
            raise ValueError(f"{kind} must be one of {', '.join(known)} or auto, got {name!r}")
    if (tool_parser or reasoning_parser) and not hasattr(tokenizer, "get_response_parser"):
        raise ValueError("--tool-parser and --reasoning-parser need transformers 5.20 or later: upgrade it")


class ChatFormat:
    """The formats of one server. Raises ValueError as `check_parsers`."""

    def __init__(self, tokenizer: Any, tool_parser: str | None = None, reasoning_parser: str | None = None) -> None:
        check_parsers(tokenizer, tool_parser, reasoning_parser)
        self.tool_parser, self.reasoning_parser = tool_parser, reasoning_parser
        self._tokenizer = tokenizer
        self.dropped_tokens = self._dropped_tokens() if tool_parser or reasoning_parser else None
        """Tokens to leave out of texts: special ones, but not those that parsers look for. None: all special ones."""

    def end_of_reasoning(self, prompt: Sequence[int]) -> int | None:
        """The token that ends the reasoning with which an answer begins; None if it begins with content.

        Raises ValueError where that end is not one token.
        """
        if not self._begins_inside(prompt):
            return None
        token = self._tokenizer.convert_tokens_to_ids(END_THINK)
        if token is None or token == self._tokenizer.unk_token_id:
            raise ValueError(
                f"structured output behind reasoning needs {END_THINK} to be one token, which it is not here: turn "
                "reasoning off with chat_template_kwargs, or ask without response_format"
            )
        return token

    def parser(self, prompt: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> MessageParser | None:
        """A parser for one answer to `prompt`; None where the text is content and nothing else."""
        use_tools = bool(tools) and self.tool_parser is not None
        if not use_tools and self.reasoning_parser is None:
            return None
        fields: dict[str, Any] = {"content": {}}
        if use_tools:
            fields["tool_calls"] = {**TOOL_PARSERS[self.tool_parser], "repeats": True}
        if self.reasoning_parser is not None:
            # A call that begins inside the reasoning ends it.
            end = {"close_pattern": f"{END_THINK}|(?={TOOL_CALL})"} if use_tools else {"close": END_THINK}
            fields["reasoning_content"] = {"open": THINK, **end}
        # The prompt is not parsed with it: earlier messages hold marks of their own.
        template = {"start_anchor": "\0", "fields": fields}
        inner = self._tokenizer.get_response_parser(template, prefix="", tools=list(tools) or None)
        parser = MessageParser(inner, self.tool_parser, {tool["function"]["name"] for tool in tools})
        if self._begins_inside(prompt):
            parser.feed(THINK)
        return parser

    def _begins_inside(self, prompt: Sequence[int]) -> bool:
        if self.reasoning_parser is None:
            return False
        tail = self._tokenizer.decode(list(prompt[-TAIL_TOKENS:]), skip_special_tokens=False).rstrip()
        return tail.endswith(THINK) or (REASONING_PARSERS[self.reasoning_parser] and not tail.endswith(END_THINK))

    def _dropped_tokens(self) -> frozenset[int]:
        marks = (THINK, END_THINK, TOOL_CALL, END_TOOL_CALL)
        added = self._tokenizer.added_tokens_decoder
        special = {token for token, value in added.items() if value.special} | set(self._tokenizer.all_special_ids)
        return frozenset(token for token in special if token not in added or added[token].content not in marks)


class _Trimmed:
    """Text without the whitespace around it, piece by piece."""

    def __init__(self) -> None:
        self.begun = False
        self._held = ""

    def add(self, text: str) -> str:
        text = self._held + text
        text = text if self.begun else text.lstrip()
        whole = text.rstrip()
        self._held = text[len(whole) :]
        self.begun = self.begun or bool(whole)
        return whole

    def rest(self) -> str:
        """The whitespace behind the text."""
        held, self._held = self._held, ""
        return held


class MessageParser:
    """Sorts an answer's text into parts while it arrives; whole answers and streams get the same ones."""

    def __init__(self, parser: Any, tool_parser: str | None, names: set[str]) -> None:
        self._parser = parser
        self._tool_parser, self._names = tool_parser, names
        self._call_text = ""
        self._reasoning, self._content = _Trimmed(), _Trimmed()
        # Whitespace around an answer is the format's only where something else stands before or behind it.
        self._alone = True
        self._failed = False
        self.calls = 0

    def feed(self, text: str) -> Part:
        """Take the next piece of text. Where parsing fails, everything from there is content."""
        part = Part()
        if not self._failed:
            try:
                self._take(part, self._parser.feed(text), finished=False)
                return part
            except (ValueError, RecursionError):  # a region that is too deep, or of a form that the parser refuses
                self._failed = True
                text = self._call_text + text
        self._add_content(part, text)
        return part

    def finish(self) -> Part:
        """The text has ended. A call that was not finished is content."""
        part = Part()
        if not self._failed:
            try:
                self._take(part, self._parser.finalize()[1], finished=True)
            except (ValueError, RecursionError):
                self._add_content(part, self._call_text)
        if not self.calls:
            part.content += self._content.rest()
        return part

    def _take(self, part: Part, events: Sequence[Mapping[str, Any]], finished: bool) -> None:
        for event in events:
            kind, field = event["type"], event["field"]
            if field == "content" and kind == "region_chunk":
                self._add_content(part, event["text"])
            elif field == "reasoning_content":
                self._alone = False
                if kind == "region_chunk":
                    part.reasoning += self._reasoning.add(event["text"])
                elif kind == "region_close":
                    self._reasoning.rest()
            elif field == "tool_calls":
                self._take_call(part, event, finished)

    def _add_content(self, part: Part, text: str) -> None:
        if self._alone:
            self._content.begun = True
        part.content += self._content.add(text)

    def _take_call(self, part: Part, event: Mapping[str, Any], finished: bool) -> None:
        if event["type"] == "region_open":
            self._call_text = ""
        elif event["type"] == "region_chunk":
            self._call_text += event["text"]
        else:
            call = None if finished else self._call(event["value"])
            if call is None:
                self._add_content(part, self._raw(event["value"], finished))
                return
            self._alone = False
            self._content.rest()
            self.calls += 1
            part.calls = (*part.calls, call)

    def _call(self, value: Any) -> ToolCall | None:
        """The call that a parsed region is; None for one of no such tool, or without the form of a call."""
        if self._tool_parser == "qwen3_coder":
            value = value["function"]
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        arguments = value.get("arguments", {})
        if not isinstance(arguments, dict):
            return None
        return ToolCall(value["name"], json.dumps(arguments, ensure_ascii=False))

    def _raw(self, value: Any, finished: bool) -> str:
        """The text of a region that is no call, as the model wrote it but for whitespace between its marks."""
        if self._tool_parser == "qwen3_coder":
            start, end = f"{TOOL_CALL}\n<function={value['function']['name']}>", f"</function>\n{END_TOOL_CALL}"
        else:
            start, end = TOOL_CALL, END_TOOL_CALL
        return start + self._call_text + ("" if finished else end)
