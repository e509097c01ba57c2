"""Single safetensors files: written piece by piece, read lazily, refused where they are not what was announced."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from replayssm.builders.safetensors_file import SafetensorsFile, SafetensorsWriter, plan_shards


def test_writer_and_reader_agree_with_safetensors(tmp_path):
    tensors = {
        "scalar": torch.tensor(3.5),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "half": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "eighth": torch.ones(5).to(torch.float8_e4m3fn),
        "empty": torch.empty(0, 4),
    }
    path = tmp_path / "file.safetensors"
    specs = {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items()}
    with SafetensorsWriter(path, specs) as writer:
        for name in reversed(tensors):
            writer.write(name, tensors[name])
    assert path.stat().st_size == writer.size
    file = SafetensorsFile(path)
    for name, tensor in load_file(path).items():
        assert torch.equal(tensor.float(), tensors[name].float())
        assert torch.equal(file.view(file.entries[name]).float(), tensor.float())
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_unaligned_tensors_are_read(tmp_path):
    """The format does not promise alignment; other writers may put a byte before a float."""
    header = {
        "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    encoded = json.dumps(header).encode()
    path = tmp_path / "file.safetensors"
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"\x07" + struct.pack("<2f", 1.5, -2.0))
    file = SafetensorsFile(path)
    assert file.view(file.entries["b"]).tolist() == [1.5, -2.0]


def test_writer_refuses_what_was_not_announced(tmp_path):
    with pytest.raises(ValueError, match="'b' was announced but never written"):  # noqa: SIM117
        with SafetensorsWriter(tmp_path / "one", {"a": ("float32", (2,)), "b": ("float32", ())}) as writer:
            writer.write("a", torch.ones(2))
    with SafetensorsWriter(tmp_path / "two", {"a": ("bfloat16", (2,))}) as writer:
        with pytest.raises(ValueError, match="announced as"):
            writer.write("a", torch.ones(3, dtype=torch.bfloat16))
        with pytest.raises(ValueError, match="announced as"):
            writer.write("a", torch.ones(2))
        writer.write("a", torch.full((2,), 1.0078125 + 2**-9), convert=True)
    assert load_file(tmp_path / "two")["a"].tolist() == [1.0078125, 1.0078125]


def test_plan_shards():
    assert plan_shards([("a", 5), ("b", 5)], 10) == {"model.safetensors": ["a", "b"]}
    plan = plan_shards([("a", 5), ("b", 6), ("c", 20), ("d", 1)], 10)
    assert list(plan.values()) == [["a"], ["b"], ["c"], ["d"]]
    assert next(iter(plan)) == "model-00001-of-00004.safetensors"
