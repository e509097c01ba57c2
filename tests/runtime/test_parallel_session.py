"""Sessions of two processes over gloo: the calls of a session, their errors, and what happens when a rank is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time

import pytest
import torch

from replayssm.plugins.step_ends import LAST_CHOSEN
from replayssm.runtime import parallel_processes, parallel_session
from replayssm.runtime.errors import RankLostError
from replayssm.runtime.generation import generate
from replayssm.runtime.parallel import rank_engine
from replayssm.runtime.parallel_processes import Peers, Place
from replayssm.runtime.parallel_session import ParallelSession, open_session
from replayssm.runtime.requests import Request
from replayssm.runtime.sampling import SamplingParams
from replayssm.runtime.scheduler import Scheduler, SchedulerOptions
from replayssm.runtime.serving import make_drafter
from replayssm.runtime.session import Row, Session

PROMPTS = [list(range(3, 40)), list(range(50, 60)), [7] * 20]
TIGHT = {"rtol": 1e-10, "atol": 1e-10}
"""float64 engines: sums in another order differ by some 1e-15 of logits of order 1."""


@pytest.fixture(scope="module")
def engine(tiny_engine):
    return tiny_engine("nano")


@pytest.fixture(scope="module")
def session(engine):
    """Two ranks, warm, with captured steps in their stand-in. Tests free what they allocate."""
    with contextlib.closing(open_session(rank_engine(engine, 0, 2), 3, graphs=True)) as session:
        session.warm_up()
        yield session


@pytest.fixture
def plain(engine):
    return Session(engine, 3, graphs=True)


def test_one_rank_is_a_plain_session(engine):
    assert rank_engine(engine, 0, 1) is engine
    assert type(open_session(engine, 2)) is Session


@pytest.mark.parametrize("draft", ["none", "mtp"])
def test_generated_tokens_are_those_of_one_process(session, plain, draft):
    sampled = [SamplingParams(), SamplingParams(temperature=1.0, seed=3), SamplingParams()]
    results = [
        generate(each, PROMPTS, 12, sampled, make_drafter(draft, each), eos_token_ids=()) for each in (session, plain)
    ]
    ours, expected = ([result.token_ids for result in each] for each in results)
    assert ours == expected
    assert session.free_slots == session.slots
    assert session.can_run_ahead


def test_requests_make_way_for_others(session, plain):
    """Slots go to host memory and come back: all ranks' parts of them."""
    found = []
    for each in (session, plain):
        scheduler = Scheduler(each, options=SchedulerOptions(time_slice=3))
        requests = [Request.create(each, [5 + n, 6, 7, 8], 12, end_tokens=()) for n in range(5)]
        for request in requests:
            scheduler.submit(request)
        while scheduler.step():
            pass
        assert scheduler.stats.preemptions > 0
        found.append([request.generated for request in requests])
    assert found[0] == found[1]


def test_a_step_starts_before_the_last_one_was_waited_for(session, plain):
    for each in (session, plain):
        slot = each.allocate()
        each.prefill(slot, PROMPTS[1])
        finishes = [each.start_step([Row(slot, [5])])]
        each.advance({slot: 1})
        finishes.append(each.start_step([Row(slot, [LAST_CHOSEN])]))
        chosen = [finish().chosen.tokens for finish in finishes]
        each.advance({slot: 1})
        each.free(slot)
        if each is session:
            ours = chosen
    assert ours == chosen


def test_logits_copies_and_decoding_ahead(session, plain):
    for each in (session, plain):
        slot = each.allocate()
        logits = each.prefill(slot, PROMPTS[0])
        fork, loaded = each.fork(slot), each.load(each.save(slot))
        ahead = list(each.decode_ahead([loaded], [5], 4))
        stopped = each.decode_ahead([fork], [5], 4)
        first = next(stopped)
        stopped.close()
        rest = each.decode([fork], first)
        assert [first[0], int(rest.argmax())] == [tokens[0] for tokens in ahead[:2]]
        if each is session:
            kept = logits, ahead, rest
        for used in (slot, fork, loaded):
            each.free(used)
    torch.testing.assert_close(kept[0], logits, **TIGHT)
    torch.testing.assert_close(kept[2], rest, **TIGHT)
    assert kept[1] == ahead
    assert 2 * session.state_bytes == plain.state_bytes


def test_errors_are_those_of_a_plain_session_and_change_nothing(session, plain):
    for each in (session, plain):
        slot = each.allocate()
        for method, arguments, message in (
            (each.step, ([],), "at least one row"),
            (each.step, ([Row(slot, [10**6])],), "outside the vocabulary"),
            (each.free, (2,), "slot 2 is not in use"),
            (each.advance, ({slot: 3},), "expected 0 to 0 accepted tokens"),
            (lambda *given: next(each.decode_ahead(*given)), ([slot], [10**6], 2), "outside the vocabulary"),  # noqa: B023
        ):
            with pytest.raises(ValueError, match=message):
                method(*arguments)
        logits = each.prefill(slot, PROMPTS[1])
        each.free(slot)
        if each is session:
            ours = logits
    torch.testing.assert_close(ours, logits, **TIGHT)


def test_blobs_that_are_not_whole_or_of_other_ranks(session, plain):
    slot = session.allocate()
    session.prefill(slot, PROMPTS[1])
    blob = session.save(slot)
    own = plain.allocate()
    for damaged in (blob[:-1], blob[:100] + bytes([blob[100] ^ 1]) + blob[101:], plain.save(own)):
        with pytest.raises(ValueError, match="not a whole blob of a session with several ranks"):
            session.load(damaged)
    session.free(slot)
    assert session.free_slots == session.slots


def test_graphs_of_one_rank_are_not_handed_out(session):
    with pytest.raises(ValueError, match="waits for the others"):
        session.step_graph(1)


def test_a_second_group_is_refused(session, engine):
    with pytest.raises(ValueError, match=r"already has a torch\.distributed group"):
        open_session(rank_engine(engine, 0, 2), 1)


def test_only_rank_0_leads(engine):
    with pytest.raises(ValueError, match="rank 0 leads the others, got rank 1"):
        ParallelSession(rank_engine(engine, 1, 2), 1)


class Told:
    """A pipe through which rank 0 has said these things."""

    def __init__(self, *messages):
        self.messages, self.sent = list(messages), []

    def recv(self):
        if not self.messages:
            raise EOFError
        return self.messages.pop(0)

    def send(self, value):
        self.sent.append(value)


@pytest.mark.parametrize(
    ("outcome", "error"), [("ValueError", EOFError), ("", RuntimeError), ("InferenceError", RuntimeError)]
)
def test_a_rank_ends_where_its_calls_end_otherwise_than_rank_0s(engine, monkeypatch, outcome, error):
    """The first call fails with a ValueError; rank 0 tells with the second how it ended there."""
    monkeypatch.setattr(parallel_session, "join_group", lambda place: None)
    pipe = Told(("step", ([],), ""), ("allocate", (), outcome))
    plan = parallel_session._Plan(engine.directory, engine.manifest, {}, 1, 8, None)
    with pytest.raises(
        error, match="the call before 'allocate' ended with ValueError" if error is RuntimeError else None
    ):
        parallel_session._follow(Place(1, 2, "cpu", "store", 1), pipe, plan)
    assert pipe.sent == [True, True]


def test_an_error_that_only_rank_0_has_loses_the_group(session):
    """The others may wait for it in a collective. A group of its own, without processes."""
    peers = object.__new__(Peers)
    peers.__dict__ |= {**session._peers.__dict__, "_processes": [], "_lost": threading.Event()}
    with pytest.raises(MemoryError, match="full"), peers.call():
        raise MemoryError("full")
    with pytest.raises(RankLostError, match=r"rank 0 failed in a call \(MemoryError: full\)"):
        peers.send(None)
    assert session._peers.are_there


def test_fewer_than_one_rank(engine):
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        rank_engine(engine, 0, 0)


def test_plans_run_on_one_gpu(plan_engine):
    engine, _ = plan_engine("nano")
    with pytest.raises(ValueError, match=r"plans, which run on one GPU: build it with --target torch"):
        rank_engine(engine, 0, 2)


def test_more_ranks_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="2 ranks need 2 GPUs, torch sees 1: lower --tensor-parallel-size"):
        Peers(2, torch.device("cuda"), print, None)


def test_a_rank_that_is_lost_ends_the_session_at_once(session):
    """The last test of the shared session. Rank 0 waits in a collective when the other, stopped before, is killed."""
    slot = session.allocate()
    session.prefill(slot, PROMPTS[1])
    other = session._peers._processes[0].pid
    os.kill(other, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (other, signal.SIGKILL)).start()
    started = time.monotonic()
    for _ in range(2):
        with pytest.raises(RankLostError, match=r"rank 1 of 2 ended \(exit code -9\), .* killed, or out of memory"):
            session.decode([slot], [5])
    assert time.monotonic() - started < 20, "the time to notice, not that of a collective to give up"
    session.free(slot)
    assert session.free_slots == session.slots


def test_a_rank_that_cannot_load_says_why(session, engine, tmp_path):
    """Rank 0 has read the engine; the other finds a file of it gone."""
    session.close()
    copy = tmp_path / "engine"
    copy.mkdir()
    for path in engine.directory.iterdir():
        os.symlink(path, copy / path.name)
    whole = type(engine).load(copy)
    (copy / json.loads((copy / "config.json").read_text())["networks"]).unlink()
    with pytest.raises(RankLostError, match=r"rank 1 of 2 ended \(exit code 1\), EngineDirectoryError: .*networks"):
        open_session(rank_engine(whole, 0, 2), 1)


def test_a_group_that_cannot_be_left_in_order_is_aborted(monkeypatch):
    """A thread that stays in the group would abort the interpreter's end, whatever its exit code was to be."""
    stuck, left = threading.Event(), []
    monkeypatch.setattr(parallel_processes, "GRACE_S", 0.2)
    monkeypatch.setattr(parallel_processes.dist, "destroy_process_group", stuck.wait)
    monkeypatch.setattr(parallel_processes, "_abort", lambda: left.append("aborted"))
    peers = Peers.__new__(Peers)
    peers.failure = None
    peers._leave()
    assert left == ["aborted"]
    stuck.set()
    peers._leave()
    assert left == ["aborted"], "in order where that ends"
