"""Text to tokens, and tokens to text while they arrive: whole characters only, and stop strings."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer decodes an unfinished UTF-8 sequence to."""


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text`. Raises ValueError where it holds surrogates, which no UTF-8 text has."""
    _check_text(text)
    # Without `verbose` transformers warns on stderr of texts longer than the checkpoint's own limit; ours is checked.
    return list(tokenizer(text, verbose=False)["input_ids"])


def encode_chat(
    tokenizer: Any,
    messages: list[dict[str, Any]],
    template: str | None = None,
    variables: dict[str, Any] | None = None,
    tools: list[dict[str, Any]] | None = None,
) -> list[int]:
    """Token ids of `messages` in a chat template, the tokenizer's own by default, up to where the answer begins.

    variables: of the template. tools: that the model may call, as OpenAI describes them.
    Raises ValueError if the template fails. It is a program of whoever made the checkpoint, so any exception may come.
    """
    _check_texts([messages, tools])
    try:
        encoded = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template,
            add_generation_prompt=True,
            return_dict=True,
            tokenizer_kwargs={"verbose": False},
            **(variables or {}),
        )
        # A variable with the name of one of the call's options can change what comes back.
        return [operator.index(token) for token in encoded["input_ids"]]
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"the chat template refused the messages: {reason}") from error


def _check_texts(value: Any) -> None:
    """`_check_text` of every string in lists and dicts."""
    if isinstance(value, str):
        _check_text(value)
    elif isinstance(value, dict):
        _check_texts([*value, *value.values()])
    elif isinstance(value, list):
        for item in value:
            _check_texts(item)


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text is not valid Unicode: character {error.start} is a lone surrogate, which a byte that is not "
            "UTF-8 becomes on a command line: convert the text to UTF-8 first"
        ) from error


class TextStream:
    """Decodes a growing token sequence piece by piece.

    Special tokens are left out, or `dropped` ones instead. A piece ends where characters are complete, and text that
    might become a stop string is held back, so that what was handed out never has to be taken back.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), dropped: frozenset[int] | None = None) -> None:
        if any(not text for text in stop):
            raise ValueError("a stop string must not be empty")
        for text in stop:
            _check_text(text)
        self.text = ""
        self.stopped = False
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._dropped = dropped
        self._tokens: list[int] = []
        self._prefix = 0
        self._read = 0
        self._pending = ""

    @property
    def count(self) -> int:
        """Tokens taken; those behind the one that completed a stop string are not."""
        return len(self._tokens)

    def push(self, tokens: Sequence[int]) -> str:
        """Take more tokens; returns the text that became final. `stopped` says that a stop string was met."""
        for token in tokens:
            if self.stopped:
                break
            self._tokens.append(token)
            self._pending += self._decode()
            self._look_for_stop()
        return self._release(len(self._pending) - self._held_back())

    def finish(self) -> str:
        """The text held back so far, after the last token."""
        if not self.stopped:
            # An unfinished character stays visible as a replacement character.
            self._pending += self._decode(final=True)
            self._look_for_stop()
        return self._release(len(self._pending))

    def _decode(self, final: bool = False) -> str:
        # Tokenizers may drop or add spaces at the start of a text; decoding with the last whole piece in front of the
        # new tokens and cutting it off again gives what the new tokens add.
        known = self._text(self._prefix, self._read)
        full = self._text(self._prefix, len(self._tokens))
        if len(full) <= len(known) or (full.endswith(_REPLACEMENT) and not final):
            return ""
        self._prefix, self._read = self._read, len(self._tokens)
        return full[len(known) :]

    def _text(self, start: int, end: int) -> str:
        tokens = self._tokens[start:end]
        if self._dropped is None:
            return self._tokenizer.decode(tokens, skip_special_tokens=True)
        return self._tokenizer.decode([t for t in tokens if t not in self._dropped], skip_special_tokens=False)

    def _look_for_stop(self) -> None:
        found = [index for index in (self._pending.find(text) for text in self._stop) if index >= 0]
        if found:
            self.stopped = True
            self._pending = self._pending[: min(found)]

    def _held_back(self) -> int:
        """Length of the longest end of the pending text that begins a stop string."""
        if self.stopped:
            return 0
        longest = max((len(text) for text in self._stop), default=1) - 1
        for size in range(min(longest, len(self._pending)), 0, -1):
            if any(text.startswith(self._pending[-size:]) for text in self._stop):
                return size
        return 0

    def _release(self, length: int) -> str:
        piece, self._pending = self._pending[:length], self._pending[length:]
        self.text += piece
        return piece
