"""Reads an engine directory."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from replayssm.plugins.manifest import EngineDirectoryError, EngineManifest, read_manifest, verify_files
from replayssm.plugins.network import Network
from replayssm.plugins.state import torch_dtype
from replayssm.runtime.network_check import check_network

SUPPORTED_TARGETS = ("torch", "tensorrt", "tensorrt-rtx")


@dataclass
class Engine:
    """A verified engine in memory.

    networks: "main" and, where the model has a draft head, "mtp".
    weights: by name, memory-mapped from the engine's files; networks share them. Plans hold their own: an engine of
        them has only the weights that operators between plans read.
    emulate_activation_quantization: executors round activations as the checkpoint's recipe says; for comparisons.
    fp8_products: executors multiply FP8 weights with activations in FP8 where the checkpoint's recipe rounds them so.
    fp8_experts: executors multiply NVFP4 experts in FP8 where the recipe rounds what they read (`plugins.fp8_experts`).
    operators: of its networks, by name, beside those that every executor knows (`runtime.parallel`).
    built_max_seq_len: what the directory's engine allows, where its user asked for shorter sequences; None: the same.
    """

    directory: Path
    manifest: EngineManifest
    networks: dict[str, Network]
    weights: Mapping[str, torch.Tensor]
    resident_weights: dict[torch.device, dict[str, torch.Tensor]] = field(default_factory=dict, repr=False)
    emulate_activation_quantization: bool = False
    fp8_products: bool = False
    fp8_experts: bool = False
    operators: Mapping[str, Callable[..., Any]] = field(default_factory=dict, repr=False)
    built_max_seq_len: int | None = None

    # Of a tensor-parallel group (`parallel.RankEngine`); the part of the logits that networks give, None for all.
    ranks = 1
    vocabulary_part = None

    @classmethod
    def load(cls, directory: str | Path, verify: str = "size") -> Engine:
        """Load the engine in `directory`.

        verify: "size" compares file sizes with the manifest, and the SHA-256 of all but weights and large files;
            "full" compares every SHA-256, which reads all weights.
        Raises EngineDirectoryError (a ValueError) for anything that is not a whole engine of a known schema.
        """
        directory = Path(directory)
        manifest = read_manifest(directory)
        if manifest.target not in SUPPORTED_TARGETS:
            raise EngineDirectoryError(
                f"{directory} was built for target {manifest.target!r}, this version runs engines for "
                f"{', '.join(SUPPORTED_TARGETS)}: rebuild it"
            )
        verify_files(directory, manifest, verify)
        networks = read_networks(directory / manifest.networks)
        size = networks["main"].spec(networks["main"].outputs["logits"]).shape[-1]
        if size != manifest.model["vocab_size"]:
            raise EngineDirectoryError(
                f"{directory} has logits of {size} tokens, its manifest says {manifest.model['vocab_size']}: "
                "rebuild the engine"
            )
        weights: dict[str, torch.Tensor] = {}
        for name in manifest.weight_files:
            weights |= _read_weights(directory / name)
        _check_weights(directory, networks, weights, manifest.target)
        return cls(directory, manifest, networks, weights)

    @property
    def has_plans(self) -> bool:
        """Whether TensorRT plans run the networks, with all slots and sizes that they were built for."""
        return self.manifest.target != "torch"

    @property
    def how_to_lengthen(self) -> str:
        """What the user of a command can do for longer sequences, as part of an error."""
        built, limit = self.built_max_seq_len, self.manifest.replay.max_seq_len
        if built is not None and built > limit:
            return f"raise --max-seq-len, here up to {built}"
        return "build the engine with a larger --max-seq-len"

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, those in plans included."""
        plans = sum(entry.size for entry in self.manifest.files if entry.name.endswith(".plan"))
        return plans + sum(tensor.nbytes for tensor in self.weights.values())

    def resident(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Weights as executors on `device` hold them, by name: sessions over one engine keep them once."""
        return self.resident_weights.setdefault(device, {})

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return tuple(self.manifest.model["eos_token_ids"])

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """The checkpoint's end tokens, or else its tokenizer's."""
        token = None if self.eos_token_ids else self.tokenizer.eos_token_id
        return self.eos_token_ids if token is None else (token,)

    @property
    def vocab_size(self) -> int:
        return int(self.manifest.model["vocab_size"])

    @cached_property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, read from the engine directory alone: no download, no remote code."""
        names = ("tokenizer.json", "tokenizer.model", "vocab.json")
        path = next((self.directory / name for name in names if (self.directory / name).is_file()), None)
        if path is None:
            raise EngineDirectoryError(
                f"{self.directory} has no tokenizer: put tokenizer.json beside the checkpoint's config.json and "
                "build the engine again"
            )
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.directory, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises many kinds for a damaged or foreign tokenizer
            raise EngineDirectoryError(
                f"{path} or a file beside it is damaged, no tokenizer can be loaded from it "
                f"({type(error).__name__}: {error}): put the checkpoint's tokenizer right and rebuild the engine"
            ) from error


def read_networks(path: Path) -> dict[str, Network]:
    """Networks of an engine by name, "main" among them. EngineDirectoryError for what this version does not run."""
    if not path.is_file():
        raise EngineDirectoryError(f"{path} is missing: rebuild or copy the engine again")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"expected a JSON object, got a {type(content).__name__}")
        networks = {name: Network.from_json(value) for name, value in content.items()}
        for network in networks.values():
            check_network(network)
    except (ValueError, RecursionError) as error:
        raise EngineDirectoryError(
            f"{path} does not hold networks that this version runs ({error}): rebuild the engine"
        ) from error
    if "main" not in networks:
        raise EngineDirectoryError(f"{path} has no network 'main': rebuild the engine")
    if "hidden_states" in networks["main"].inputs:
        raise EngineDirectoryError(f"{path}: the network 'main' cannot have the input 'hidden_states'")
    return networks


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    with path.open("rb"):  # OSError in the system's words: safetensors calls a file missing that may not be read
        pass
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  safe_open is no mapping
    except (SafetensorError, OSError) as error:
        raise EngineDirectoryError(f"{path} is not readable as safetensors ({error}): rebuild the engine") from error


def _check_weights(
    directory: Path, networks: dict[str, Network], weights: dict[str, torch.Tensor], target: str
) -> None:
    for network in networks.values():
        between = {name for node in network.nodes if node.state is not None for name in node.inputs}
        for name, spec in network.weights.items():
            if target == "tensorrt" or (target == "tensorrt-rtx" and name not in between):
                continue
            weight = weights.get(name)
            if weight is None:
                raise EngineDirectoryError(f"{directory} has no weight {name!r}: rebuild the engine")
            if tuple(weight.shape) != spec.shape or weight.dtype != torch_dtype(spec.dtype):
                raise EngineDirectoryError(
                    f"weight {name!r} of {directory} is {weight.dtype} {list(weight.shape)}, "
                    f"its network needs {spec.dtype} {list(spec.shape)}: rebuild the engine"
                )
