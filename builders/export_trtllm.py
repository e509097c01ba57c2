"""A checkpoint directory that TensorRT-LLM loads, with the configuration and the commands that serve it with replay.

Weights are not touched: TensorRT-LLM reads the same unified Hugging Face checkpoints that modelopt and `quantize`
write. What it wants differently is where formats are declared, and a configuration under which replay is safe.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from replayssm.builders.architecture import ModelConfig
from replayssm.builders.atomic import atomic_directory, require_apart
from replayssm.builders.checkpoint import Checkpoint
from replayssm.builders.config import read_json
from replayssm.builders.formats import MIXED_PRECISION, NVFP4, W4A16_NVFP4
from replayssm.builders.inspection import Inspection, inspect_model
from replayssm.builders.output_marker import MARKER_NAME, is_marked
from replayssm.plugins.contract import Mamba2Geometry, RecurrentGeometry
from replayssm.plugins.settings import ReplaySettings

VERSIONS = ("1.2", "1.3", "1.4")
STATE_DTYPES = ("float32", "bfloat16", "float16")
CONFIG_NAME, GUIDE_NAME = "trtllm.yaml", "TRTLLM.md"
_MARKER_FORMAT = "replayssm-trtllm-export"
_REWRITTEN = ("hf_quant_config.json", "quant_cfg.json", CONFIG_NAME, GUIDE_NAME, MARKER_NAME)
_CACHE_SHARE = 0.9
"""Share of the free memory that TensorRT-LLM's caches take by default."""


@dataclass(frozen=True)
class ExportOptions:
    """version: TensorRT-LLM's major and minor. state_dtype: of the state pool, None for what the model's config says.
    max_seq_len: None takes the model's own limit, at most 4096. memory_bytes: of one GPU, from which the share of the
    caches is computed."""

    version: str = "1.3"
    max_batch_size: int = 256
    max_seq_len: int | None = None
    tp_size: int = 1
    buffer_len: int = 16
    state_dtype: str | None = None
    memory_bytes: int = 139 * 2**30
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.version not in VERSIONS:
            raise ValueError(f"TensorRT-LLM version must be one of {', '.join(VERSIONS)}, got {self.version!r}")
        for name in ("max_batch_size", "max_seq_len", "tp_size"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Export:
    """What was written. inspection: sizes and traffic of the whole model; ring_bytes: of all slots, per GPU; step:
    at the largest batch, with sequences of half the largest length."""

    directory: Path
    inspection: Inspection
    ring_bytes: int
    commands: Mapping[str, str]
    warnings: tuple[str, ...]
    step: StepTraffic


@dataclass(frozen=True)
class StepTraffic:
    """Bytes that one decode step moves: weights, attention caches, and recurrent state rewritten or replayed.

    The estimate of docs/trtllm.md. Activations and what a mixture of experts leaves unread are not in it, so real
    steps gain less at small batches.
    """

    plain: float
    replay: float

    @classmethod
    def of(cls, inspection: Inspection, batch: int, tokens: int) -> StepTraffic:
        """For `batch` sequences that hold `tokens` tokens each."""
        rest = inspection.weights["total"] + batch * tokens * inspection.slot.kv_per_token
        traffic = inspection.traffic
        return cls(rest + batch * traffic.plain, rest + batch * traffic.replay)

    @property
    def speedup(self) -> float:
        """How many times faster the step becomes where memory traffic is all that counts."""
        return self.plain / self.replay


def export_trtllm(checkpoint_dir: Path, output_dir: Path, options: ExportOptions | None = None) -> Export:
    """Write `output_dir`: shards as hard links where the file system allows, everything else as copies.

    Raises ValueError for a checkpoint that TensorRT-LLM cannot load or shard so, and for an output in the way.
    """
    options = options or ExportOptions()
    require_apart(Path(checkpoint_dir), Path(output_dir))
    checkpoint = Checkpoint.open(checkpoint_dir)
    _check(checkpoint, options)
    options = replace(options, max_seq_len=checkpoint.config.max_seq_len(options.max_seq_len))
    state_dtype = options.state_dtype or _declared_state_dtype(checkpoint.directory)
    settings = ReplaySettings(options.buffer_len, 1, options.max_seq_len, state_dtype)
    inspection = inspect_model(checkpoint.config, settings, name=str(checkpoint_dir), memory_bytes=options.memory_bytes)
    ring_bytes = -(-inspection.slot.ring // options.tp_size) * (options.max_batch_size + 1)
    fraction = _cache_fraction(inspection, ring_bytes, options)
    target = Path(output_dir).resolve()
    commands = _commands(target, options)
    warnings = _warnings(checkpoint, options)
    with atomic_directory(Path(output_dir), options.overwrite, is_own_export) as directory:
        _link_files(checkpoint.directory, directory)
        _write_formats(checkpoint.directory, directory)
        (directory / CONFIG_NAME).write_text(_configuration(options, state_dtype, fraction), encoding="utf-8")
        (directory / GUIDE_NAME).write_text(_guide(commands, warnings), encoding="utf-8")
        files = sorted(path.name for path in directory.iterdir())
        _write_json(directory / MARKER_NAME, {"format": _MARKER_FORMAT, "files": files})
    step = StepTraffic.of(inspection, options.max_batch_size, options.max_seq_len // 2)
    return Export(Path(output_dir), inspection, ring_bytes, commands, warnings, step)


def is_own_export(directory: Path) -> bool:
    """Whether an export wrote `directory`; ValueError if it holds files of others too."""
    return is_marked(directory, _MARKER_FORMAT)


def recurrent_geometries(config: ModelConfig) -> list[RecurrentGeometry]:
    """Geometry of every recurrent layer, unsharded."""
    return [layer.mixer.geometry for layer in config.recurrent_layers]


def _check(checkpoint: Checkpoint, options: ExportOptions) -> None:
    if W4A16_NVFP4 in checkpoint.formats.values():
        raise ValueError(
            f"{checkpoint.directory}: weights are W4A16 NVFP4, a format that TensorRT-LLM has no name for; quantize "
            "with --recipe nvfp4, which 1.3 and later run with 16-bit activations on Hopper by themselves"
        )
    if not checkpoint.config.recurrent_layers:
        raise ValueError(f"{checkpoint.directory}: the model has no recurrent layer, so replay has nothing to do")
    for geometry in recurrent_geometries(checkpoint.config):
        if isinstance(geometry, Mamba2Geometry):
            sizes = {"heads": geometry.nheads, "groups": geometry.ngroups}
        else:
            sizes = {"value heads": geometry.num_v_heads, "key heads": geometry.num_k_heads}
        for name, size in sizes.items():
            if size % options.tp_size:
                raise ValueError(
                    f"{checkpoint.directory}: {size} {name} of a recurrent layer cannot be split over "
                    f"{options.tp_size} GPUs; choose a --tp-size that divides {size}"
                )


def _warnings(checkpoint: Checkpoint, options: ExportOptions) -> tuple[str, ...]:
    found = []
    if options.version == "1.2" and NVFP4 in checkpoint.formats.values():
        found.append("TensorRT-LLM 1.2 runs NVFP4 on Blackwell GPUs; on Hopper use 1.3, or --recipe fp8")
    if options.version == "1.2" and "Qwen3_5" in checkpoint.config.architecture:
        found.append(f"TensorRT-LLM 1.2 may not know {checkpoint.config.architecture}; 1.3 does")
    return tuple(found)


def _declared_state_dtype(directory: Path) -> str:
    config = read_json(directory / "config.json")
    declared = config.get("mamba_ssm_cache_dtype", config.get("mamba_ssm_dtype"))
    return declared if declared in STATE_DTYPES else "float32"


def _cache_fraction(inspection: Inspection, ring_bytes: int, options: ExportOptions) -> float:
    """Share of the memory behind the weights that is left for TensorRT-LLM's caches beside the rings."""
    free = options.memory_bytes - inspection.weights["total"] // options.tp_size
    left = _CACHE_SHARE - ring_bytes / free if free > 0 else 0
    if left < 0.05:
        raise ValueError(
            f"weights and rings of {options.max_batch_size} sequences ({ring_bytes / 2**30:.1f} GiB) leave no room for "
            "TensorRT-LLM's caches: choose a smaller --max-batch-size, a larger --tp-size, or say --memory"
        )
    return int(left * 100) / 100


def _link_files(source: Path, target: Path) -> None:
    """Everything at the top of the checkpoint but what is rewritten, remote code and pickles."""
    for path in sorted(source.iterdir()):
        if not path.is_file() or path.name in _REWRITTEN or path.suffix in (".py", ".pyc", ".bin", ".pt", ".pth"):
            continue
        if path.suffix == ".safetensors":
            try:
                # Shards are never changed in place, by us or by TensorRT-LLM, so two names for one file are safe.
                os.link(os.path.realpath(path), target / path.name)
                continue
            except OSError:
                pass
        shutil.copyfile(path, target / path.name)


def _write_formats(source: Path, target: Path) -> None:
    """hf_quant_config.json, which every version reads, and quant_cfg.json, from which 1.2 reads formats per layer."""
    declared = _declared_formats(source)
    if declared is None:
        return
    producer, section = declared
    _write_json(target / "hf_quant_config.json", {"producer": producer, "quantization": section})
    if section["quant_algo"] == MIXED_PRECISION:
        layers = {name: section[name] for name in ("quant_algo", "kv_cache_quant_algo", "quantized_layers")}
        _write_json(target / "quant_cfg.json", layers)


def _declared_formats(source: Path) -> tuple[Any, dict[str, Any]] | None:
    """(producer, "quantization" of hf_quant_config.json); None for an unquantized checkpoint."""
    path = source / "hf_quant_config.json"
    if path.is_file():
        content = read_json(path)
        return content.get("producer"), {"kv_cache_quant_algo": None, **content["quantization"]}
    inline = read_json(source / "config.json").get("quantization_config")
    if inline is None:
        return None
    section = {
        "quant_algo": inline["quant_algo"],
        "kv_cache_quant_algo": "FP8" if inline.get("kv_cache_scheme") else None,
        "exclude_modules": list(inline.get("ignore") or []),
    }
    for name in ("group_size", "quantized_layers"):
        if inline.get(name) is not None:
            section[name] = inline[name]
    return inline.get("producer"), section


def _configuration(options: ExportOptions, state_dtype: str, fraction: float) -> str:
    """LlmArgs as YAML for `--config`; every line but the sizes is a condition of replay or its default."""
    manager = "" if options.version == "1.2" else "  use_kv_cache_manager_v2: false  # it suspends requests\n"
    return (
        f"# TensorRT-LLM {options.version}, replay of recurrent state. See {GUIDE_NAME}.\n"
        f"max_batch_size: {options.max_batch_size}\n"
        f"max_seq_len: {options.max_seq_len}\n"
        f"tensor_parallel_size: {options.tp_size}\n"
        "kv_cache_config:\n"
        f"  mamba_ssm_cache_dtype: {state_dtype}\n"
        "  enable_block_reuse: false  # copies states between slots\n"
        f"{manager}"
        f"  free_gpu_memory_fraction: {fraction}  # leaves room for the rings\n"
        "scheduler_config:\n"
        "  capacity_scheduler_policy: GUARANTEED_NO_EVICT\n"
        "cuda_graph_config:\n"
        f"  max_batch_size: {options.max_batch_size}\n"
        "  enable_padding: true\n"
    )


def _commands(target: Path, options: ExportOptions) -> dict[str, str]:
    """The commands, by what they do."""
    model, config = shlex.quote(str(target)), shlex.quote(str(target / CONFIG_NAME))
    module = '--custom_module_dirs "$(replayssm trtllm-module)"'
    length = "" if options.buffer_len == 16 else f"TRTLLM_REPLAYSSM_BUFFER_LEN={options.buffer_len} "
    bench = (
        f"trtllm-bench --model {model} --model_path {model} throughput {module} "
        f"--extra_llm_api_options {config} --tp {options.tp_size} --dataset data.jsonl --report_json"
    )
    return {
        "serve": f"{length}trtllm-serve {model} --config {config} {module}",
        "measure without replay": f"TRTLLM_REPLAYSSM=0 {bench} without.json",
        "measure with replay": f"{length}{bench} with.json",
        "compare": "replayssm bench compare without.json with.json",
    }


def _guide(commands: Mapping[str, str], warnings: tuple[str, ...]) -> str:
    parts = ["# Serving this checkpoint with TensorRT-LLM and replay\n"]
    parts += [f"Note: {text}.\n" for text in warnings]
    parts += [f"{name.capitalize()}:\n\n```\n{command}\n```\n" for name, command in commands.items()]
    parts.append("The log says `[ReplaySSM] active for ...` when replay is in use, and why where it is not.\n")
    return "\n".join(parts)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
