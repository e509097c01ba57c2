"""A whole generation on a GPU: the example models answer there as they do on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from replayssm.builders.engine import BuildOptions, build_engine
from replayssm.runtime.engine import Engine
from replayssm.runtime.generation import generate
from replayssm.runtime.session import Session
from replayssm.runtime.speculation import MtpDrafter

EXAMPLES = Path(__file__).parents[2] / "examples"
QUESTIONS = json.loads((EXAMPLES / "questions.json").read_text(encoding="utf-8"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("draft_len", [0, 3])
@pytest.mark.parametrize("name", QUESTIONS)
def test_example_model_answers(tmp_path: Path, name: str, draft_len: int) -> None:
    build_engine(EXAMPLES / name, tmp_path / "engine", BuildOptions(max_seq_len=1024, max_draft_len=draft_len))
    engine = Engine.load(tmp_path / "engine")
    session = Session(engine, slots=1, device="cuda")
    question = [{"role": "user", "content": QUESTIONS[name]["question"]}]
    prompt = engine.tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True)
    drafter = MtpDrafter(session) if draft_len else None
    (result,) = generate(session, [prompt["input_ids"]], 512, drafter=drafter, tokenizer=engine.tokenizer)
    assert result.text.strip().endswith(QUESTIONS[name]["answer"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_missing_gpu_is_one_clear_error(tmp_path: Path, tiny_checkpoint) -> None:
    build_engine(tiny_checkpoint("nano"), tmp_path / "engine", BuildOptions(max_seq_len=64))
    with pytest.raises(ValueError, match=r"no CUDA device .* use device cpu"):
        Session(Engine.load(tmp_path / "engine"), device="cuda")
