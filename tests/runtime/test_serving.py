"""Slots by memory, limits, log lines."""

from __future__ import annotations

import json
import logging

import pytest

from replayssm.runtime.logs import JsonFormatter, TextFormatter
from replayssm.runtime.serving import (
    free_bytes,
    make_drafter,
    make_loop,
    slot_bytes,
    slots_that_fit,
    usable_bytes,
    with_max_seq_len,
)
from replayssm.runtime.session import Session


@pytest.mark.parametrize("layout", ["nano", "qwen"])
def test_slot_bytes_are_what_a_session_allocates(tiny_engine, layout):
    engine = tiny_engine(layout)
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
        with pytest.raises(ValueError, match="lower --max-batch-size or --max-seq-len"):
            slots_that_fit(engine, memory, wanted)
    weights = sum(tensor.nbytes for tensor in engine.weights.values())
    assert 0 < usable_bytes(engine, "cpu", 0.5) < free_bytes("cpu")
    monkeypatch.setattr("replayssm.runtime.serving.free_bytes", lambda device: weights + 100)
    assert usable_bytes(engine, "cpu", 0.5) == 50


def test_shorter_sequences_take_less(tiny_engine):
    engine = tiny_engine("nano")
    short = with_max_seq_len(engine, 100)
    (total, cache), (less, less_cache) = slot_bytes(engine), slot_bytes(short)
    assert (cache, less_cache) == (400 * cache // 400, 100 * cache // 400)
    assert total - less == cache - less_cache
    session = make_loop(short, 1).scheduler.session
    with pytest.raises(ValueError, match="max_seq_len 100"):
        session.prefill(session.allocate(), [1] * 101)
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
