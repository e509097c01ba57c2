"""Where replay would corrupt or not help, and so does not start.

Between two rewrites, the pool holds older states than TensorRT-LLM thinks. Whatever reads it there, other than the
decode operator that we replace, must either be ruled out here or be preceded by `write_back` (see docs/trtllm.md for
the list). Everything is read defensively: an attribute that a version lacks says nothing.
"""

from __future__ import annotations

import re
import sys
from typing import Any

from .settings import TRUST, RefusedError, Settings

OLDEST, NEWEST = (1, 2), (1, 4)
"""Versions (major, minor) of TensorRT-LLM whose sources this package was written against."""

MANAGERS = (
    "MambaHybridCacheManager",
    "MambaHybridCacheManagerV1",
    "MixedMambaHybridCacheManager",
    "CppMambaHybridCacheManager",
    "MambaCacheManager",
    "PythonMambaCacheManager",
)
"""State managers whose slots stay with a request until it ends and are read only by the mixers."""


def check_version(version: str, settings: Settings) -> None:
    """RefusedError for a version that nobody compared this package with."""
    match = re.match(r"(\d+)\.(\d+)", version)
    known = match is not None and OLDEST <= (int(match[1]), int(match[2])) <= NEWEST
    if not known and "version" not in settings.trust:
        raise RefusedError(
            f"TensorRT-LLM {version} is not one of the versions {_dotted(OLDEST)} to {_dotted(NEWEST)} that this "
            f"module was written for; {TRUST}=version tries it anyway"
        )


def check_model(model: Any, settings: Settings) -> None:
    """RefusedError if the configuration of the model, or the arguments it is started with, rule replay out."""
    config = getattr(model, "model_config", None)
    if getattr(config, "spec_config", None) is not None:
        raise RefusedError(_SPECULATION)
    if getattr(getattr(config, "mapping", None), "cp_size", 1) not in (1, None):
        raise RefusedError("context parallelism splits sequences over ranks; start with --context_parallel_size 1")
    if getattr(getattr(config, "quant_config", None), "mamba_ssm_stochastic_rounding", False):
        raise RefusedError(
            "the state is rounded stochastically, which the replay operators do not do; switch that off, or use "
            "kv_cache_config.mamba_ssm_cache_dtype: float32"
        )
    arguments = visible_arguments()
    if arguments is None:
        if "arguments" not in settings.trust:
            raise RefusedError(
                "the arguments of this deployment are not visible from here, so eviction, disaggregated serving and "
                f"torch.compile cannot be ruled out; {TRUST}=arguments vouches that none of them is in use"
            )
    else:
        check_arguments(arguments)


_SPECULATION = (
    "speculative decoding is configured, and TensorRT-LLM's own replay handles it; remove speculative_config to use "
    "ReplaySSM's decoding instead"
)


def check_arguments(arguments: Any) -> None:
    """RefusedError for the first unsafe setting among TensorRT-LLM's LlmArgs."""
    scheduler = _get(arguments, "scheduler_config", "capacity_scheduler_policy")
    cache = _get(arguments, "kv_cache_config")
    unsafe = {
        _SPECULATION: _get(arguments, "speculative_config") is not None,
        "scheduler_config.capacity_scheduler_policy is MAX_UTILIZATION, which pauses requests between two tokens; use "
        "GUARANTEED_NO_EVICT": "MAX_UTILIZATION" in str(getattr(scheduler, "value", scheduler)).upper(),
        "cache_transceiver_config is set: a disaggregated deployment sends states to other workers; remove it": (
            _active(_get(arguments, "cache_transceiver_config"))
        ),
        "kv_connector_config is set: a connector may read states at any time; remove it": (
            _get(arguments, "kv_connector_config") is not None
        ),
        "kv_cache_config.use_kv_cache_manager_v2 is true: that manager suspends requests and moves their states; set "
        "it to false": _get(cache, "use_kv_cache_manager_v2") is True,
        "torch_compile_config is set: a compiled model does not call the mixers' Python code; set it to null": (
            _get(arguments, "torch_compile_config") is not None
        ),
        "beams share states; set max_beam_width to 1": (_get(arguments, "max_beam_width") or 1) > 1,
    }
    for reason, found in unsafe.items():
        if found:
            raise RefusedError(reason)


def check_manager(manager: Any, settings: Settings) -> None:
    """RefusedError for a state manager that reads, moves or shares states while requests are decoded."""
    name = type(manager).__name__
    if manager.is_speculative():
        raise RefusedError(_SPECULATION)
    newer = any("V2" in base.__name__ for base in type(manager).__mro__) or hasattr(manager, "suspend_request")
    if newer:
        raise RefusedError(
            f"the state manager {name} suspends requests and moves their states; set "
            "kv_cache_config.use_kv_cache_manager_v2: false, or TRTLLM_USE_PY_MAMBA=1 in the environment"
        )
    if name not in MANAGERS and "manager" not in settings.trust:
        raise RefusedError(
            f"the state manager {name} is unknown to this module, which knows {', '.join(MANAGERS)}; "
            f"{TRUST}=manager vouches that only the mixers read the states of requests that are being decoded"
        )
    # Some managers have an interval of snapshots even where none is taken, so it tells only what nothing else does.
    pages = getattr(manager, "linear_attention_metadata", None)
    reuse = _get(manager, "kv_cache_config", "enable_block_reuse")
    if reuse is None:
        reuse = _get(pages, "states_snapshot_interval")
    if reuse and (pages is not None or name.startswith("Cpp")):
        raise RefusedError(
            "blocks are reused, so the state manager copies states between slots while requests are decoded; set "
            "kv_cache_config.enable_block_reuse: false"
        )


def visible_arguments() -> Any:
    """The LlmArgs that the calling code holds, None if it holds none.

    A model class is given its ModelConfig only. What a deployment was started with is known to TensorRT-LLM's
    ModelLoader, which is what constructs the model, a few calls up the stack.
    """
    frame = sys._getframe(1)
    while frame is not None:
        variables = frame.f_locals
        owner = variables.get("self")
        for found in (variables.get("llm_args"), getattr(owner, "__dict__", {}).get("llm_args")):
            if hasattr(found, "kv_cache_config"):
                return found
        frame = frame.f_back
    return None


def _get(value: Any, *names: str) -> Any:
    """value.a.b, or None where something is missing."""
    for name in names:
        value = getattr(value, name, None)
    return value


def _active(transceiver: Any) -> bool:
    """A transceiver configuration without a backend is one that is not used."""
    return transceiver is not None and getattr(transceiver, "backend", True) is not None


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
