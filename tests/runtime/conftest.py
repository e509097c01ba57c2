"""Engines of the tiny checkpoints, and the rule for comparing two greedy outputs."""

from __future__ import annotations

import threading
import time
from collections import defaultdict

import pytest

WAIT_S = 30
LAYOUTS = ("nano", "super", "qwen", "qwen_moe")


@pytest.fixture
def folding_rows_first(monkeypatch):
    """However few rows a captured step has, and whatever its states' formats, those that fold come first."""
    from replayssm.plugins import row_order

    def orderable(states):
        return next((state for state in states.values() if "checkpoint_position" in state.tensors), None)

    monkeypatch.setattr(row_order, "ORDERED_ROWS", 1)
    monkeypatch.setattr(row_order, "orderable", orderable)


@pytest.fixture(scope="session")
def tiny_engine(tiny_checkpoint, tmp_path_factory):
    """`tiny_engine(layout, **build_options)` -> Engine, built once. The default dtype is float64: there, differences of
    rounding between batch shapes are some 1e-15 of logits of order 1, too small to change a choice."""
    from replayssm.builders.engine import BuildOptions, build_engine
    from replayssm.runtime.engine import Engine

    built = {}

    def make(layout, **options):
        options = {
            "max_batch_size": 8,
            "max_seq_len": 400,
            "max_draft_len": 3,
            "buffer_len": 8,
            "dtype": "float64",
            "state_dtype": "float64" if options.get("dtype", "float64") == "float64" else "float32",
            "u_format": "exact" if options.get("dtype", "float64") == "float64" else "bfloat16x2",
            **options,
        }
        key = (layout, *sorted(options.items()))
        if key not in built:
            output = tmp_path_factory.mktemp("engines") / layout
            build_engine(tiny_checkpoint(layout), output, BuildOptions(**options))
            built[key] = Engine.load(output)
        return built[key]

    return make


@pytest.fixture
def assert_same_tokens():
    """`assert_same_tokens(engine, prompt, ours, plain, bound)`: equal, or first different where it may be.

    CPU matmuls are not batch-invariant, so logits of one token differ in the last bits between batch shapes. Two
    greedy outputs may part only where the plain run's two largest logits lie closer than `bound`.
    """
    from replayssm.runtime.session import Session

    def check(engine, prompt, ours, plain, bound):
        if ours == plain:
            return
        index = next(i for i, pair in enumerate(zip(ours, plain, strict=False)) if pair[0] != pair[1])
        session = Session(engine, slots=1)
        logits = session.prefill(session.allocate(), [*prompt, *plain[:index]])
        first, second = logits.topk(2).values.tolist()
        assert first - second < bound, f"token {index}: {ours[index]} instead of {plain[index]}, gap {first - second}"

    return check


class RunningServer:
    """A server in a thread on a free port."""

    def __init__(self, engine, slots=2, draft="ngram", scheduling=None, shutdown_timeout_s=5, **options):
        from replayssm.runtime.api import ServerOptions, create_app
        from replayssm.runtime.http_server import HttpServer
        from replayssm.runtime.serving import make_loop

        self.loop = make_loop(engine, slots, scheduling, draft, prefill_chunk=8)
        self.app = create_app(self.loop, ServerOptions("tiny", **options))
        self.server = HttpServer(self.app, self.loop, "127.0.0.1", 0, shutdown_timeout_s)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        deadline = time.monotonic() + WAIT_S
        while not self.server.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self.server.servers[0].sockets[0].getsockname()[1]}"

    def client(self, **options):
        import openai

        options = {"api_key": "none", "max_retries": 0, "timeout": WAIT_S, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def metrics(self):
        """Values at /metrics by name, without the prefix, with labels."""
        import httpx

        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        pairs = (line.removeprefix("replayssm_").rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return defaultdict(float, {name: float(value) for name, value in pairs})

    def until_idle(self):
        """Wait until nothing runs and no slot is taken."""
        scheduler, deadline = self.loop.scheduler, time.monotonic() + WAIT_S
        while scheduler.has_work or scheduler.session.free_slots < scheduler.session.slots:
            assert time.monotonic() < deadline, "requests are left over"
            time.sleep(0.01)

    def stop(self):
        self.server.should_exit = True
        self.thread.join(WAIT_S)
        assert not self.thread.is_alive()
        assert not self.loop._thread.is_alive()


@pytest.fixture(scope="module")
def start(tiny_engine):
    """`start(**options)` -> RunningServer over the nano engine, stopped at the end."""
    running = []

    def make(**options):
        running.append(RunningServer(tiny_engine("nano"), **options))
        return running[-1]

    yield make
    for server in running:
        server.stop()


class Sentence:
    """A grammar of one text, for a random model to say what a trained one would."""

    def __init__(self, tokens, vocab_size):
        self.tokens, self.vocab_size, self.taken = tokens, vocab_size, 0

    @property
    def finished(self):
        return self.taken == len(self.tokens)

    def allowed(self, drafts, count):
        import torch

        rows = torch.zeros(count, self.vocab_size, dtype=torch.bool)
        for index in range(count):
            rows[index, self.tokens[min(self.taken + index, len(self.tokens) - 1)]] = True
        return rows

    def accept(self, tokens):
        count = min(len(tokens), len(self.tokens) - self.taken)
        assert tokens[:count] == self.tokens[self.taken : self.taken + count]
        self.taken += count
        return count


@pytest.fixture(scope="session")
def sentence():
    """`sentence(tokens, vocab_size)` -> a grammar for `LogitsProcessor` that allows this text and no other."""
    return Sentence
