"""Sessions over two GPUs: NCCL, captured steps, and a rank that is lost while the device waits for it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from replayssm.builders.engine import BuildOptions, build_engine
from replayssm.runtime.engine import Engine
from replayssm.runtime.generation import generate
from replayssm.runtime.parallel import rank_engine
from replayssm.runtime.parallel_session import open_session
from replayssm.runtime.sampling import SamplingParams
from replayssm.runtime.session import Session
from replayssm.runtime.speculation import MtpDrafter

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTIONS = json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))
LOGITS_BOUND = 0.03
"""Relative distance of logits computed in two ways in bf16: 2^-9 per rounding, some tens of them in a row."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """`built(name)` -> directory of an engine with drafts."""

    def make(name: str) -> Path:
        path = tmp_path_factory.mktemp("engines") / name
        build_engine(EXAMPLES / name, path, BuildOptions(max_seq_len=1024, max_batch_size=4, max_draft_len=3))
        return path

    return make


def prompts_of(engine: Engine, name: str) -> list[list[int]]:
    question = [{"role": "user", "content": QUESTIONS[name]["question"]}]
    prompt = engine.tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)["input_ids"]
    return [prompt[start:] + prompt[:start] for start in (0, 3, 7, 12)]


@pytest.mark.parametrize("name", QUESTIONS)
def test_two_gpus_answer_as_one(built, name):
    engine = Engine.load(built(name))
    prompts = prompts_of(engine, name)
    plain = Session(engine, 4, "cuda")
    with contextlib.closing(open_session(rank_engine(engine, 0, 2), 4, "cuda")) as session:
        session.warm_up()
        for make_drafter in (lambda session: None, MtpDrafter):
            result = generate(session, prompts, 512, drafter=make_drafter(session), tokenizer=engine.tokenizer)[0]
            assert result.text.strip().endswith(QUESTIONS[name]["answer"])
        sampled = generate(session, prompts, 24, SamplingParams(temperature=1.0, seed=1), eos_token_ids=())
        assert [len(each.token_ids) for each in sampled] == [24] * 4
        slots, logits = [], []
        for each in (session, plain):
            slots.append([each.allocate() for _ in prompts])
            for slot, prompt in zip(slots[-1], prompts, strict=True):
                each.prefill(slot, prompt)
            logits.append(torch.stack([each.decode(slots[-1], [5 + i] * 4).clone() for i in range(20)]))
        assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < LOGITS_BOUND
        blob = session.save(slots[0][0])
        session.free(slots[0][0])
        assert len(list(session.decode_ahead([session.load(blob)], [5], 8))) == 8
        assert session.state_bytes < 0.6 * plain.state_bytes


LOST = """
import os, signal, sys, threading
from replayssm.runtime.engine import Engine
from replayssm.runtime.parallel import rank_engine
from replayssm.runtime.parallel_session import open_session

if __name__ == "__main__":
    session = open_session(rank_engine(Engine.load(sys.argv[1]), 0, 2), 1, "cuda")
    slot = session.allocate()
    session.prefill(slot, list(range(3, 40)))
    session.decode([slot], [5])
    other = session._peers._processes[0].pid
    os.kill(other, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (other, signal.SIGKILL)).start()
    session.decode([slot], [6])
"""


def test_a_rank_that_is_lost_does_not_hang_the_device(built, tmp_path):
    """Rank 0 waits in a captured collective. The call ends with the error, or else the process does."""
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    command = [sys.executable, str(script), str(built(next(iter(QUESTIONS))))]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 1
    print("ended by", "an exception" if "RankLostError" in result.stderr else "the watcher")
    assert "rank 1 of 2 ended (exit code -9)" in result.stderr


SUMS = """
import multiprocessing, os, sys
import torch
from replayssm.runtime.parallel import ONE_SHOT_BYTES, OneShotSums, collectives
from replayssm.runtime.parallel_processes import Place, join_group

SIZES = ((1, 128), (7, 8), (256, 2560), (512, 4096), (513, 4096))

def rank_main(place):
    join_group(place)
    sums, ring = collectives()["all_reduce"], collectives(one_shot_bytes=0)["all_reduce"]
    generator = torch.Generator(place.torch_device).manual_seed(place.rank)
    for rows, columns in SIZES:
        x = torch.zeros(rows, columns, dtype=torch.bfloat16, device=place.torch_device)
        sums(x.clone())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            once = sums(x * 1)
            twice = sums(once / 2)
        for _ in range(30):
            x.normal_(generator=generator)
            graph.replay()
            expected = ring(x.clone())
            assert torch.equal(once, expected), (rows, columns)
            assert torch.equal(twice, ring(expected / 2)), (rows, columns)
            assert torch.equal(sums(x.clone()), expected), (rows, columns)
    print("taken in one kernel:", OneShotSums(None, ONE_SHOT_BYTES).take(x[:1]), flush=True)
    os._exit(0)

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=rank_main, args=(Place(r, 2, "cuda", sys.argv[1], 1),)) for r in range(2)]
    [each.start() for each in ranks]
    [each.join(25) for each in ranks]
    sys.exit(max(9 if each.exitcode is None else abs(each.exitcode) for each in ranks))
"""


def test_sums_in_one_kernel_are_those_of_nccl(tmp_path):
    """Of two terms, which have one sum in any order; eager and in replayed graphs, above the limit too."""
    script = tmp_path / "sums.py"
    script.write_text(SUMS)
    command = [sys.executable, str(script), str(tmp_path / "store")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    print(result.stdout)
    assert result.returncode == 0, result.stderr
