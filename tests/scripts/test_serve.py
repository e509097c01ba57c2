"""`replayssm serve` as a process: it starts, answers, ends on SIGTERM and survives being killed."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

pytest.importorskip("fastapi")

import httpx

from replayssm.builders.engine import BuildOptions, build_engine
from replayssm.runtime.engine import Engine
from replayssm.scripts.cli import main

START_S = 60
COMMAND = [sys.executable, "-c", "from replayssm.scripts.cli import main; main()", "serve"]


@pytest.fixture(scope="module")
def engine(tiny_checkpoint, tmp_path_factory):
    output = tmp_path_factory.mktemp("engines") / "nano"
    build_engine(tiny_checkpoint("nano"), output, BuildOptions(max_batch_size=3, max_seq_len=128, max_draft_len=3))
    return output


class Process:
    """The command with JSON logs; `url` once it listens."""

    def __init__(self, *arguments, home):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
        self.log = Path(home) / "log"
        with self.log.open("w") as file:
            command = [*COMMAND, *map(str, arguments), "--port", "0", "--log-format", "json"]
            self.process = subprocess.Popen(command, stderr=file, stdout=subprocess.PIPE, text=True, env=environment)
        self.url = self._wait_for_url()

    def _wait_for_url(self):
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if found := re.search(r"http://[\w.\[\]:]+:\d+", self.log.read_text()):
                return found[0]
            time.sleep(0.05)
        self.process.kill()
        raise AssertionError(self.log.read_text())

    def records(self):
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def complete(self, **body):
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=30)

    def end(self, number):
        self.process.send_signal(number)
        stdout, _ = self.process.communicate(timeout=30)
        assert stdout == ""
        return self.process.returncode


def test_the_engine_thread_ends_however_the_server_does(engine, monkeypatch):
    """An error may skip the application's own end; a thread that computes while Python ends aborts the process."""
    alive = lambda: [thread for thread in threading.enumerate() if thread.name == "replayssm-engine"]  # noqa: E731

    def interrupted(server):
        server.config.app.state.server.loop.start()
        assert alive()
        raise KeyboardInterrupt

    monkeypatch.setattr("replayssm.runtime.logs.set_up", lambda *_: None)
    monkeypatch.setattr("replayssm.runtime.http_server.HttpServer.run", interrupted)
    CliRunner().invoke(main, ["serve", str(engine), "--port", "0"])
    assert not alive()


def test_serve_then_end_at_once(engine, tmp_path):
    """The second signal does not wait for the requests that the first one lets finish."""
    (tmp_path / "config.yml").write_text("max_batch_size: 2\nspeculative_config: {decoding_type: NGram}\n")
    options = ("--config", tmp_path / "config.yml", "--max_batch_size", 3, "--no-cuda-graphs")
    options += ("--served-model-name", "mine", "--adaptive-drafts", "--shutdown-timeout", 600)
    server = Process(engine, *options, home=tmp_path)
    try:
        answer = server.complete(model="mine", prompt="is read", max_tokens=5, temperature=0)
        assert answer.json()["usage"]["completion_tokens"] == 5
        # 120 sequences over two slots: seconds of work.
        body = {"prompt": "is read", "n": 120, "ignore_eos": True, "max_tokens": 100, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as stream:
            lines = (line for line in stream.iter_lines() if line)
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            while not any("running requests have 600 s" in record["message"] for record in server.records()):
                next(lines)  # they go on
            code = server.end(signal.SIGTERM)
            *_, last, _ = lines
    finally:
        server.process.kill()
    assert code == 128 + signal.SIGTERM
    assert "shutting down" in json.loads(last[6:])["error"]["message"]
    assert "Traceback" not in server.log.read_text()
    record = next(record for record in server.records() if record["message"] == "request")
    assert record["completion_tokens"] == 5
    assert record["id"] == answer.json()["id"]
    messages = [record["message"] for record in server.records()]
    for part in ("2 slots of", "of attention cache for 128 tokens", "(--max-seq-len)", "drafts for 2 rows"):
        assert any(part in message for message in messages), part


def cpu_seconds(process_id):
    """Processor time that a process and all its threads have used."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_kill_and_restart_from_a_checkpoint(tiny_checkpoint, tmp_path):
    """The engine is built once; killing the server under load damages nothing, and it is back within 10 s.

    The limit is held against processor time, in which starting is measured alike on a busy machine: all of start-up is
    one thread's work (imports, weights, a first step), so on a free core that is how long it takes.
    """
    arguments = ("--checkpoint", tiny_checkpoint("qwen"), "--max-seq-len", 64, "--max-batch-size", 4)
    server = Process(*arguments, home=tmp_path)
    body = {"prompt": "is read", "max_tokens": 60, "temperature": 0}
    lines = threading.Semaphore(0)

    def stream(client):
        call = client.stream("POST", f"{server.url}/v1/completions", json={**body, "stream": True})
        with contextlib.suppress(httpx.TransportError), call as answer:
            for _ in answer.iter_lines():
                lines.release()

    # Four run and stream; two more wait in the queue.
    with httpx.Client(timeout=30) as client, concurrent.futures.ThreadPoolExecutor(6) as pool:
        calls = [pool.submit(stream, client) for _ in range(6)]
        assert all(lines.acquire(timeout=30) for _ in range(8))
        assert server.end(signal.SIGKILL) == -signal.SIGKILL
        assert all(call.result(timeout=30) is None for call in calls)
    (built,) = (tmp_path / "cache" / "replayssm" / "engines").iterdir()
    Engine.load(built, "full")
    before = built.stat().st_mtime_ns
    server = Process(*arguments, home=tmp_path)
    try:
        ready = httpx.get(f"{server.url}/health", timeout=30)
        used = cpu_seconds(server.process.pid)
        assert (ready.status_code, server.complete(**body).status_code) == (200, 200)
    finally:
        code = server.end(signal.SIGTERM)
    assert (used < 10, code) == (True, 0)
    assert [path.stat().st_mtime_ns for path in built.parent.iterdir()] == [before]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give an engine directory, or --checkpoint"),
        (("ENGINE", "--checkpoint", "ENGINE"), "give an engine directory, or --checkpoint"),
        (
            ("ENGINE", "--max-batch-size", 9),
            "error: --max-batch-size must be between 1 and the engine's",
        ),
        (("ENGINE", "--max-seq-len", 4000), "error: --max-seq-len must be between 2 and the engine's 128, got 4000"),
        (("ENGINE", "--draft", "ngram", "--draft-len", 9), "error: --draft-len must be between 1 and"),
        (("ENGINE", "--max-num-tokens", 10), "error: --max-num-tokens 10 is less than the 264 tokens"),
        (("ENGINE", "--free-gpu-memory-fraction", 1e-9), "GB may be used: free memory"),
        (("ENGINE/weights",), "has no config.json"),
        (("/nowhere",), "does not exist"),
        (("CHECKPOINT",), "nano is a checkpoint: serve it with --checkpoint, or build an engine of it"),
        (
            ("ENGINE", "--tool-parser", "hermes"),
            "error: --tool-parser must be one of qwen3, qwen3_coder or auto, got 'hermes'",
        ),
        (("ENGINE", "--draft-len", 2), "--draft-len means nothing without drafts: choose --draft ngram, mtp, engine"),
        (("ENGINE", "--adaptive-drafts"), "--adaptive-drafts means nothing without drafts"),
        (("ENGINE", "--api-key", ""), "the API key is empty"),
        (("ENGINE", "--metrics-prefix", "9-"), "error: --metrics-prefix must be letters, digits, _ and :"),
        (("ENGINE", "--chat-template", "/dev/null"), "/dev/null is empty: expected a chat template"),
        (("ENGINE", "--swap-memory", -1), "Invalid value for '--swap-memory': -1 is not in the range x>=0"),
        (("ENGINE", "--shutdown-timeout", -1), "Invalid value for '--shutdown-timeout'"),
        (("ENGINE", "--config", "ENGINE/config.json"), "config.json: the key 'format' means nothing here"),
    ],
)
def test_bad_options(engine, tiny_checkpoint, monkeypatch, arguments, message):
    monkeypatch.setattr(
        "replayssm.runtime.logs.set_up", lambda *_: None
    )  # it would log to this runner's stderr for ever
    # Memory is described when nothing is left to refuse.
    monkeypatch.setattr("replayssm.runtime.serving.describe_memory", lambda *_: pytest.fail("too early"))
    paths = {"ENGINE": str(engine), "CHECKPOINT": str(tiny_checkpoint("nano"))}
    given = [str(argument) for argument in arguments]
    for name, path in paths.items():
        given = [argument.replace(name, path) for argument in given]
    result = CliRunner().invoke(main, ["serve", *given])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_taken_port_is_one_line_before_anything_is_loaded(engine):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = CliRunner().invoke(main, ["serve", str(engine), "--port", str(taken.getsockname()[1])])
    assert result.exit_code == 2
    assert re.fullmatch(r"error: cannot listen on .*; change --host or --port\n", result.stderr)
