"""Reasoning and tool calls: sorted alike whole and in pieces of any size; what follows no format stays visible."""

from __future__ import annotations

import json
import random

import pytest

from replayssm.runtime.chat_format import ChatFormat, Part, detect

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "note": {"type": "string"}, "tags": {"type": "array"}},
            },
        },
    }
]
XML_CALL = """<tool_call>
<function=add>
<parameter=a>
7
</parameter>
<parameter=note>
two
lines
</parameter>
</function>
</tool_call>"""
JSON_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 7, "note": "two\\nlines"}}\n</tool_call>'
CALLS = [("add", {"a": 7, "note": "two\nlines"})]


@pytest.fixture(scope="module")
def tokenizer(tiny_engine):
    return tiny_engine("nano").tokenizer


def parse(parser, text, sizes=None):
    """The whole answer, fed in pieces of these sizes."""
    total, start = Part(), 0
    pieces = []
    for size in sizes or [len(text)]:
        pieces.append(text[start : start + size])
        start += size
    for part in [*(parser.feed(piece) for piece in [*pieces, text[start:]]), parser.finish()]:
        total.content += part.content
        total.reasoning += part.reasoning
        total.calls += part.calls
    return total.content, total.reasoning, [(call.name, json.loads(call.arguments)) for call in total.calls]


CASES = [
    # tool parser, reasoning parser, end of the prompt, answer -> content, reasoning, calls
    ("qwen3_coder", None, "", f"Let me see.\n\n{XML_CALL}", ("Let me see.", "", CALLS)),
    ("qwen3_coder", "qwen3_5", "<think>\n", f"Hm.\n</think>\n\n{XML_CALL}\n", ("", "Hm.", CALLS)),
    ("qwen3_coder", "nano-v3", "<think>\n", f"Hm {XML_CALL}", ("", "Hm", CALLS)),  # a call ends the reasoning
    ("qwen3_coder", "nano-v3", "<think></think>", "The answer.", ("The answer.", "", [])),
    ("qwen3_coder", None, "", f"{XML_CALL}\n{XML_CALL}", ("", "", CALLS * 2)),
    ("qwen3", "qwen3", "", f"<think>\nHm.\n</think>\n\n{JSON_CALL}", ("", "Hm.", CALLS)),
    ("qwen3", None, "", JSON_CALL, ("", "", CALLS)),
    ("qwen3", None, "", "a < b and <tool", ("a < b and <tool", "", [])),
    ("qwen3", None, "", "  spaced \n", ("  spaced \n", "", [])),
    (None, "deepseek-r1", "", "Hm.</think>\n42", ("42", "Hm.", [])),
    (None, "qwen3", "", "No thought.\n", ("No thought.\n", "", [])),
    (None, "qwen3", "<think>\n\n</think>\n\n", "42", ("42", "", [])),
    (None, "qwen3_5", "<think>\n", "never ends", ("", "never ends", [])),
    # What is no call stays visible.
    ("qwen3", None, "", "<tool_call>{oops}</tool_call>.", ("<tool_call>{oops}</tool_call>.", "", [])),
    ("qwen3", None, "", '<tool_call>[1]</tool_call>', ("<tool_call>[1]</tool_call>", "", [])),
    ("qwen3", None, "", '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
     ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>', "", [])),
    ("qwen3", None, "", '<tool_call>{"name": "add", "argu', ('<tool_call>{"name": "add", "argu', "", [])),
    ("qwen3_coder", None, "", XML_CALL[:-30], (XML_CALL[:-30], "", [])),
    ("qwen3_coder", None, "", XML_CALL.replace("=add", "=rm"), (XML_CALL.replace("=add", "=rm"), "", [])),
    ("qwen3_coder", None, "", "<tool_call>{}</tool_call>", ("<tool_call>{}</tool_call>", "", [])),
]  # fmt: skip


@pytest.mark.parametrize(("tools", "reasoning", "prompt", "text", "expected"), CASES)
def test_answers(tokenizer, tools, reasoning, prompt, text, expected):
    formats = ChatFormat(tokenizer, tools, reasoning)
    tokens = tokenizer(f"user: a <think> b</think>\nassistant:{prompt}")["input_ids"]
    make = lambda: formats.parser(tokens, TOOLS if tools else [])  # noqa: E731
    assert parse(make(), text) == expected
    assert parse(make(), text, [1] * len(text)) == expected
    choose = random.Random(text)
    for _ in range(10):
        assert parse(make(), text, [choose.randrange(1, 9) for _ in range(len(text) // 3)]) == expected


def test_arguments_have_the_types_of_the_schema(tokenizer):
    parser = ChatFormat(tokenizer, "qwen3_coder").parser([1], TOOLS)
    text = XML_CALL.replace("two\nlines", "12").replace(
        "</function>", '<parameter=tags>\n["x", 1]\n</parameter>\n</function>'
    )
    assert parse(parser, text)[2] == [("add", {"a": 7, "note": "12", "tags": ["x", 1]})]


@pytest.mark.parametrize("end", ["</tool_call> and more", ""])
def test_a_region_that_cannot_be_parsed_is_content(tokenizer, end):
    """Nested deeper than Python's json reads."""
    deep = "[" * 100_000
    content, reasoning, calls = parse(ChatFormat(tokenizer, "qwen3").parser([1], TOOLS), f"ab<tool_call>{deep}{end}")
    assert deep in content
    assert (reasoning, calls) == ("", [])


def test_no_parser_where_there_is_nothing_to_find(tokenizer):
    assert ChatFormat(tokenizer).parser([1], TOOLS) is None
    assert ChatFormat(tokenizer, "qwen3").parser([1], []) is None
    assert ChatFormat(tokenizer).dropped_tokens is None
    for options in ({"tool_parser": "hermes"}, {"reasoning_parser": "o1"}):
        with pytest.raises(ValueError, match="_parser must be one of qwen3"):
            ChatFormat(tokenizer, **options)


def test_marks_that_are_special_tokens_are_kept_in_texts(tiny_engine):
    import copy

    from replayssm.runtime.text import TextStream

    tokenizer = copy.deepcopy(tiny_engine("nano").tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<|im_end|>"]})
    tokens = tokenizer("<think>a b</think>c<|im_end|>")["input_ids"]
    formats = ChatFormat(tokenizer, None, "qwen3")
    assert TextStream(tokenizer).push(tokens) == "a bc"
    stream = TextStream(tokenizer, dropped=formats.dropped_tokens)
    assert "".join(stream.push([token]) for token in tokens) == "<think>a b</think>c"
    assert formats.end_of_reasoning(tokenizer("<think>")["input_ids"]) == tokenizer.convert_tokens_to_ids("</think>")
    assert formats.end_of_reasoning(tokenizer("a")["input_ids"]) is None
    with pytest.raises(ValueError, match="to be one token"):
        ChatFormat(tiny_engine("nano").tokenizer, None, "qwen3_5").end_of_reasoning([1])


def test_detection():
    assert detect("... <tool_call>\n<function=x> ... <think>", "nemotron_h") == ("qwen3_coder", "nano-v3")
    assert detect("... <tool_call>\n<function=x> ... <think>", "qwen3_5") == ("qwen3_coder", "qwen3_5")
    assert detect('... <tool_call>{"name": ...', "other") == ("qwen3", None)
    assert detect(None, "qwen3_5") == (None, None)
