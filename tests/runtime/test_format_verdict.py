"""Bounds of what was measured, and what is recommended."""

from __future__ import annotations

import math

import pytest

from replayssm.plugins.settings import ReplaySettings
from replayssm.runtime.format_verdict import FormatResult, paired_bound, problems_needed, recommend, upper_bound


def test_bounds():
    """By hand: rare events take 3 / n, others 1.96 deviations of clusters or of pairs."""
    assert upper_bound([0, 0, 0], [100, 50, 150]) == (0.0, 0.01, 0.0)
    rate, bound, _ = upper_bound([10, 0, 5, 5], [100, 100, 100, 100])
    assert rate == 0.05
    assert bound == pytest.approx(0.05 + 1.96 * math.sqrt((25 + 25) * 4 / 3) / 400)
    # All in one text: far less certain than spread over them.
    assert upper_bound([20, 0, 0, 0], [100] * 4)[1] > bound + 0.05
    assert paired_bound([(True, True)] * 300) == (0.0, -0.01, 0.0)
    pairs = [(True, False)] * 10 + [(False, True)] * 30 + [(True, True)] * 360
    difference, low, deviation = paired_bound(pairs)
    assert difference == -0.05
    assert low == pytest.approx(-0.05 - 1.96 * math.sqrt((0.1 - 0.0025) / 400))
    assert low == difference - deviation


def test_too_few_problems_are_no_verdict_of_harm():
    """By hand: 3 / n within 2 % takes 150; 1.96 deviations of 10 of 100 that changed either way, (0.62 / 0.2)^2 as
    many for a tenth of it. A limit that the measured value itself breaks takes no more problems."""
    assert problems_needed(3, 0.02, 0.0, 1.0) == 150
    assert paired_bound([(True, True)] * 150)[1] == pytest.approx(-0.02)
    pairs = [(True, False)] * 5 + [(False, True)] * 5 + [(True, True)] * 90
    _, low, deviation = paired_bound(pairs)
    count = problems_needed(100, 0.02, deviation, 0.03)
    times = count // 100 + 1
    assert low < -0.02 < paired_bound(pairs * times)[1]
    assert paired_bound(pairs * (times - 1))[1] < -0.02
    assert problems_needed(100, 0.0, deviation, 0.03) is None

    def refusal(pairs, tolerance=0.02):
        result = FormatResult("half", ReplaySettings(), 50, 50.0, 10, problems=len(pairs), answered=len(pairs))
        result.difference, result.difference_bound, result.difference_deviation = paired_bound(pairs)
        return result.refusal(0.01, tolerance)

    assert refusal([(True, True)] * 3) == (
        "too few problems (3) to tell, about 150 or more are needed: accuracy may lose 100.0%, allowed 2.0%, "
        "measured +0.0%"
    )
    assert refusal([(False, True)] + [(True, True)] * 3).startswith("too few problems (4) to tell, about 150 or more")
    assert refusal([(False, True)] * 50 + [(True, True)] * 50) == "accuracy may lose 59.8%, allowed 2.0%"
    tokens = FormatResult("half", ReplaySettings(), 50, 50.0, 60, 0.0, 0.05, problems=3)
    assert tokens.refusal(0.01, 0.02) == (
        "too few problems (3) to tell, about 15 or more are needed: other tokens up to 5.00%, allowed 1.00%, "
        "measured 0.00%"
    )
    tokens.answered = 3
    tokens.difference, tokens.difference_bound, tokens.difference_deviation = paired_bound([(True, True)] * 3)
    assert "(3) to tell, about 150 or more" in tokens.refusal(0.01, 0.02), "the limit that takes the most"
    one = FormatResult("half", ReplaySettings(), 50, 50.0, 24, 1 / 24, 1 / 24 + 3 / 24, problems=2)
    assert one.refusal(0.01, 0.02).startswith("too few problems (2) to tell, about 25 or more"), "one token, by chance"
    one.tokens, one.disagreement_bound = 2400, 1 / 24 + 3 / 2400
    assert one.refusal(0.01, 0.02) == "other tokens up to 4.29%, allowed 1.00%"


def test_recommendation_is_the_cheapest_that_fits():
    settings = ReplaySettings()
    exact = FormatResult("float32", settings, 100, 100.0, 10)
    half = FormatResult(
        "half", settings, 50, 50.0, 10, disagreement_bound=0.005, difference=0.0, difference_bound=-0.01
    )
    small = FormatResult(
        "small", settings, 20, 20.0, 10, disagreement_bound=0.02, difference=0.0, difference_bound=-0.01
    )
    results = [exact, half, small]
    assert recommend(results, 0.01, 0.02) is half
    assert recommend(results, 0.03, 0.02) is small
    assert recommend(results, 0.03, 0.005) is exact
    assert "other tokens up to 2.00%, allowed 1.00%" in small.refusal(0.01, 0.02)
    assert "accuracy may lose 1.0%, allowed 0.5%" in small.refusal(0.03, 0.005)
