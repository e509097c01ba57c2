"""The `torch` target: the networks as JSON and the weights as safetensors shards, both read by `runtime`.

Weights are streamed from the checkpoint one source tensor at a time, quantized ones as they are, so that building
needs little memory whatever the model's size. Every file's SHA-256 is computed while it is written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from replayssm.builders.parameters import WeightRecipe
from replayssm.plugins.contract import ELEMENT_BITS
from replayssm.plugins.manifest import FileEntry
from replayssm.plugins.network import Network

NETWORKS_FILE = "networks.json"
SHARD_BYTES = 10**9

# The safetensors format's names of the dtypes that engine weights may have.
_SAFETENSORS_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "uint8": "U8",
    "int32": "I32",
}

Progress = Callable[[int, str], None]


def write(
    directory: Path,
    networks: Mapping[str, Network],
    plan: Mapping[str, WeightRecipe],
    read: Callable[[str], torch.Tensor],
    progress: Progress = lambda nbytes, name: None,
    shard_bytes: int = SHARD_BYTES,
) -> list[FileEntry]:
    """Write everything that the runtime needs to execute `networks` below `directory`; returns the files.

    plan: how each weight is obtained; read: canonical checkpoint name -> tensor.
    progress: called with the bytes just written and the weight's name.
    """
    content = json.dumps({name: network.to_json() for name, network in networks.items()}, separators=(",", ":"))
    path = directory / NETWORKS_FILE
    path.write_text(content, encoding="utf-8")
    files = [FileEntry(NETWORKS_FILE, path.stat().st_size, hashlib.sha256(content.encode()).hexdigest())]
    (directory / "weights").mkdir()
    shards = list(_shards(plan, shard_bytes))
    for index, names in enumerate(shards, start=1):
        name = f"weights/{index:05d}-of-{len(shards):05d}.safetensors"
        files.append(_write_shard(directory, name, {weight: plan[weight] for weight in names}, read, progress))
    return files


def _shards(plan: Mapping[str, WeightRecipe], limit: int) -> Iterator[list[str]]:
    """Weight names in files of at most `limit` bytes; a larger weight has one for itself."""
    names: list[str] = []
    size = 0
    for name, recipe in plan.items():
        if names and size + recipe.nbytes > limit:
            yield names
            names, size = [], 0
        names.append(name)
        size += recipe.nbytes
    if names:
        yield names


def _write_shard(
    directory: Path,
    file_name: str,
    recipes: Mapping[str, WeightRecipe],
    read: Callable[[str], torch.Tensor],
    progress: Progress,
) -> FileEntry:
    # Wide elements first keeps every tensor aligned to its element, which readers by memory map need.
    order = sorted(recipes, key=lambda name: -ELEMENT_BITS[recipes[name].dtype])
    header, offset = {}, 0
    for name in order:
        recipe = recipes[name]
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[recipe.dtype],
            "shape": list(recipe.shape),
            "data_offsets": [offset, offset + recipe.nbytes],
        }
        offset += recipe.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(directory / file_name, "wb") as file:

        def put(data: bytes | memoryview) -> None:
            file.write(data)
            digest.update(data)

        put(len(text).to_bytes(8, "little"))
        put(text)
        for name in order:
            written = 0
            for piece in recipes[name].pieces(read):
                data = memoryview(piece.reshape(-1).view(torch.uint8).numpy())
                put(data)
                written += len(data)
            if written != recipes[name].nbytes:
                raise ValueError(f"weight {name!r} has {written} bytes, its plan says {recipes[name].nbytes}")
            progress(written, name)
        size = file.tell()
    return FileEntry(file_name, size, digest.hexdigest())
