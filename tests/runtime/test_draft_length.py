"""Draft lengths follow acceptance and measured costs."""

from __future__ import annotations

import pytest

from replayssm.runtime.draft_length import AdaptiveDraftLength, DraftCosts


def test_good_drafts_get_longer_and_bad_ones_stop():
    costs = [1.0, 1.15, 1.3, 1.45, 1.6]
    good, bad = AdaptiveDraftLength(), AdaptiveDraftLength()
    for _ in range(30):
        good.observe(good.choose(costs), 4)
        bad.observe(bad.choose(costs), 0)
    assert (good.choose(costs), bad.choose(costs)) == (4, 0)
    assert any(bad.choose(costs) for _ in range(300))  # it tries again some time


def test_a_new_request_begins_with_what_others_met():
    costs = [1.0, 1.15, 1.3, 1.45, 1.6]
    for stood, first in ((4, 4), (0, 0)):
        shared = AdaptiveDraftLength.for_all()
        for _ in range(10):
            other = AdaptiveDraftLength(shared)
            for _ in range(20):
                other.observe(other.choose(costs), stood)
        assert AdaptiveDraftLength(shared).choose(costs) == first
    # Drafts that fell for everybody are tried again some time: the text may have changed.
    tries = 0
    for _ in range(5000):
        other = AdaptiveDraftLength(shared)
        drafted = other.choose(costs)
        tries += drafted > 0
        other.observe(drafted, 0)
    assert 0 < tries < 500


def test_the_choice_is_where_the_measured_cost_is_worth_it():
    """With 0.7 as the chance of standing, windows yield 1, 1.7, 2.19 and 2.533 tokens."""
    assert AdaptiveDraftLength().rate == pytest.approx(0.7)
    for costs, best in (
        ([1, 1, 1, 1], 3),
        ([1, 1.69, 2.2, 2.6], 1),
        ([1, 1.71, 2.2, 2.6], 0),
        ([1, 1.71, 2.2, 2.5], 3),  # a step up at the first draft, then flat: only a long draft pays
        ([1, 1.2], 1),
        ([1], 0),
    ):
        assert AdaptiveDraftLength().choose(costs) == best


def test_costs_between_measured_batches():
    costs = DraftCosts((1, 4, 16), ((1.0, 1.1), (1.0, 1.5), (4.0, 8.0)))
    assert [costs.relative(batch)[1] for batch in (1, 4, 16, 100)] == pytest.approx([1.1, 1.5, 2.0, 2.0])
    assert costs.relative(2)[1] == pytest.approx(1.1 + 0.4 / 3)
    assert costs.relative(10)[1] == pytest.approx((1.5 + 8.0) / (1.0 + 4.0))  # times are interpolated, then divided
    assert costs.crossovers() == pytest.approx({1: 0.1, 4: 0.5, 16: 1.0})
    assert costs.to_json()["16"] == {"step_s": 4.0, "relative_cost": [1.0, 2.0], "crossover": 1.0}


@pytest.mark.parametrize(
    ("batches", "seconds"),
    [((), ()), ((1,), ((1.0,), (2.0,))), ((1, 2), ((1.0,), (1.0, 2.0))), ((2, 1), ((1.0,), (1.0,))), ((1,), ((0.0,),))],
)
def test_tables_that_are_none(batches, seconds):
    with pytest.raises(ValueError, match="expected"):
        DraftCosts(batches, seconds)
