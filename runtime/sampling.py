"""Sampling of next tokens, vectorised over rows.

Randomness is counter-based: the uniform of a draw is a function of (request seed, position of the token, purpose) and
of nothing else, so a request gets the same tokens whatever it is batched with, and after a preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from replayssm.plugins import elementwise
from replayssm.plugins.philox import philox4x32
from replayssm.runtime.errors import NOT_FINITE, InferenceError

_WORD = 0xFFFFFFFF
_PHILOX_ROUNDS = 10

KINDS = ("greedy", "plain", "ranked")
"""Of `SamplingParams.kind`, each dearer than the one before."""
PLAIN_BLOCK = 512


class Purpose:
    """Third counter word of a draw: draws for different purposes at one position are independent."""

    TOKEN = 0
    ACCEPT = 1
    DRAFT = 2


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen. Filters apply in the order temperature, top_k, top_p, min_p.

    temperature: 0 takes the most likely token and ignores everything else.
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: keep the smallest set of most likely tokens whose probabilities sum to at least top_p.
    min_p: keep tokens at least min_p times as likely as the most likely one.
    seed: key of the request's random numbers.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, valid, rule in (
            ("temperature", 0.0 <= self.temperature < float("inf"), "a finite number >= 0"),
            ("top_k", isinstance(self.top_k, int) and 0 <= self.top_k < 2**31, "an integer in [0, 2^31) (0 keeps all)"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]"),
            ("seed", isinstance(self.seed, int) and 0 <= self.seed < 2**64, "an integer in [0, 2^64)"),
        ):
            if not valid:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def kind(self) -> str:
        """How a token is chosen: "greedy", "plain" (any token may come), or "ranked" (only some of the likeliest)."""
        if self.is_greedy:
            return "greedy"
        return "ranked" if self.top_k or self.top_p < 1.0 else "plain"


@dataclass(frozen=True)
class VocabularyPart:
    """The tokens from `start` on, whose logits this rank of several has, as many as every rank.

    gather: joins tensors [R, n] of all ranks to [R, ranks * n], in the order of their tokens. All have to call it.
    """

    start: int
    gather: Callable[[torch.Tensor], torch.Tensor]


def uniform(seeds: torch.Tensor, positions: torch.Tensor, purpose: int) -> torch.Tensor:
    """Uniform float64 numbers in [0, 1) for int64 `seeds` (two's complement of the 64-bit seed) and `positions` [R]."""
    zero = torch.zeros_like(positions)
    counter = (positions & _WORD, positions >> 32 & _WORD, zero + purpose, zero)
    words = philox4x32(counter, (seeds & _WORD, seeds >> 32 & _WORD), _PHILOX_ROUNDS)
    return ((words[0] >> 5) * 2**26 + (words[1] >> 6)).double() * 2.0**-53


class SamplingBatch:
    """Sampling parameters of R rows as tensors on `device`; positions [R] are those of the tokens to be drawn."""

    COLUMNS: ClassVar[dict[str, torch.dtype]] = {
        "temperature": torch.float32,
        "top_k": torch.int64,
        "top_p": torch.float64,
        "min_p": torch.float32,
        "seeds": torch.int64,
    }
    """Parameters as tensors [R]; seeds are the two's complement of the 64-bit seed."""

    def __init__(
        self, params: Sequence[SamplingParams], positions: Sequence[int], device: torch.device | str = "cpu"
    ) -> None:
        self.kind = self.kind_of(params)
        columns = {name: column.to(device) for name, column in self.columns(params).items()}
        self._set(columns, torch.tensor(list(positions), dtype=torch.int64, device=device))

    @staticmethod
    def kind_of(params: Iterable[SamplingParams]) -> str:
        """The kind that serves all of `params`: each of KINDS also does what those before it do."""
        return max((row.kind for row in params), key=KINDS.index, default="greedy")

    @classmethod
    def from_columns(cls, columns: Mapping[str, torch.Tensor], positions: torch.Tensor, kind: str) -> SamplingBatch:
        """A batch over tensors named as in COLUMNS, which are read when it is used; no row is of a later kind."""
        batch = cls.__new__(cls)
        batch.kind = kind
        batch._set(columns, positions)
        return batch

    @classmethod
    def columns(cls, params: Sequence[SamplingParams]) -> dict[str, torch.Tensor]:
        """COLUMNS of `params`, on the CPU."""
        values = {name: [getattr(row, name) for row in params] for name in cls.COLUMNS if name != "seeds"}
        values["seeds"] = [row.seed - 2**64 if row.seed >= 2**63 else row.seed for row in params]
        return {name: torch.tensor(values[name], dtype=dtype) for name, dtype in cls.COLUMNS.items()}

    def _set(self, columns: Mapping[str, torch.Tensor], positions: torch.Tensor) -> None:
        self.temperature, self.top_k = columns["temperature"], columns["top_k"]
        self.top_p, self.min_p, self.seeds = columns["top_p"], columns["min_p"], columns["seeds"]
        self.positions = positions

    def uniform(self, purpose: int) -> torch.Tensor:
        return uniform(self.seeds, self.positions, purpose)


def _ranked_probabilities(logits: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, probabilities), both [R, V], most likely first; filtered-out tokens have probability 0.

    Probabilities are float64 and sum to 1. A greedy row is the one-hot of its first most likely token.
    """
    logits = logits.float()
    greedy = (batch.temperature == 0).unsqueeze(1)
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    scaled = (logits - logits.amax(dim=1, keepdim=True)) / torch.where(greedy, 1.0, batch.temperature.unsqueeze(1))
    ranked, ids = scaled.sort(dim=1, descending=True, stable=True)
    ranks = torch.arange(ranked.shape[1], device=ranked.device)
    top_k = torch.where(batch.top_k == 0, ranked.shape[1], batch.top_k)
    top_k = torch.where(greedy.squeeze(1), 1, top_k)
    ranked = ranked.masked_fill(ranks >= top_k.unsqueeze(1), float("-inf"))
    probs = ranked.double().softmax(dim=1)
    before = probs.cumsum(dim=1) - probs
    dropped = (before >= batch.top_p.unsqueeze(1)) & (ranks > 0)
    dropped |= probs < batch.min_p.unsqueeze(1) * probs[:, :1]
    probs = probs.masked_fill(dropped, 0.0)
    return ids, probs / probs.sum(dim=1, keepdim=True)


def probabilities(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """The distributions [R, V] (float64, vocabulary order) that `sample` draws from."""
    ids, probs = _ranked_probabilities(logits, batch)
    return torch.zeros_like(probs).scatter_(1, ids, probs)


def draw(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Indices [R] drawn from `probs` [R, V] by inverting the cumulative sum at `uniforms` [R] in [0, 1).

    `probs` need not be normalised. An entry of probability 0 is never drawn.
    """
    cumulative = probs.cumsum(dim=1)
    # Rounding can lift u * total to total itself; the last entry that adds anything is then the answer.
    last = (probs > 0).to(torch.int64).mul(torch.arange(probs.shape[1], device=probs.device)).amax(dim=1)
    index = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1]).unsqueeze(1), right=True).squeeze(1)
    return torch.minimum(index, last)


def sample(logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    """Draw one token per row of `logits` [R, V]; returns int64 [R].

    Raises InferenceError if a row has no finite maximum, which damaged weights or state would cause.
    """
    if not bool(logits.amax(dim=1).isfinite().all()):
        raise InferenceError(NOT_FINITE)
    return sample_tokens(logits, batch)


def likeliest(logits: torch.Tensor, part: VocabularyPart | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(largest of each row's logits, its token), both [R]; the first token of equal ones, in every part alike."""
    largest, tokens = elementwise.argmax(logits) if elementwise.takes_rows(logits) else logits.max(dim=1)
    if part is None:
        return largest, tokens
    # A token and its logit are exact in float64.
    both = part.gather(torch.stack([largest.double(), (tokens + part.start).double()], dim=1))
    values, tokens = both.view(len(both), -1, 2).unbind(dim=2)
    rank = values.argmax(dim=1, keepdim=True)
    return values.gather(1, rank).squeeze(1), tokens.gather(1, rank).squeeze(1).to(torch.int64)


def sample_tokens(logits: torch.Tensor, batch: SamplingBatch, part: VocabularyPart | None = None) -> torch.Tensor:
    """`sample` of finite logits, without waiting for the device: a CUDA graph can hold it.

    A row is drawn by what its own parameters say, whatever the batch holds. part: what `logits` are of; ranks then
    exchange a few numbers of each row, and whole rows where a batch is of the kind "ranked".
    """
    largest, tokens = likeliest(logits, part)
    if batch.kind == "greedy":
        return tokens
    uniforms = batch.uniform(Purpose.TOKEN)
    drawn = _draw_plain(logits, largest, batch, uniforms, part)
    if batch.kind == "ranked":
        ids, probs = _ranked_probabilities(logits if part is None else part.gather(logits), batch)
        ranked = ids.gather(1, draw(probs, uniforms).unsqueeze(1)).squeeze(1)
        drawn = torch.where((batch.top_k > 0) | (batch.top_p < 1.0), ranked, drawn)
    return torch.where(batch.temperature == 0, tokens, drawn)


def _draw_plain(
    logits: torch.Tensor,
    largest: torch.Tensor,
    batch: SamplingBatch,
    uniforms: torch.Tensor,
    part: VocabularyPart | None,
) -> torch.Tensor:
    """Tokens of rows without top_k and top_p, in the order of the vocabulary: first a block of it, then in the block.

    Sorting the vocabulary is most of the time of a ranked draw; this reads the logits a few times. Probabilities are
    fp32, their sums fp64: a token's probability is off by some 1e-7 of itself. Ranks exchange the sums of their blocks,
    and the one that has the block draws from it.
    """
    temperature = torch.where(batch.temperature == 0, 1.0, batch.temperature).unsqueeze(1)
    weights = logits.float() - largest.float().unsqueeze(1)
    weights = weights.div_(temperature).exp_()
    # The likeliest token has weight 1.
    weights = weights.masked_fill_(weights < batch.min_p.unsqueeze(1), 0.0)
    if rest := -weights.shape[1] % PLAIN_BLOCK:
        weights = torch.nn.functional.pad(weights, (0, rest))
    blocks = weights.view(len(weights), -1, PLAIN_BLOCK)
    sums = blocks.sum(dim=2, dtype=torch.float64)
    first, count, start = 0, blocks.shape[1], 0
    if part is not None:
        first, start = part.start // logits.shape[1] * count, part.start
        sums = part.gather(sums)
    block = draw(sums, uniforms).unsqueeze(1)
    own = (block - first).clamp(0, count - 1)
    inside = blocks.gather(1, own.unsqueeze(2).expand(-1, 1, PLAIN_BLOCK)).squeeze(1).double()
    before = (sums.cumsum(dim=1) - sums).gather(1, block)
    mass = sums.gather(1, block)
    within = ((uniforms.unsqueeze(1) * sums.sum(dim=1, keepdim=True) - before) / mass).clamp_(0.0, 1.0)
    tokens = start + own.squeeze(1) * PLAIN_BLOCK + draw(inside, within.squeeze(1))
    if part is None:
        return tokens
    # A sum of one token and of zeros, in integers below 2^53.
    tokens = torch.where((own == block - first).squeeze(1), tokens, 0).double()
    return part.gather(tokens.unsqueeze(1)).sum(dim=1).to(torch.int64)
