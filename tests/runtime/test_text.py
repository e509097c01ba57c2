"""Text that arrives token by token equals the text of all tokens, and stop strings end it exactly."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm.runtime.text import TextStream, encode_chat, encode_text


class ByteTokenizer:
    """One token per byte; 256 is special."""

    def decode(self, tokens, skip_special_tokens):
        assert skip_special_tokens
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")


class SpacingTokenizer:
    """Words that carry a space in front, which is dropped at the start of a text, as sentencepiece does."""

    WORDS = ("a", "bc", "d")

    def decode(self, tokens, skip_special_tokens):
        return "".join(f" {self.WORDS[token]}" for token in tokens)[1:]


def stream_of(tokens, cuts, stop=(), tokenizer=None):
    """(pieces, stream) after pushing `tokens` in groups and finishing."""
    stream = TextStream(tokenizer or ByteTokenizer(), stop)
    pieces, start = [], 0
    for cut in [*sorted(cuts), len(tokens)]:
        pieces.append(stream.push(tokens[start:cut]))
        start = max(start, cut)
    return [*pieces, stream.finish()], stream


@settings(deadline=None)
@given(st.text(max_size=20), st.data())
def test_pieces_join_to_the_text(text, data):
    tokens = list(text.encode())
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=5))
    pieces, stream = stream_of(tokens, cuts)
    assert "".join(pieces) == text == stream.text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces[:-1]) or "\N{REPLACEMENT CHARACTER}" in text


@settings(deadline=None)
@given(st.text("abc", max_size=20), st.lists(st.text("abc", min_size=1, max_size=3), max_size=3), st.data())
def test_stop_strings(text, stop, data):
    tokens = list(text.encode())
    cuts = data.draw(st.lists(st.integers(0, len(tokens)), max_size=5))
    pieces, stream = stream_of(tokens, cuts, stop)
    # The first stop string to be complete ends the text where it begins.
    ends = [(text.find(item) + len(item), text.find(item)) for item in stop if item in text]
    if not ends:
        assert (stream.stopped, stream.text) == (False, text)
        assert stream.count == len(tokens)
    else:
        end = min(ends)[0]
        begin = min(start for finish, start in ends if finish == end)
        assert (stream.stopped, stream.text, stream.count) == (True, text[:begin], end)
    assert "".join(pieces) == stream.text


def test_a_possible_stop_string_is_held_back():
    stream = TextStream(ByteTokenizer(), ["END", "\n\n"])
    assert stream.push(b"xE") == "x"
    assert stream.push(b"N") == ""
    assert stream.push(b"x\n") == "ENx"
    assert stream.push(b"y") == "\ny"
    assert stream.push(b"EN") == ""
    assert stream.finish() == "EN"


def test_characters_are_whole():
    stream = TextStream(ByteTokenizer())
    euro = "\N{EURO SIGN}".encode()
    assert stream.push(euro[:2]) == ""
    assert stream.push(euro[2:]) == "\N{EURO SIGN}"
    assert stream.push(euro[:1]) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def test_spaces_between_words_survive():
    pieces, stream = stream_of([0, 1, 2, 2, 0], [1, 2, 3, 4], tokenizer=SpacingTokenizer())
    assert stream.text == "a bc d d a"
    assert pieces[:2] == ["a", " bc"]


def test_special_tokens_are_silent():
    stream = TextStream(ByteTokenizer(), ["b"])
    assert stream.push([97, 256]) == "a"
    assert stream.push([256, 98, 99]) == ""
    assert (stream.stopped, stream.count, stream.text) == (True, 4, "a")
    assert stream.push([97]) == ""


def test_empty_stop_string():
    with pytest.raises(ValueError, match="must not be empty"):
        TextStream(ByteTokenizer(), ["a", ""])


@pytest.mark.parametrize("encode", [encode_text, lambda tokenizer, text: encode_chat(tokenizer, [{"content": text}])])
def test_a_lone_surrogate_is_no_text(tiny_engine, encode):
    with pytest.raises(ValueError, match="character 2 is a lone surrogate"):
        encode(tiny_engine("nano").tokenizer, "ab\udcff")


FAILING_TEMPLATES = {
    "no such role": "{{ raise_exception('no such\n role') }}",
    "Expected an expression": "{% if %}",
    "division": "{{ 1 // 0 }}",
    "unsafe": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "'x' is undefined": "{{ x.y }}",
    "range": "{{ range(10**9) }}",
}


@pytest.mark.parametrize("message", FAILING_TEMPLATES)
def test_a_chat_template_that_fails(tiny_engine, message):
    tokenizer, messages = tiny_engine("nano").tokenizer, [{"role": "user", "content": "a"}]
    with pytest.raises(ValueError, match=f"the chat template refused the messages: .*{message}") as caught:
        encode_chat(tokenizer, messages, FAILING_TEMPLATES[message])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "variables", [{"tokenize": False}, {"return_tensors": "pt"}, {"chat_template": "x"}, {"conversation": []}]
)
def test_template_variables_cannot_change_the_call(tiny_engine, variables):
    with pytest.raises(ValueError, match="the chat template refused"):
        encode_chat(tiny_engine("nano").tokenizer, [{"role": "user", "content": "a"}], "{{ messages }}", variables)


def test_a_long_text_is_encoded_silently(tiny_engine, capfd, caplog):
    """The engine's limit is checked elsewhere; the checkpoint's would be a warning of transformers."""
    tokenizer = tiny_engine("nano").tokenizer
    limit, tokenizer.model_max_length = tokenizer.model_max_length, 3
    try:
        assert len(encode_text(tokenizer, "a" * 9 + "0123")) > 3
        assert len(encode_chat(tokenizer, [{"role": "user", "content": "0123456"}], "{{ messages[0].content }}")) > 3
    finally:
        tokenizer.model_max_length = limit
    assert capfd.readouterr().err == ""
    assert caplog.records == []
