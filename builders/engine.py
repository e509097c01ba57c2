"""Builds an engine directory from a Hugging Face checkpoint."""

from __future__ import annotations

import json
import platform
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from replayssm.builders.atomic import atomic_directory, require_apart, require_only
from replayssm.builders.checkpoint import Checkpoint
from replayssm.builders.config import ModelConfig, read_json
from replayssm.builders.inspection import check_readout_layers, check_u_source, count_layers
from replayssm.builders.models import build_networks
from replayssm.builders.parameters import WeightRecipe
from replayssm.builders.targets import tensorrt as tensorrt_target
from replayssm.builders.targets import torch as torch_target
from replayssm.builders.targets.tensorrt_layers import load_module
from replayssm.plugins.contract import RecurrentGeometry
from replayssm.plugins.manifest import (
    MANIFEST_NAME,
    EngineManifest,
    FileEntry,
    Limits,
    is_engine_directory,
    sha256_file,
)
from replayssm.plugins.network import Network
from replayssm.plugins.settings import ACTIVATION_DTYPES, ReplaySettings
from replayssm.plugins.state import allocate_state

TARGETS = {
    "torch": torch_target.write_target,
    "tensorrt": tensorrt_target.write_tensorrt,
    "tensorrt-rtx": tensorrt_target.write_rtx,
}

COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that go from the checkpoint into the engine as they are, where they exist."""

_RECORDED_PACKAGES = ("replayssm-trt", "torch", "transformers", "safetensors", "tokenizers", "numpy")


@dataclass(frozen=True)
class BuildOptions:
    """What to build.

    max_seq_len: None takes the model's own limit, at most 4096.
    dtype: of activations and unquantised weights; "auto" takes the checkpoint's.
    u_format: None takes what `ReplaySettings.with_u_format` chooses.
    alias: of the tensorrt target: whether TensorRT is told that plugins update state in place, or only both names are
        bound to one address.
    prefill_plan: of the tensorrt target: prompts run by a second plan, with chunked kernels and the weights once more.
    The other fields are those of `Limits` and `ReplaySettings`.
    """

    target: str = "torch"
    max_batch_size: int = 8
    max_seq_len: int | None = None
    max_draft_len: int = 0
    buffer_len: int = 16
    state_dtype: str = "float32"
    readout_dtype: str = "same"
    dtype: str = "auto"
    u_format: str | None = None
    serial_exact: bool = False
    alias: str = "declared"
    prefill_plan: bool = False
    state_rounding: str = "nearest"
    rounding_seed: int = 0
    u_source: str = "readout"
    readout_layers: tuple[tuple[int, str], ...] = ()

    def limits(self, config: ModelConfig) -> Limits:
        return Limits(self.max_batch_size, config.max_seq_len(self.max_seq_len), self.max_draft_len)

    def replay(self, config: ModelConfig, limits: Limits) -> ReplaySettings:
        dtype = config.dtype if self.dtype == "auto" else self.dtype
        if dtype not in ACTIVATION_DTYPES:
            raise ValueError(f"dtype must be auto or one of {', '.join(ACTIVATION_DTYPES)}, got {dtype!r}")
        settings = ReplaySettings(
            buffer_len=self.buffer_len,
            max_window=limits.max_window,
            max_seq_len=limits.max_seq_len,
            state_dtype=self.state_dtype,
            readout_dtype=self.readout_dtype,
            activation_dtype=dtype,
            serial_exact=self.serial_exact,
            state_rounding=self.state_rounding,
            rounding_seed=self.rounding_seed,
            u_source=self.u_source,
            readout_layers=self.readout_layers,
        )
        return settings.with_u_format(self.u_format)


def build_engine(
    checkpoint: str | Path,
    output: str | Path,
    options: BuildOptions | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int, str], None] = lambda done, total, name: None,
) -> EngineManifest:
    """Build the engine directory `output` from the checkpoint directory `checkpoint`.

    The directory appears complete or not at all; an existing one is replaced only with `overwrite`, and only if it is
    an engine without files of others. progress: called with bytes written so far, bytes in all and the weight's name.

    Raises ValueError for a checkpoint or options that cannot be built, OSError where the disk fails.
    """
    options = options or BuildOptions()
    _check_target(options.target)
    if options.target != "tensorrt" and (options.alias != "declared" or options.prefill_plan):
        raise ValueError(f"alias and prefill_plan are choices of the tensorrt target, not of {options.target}")
    require_apart(Path(checkpoint), Path(output))
    opened = Checkpoint.open(checkpoint)
    config = opened.config
    limits = options.limits(config)
    replay = options.replay(config, limits)
    traced = build_networks(config, opened.module_format, replay.activation_dtype)
    networks = {network.name: network for network in (traced.main, traced.mtp) if network is not None}
    plan = traced.weight_plan
    _check_states(networks.values(), replay)
    with atomic_directory(Path(output), overwrite, _is_own_engine) as directory:
        total = sum(recipe.nbytes for recipe in plan.values())
        _check_space(directory, total, Path(output).parent)
        _copy_files(Path(checkpoint), directory)
        more = {}
        if options.target == "tensorrt":
            more = {"alias": options.alias, "prefill_plan": options.prefill_plan}
        kernels = TARGETS[options.target](
            directory, networks, plan, opened.tensor, _cumulative(progress, total), limits, replay, **more
        )
        manifest = EngineManifest(
            model=_describe_model(config, Path(checkpoint), traced.mtp is not None),
            quantization=_describe_quantization(plan),
            replay=replay,
            limits=limits,
            target=options.target,
            versions=_versions(),
            checkpoint={"name": _checkpoint_name(Path(checkpoint)), "identity": opened.identity},
            networks=torch_target.NETWORKS_FILE,
            files=_list_files(directory),
            kernels=kernels,
        )
        (directory / MANIFEST_NAME).write_text(json.dumps(manifest.to_json(), indent=2) + "\n", encoding="utf-8")
    return manifest


def _check_target(name: str) -> None:
    """A missing package must fail here, not after minutes of work."""
    if name not in TARGETS:
        raise ValueError(f"target must be one of {', '.join(TARGETS)}, got {name!r}")
    if name != "torch":
        load_module(name)


def _is_own_engine(directory: Path) -> bool:
    """Whether `directory` is an engine, damaged or of another version; ValueError if it holds files of others too."""
    if not is_engine_directory(directory):
        return False
    listed = read_json(directory / MANIFEST_NAME).get("files")
    entries = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    require_only(directory, {MANIFEST_NAME, *(str(entry.get("name")) for entry in entries)})
    return True


def _check_states(networks: Iterable[Network], replay: ReplaySettings) -> None:
    """Settings that the operators or a layer's state refuse must fail here, not at the first token."""
    states = [state for network in networks for state in network.states.values()]
    check_u_source((state.geometry for state in states), replay)
    recurrent = [state.number for state in states if isinstance(state.geometry, RecurrentGeometry)]
    check_readout_layers(recurrent, replay)
    for state in states:
        allocate_state(state.geometry, state.settings(replay), 1, "meta")


def _check_space(directory: Path, needed: int, place: Path) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ValueError(f"the engine needs {needed / 1e9:.2f} GB at {place}, where {free / 1e9:.2f} GB are free")


def _cumulative(progress: Callable[[int, int, str], None], total: int) -> Callable[[int, str], None]:
    done = 0

    def advance(nbytes: int, name: str) -> None:
        nonlocal done
        done += nbytes
        progress(done, total, name)

    return advance


def _copy_files(checkpoint: Path, directory: Path) -> None:
    for name in COPIED_FILES:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, directory / name)


def _list_files(directory: Path) -> tuple[FileEntry, ...]:
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return tuple(
        FileEntry(path.relative_to(directory).as_posix(), path.stat().st_size, sha256_file(path)) for path in paths
    )


def _checkpoint_name(checkpoint: Path) -> str:
    return checkpoint.resolve().name


def _describe_model(config: ModelConfig, checkpoint: Path, has_mtp: bool) -> dict[str, Any]:
    return {
        "name": _checkpoint_name(checkpoint),
        "family": config.family,
        "architecture": config.architecture,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "layers": count_layers(config),
        "max_position_embeddings": config.max_position_embeddings,
        "has_mtp": has_mtp,
        "bos_token_id": config.bos_token_id,
        "eos_token_ids": list(config.eos_token_ids),
        "pad_token_id": config.pad_token_id,
    }


def _describe_quantization(plan: dict[str, WeightRecipe]) -> dict[str, Any]:
    """Bytes of weights by stored dtype: uint8 is packed NVFP4, float8_e4m3fn FP8 weights and NVFP4 block scales."""
    nbytes: Counter[str] = Counter()
    for recipe in plan.values():
        nbytes[recipe.dtype] += recipe.nbytes
    return {"weight_bytes": sum(nbytes.values()), "weight_bytes_by_dtype": dict(nbytes)}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in _RECORDED_PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
