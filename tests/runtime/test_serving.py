"""Slots by memory, limits, log lines."""

from __future__ import annotations

import json
import logging
import math
import re

import pytest

from replayssm.runtime.logs import JsonFormatter, TextFormatter
from replayssm.runtime.scheduler import SchedulerOptions
from replayssm.runtime.serving import (
    describe_memory,
    free_bytes,
    make_drafter,
    make_loop,
    slot_bytes,
    slots_that_fit,
    usable_bytes,
    with_max_seq_len,
)
from replayssm.runtime.session import Session

SMALL_STATE = {"dtype": "float32", "state_dtype": "float16", "state_rounding": "stochastic", "readout_dtype": "float8"}


@pytest.mark.parametrize("options", [{}, SMALL_STATE], ids=["float64", "readout"])
@pytest.mark.parametrize("layout", ["nano", "qwen"])
def test_slot_bytes_are_what_a_session_allocates(tiny_engine, layout, options):
    engine = tiny_engine(layout, **options)
    total, cache = slot_bytes(engine)
    session = Session(engine, slots=3)
    assert 3 * total == session.state_bytes
    kept = sum(state.nbytes for state in session.states.values() if state.geometry.kind == "attention")
    assert 3 * cache == kept


def test_slots_that_fit(tiny_engine, monkeypatch):
    engine = tiny_engine("nano")
    size, _ = slot_bytes(engine)
    assert slots_that_fit(engine, 3 * size + 1, None) == 3
    assert slots_that_fit(engine, 1000 * size, None) == 8
    assert slots_that_fit(engine, 3 * size, 2) == 2
    for memory, wanted in ((size - 1, None), (3 * size, 4)):
        with pytest.raises(ValueError, match="lower --max-seq-len to") as error:
            slots_that_fit(engine, memory, wanted)
        # The advice holds: that many sequences of the length it names fit, of one token more they do not.
        length = int(re.search(r"--max-seq-len to (\d+)", str(error.value))[1])
        assert slots_that_fit(with_max_seq_len(engine, length), memory, wanted) == (wanted or 1)
        with pytest.raises(ValueError, match="lower"):
            slots_that_fit(with_max_seq_len(engine, length + 1), memory, wanted)
        # Fewer sequences are an advice where there are fewer to have.
        assert ("lower --max-batch-size to 3 or " in str(error.value)) == (wanted == 4)
    weights = sum(tensor.nbytes for tensor in engine.weights.values())
    assert 0 < usable_bytes(engine, "cpu", 0.5) < free_bytes("cpu")
    monkeypatch.setattr("replayssm.runtime.serving.free_bytes", lambda device: weights + 100)
    assert usable_bytes(engine, "cpu", 0.5) == 50


def test_admission_follows_the_formats_of_the_state(tiny_engine):
    """A checkpoint of 2 and a readout of 1 byte an element, with a scale of 1 byte a row, instead of 4."""
    engines = [with_max_seq_len(tiny_engine("nano", **options), 8) for options in ({"dtype": "float32"}, SMALL_STATE)]
    large, small = (slot_bytes(engine)[0] for engine in engines)
    states = [spec.geometry for spec in engines[0].networks["main"].states.values() if hasattr(spec.geometry, "dstate")]
    elements = sum(math.prod(geometry.state_shape) for geometry in states)
    scales = sum(math.prod(geometry.state_shape[:2]) for geometry in states)
    assert large - small == elements - scales
    assert [slots_that_fit(engine, 5 * small, None) for engine in engines] == [4, 5]


def test_the_trade_of_length_for_sequences_is_printed(tiny_engine):
    engine = tiny_engine("nano")
    size, cache = slot_bytes(engine)
    memory = 5 * size
    first, second = describe_memory(engine, memory, 5)
    assert first.startswith(f"5 slots of {size / 1e6:.1f} MB: {(size - cache) / 1e6:.1f} MB of state and rings, ")
    assert f"{cache / 1e6:.1f} MB of attention cache for 400 tokens" in first
    for count, length in re.findall(r"(\d+) of (\d+)[,;]", second):
        bytes_each = slot_bytes(with_max_seq_len(engine, int(length)))[0]
        assert int(count) * bytes_each <= memory < (int(count) + 1) * bytes_each
    assert re.findall(r"of (\d+)[,;]", second) == ["400", "200", "100", "50"]
    assert second.endswith("max_batch_size is 8, which `replayssm build --max-batch-size N` raises")


def test_a_draft_engine_takes_its_share(tiny_engine, monkeypatch):
    engine, draft = tiny_engine("nano"), tiny_engine("qwen", max_seq_len=64, max_batch_size=2)
    own, beside = slot_bytes(engine)[0], slot_bytes(draft)[0]
    assert slot_bytes(engine, draft)[0] == own + beside
    assert slots_that_fit(engine, 3 * own, None) == 3
    assert slots_that_fit(engine, 3 * own, None, draft) == 3 * own // (own + beside)
    assert slots_that_fit(engine, 100 * (own + beside), None, draft) == 2
    weights = sum(tensor.nbytes for each in (engine, draft) for tensor in each.weights.values())
    monkeypatch.setattr("replayssm.runtime.serving.free_bytes", lambda device: weights + 100)
    assert usable_bytes(engine, "cpu", 0.5, draft) == 50


def test_adaptive_drafts_are_measured_at_the_start(tiny_engine, caplog):
    caplog.set_level(logging.INFO, "replayssm.server")
    options = SchedulerOptions(draft_len=2)
    scheduler = make_loop(tiny_engine("nano"), 3, options, "ngram", adaptive_drafts=True).scheduler
    costs = scheduler.options.draft_costs
    assert (costs.batches, len(costs.seconds[0]), scheduler.draft_len) == ((1, 3), 3, 2)
    said, *measured = (message.split(":")[0] for message in caplog.messages)
    assert said.startswith("timing steps"), "it can take a minute, in which the server is not ready"
    assert measured == ["drafts for 1 rows", "drafts for 3 rows"]
    assert scheduler.session.free_slots == 3
    assert make_loop(tiny_engine("nano"), 3, options, adaptive_drafts=True).scheduler.options.draft_costs is None


def test_shorter_sequences_take_less(tiny_engine):
    engine = tiny_engine("nano")
    short = with_max_seq_len(engine, 100)
    (total, cache), (less, less_cache) = slot_bytes(engine), slot_bytes(short)
    assert (cache, less_cache) == (400 * cache // 400, 100 * cache // 400)
    assert total - less == cache - less_cache
    session = make_loop(short, 1).scheduler.session
    with pytest.raises(ValueError, match="max_seq_len 100: shorten the text, or raise --max-seq-len, here up to 400"):
        session.prefill(session.allocate(), [1] * 101)
    assert engine.how_to_lengthen == "build the engine with a larger --max-seq-len"
    assert with_max_seq_len(engine, None) is engine
    for length in (1, 401):
        with pytest.raises(ValueError, match="between 2 and the engine's 400"):
            with_max_seq_len(engine, length)


def test_drafters(tiny_engine):
    session = Session(tiny_engine("nano"), slots=1)
    assert make_drafter("none", session) is None
    with pytest.raises(ValueError, match="one of none, ngram, mtp, engine, got 'oracle'"):
        make_drafter("oracle", session)


def test_log_lines():
    record = logging.LogRecord("replayssm.server", logging.INFO, "", 0, "request %d", (7,), None)
    record.fields = {"id": "cmpl-1", "error": None}
    value = json.loads(JsonFormatter().format(record))
    assert {key: value[key] for key in ("level", "logger", "message", "id", "error")} == {
        "level": "info", "logger": "replayssm.server", "message": "request 7", "id": "cmpl-1", "error": None
    }  # fmt: skip
    assert value["time"].endswith("Z")
    assert TextFormatter().format(record).endswith("INFO    request 7 id=cmpl-1")
