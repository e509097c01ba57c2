"""Tokenizer and packing."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from examples import data, tasks
from examples.networks import answer_mask, segments
from examples.tokenizer import ASSISTANT, BEGIN, END, PAD, USER, prompt_ids
from tests.examples.conftest import ROOT

CHECKPOINTS = ("nemotron-h-tiny", "qwen3.5-tiny")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(ROOT / "examples" / CHECKPOINTS[0] / "tokenizer.json"))


def test_both_checkpoints_share_the_tokenizer():
    first, second = ((ROOT / "examples" / c / "tokenizer.json").read_bytes() for c in CHECKPOINTS)
    assert first == second


@pytest.mark.parametrize("text", ["The answer is 538.", "x = 3 €, ünïcödé\n\t1,000.5", "  two  spaces ", "日本 12"])
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_digits_are_isolated(tokenizer):
    for token in tokenizer.encode("12345 books and 9a8").tokens:
        assert sum(c.isdigit() for c in token) <= 1
        assert len(token) == 1 or not any(c.isdigit() for c in token)
    assert not any(len(token) > 1 and any(c.isdigit() for c in token) for token in tokenizer.get_vocab())


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_chat_template_gives_the_training_format(tokenizer, checkpoint):
    transformers = pytest.importorskip("transformers")
    hf = transformers.AutoTokenizer.from_pretrained(ROOT / "examples" / checkpoint)
    question = tasks.generate("easy", "test", 1).question
    messages = [{"role": "user", "content": question}]
    encoded = hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert list(encoded["input_ids"]) == prompt_ids(tokenizer, question)
    assert (hf.bos_token_id, hf.eos_token_id, hf.pad_token_id) == (BEGIN, END, PAD)


def test_packing_keeps_documents_whole():
    documents = [[BEGIN, *([10 + i] * n), END] for i, n in enumerate((5, 3, 9, 2, 4, 40))]
    rows = data.pack(documents, 2, 20)
    found = []
    for row in rows:
        for part in np.split(row, np.flatnonzero(row == BEGIN))[1:]:
            found.append(part[part != PAD].tolist())
    assert sorted(found) == sorted(d for d in documents if len(d) <= 20)


def test_shard_depends_on_its_number_alone(tokenizer, monkeypatch):
    monkeypatch.setattr(data, "MIXTURE", dict.fromkeys(("easy", "hard", "recall"), 1))
    first, again = (data.make_shard(tokenizer, 3, rows=2) for _ in range(2))
    assert first.shape == (2, data.ROW_TOKENS + 2)
    assert (first == again).all()
    assert (first != data.make_shard(tokenizer, 4, rows=2)).any()


def test_loss_covers_answers_alone():
    import torch

    ids = torch.tensor([[BEGIN, USER, 9, ASSISTANT, 8, 7, END, BEGIN, USER, 6, ASSISTANT, 5]])
    expected = [0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1]
    assert answer_mask(ids).int().tolist() == [expected]
    assert segments(ids).tolist() == [[1] * 7 + [2] * 5]


def test_missing_shard_says_what_to_run(tmp_path):
    with pytest.raises(TimeoutError, match="did not appear"):
        data.load_shard(tmp_path, 0, patience_s=0)
