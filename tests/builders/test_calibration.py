"""Calibration data: the built-in text, files of samples, and one clear error for what cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from replayssm.builders.calibration import calibration_batches, calibration_text


def batches_of(source: Path, data: Path | None, samples: int = 4, length: int = 8) -> list[torch.Tensor]:
    return calibration_batches(source, data, samples, length, 512)


def test_built_in_text_is_varied_and_enough(tiny_checkpoint):
    text = calibration_text()
    assert len(text) > 7000
    assert len(set(text.split())) > 800
    (batch,) = batches_of(tiny_checkpoint("nano"), None, samples=10**6, length=64)
    assert batch.shape[1] == 64
    assert batch.numel() > 2000


def test_text_is_cut_into_pieces(tiny_checkpoint, tmp_path):
    path = tmp_path / "data.txt"
    path.write_text("abcdefghij" * 10)
    (batch,) = batches_of(tiny_checkpoint("nano"), path)
    assert batch.shape == (4, 8)
    assert batch.dtype == torch.int64
    path.write_text("ab")
    (batch,) = batches_of(tiny_checkpoint("nano"), path)
    assert batch.shape[0] == 1
    assert batch.shape[1] <= 2


def test_jsonl_samples_are_grouped_by_length(tiny_checkpoint, tmp_path):
    path = tmp_path / "data.jsonl"
    lines = [
        {"token_ids": [1, 2, 3]},
        {"token_ids": list(range(20))},
        {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]},
        {"text": "ab\nc"},
        {"text": "not read: four samples are enough"},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    batches = batches_of(tiny_checkpoint("nano"), path)
    assert sum(batch.shape[0] for batch in batches) == 4
    assert batches[0].tolist() == [[1, 2, 3]]
    assert batches[1].tolist() == [list(range(8))]
    assert batches[2].shape[0] == 2
    assert torch.equal(batches[2][0], batches[2][1])


def test_jsonl_lines_end_in_newlines_only(tiny_checkpoint, tmp_path):
    """U+2028, U+0085 and form feeds may stand in JSON strings; a byte order mark and CRLF do no harm."""
    text = "a\u2028b\u0085c"
    path = tmp_path / "data.jsonl"
    path.write_bytes(f'\ufeff{{"text": "{text}"}}\r\n{{"text": "{text}"}}\r\n'.encode())
    (batch,) = batches_of(tiny_checkpoint("nano"), path)
    path.write_text(json.dumps({"text": text}))
    assert batch.tolist() == 2 * batches_of(tiny_checkpoint("nano"), path)[0].tolist()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data.csv", b"a,b", r"data\.csv: expected calibration data in a \.txt or \.jsonl file"),
        ("data.txt", b"", "no calibration tokens in it"),
        ("data.txt", b"\xff\xfe", "not UTF-8 text"),
        ("data.jsonl", b"{}", 'line 1: expected an object with "text", "messages" or "token_ids"'),
        ("data.jsonl", b'\n{"text": 3}', "line 2: expected an object"),
        ("data.jsonl", b'{"token_ids": [1, "2"]}', "line 1: expected an object"),
        ("data.jsonl", b"not json", "line 1: not valid JSON"),
        ("data.jsonl", b"[" * 200_000, "line 1: not valid JSON"),
        ("data.jsonl", b'{"text": "\\ud800"}', r"line 1: the text holds \\ud800 without the other half"),
        ("data.jsonl", b'{"token_ids": [512]}', "gives token ids up to 512, expected 0 to 511"),
        ("data.jsonl", b'{"token_ids": [-1]}', "expected 0 to 511"),
    ],
)
def test_unusable_calibration_data(tiny_checkpoint, tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        batches_of(tiny_checkpoint("nano"), path)
    with pytest.raises(ValueError, match="cannot be read"):
        batches_of(tiny_checkpoint("nano"), path.with_name("missing.txt"))
