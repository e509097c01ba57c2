"""The table of draft costs comes from steps of the engine; here a clock that counts tokens stands in for time."""

from __future__ import annotations

import itertools

import pytest

from replayssm.runtime.calibration import measure_draft_costs
from replayssm.runtime.draft_engine import EngineDrafter
from replayssm.runtime.scheduler import Scheduler, SchedulerOptions
from replayssm.runtime.session import Session
from replayssm.runtime.speculation import MtpDrafter, NgramDrafter


class TokenClock:
    """Time is the number of tokens that the session has computed, plus `fixed` per step."""

    def __init__(self, session, fixed=0.0):
        self.now = 0.0
        step = session.step

        def timed(rows):
            self.now += fixed + sum(len(row.tokens) for row in rows)
            return step(rows)

        session.step = timed

    def __call__(self):
        return self.now


@pytest.mark.parametrize(("draft", "buffer_len"), [("ngram", 8), ("ngram", 0), ("mtp", 8), ("engine", 8)])
def test_every_batch_and_number_of_drafts_is_timed_at_full_length(tiny_engine, draft, buffer_len):
    engine = tiny_engine("nano", buffer_len=buffer_len)
    session = Session(engine, slots=6)
    drafter = {
        "ngram": NgramDrafter,
        "mtp": lambda: MtpDrafter(session),
        "engine": lambda: EngineDrafter(tiny_engine("qwen"), session),
    }[draft]()
    costs = measure_draft_costs(session, drafter, 3, TokenClock(session, fixed=10.0))
    assert costs.batches == (1, 4, 6)
    assert costs.seconds == tuple(tuple(10.0 + batch * (1 + k) for k in range(4)) for batch in (1, 4, 6))
    assert session.free_slots == 6
    if draft == "engine":
        assert drafter.session.free_slots == 6
    # What was measured decides: at 6 rows a first draft costs 22 / 16, and it stands with chance 0.7 at first.
    assert costs.crossovers()[6] == pytest.approx(22 / 16 - 1)
    assert Scheduler(session, drafter, SchedulerOptions(draft_costs=costs)).draft_len == 3


def test_other_work_on_the_machine_does_not_count(tiny_engine):
    """Steps that were held up are not taken, and more drafts never look cheaper than fewer."""
    session = Session(tiny_engine("nano"), slots=1)
    noise = itertools.cycle((0.0, 50.0, 9.0))
    clock = TokenClock(session, fixed=10.0)
    step = session.step

    def held_up(rows):
        clock.now += next(noise)
        return step(rows)

    session.step = held_up
    assert measure_draft_costs(session, NgramDrafter(), 3, clock).seconds == ((11.0, 12.0, 13.0, 14.0),)
    session.step = lambda rows: setattr(clock, "now", clock.now - 2 * len(rows[0].tokens)) or step(rows)
    assert measure_draft_costs(session, NgramDrafter(), 3, clock).seconds == ((9.0,) * 4,)


def test_it_needs_room_and_free_slots(tiny_engine):
    session = Session(tiny_engine("nano", max_seq_len=8), slots=2)
    with pytest.raises(ValueError, match="max_seq_len 8 is too short to measure 0 drafts"):
        measure_draft_costs(session, NgramDrafter(), 3)
    assert session.free_slots == 2
    session.allocate()
    with pytest.raises(ValueError, match="before requests arrive"):
        measure_draft_costs(session, NgramDrafter(), 3)
