"""trtllm-serve's YAML file of LLM arguments, as far as its keys mean something here.

What the file says goes before the command line, as there. A key without a meaning here is an error, unless it has the
value that changes nothing: a setting that is silently dropped would be a setting that somebody relies on.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from replayssm.scripts.files import FileKeyError

SAME = ("max_batch_size", "max_num_tokens", "max_seq_len", "reasoning_parser", "tensor_parallel_size", "tool_parser")
"""Top-level keys that are options of the same name."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "backend": ("pytorch",),
    "pipeline_parallel_size": (1,),
    "context_parallel_size": (1,),
    "moe_expert_parallel_size": (1, None),
    "max_beam_width": (1,),
    "enable_chunked_prefill": (True,),
    "trust_remote_code": (False,),
    "kv_cache_config.dtype": ("auto",),
    "kv_cache_config.mamba_ssm_cache_dtype": ("auto",),
    "scheduler_config.context_chunking_policy": (None,),
}
"""Keys that are taken with these values only, which are what happens anyway."""

DRAFTERS = {"mtp": "mtp", "ngram": "ngram", "draft_target": "engine"}
POLICIES = ("GUARANTEED_NO_EVICT", "MAX_UTILIZATION")
MAX_UTILIZATION_SLICE = 256
"""Steps of a time slice under MAX_UTILIZATION, where the command line gives none."""


def apply_config(path: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` of a command with what the file at `path` says in their place.

    Raises ValueError for a file that is no YAML mapping, FileKeyError for keys and values that mean nothing here.
    """
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected a mapping of trtllm-serve's keys, got {type(values).__name__}")
    changed = dict(options)
    for key, value in _flat(values).items():
        try:
            _apply(key, value, changed)
        except ValueError as error:
            raise FileKeyError(f"{path}: {error}") from error
    return changed


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name in ("kv_cache_config", "speculative_config", "scheduler_config"):
            flat.update(_flat(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def _apply(key: str, value: Any, options: dict[str, Any]) -> None:
    if key in SAME and key in options:
        _typed(key, value, str if key.endswith("_parser") else int)
        options[key] = value
    elif key in NEUTRAL:
        if value not in NEUTRAL[key]:
            raise ValueError(f"{key} can only be {NEUTRAL[key][0]!r} here, got {value!r}")
    elif key in _SETTERS and _SETTERS[key][0] in options:
        name, convert = _SETTERS[key]
        options[name] = convert(key, value, options)
    elif key == "cuda_graph_config" and "cuda_graphs" in options:
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"cuda_graph_config must be null (no graphs) or a mapping, got {value!r}")
        # A mapping asks for graphs, which are captured wherever there is a GPU to capture them on.
        options["cuda_graphs"] = False if value is None else None
    else:
        known = sorted({*(name for name in SAME if name in options), *NEUTRAL, *_SETTERS, "cuda_graph_config"})
        near = _nearest(str(key), known)
        hint = f" (did you mean {near!r}?)" if near else ""
        raise ValueError(f"the key {key!r} means nothing here{hint}; known are {', '.join(known)}")


def _nearest(key: str, known: Iterable[str]) -> str | None:
    """The key, or mapping of keys, of the same mapping that `key` looks like a slip of."""
    prefix = key[: key.rfind(".") + 1]
    names = {name.removeprefix(prefix).partition(".")[0] for name in known if name.startswith(prefix)}
    near = difflib.get_close_matches(key.removeprefix(prefix), sorted(names - {key}), 1, cutoff=0.75)
    return prefix + near[0] if near else None


def _typed(key: str, value: Any, kind: type) -> Any:
    if not isinstance(value, (int, float) if kind is float else kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{key} must be of type {kind.__name__}, got {value!r}")
    return value


def _share(key: str, value: Any, options: Mapping[str, Any]) -> float:
    if not 0 < _typed(key, value, float) <= 1:
        raise ValueError(f"{key} must be above 0 and at most 1, got {value}")
    return float(value)


def _reuse(key: str, value: Any, options: Mapping[str, Any]) -> int:
    return options["prefix_cache"] if _typed(key, value, bool) else 0


def _mebibytes(key: str, value: Any, options: Mapping[str, Any]) -> int:
    return max(_typed(key, value, int), 0) >> 20


def _drafter(key: str, value: Any, options: Mapping[str, Any]) -> str:
    name = DRAFTERS.get(str(value).lower())
    if name is None:
        raise ValueError(f"{key} must be one of MTP, NGram, Draft_Target, got {value!r}")
    return name


def _count(key: str, value: Any, options: Mapping[str, Any]) -> int:
    return _typed(key, value, int)


def _directory(key: str, value: Any, options: Mapping[str, Any]) -> Path:
    path = Path(_typed(key, value, str))
    if not path.is_dir():
        raise ValueError(f"{key} must be the directory of an engine, there is none at {value}")
    return path


def _slice(key: str, value: Any, options: Mapping[str, Any]) -> int | None:
    if value not in POLICIES:
        raise ValueError(f"{key} must be one of {', '.join(POLICIES)}, got {value!r}")
    return None if value == POLICIES[0] else options["time_slice"] or MAX_UTILIZATION_SLICE


_SETTERS = {
    "kv_cache_config.free_gpu_memory_fraction": ("free_gpu_memory_fraction", _share),
    "kv_cache_config.enable_block_reuse": ("prefix_cache", _reuse),
    "kv_cache_config.host_cache_size": ("swap_memory", _mebibytes),
    "speculative_config.decoding_type": ("draft", _drafter),
    "speculative_config.max_draft_len": ("draft_len", _count),
    "speculative_config.num_nextn_predict_layers": ("draft_len", _count),
    "speculative_config.speculative_model": ("draft_engine", _directory),
    "speculative_config.speculative_model_dir": ("draft_engine", _directory),
    "scheduler_config.capacity_scheduler_policy": ("time_slice", _slice),
}
"""Key -> (option of `serve`, how its value becomes that option's)."""
