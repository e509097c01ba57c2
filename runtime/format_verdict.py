"""Whether a state format is safe to use: what was measured of it, how sure that is, and what follows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from replayssm.plugins.settings import ReplaySettings
from replayssm.runtime.engine import Engine

Z_95 = 1.96
RULE_OF_THREE = 3.0
"""Where n trials show no event, its rate lies below 3 / n with 95 % confidence."""


@dataclass
class FormatResult:
    """What one format did.

    tokens: positions compared, over all problems. disagreement: share of them where another token is most likely than
        with float32; its bound is the upper one of a 95 % interval over problems. kl: mean KL divergence from float32's
        distribution, nats a token.
    accuracy: share of right answers; difference: to float32's; difference_bound: the lower one of its 95 % interval.
        None without answers.
    problems, answered: how many were compared, and how many of them have answers. cut_off: texts of those that
        max_new_tokens ended; out_of_room: that max_seq_len did. Neither had a chance to come to its answer.
    disagreement_deviation, difference_deviation: 1.96 standard errors, for how many problems a limit takes.
    state_bytes: checkpoint and readout of a sequence. traffic_bytes: state moved per decoded token.
    """

    name: str
    settings: ReplaySettings
    state_bytes: int
    traffic_bytes: float
    tokens: int = 0
    disagreement: float = 0.0
    disagreement_bound: float = 0.0
    kl: float = 0.0
    accuracy: float | None = None
    difference: float | None = None
    difference_bound: float | None = None
    problems: int = 0
    answered: int = 0
    cut_off: int = 0
    out_of_room: int = 0
    disagreement_deviation: float = 0.0
    difference_deviation: float = 0.0

    def refusal(self, max_disagreement: float, tolerance: float) -> str:
        """Why not to use it, empty if nothing speaks against it. Where bounds exceed limits that the measured values
        may well keep, that is too few problems, not harm: then it says how many all those limits take."""
        broken = []
        if self.disagreement_bound > max_disagreement:
            found = f"other tokens up to {self.disagreement_bound:.2%}, allowed {max_disagreement:.2%}"
            measured, least = f"measured {self.disagreement:.2%}", RULE_OF_THREE / max(self.tokens, 1)
            values = (max_disagreement, self.disagreement, self.disagreement_deviation, least)
            broken.append((found, measured, self.problems, _needed(self.problems, *values)))
        if self.difference_bound is not None and self.difference_bound < -tolerance:
            found = f"accuracy may lose {-self.difference_bound:.1%}, allowed {tolerance:.1%}"
            measured, least = f"measured {self.difference:+.1%}", RULE_OF_THREE / max(self.answered, 1)
            values = (tolerance, -self.difference, self.difference_deviation, least)
            broken.append((found, measured, self.answered, _needed(self.answered, *values)))
        for found, _, count, needed in broken:
            if needed is None or needed <= count:
                return found
        if not broken:
            return ""
        found, measured, count, needed = max(broken, key=lambda verdict: verdict[3])
        which = "problems" if count == self.problems else "problems with answers"
        return f"too few {which} ({count}) to tell, about {needed} or more are needed: {found}, {measured}"


def _needed(count: int, limit: float, value: float, deviation: float, least: float) -> int | None:
    """`problems_needed` for a bound on `value` to keep `limit`; None if the value breaks it beyond its deviation. One
    that breaks it within that may be chance: then what the limit takes at the very least."""
    if value < limit:
        return problems_needed(count, limit - value, deviation, least)
    return problems_needed(count, limit, 0.0, least) if value - max(deviation, least) < limit else None


def problems_needed(count: int, room: float, deviation: float, least: float) -> int | None:
    """Problems with which max(deviation, least), measured on `count` of them, shrinks to `room`: deviations go with
    1 / sqrt(n), the rule of three with 1 / n. None if there is no room or nothing was counted."""
    if room <= 0 or not count:
        return None
    return math.ceil(count * max((deviation / room) ** 2, least / room) - 1e-9)


def upper_bound(events: Sequence[int], trials: Sequence[int]) -> tuple[float, float, float]:
    """(rate, upper bound of its 95 % interval, 1.96 standard errors) of events among trials in clusters, such as the
    tokens of texts."""
    total, clusters = sum(trials), len(trials)
    rate = sum(events) / total
    spread = sum((e - rate * n) ** 2 for e, n in zip(events, trials, strict=True))
    deviation = Z_95 * math.sqrt(spread * clusters / max(clusters - 1, 1)) / total
    return rate, min(1.0, rate + max(deviation, RULE_OF_THREE / total)), deviation


def paired_bound(pairs: Sequence[tuple[bool, bool]]) -> tuple[float, float, float]:
    """(difference of two proportions over the same problems, lower bound of its 95 % interval, its 1.96 deviations)."""
    count = len(pairs)
    difference = sum(int(ours) - int(base) for ours, base in pairs) / count
    changed = sum(ours != base for ours, base in pairs) / count
    deviation = Z_95 * math.sqrt(max(changed - difference**2, 0.0) / count)
    return difference, max(-1.0, difference - max(deviation, RULE_OF_THREE / count)), deviation


def recommend(results: Sequence[FormatResult], max_disagreement: float, tolerance: float) -> FormatResult:
    """The format that moves the fewest bytes among those that nothing speaks against; float32 is one."""
    fit = [result for result in results if not result.refusal(max_disagreement, tolerance)]
    return min(fit, key=lambda result: result.traffic_bytes)


def answer_notes(engine: Engine, results: Sequence[FormatResult], max_new_tokens: int) -> list[str]:
    """What keeps right answers from being counted, of the texts that float32 wrote."""
    exact, notes = results[0], []
    if exact.cut_off:
        notes.append(
            f"{exact.cut_off} of {exact.answered} texts were cut off at {max_new_tokens} tokens, before their answers: "
            "raise --max-new-tokens"
        )
    if exact.out_of_room:
        notes.append(
            f"{exact.out_of_room} of {exact.answered} texts were cut off at the engine's max_seq_len "
            f"{engine.manifest.replay.max_seq_len}, before their answers: {engine.how_to_lengthen}"
        )
    if exact.accuracy == 0:
        notes.append(
            f"{exact.name} has no right answer, so no format can lose one: only other tokens and KL count here"
        )
    return notes
