"""Load on a running server's process: many streaming clients, some of which leave, and every answer checked.

    python benchmarks/serve_load.py --engine ENGINE [--clients 64] [--seconds 120] [--mixed] [-- --draft mtp ...]

Starts `replayssm serve ENGINE` on a free loopback port. Each client asks greedy questions one after another; a third
of the streams is closed half way, some calls are not streamed. An answer must equal the one that the same server gave
before the load, when it was idle; build the engine with --dtype float64, where batching does not move near ties. With
--mixed, half of the calls are of other kinds (schemas, expressions, choices, stop strings, log-probabilities, several
choices, penalties, bodies that must be refused), which have to keep what they ask for. At the end nothing may wait or
run, all slots are free, and the process holds at most MEMORY_GROWTH more than after the first quarter of the time. One
line of result per run goes to benchmarks/results with --output.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from commit import current_commit  # noqa: E402

from examples import tasks  # noqa: E402

COMMAND = [sys.executable, "-c", "from replayssm.scripts.cli import main; main()", "serve"]
START_S = 60.0
MEMORY_GROWTH = 64 << 20
"""Allocators keep some of what a burst needed; 64 MiB is a tenth of the process, and far below what a state or a
transcript kept per call would come to in two minutes."""


class Server:
    """The process under load."""

    def __init__(self, engine: Path, arguments: list[str], log: Path) -> None:
        command = [*COMMAND, str(engine), "--port", "0", "--log-format", "json", *arguments]
        with log.open("w") as file:
            self.process = subprocess.Popen(command, stderr=file)
        deadline = time.monotonic() + START_S
        while not (found := re.search(r"http://[\w.]+:\d+", log.read_text())):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise RuntimeError(log.read_text())
            time.sleep(0.1)
        self.url = found[0]

    def resident_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def metrics(self) -> dict[str, float]:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        values = (line.rsplit(" ", 1) for line in lines if line[0] != "#")
        return {name.partition("{model_name=")[0]: float(value) for name, value in values}

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def body(question: str, stream: bool, max_tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "temperature": 0, "max_tokens": max_tokens, "stream": stream}


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 99}, "who": {"enum": ["Ann", "Bob"]}},
    "required": ["n", "who"],
    "additionalProperties": False,
}


def follows_schema(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"n", "who"} and 1 <= value["n"] <= 99 and value["who"] in ("Ann", "Bob")


MIXED: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}, "max_tokens": 200},
        follows_schema,
    ),
    "regex": (
        {"structured_outputs": {"regex": "[a-f]{2,5}-[0-9]{3}"}, "max_tokens": 60},
        lambda text: re.fullmatch("[a-f]{2,5}-[0-9]{3}", text) is not None,
    ),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}, "max_tokens": 60}, lambda text: text in ("yes", "no")),
    "stop": ({"stop": ["answer", " 1"], "max_tokens": 200}, lambda text: "answer" not in text and " 1" not in text),
    "logprobs": ({"logprobs": True, "top_logprobs": 5}, lambda text: True),
    "choices": ({"n": 3, "temperature": 1.0}, lambda text: True),
    "sampled": ({"temperature": 1.3, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 7}, lambda text: True),
    "penalties": ({"presence_penalty": 1.0, "repetition_penalty": 1.2, "logit_bias": {"5": -50}}, lambda text: True),
    "refused": ({"temperature": True}, lambda text: text == "status 400"),
}
"""Kind -> (what the body has beside a question, what its first choice must be if it ends by itself)."""


async def ask_mixed(client: httpx.AsyncClient, url: str, question: str, choose: random.Random) -> tuple[str, bool]:
    """(kind, whether the answer was right) of a streamed call of some kind, a third of which is left half way."""
    kind = choose.choice(list(MIXED))
    more, is_right = MIXED[kind]
    leave_after = choose.randrange(1, 20) if choose.random() < 0.3 else None
    text, reason, pieces, ended = "", None, 0, False
    given = {**body(question, True, 40), **more}
    async with client.stream("POST", f"{url}/v1/chat/completions", json=given) as answer:
        if answer.status_code != 200:
            return kind, is_right(f"status {answer.status_code}")
        async for line in answer.aiter_lines():
            ended = ended or line == "data: [DONE]"
            if not line.startswith("data: {"):
                continue
            choice = json.loads(line[6:])["choices"][0]
            if choice["index"] == 0:
                text += choice["delta"].get("content") or ""
                reason = choice["finish_reason"] or reason
            pieces += 1
            if pieces == leave_after:
                return f"{kind}, leaves", True
    return kind, ended and reason in ("stop", "length") and (reason == "length" or is_right(text))


async def ask(client: httpx.AsyncClient, url: str, question: str, max_tokens: int, leave_after: int | None) -> str:
    """The streamed answer, or its first `leave_after` pieces."""
    text, pieces = "", 0
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body(question, True, max_tokens)) as answer:
        if answer.status_code != 200:
            return f"status {answer.status_code}"
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            value = json.loads(line[6:])
            text += value["choices"][0]["delta"].get("content") or ""
            pieces += 1
            if pieces == leave_after:
                break
    return text


async def one_client(
    number: int, url: str, answers: dict[str, str], max_tokens: int, until: float, counts: Counter, mixed: bool
) -> None:
    choose = random.Random(number)
    async with httpx.AsyncClient(timeout=httpx.Timeout(120.0)) as client:
        while time.monotonic() < until:
            question = choose.choice(list(answers))
            if mixed and choose.random() < 0.5:
                kind, right = await ask_mixed(client, url, question, choose)
                counts[f"{kind} {'right' if right else 'wrong'}"] += 1
                continue
            kind = choose.choice(("whole", "stream", "stream", "leaves"))
            if kind == "whole":
                answer = await client.post(f"{url}/v1/chat/completions", json=body(question, False, max_tokens))
                text = answer.json()["choices"][0]["message"]["content"] if answer.status_code == 200 else None
                right = text == answers[question]
            else:
                leave_after = choose.randrange(1, 30) if kind == "leaves" else None
                text = await ask(client, url, question, max_tokens, leave_after)
                right = answers[question].startswith(text) if leave_after else text == answers[question]
            counts[f"{kind} {'right' if right else 'wrong'}"] += 1


async def load(server: Server, clients: int, seconds: float, max_tokens: int, mixed: bool) -> dict[str, Any]:
    questions = [tasks.generate("easy", "test", seed).question for seed in range(24)]
    async with httpx.AsyncClient(timeout=120.0) as client:
        answers = {question: await ask(client, server.url, question, max_tokens, None) for question in questions}
    counts: Counter = Counter()
    started = time.monotonic()
    memory = [server.resident_bytes()]
    running = asyncio.gather(
        *(one_client(i, server.url, answers, max_tokens, started + seconds, counts, mixed) for i in range(clients))
    )
    while not running.done():
        await asyncio.wait([running], timeout=max(seconds / 12, 1.0))
        memory.append(server.resident_bytes())
    running.result()
    await asyncio.sleep(1.0)
    metrics = server.metrics()
    duration = time.monotonic() - started
    return {
        "model": httpx.get(f"{server.url}/v1/models").json()["data"][0]["id"],
        "clients": clients,
        "seconds": round(duration, 1),
        "calls": dict(sorted(counts.items())),
        "generated_tokens_per_s": round(metrics["replayssm_generation_tokens_total"] / duration, 1),
        "preemptions": metrics["replayssm_num_preemptions_total"],
        "waiting": metrics["replayssm_num_requests_waiting"],
        "running": metrics["replayssm_num_requests_running"],
        "free_slots": metrics["replayssm_free_slots"],
        "slots": metrics["replayssm_slots"],
        "failed_steps": metrics["replayssm_failed_steps_total"],
        "resident_mib": [round(value / 2**20) for value in memory],
        "memory_growth_bytes": memory[-1] - memory[len(memory) // 4],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--mixed", action="store_true", help="half of the calls of other kinds")
    parser.add_argument("--output", type=Path, help="append the result to this file as a JSON line")
    parser.add_argument("serve", nargs="*", help="further options of `replayssm serve`, behind --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(options.engine, options.serve, Path(folder) / "log")
        try:
            result = asyncio.run(load(server, options.clients, options.seconds, options.max_tokens, options.mixed))
        finally:
            server.stop()
    print(json.dumps(result, indent=2))
    clean = result["waiting"] == result["running"] == result["failed_steps"] == 0
    clean = clean and result["free_slots"] == result["slots"] and result["memory_growth_bytes"] <= MEMORY_GROWTH
    correct = clean and not any(kind.endswith("wrong") for kind in result["calls"])
    if options.output is not None:
        value = result["generated_tokens_per_s"]
        line = {"benchmark": "serve_load", "op": "serve", "geometry": result["model"], "variant": "ours",
                "value": value, "unit": "tokens/s", "serve": options.serve, "mixed": options.mixed, **result,
                "gpu": None, "commit": current_commit("--short"),
                "date": time.strftime("%Y-%m-%d", time.gmtime()), "correct": correct}  # fmt: skip
        with options.output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    if not correct:
        sys.exit(1)


if __name__ == "__main__":
    main()
