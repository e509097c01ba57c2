"""Structured output: JSON schemas, regular expressions and choices as grammars, by llguidance."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

WHITESPACE = r"( |\n[ \t]{0,16})?"
"""Between JSON's tokens: a space, or a new line and its indentation. A model that would rather write blanks for ever
has little room to, and reaches the end of its value before that of its tokens."""


class Grammars:
    """Makes grammars for one tokenizer and vocabulary.

    end_tokens: what may follow where the grammar is complete. Raises ValueError where llguidance is missing, or the
    tokenizer is none that it reads.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_tokens: Sequence[int]) -> None:
        self._tokenizer, self._vocab_size, self._end_tokens = tokenizer, vocab_size, list(end_tokens)
        self._lock = threading.Lock()
        self._made: Any = None

    def make(self, kind: str, value: Any, after: int | None = None) -> MatchedGrammar:
        """A grammar of texts. kind: "json" with a JSON schema, "regex" with an expression, "choice" with texts.

        after: nothing is restricted up to this token. Raises ValueError for a value that cannot be enforced.
        """
        library = self._library().LLMatcher
        try:
            if kind == "json":
                grammar = library.grammar_from_json_schema(value, overrides={"whitespace_pattern": WHITESPACE})
            elif kind == "regex":
                grammar = library.grammar_from_regex(value)
            else:
                # A terminal, so that its lexer follows all texts at once: of rules, a parser takes 2,000.
                grammar = library.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, value)))
            return self._matched(grammar, after)
        except ValueError as error:
            name = {"json": "JSON schema", "regex": "regular expression"}.get(kind, kind)
            raise ValueError(f"the {name} cannot be enforced: {' '.join(str(error).split())}") from error

    def _matched(self, grammar: str, after: int | None) -> MatchedGrammar:
        matcher = self._library().LLMatcher(self._ll_tokenizer(), grammar)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        matcher.compute_bitmask()
        if matcher.is_error() or matcher.is_stopped():  # a schema of itself only, say
            raise ValueError("no text can follow it")
        return MatchedGrammar(matcher, self._vocab_size, after)

    @staticmethod
    def _library() -> Any:
        try:
            import llguidance
        except ModuleNotFoundError as error:
            raise ValueError(
                "structured output needs the package 'llguidance': pip install '.[serve]' in the project's folder"
            ) from error
        return llguidance

    def _ll_tokenizer(self) -> Any:
        import llguidance.hf

        with self._lock:  # built once: it takes a second for a large vocabulary
            if self._made is None:
                self._made = llguidance.hf.from_tokenizer(
                    self._tokenizer, n_vocab=self._vocab_size, eos_token=self._end_tokens or None
                )
            return self._made


class MatchedGrammar:
    """A grammar and where in it a request is (`logits_processor.Grammar`)."""

    def __init__(self, matcher: Any, vocab_size: int, after: int | None = None) -> None:
        self.finished = False
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._after = after

    def allowed(self, drafts: Sequence[int], count: int) -> torch.Tensor | None:
        rows = torch.ones(count, self._vocab_size, dtype=torch.bool)
        begun, consumed, restricted = self._after is None, 0, False
        for index in range(count):
            if index:
                draft = drafts[index - 1]
                if not begun:
                    begun = draft == self._after
                elif self._matcher.try_consume_tokens([draft]) == 1:
                    consumed += 1
                else:
                    break
            if begun:
                rows[index] = self._mask()
                restricted = True
        if consumed:
            self._matcher.rollback(consumed)
        return rows if restricted else None

    def _mask(self) -> torch.Tensor:
        words = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise ValueError(f"the grammar cannot go on: {self._matcher.get_error().splitlines()[0]}")
        bits = np.unpackbits(words, bitorder="little")[: self._vocab_size]
        return torch.from_numpy(bits.astype(bool))

    def accept(self, tokens: Sequence[int]) -> int:
        for index, token in enumerate(tokens):
            if self._after is not None:
                if token == self._after:
                    self._after = None
                continue
            self._matcher.consume_token(token)
            # An end token or a value that nothing may follow; an error shows when the next mask is computed.
            if self._matcher.is_stopped() and not self._matcher.is_error():
                self.finished = True
                return index + 1
        return len(tokens)
