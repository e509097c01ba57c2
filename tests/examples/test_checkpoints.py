"""The shipped checkpoints: small, complete, and able to do what they are for."""

import json

import pytest
import torch
from safetensors import safe_open

from examples import decode, export, networks, tasks
from tests.examples.conftest import ROOT

NAMES = list(networks.LAYOUTS)
FOLDERS = {name: ROOT / "examples" / name for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_at_most_twelve_megabytes_of_bf16(name):
    path = FOLDERS[name] / "model.safetensors"
    assert path.stat().st_size <= 12_000_000
    with safe_open(path, framework="pt") as file:
        assert {file.get_tensor(k).dtype for k in file.keys()} == {torch.bfloat16}  # noqa: SIM118
        assert any(k.startswith("mtp.") for k in file.keys())  # noqa: SIM118


@pytest.mark.parametrize("name", NAMES)
def test_transformers_answers_as_the_training_network(name):
    """The shipped weights in transformers' own classes, fp32, on a held-out problem's whole text."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(FOLDERS[name], dtype=torch.float32)
    for layer in theirs.model.layers:
        if hasattr(getattr(layer, "mixer", None), "time_step_limit"):
            layer.mixer.time_step_limit = (0.0, float("inf"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDERS[name])
    problem = tasks.generate("easy", "test", 5)
    messages = [
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": problem.working},
    ]
    ids = torch.tensor([tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]])
    ours = export.load(FOLDERS[name], name)
    with torch.no_grad():
        a, b = ours(ids), theirs(ids).logits
    # Logits reach some tens here; 1e-5 of that is fp32 rounding through the layers.
    assert (a - b).abs().max() < 1e-5 * max(10.0, a.abs().max().item()) * 10
    prompt = len(tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, return_dict=True)["input_ids"])
    assert torch.equal(b.argmax(-1)[0, prompt - 1 : -1], ids[0, prompt:])


@pytest.mark.parametrize("name", NAMES)
def test_easy_held_out_problems(name):
    from tokenizers import Tokenizer

    from examples.tokenizer import prompt_ids

    model = export.load(FOLDERS[name], name)
    tokenizer = Tokenizer.from_file(str(FOLDERS[name] / "tokenizer.json"))
    problems = tasks.held_out("easy", 4)
    prompts = [prompt_ids(tokenizer, p.question) for p in problems]
    capacity = max(len(p) for p in prompts) + 200
    outputs = decode.Decoder(model, len(prompts), capacity, "cpu").generate(prompts, 200)
    for output, prompt, problem in zip(outputs, prompts, problems, strict=True):
        assert tasks.is_correct(tokenizer.decode(output[len(prompt) :]), problem.answer)


def test_quickstart_questions_are_held_out():
    questions = json.loads((ROOT / "examples" / "questions.json").read_text())
    assert set(questions) == set(NAMES)
    for entry in questions.values():
        assert tasks.split_of(entry["question"]) == "test"
        assert tasks.extract_answer(entry["answer"]) is not None
