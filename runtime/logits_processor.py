"""What a request may ask of its logits before a token is drawn: penalties, biases, a grammar."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch


class Grammar(Protocol):
    """Which tokens may follow. `structured.Grammars` makes them."""

    finished: bool
    """Whether nothing may follow any more."""

    def allowed(self, drafts: Sequence[int], count: int) -> torch.Tensor | None:
        """[count, vocab] bool: what may follow the tokens taken so far and the first 0, 1, ... of `drafts`.

        Rows behind a draft that is not allowed itself are all true: that draft falls, and they with it. None: all may.
        Raises ValueError if the grammar cannot go on.
        """

    def accept(self, tokens: Sequence[int]) -> int:
        """Take tokens up to the one that finishes it; returns how many that are."""


@dataclass(frozen=True)
class LogitRules:
    """Changes of logits that depend on the tokens so far.

    presence_penalty, frequency_penalty: subtracted from the logit of a generated token, once and per occurrence
        (OpenAI).
    repetition_penalty: a positive logit of a token of prompt or output is divided by it, a negative one multiplied
        (Keskar et al., CTRL, 2019); 1 changes nothing.
    logit_bias: added to the logits of these token ids. min_tokens: no end token before so many tokens.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0

    def __post_init__(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2.0 <= getattr(self, name) <= 2.0:
                raise ValueError(f"{name} must be in [-2, 2], got {getattr(self, name)}")
        if not 0.0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty must be a finite number above 0, got {self.repetition_penalty}")
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise ValueError(f"logit_bias must be in [-100, 100], got {bias} for token {token}")
        if self.min_tokens < 0:
            raise ValueError(f"min_tokens must be at least 0, got {self.min_tokens}")

    @property
    def change_nothing(self) -> bool:
        return self == LogitRules()


class LogitsProcessor:
    """Applies rules and grammar to one request's logits; a draft counts as taken for the positions behind it."""

    def __init__(
        self,
        prompt: Sequence[int],
        rules: LogitRules | None = None,
        end_tokens: Sequence[int] = (),
        grammar: Grammar | None = None,
    ) -> None:
        self._rules = rules or LogitRules()
        self._end_tokens = sorted(end_tokens)
        self._prompt = frozenset(prompt) if self._rules.repetition_penalty != 1.0 else frozenset()
        self._counts: Counter[int] = Counter()
        self._grammar = grammar
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def finished(self) -> bool:
        """Whether the grammar is complete, so that the request ends."""
        return self._grammar is not None and self._grammar.finished

    def accept(self, tokens: Sequence[int]) -> int:
        """Take tokens, up to the one that completes the grammar; returns how many."""
        count = len(tokens) if self._grammar is None else self._grammar.accept(tokens)
        self._counts.update(tokens[:count])
        return count

    def process(self, logits: torch.Tensor, drafts: Sequence[int]) -> torch.Tensor:
        """Changed fp32 copy of `logits` [n, vocab], whose rows follow the tokens so far and 0, 1, ... of `drafts`.

        Nothing is taken by it. Raises ValueError if the grammar cannot go on.
        """
        changed = logits.float().clone()
        counts = self._counts
        for index in range(changed.shape[0]):
            if index:
                counts = counts + Counter({drafts[index - 1]: 1})
            self._apply_rules(changed[index], counts)
        if self._grammar is not None:
            allowed = self._grammar.allowed(drafts, changed.shape[0])
            if allowed is not None:
                changed.masked_fill_(~allowed.to(changed.device), float("-inf"))
        return changed

    def _apply_rules(self, row: torch.Tensor, counts: Counter[int]) -> None:
        rules = self._rules
        if rules.repetition_penalty != 1.0 and (seen := self._prompt | counts.keys()):
            ids = torch.tensor(sorted(seen), device=row.device)
            values = row[ids]
            row[ids] = torch.where(values > 0, values / rules.repetition_penalty, values * rules.repetition_penalty)
        if (rules.presence_penalty or rules.frequency_penalty) and counts:
            ids = torch.tensor(list(counts), device=row.device)
            times = torch.tensor(list(counts.values()), dtype=row.dtype, device=row.device)
            row[ids] -= rules.presence_penalty + rules.frequency_penalty * times
        if rules.logit_bias:
            if self._bias is None:  # once: a client may bias the whole vocabulary
                ids, values = list(rules.logit_bias), list(rules.logit_bias.values())
                self._bias = torch.tensor(ids, device=row.device), torch.tensor(values, device=row.device)
            ids, values = self._bias
            row[ids] += values
        if self._end_tokens and sum(counts.values()) < rules.min_tokens:
            row[self._end_tokens] = float("-inf")
