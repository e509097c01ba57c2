"""Text that arrives token by token equals the text of all tokens, and stop strings end it exactly."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm.runtime.text import TextStream


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
