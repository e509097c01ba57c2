"""The `torch` target: the networks as JSON and the weights as safetensors shards, both read by `runtime`.

Weights are streamed from the checkpoint one source tensor at a time, quantized ones as they are, so that building
needs little memory whatever the model's size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from replayssm.builders.parameters import WeightRecipe
from replayssm.builders.safetensors_file import SafetensorsWriter, plan_shards
from replayssm.plugins.manifest import Limits
from replayssm.plugins.network import Network
from replayssm.plugins.settings import ReplaySettings

NETWORKS_FILE = "networks.json"
WEIGHTS_FOLDER = "weights"
SHARD_BYTES = 10**9


def write(
    directory: Path,
    networks: Mapping[str, Network],
    plan: Mapping[str, WeightRecipe],
    read: Callable[[str], torch.Tensor],
    progress: Callable[[int, str], None] = lambda nbytes, name: None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write everything that the runtime needs to execute `networks` below `directory`.

    plan: how each weight is obtained; read: canonical checkpoint name -> tensor.
    progress: called with the bytes just written and the weight's name.
    """
    write_networks(directory, networks)
    write_weights(directory, plan, read, progress, shard_bytes)


def write_target(
    directory: Path,
    networks: Mapping[str, Network],
    plan: Mapping[str, WeightRecipe],
    read: Callable[[str], torch.Tensor],
    progress: Callable[[int, str], None],
    limits: Limits,
    replay: ReplaySettings,
) -> dict[str, str]:
    """`write` with the signature of all targets. Returns no kernels: none are embedded."""
    write(directory, networks, plan, read, progress)
    return {}


def write_networks(directory: Path, networks: Mapping[str, Network]) -> None:
    """Write NETWORKS_FILE, which every target has."""
    content = json.dumps({name: network.to_json() for name, network in networks.items()}, separators=(",", ":"))
    (directory / NETWORKS_FILE).write_text(content, encoding="utf-8")


def write_weights(
    directory: Path,
    plan: Mapping[str, WeightRecipe],
    read: Callable[[str], torch.Tensor],
    progress: Callable[[int, str], None] = lambda nbytes, name: None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the weights of `plan` as safetensors shards below WEIGHTS_FOLDER."""
    folder = directory / WEIGHTS_FOLDER
    folder.mkdir()
    shards = plan_shards(((name, recipe.nbytes) for name, recipe in plan.items()), shard_bytes, stem="weights")
    for file_name, names in shards.items():
        tensors = {name: (plan[name].dtype, plan[name].shape) for name in names}
        with SafetensorsWriter(folder / file_name, tensors) as writer:
            for name in names:
                writer.write_pieces(name, plan[name].pieces(read))
                progress(plan[name].nbytes, name)
