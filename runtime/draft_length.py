"""How many tokens to draft: what a longer window costs on this machine against how drafts have fared."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DraftCosts:
    """Measured seconds of a step, proposals included: seconds[i][k] for batches[i] rows with k drafts each.

    `calibration.measure_draft_costs` makes one. Raises ValueError for tables that are not rectangular and positive.
    """

    batches: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        widths = {len(row) for row in self.seconds}
        if not self.batches or len(self.batches) != len(self.seconds) or len(widths) != 1 or 0 in widths:
            raise ValueError(f"expected one row of times per batch, got {len(self.seconds)} for {len(self.batches)}")
        if list(self.batches) != sorted(set(self.batches)) or min(map(min, self.seconds)) <= 0:
            raise ValueError("expected increasing batches and positive times")

    def relative(self, batch: int) -> list[float]:
        """Cost of a step of `batch` rows with 0, 1, ... drafts each, as a multiple of that with none.

        Between measured batches times are interpolated linearly; outside, the nearest measured batch stands for all.
        """
        index = bisect_left(self.batches, batch)
        if index == 0 or index == len(self.batches):
            seconds: Sequence[float] = self.seconds[min(index, len(self.batches) - 1)]
        else:
            low, high = self.batches[index - 1 : index + 1]
            share = (batch - low) / (high - low)
            pairs = zip(self.seconds[index - 1], self.seconds[index], strict=True)
            seconds = [a + share * (b - a) for a, b in pairs]
        return [value / seconds[0] for value in seconds]

    def crossovers(self) -> dict[int, float]:
        """For each measured batch: the chance of standing above which the first draft pays.

        A window with one draft yields 1 + a tokens, so it pays where 1 + a is above its relative cost.
        """
        return {batch: self.relative(batch)[1] - 1.0 for batch in self.batches} if len(self.seconds[0]) > 1 else {}

    def to_json(self) -> dict[str, Any]:
        """For reports: relative costs and crossovers by batch."""
        return {
            str(batch): {"step_s": row[0], "relative_cost": self.relative(batch), "crossover": self.crossovers()[batch]}
            for batch, row in zip(self.batches, self.seconds, strict=True)
        }


class AdaptiveDraftLength:
    """Draft length of one request, from how its drafts have fared, and at first from how those of others have.

    If each draft stands with probability a, a window with k drafts yields (1 - a^(k+1)) / (1 - a) tokens on average.
    `choose` takes the k that yields most per cost. Older windows count less and less, and while k is 0 the estimate
    drifts back to where it began, so that drafts are tried again.

    shared: what all requests have met, which a new request begins with. It is one of these too, with a longer memory.
    """

    PRIOR_TRIED, PRIOR_RATE = 2.0, 0.7

    def __init__(
        self, shared: AdaptiveDraftLength | None = None, memory: float = 0.9, idle_memory: float = 0.98
    ) -> None:
        self._shared = shared
        self._memory, self._idle_memory = memory, idle_memory
        self._tried = self._stood = 0.0

    @classmethod
    def for_all(cls) -> AdaptiveDraftLength:
        """What requests share: some hundred windows long, and back at the beginning after some thousand without one."""
        return cls(memory=0.99, idle_memory=0.999)

    @property
    def rate(self) -> float:
        """Estimated probability that a draft stands."""
        prior = self.PRIOR_RATE if self._shared is None else self._shared.rate
        return (self._stood + self.PRIOR_TRIED * prior) / (self._tried + self.PRIOR_TRIED)

    def choose(self, costs: Sequence[float]) -> int:
        """Drafts of the next window, at most len(costs) - 1; costs[k] of a step with k drafts, costs[0] = 1."""
        rate, yielded, best, most = self.rate, 0.0, 0, 0.0
        for count, cost in enumerate(costs):
            yielded += rate**count
            if yielded / cost > most:
                best, most = count, yielded / cost
        if best == 0:
            self._forget()
        return best

    def _forget(self) -> None:
        self._tried *= self._idle_memory
        self._stood *= self._idle_memory
        if self._shared is not None:
            self._shared._forget()

    def observe(self, drafted: int, stood: int) -> None:
        """A window with `drafted` drafts of which the first `stood` stood; the first that fell was the last tried."""
        if drafted:
            self._tried = self._tried * self._memory + min(drafted, stood + 1)
            self._stood = self._stood * self._memory + stood
            if self._shared is not None:
                self._shared.observe(drafted, stood)
