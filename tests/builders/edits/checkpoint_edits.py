"""Changes to the files of a checkpoint directory."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file


def rewrite(directory: Path, change, file: str = "model.safetensors") -> None:
    """Apply `change` to the dict of tensors of a file."""
    tensors = {name: tensor.clone() for name, tensor in load_file(directory / file).items()}
    change(tensors)
    save_file(tensors, directory / file)


def edit_json(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))
