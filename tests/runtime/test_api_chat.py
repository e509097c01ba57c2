"""Tool calls, reasoning, structured output and penalties through the official client.

The models here are random, so a grammar of one sentence makes them say what a trained one would.
"""

from __future__ import annotations

import json
import re

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")
pytest.importorskip("openai")

import openai

from replayssm.runtime.logits_processor import LogitsProcessor

TEMPLATE = (
    "{% for t in tools or [] %}<function={{ t.function.name }}>{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }} {{ c.function.arguments.a }}</tool_call>{% endfor %}{% endfor %}"
    "assistant:<think>{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}"
)
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    }
]
CALL = "<tool_call>\n<function=add>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "?"}], "temperature": 0}


@pytest.fixture(scope="module")
def server(start):
    return start(chat_template=TEMPLATE, tool_parser="auto", reasoning_parser="qwen3_5")


@pytest.fixture(scope="module")
def client(server):
    return server.client()


@pytest.fixture
def say(server, sentence, monkeypatch):
    """`say(text)`: the model answers this from now on. Returns the prompts that it was given."""
    maker, prompts = server.app.state.server.maker, []
    vocab_size = maker.session.engine.vocab_size

    def make(text):
        tokens = maker.tokenizer(text)["input_ids"]

        def processor(body, prompt, end_tokens):
            prompts.append(maker.tokenizer.decode(prompt))
            return LogitsProcessor(prompt, grammar=sentence(tokens, vocab_size))

        monkeypatch.setattr(maker, "_processor", processor)
        return prompts

    return make


def joined(stream):
    """A streamed answer as one message: (content, reasoning, calls, finish reason)."""
    content = reasoning = ""
    calls, reason = [], None
    for piece in stream:
        choice = piece.choices[0]
        content += choice.delta.content or ""
        reasoning += (choice.delta.model_extra or {}).get("reasoning_content") or ""
        for call in choice.delta.tool_calls or []:
            assert call.index == len(calls)
            calls.append((call.function.name, json.loads(call.function.arguments)))
        reason = choice.finish_reason or reason
    return content, reasoning, calls, reason


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls", "reason"),
    [
        (f"Sum.\n</think>\n\n{CALL.format(7)}", "", "Sum.", [7], "tool_calls"),
        (f"</think>Two.\n{CALL.format(1)}\n{CALL.format(2)}", "Two.", "", [1, 2], "tool_calls"),
        ("So.</think>\n\n42", "42", "So.", [], "stop"),
        (f"</think>{CALL.format(3)[:-5]}", CALL.format(3)[:-5], "", [], "stop"),
    ],
)
def test_reasoning_and_calls(client, say, text, content, reasoning, calls, reason):
    prompts = say(text)
    answer = client.chat.completions.create(**ASK, tools=TOOLS)
    message = answer.choices[0].message
    found = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
    assert (message.content or "", (message.model_extra or {}).get("reasoning_content", "")) == (content, reasoning)
    assert found == [("add", {"a": value}) for value in calls]
    assert answer.choices[0].finish_reason == reason
    assert len({call.id for call in message.tool_calls or []}) == len(calls)
    assert prompts[0].startswith("<function=add>user: ?")
    streamed = joined(client.chat.completions.create(**ASK, tools=TOOLS, stream=True))
    assert streamed == (content, reasoning, found, reason)
    first = joined(client.chat.completions.create(**ASK, tools=TOOLS, stream=True, parallel_tool_calls=False))
    assert first == (content, reasoning, found[:1], reason)


def test_a_conversation_with_a_tool(client, say):
    """What came out goes in again: the call, its result, and the reasoning of the turn."""
    prompts = say("</think>" + CALL.format(5))
    call = client.chat.completions.create(**ASK, tools=TOOLS).choices[0].message
    say("</think>Ten.")
    messages = [*ASK["messages"], call, {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "10"}]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == "Ten."
    assert "assistant: <tool_call>add 5</tool_call>tool: 10assistant:" in prompts[-1]


def test_tools_that_may_not_be_called(client, say):
    prompts = say(f"</think>{CALL.format(1)}")
    answer = client.chat.completions.create(**ASK, tools=TOOLS, tool_choice="none").choices[0]
    assert (answer.message.tool_calls, answer.message.content) == (None, CALL.format(1))
    assert prompts[-1].startswith("user: ?")


def test_json_output(client):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9, "minimum": 1}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    options = {**ASK, "response_format": wanted, "extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}
    answer = client.chat.completions.create(**options).choices[0]
    assert 1 <= json.loads(answer.message.content)["n"] <= 9
    assert answer.finish_reason == "stop"
    streamed = joined(client.chat.completions.create(**options, stream=True))
    assert streamed == (answer.message.content, "", [], "stop")
    complete = client.completions.create(
        model="tiny", prompt="a", max_tokens=60, extra_body={"response_format": wanted}
    )
    assert 1 <= json.loads(complete.choices[0].text)["n"] <= 9
    many = [f"word {number}" for number in range(3000)]
    for outputs, expected in (({"regex": "[0-9]{3}"}, r"\d{3}"), ({"choice": ["yes", 'no "\n']}, 'yes|no "\n'),
                              ({"choice": many}, "|".join(many))):  # fmt: skip
        extra = {"structured_outputs": outputs}
        complete = client.completions.create(model="tiny", prompt="a", max_tokens=60, extra_body=extra)
        assert re.fullmatch(expected, complete.choices[0].text)
    wanted["json_schema"]["schema"] = {"type": "nonsense"}
    with pytest.raises(openai.BadRequestError, match="the JSON schema cannot be enforced"):
        client.chat.completions.create(**options)
    # This tokenizer has no token for the end of reasoning, behind which the grammar would begin.
    with pytest.raises(openai.BadRequestError, match="to be one token"):
        client.chat.completions.create(**ASK, response_format={"type": "json_object"})


def test_penalties_and_biases(client):
    """A bias of 100 decides, whatever the model thinks; penalties forbid nothing but repeat less."""
    options = {"model": "tiny", "prompt": "aaaa", "temperature": 0, "max_tokens": 30}
    assert client.completions.create(**options, logit_bias={"67": 100}).choices[0].text == "a" * 30
    plain = client.completions.create(**options, logprobs=0).choices[0].logprobs.tokens
    spread = client.completions.create(**options, logprobs=0, frequency_penalty=2, presence_penalty=2).choices[0]
    assert len(set(spread.logprobs.tokens)) > len(set(plain))
    first = client.completions.create(**options, extra_body={"stop_token_ids": [67]}, logit_bias={"67": 100})
    assert (first.usage.completion_tokens, first.choices[0].finish_reason) == (1, "stop")
    longer = client.completions.create(
        **options, extra_body={"stop_token_ids": [67], "min_tokens": 4}, logit_bias={"67": 100}
    )
    assert longer.usage.completion_tokens == 5
