"""Registers subclasses of TensorRT-LLM's hybrid models under the same architecture names.

TensorRT-LLM hands the classes to its workers: pickled by their module's name (1.2), or as that name alone (later).
Either way a worker imports this package, and these classes must be found as attributes of this module.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

from . import install
from .safety import check_version
from .settings import SWITCH, RefusedError, Settings, say, say_refused

ARCHITECTURES = {
    "NemotronHForCausalLM": ("modeling_nemotron_h", "NemotronHForCausalLM"),
    "NemotronHPuzzleForCausalLM": ("modeling_nemotron_h", "NemotronHForCausalLM"),
    "Qwen3NextForCausalLM": ("modeling_qwen3_next", "Qwen3NextForCausalLM"),
    "Qwen3_5ForCausalLM": ("modeling_qwen3_5", "Qwen3_5ForCausalLM"),
    "Qwen3_5MoeForCausalLM": ("modeling_qwen3_5", "Qwen3_5MoeForCausalLM"),
}
"""Architecture -> module of tensorrt_llm._torch.models, and class to expect there if the registry has none yet.

Multimodal wrappers build their text model through the same registry, so they need no entry.
"""


def __getattr__(name: str) -> type:
    """TensorRT-LLM's own class, for a worker that unpickles a class of ours and refuses where its parent did not."""
    architecture = name.removeprefix("Replay")
    if name != architecture and architecture in ARCHITECTURES:
        utils = importlib.import_module("tensorrt_llm._torch.models.modeling_utils")
        found = _base_class(utils.MODEL_CLASS_MAPPING, architecture, *ARCHITECTURES[architecture])
        if found is not None:
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> list[str]:
    """Register what this version of TensorRT-LLM has. Returns the architectures; says why where there are none."""
    try:
        settings = Settings.read()
        if not settings.enabled:
            raise RefusedError(f"{SWITCH}=0")
        return _register(settings)
    except RefusedError as reason:
        say_refused(reason)
        return []


def _register(settings: Settings) -> list[str]:
    try:
        import tensorrt_llm
    except ImportError as error:
        raise ImportError(
            "replayssm_trtllm is loaded by TensorRT-LLM (trtllm-serve --custom_module_dirs ...), which is not "
            "installed in this Python"
        ) from error
    version = str(getattr(tensorrt_llm, "__version__", "of unknown version"))
    check_version(version, settings)
    _require_compiler()
    try:
        utils = importlib.import_module("tensorrt_llm._torch.models.modeling_utils")
        decorator, mapping = utils.register_auto_model, utils.MODEL_CLASS_MAPPING
    except (ImportError, AttributeError) as error:
        raise RefusedError(f"TensorRT-LLM {version} has no model registry where it is expected ({error})") from error
    registered = []
    for architecture, (module_name, class_name) in ARCHITECTURES.items():
        base = _base_class(mapping, architecture, module_name, class_name)
        if base is None:
            continue
        try:
            decorator(architecture)(_subclass(base, architecture))
        except Exception as error:
            # An exception here would end the import, and with it the server.
            say(f"{architecture} is left out: it does not register ({type(error).__name__}: {error})", warning=True)
            continue
        registered.append(architecture)
    if not registered:
        raise RefusedError(f"TensorRT-LLM {version} has none of the models {', '.join(ARCHITECTURES)}")
    say(
        f"registered for {', '.join(registered)} (TensorRT-LLM {version}, L = {settings.buffer_len}); {SWITCH}=0 is off"
    )
    return registered


def _require_compiler() -> None:
    try:
        importlib.import_module("cuda.bindings.nvrtc")
    except Exception as error:  # bindings that do not fit the installed CUDA raise others than ImportError
        raise RefusedError(
            f"the kernels are compiled with NVRTC, whose Python bindings are missing ({error}): "
            "pip install cuda-bindings nvidia-cuda-nvrtc"
        ) from error


def _base_class(mapping: dict[str, type], architecture: str, module_name: str, class_name: str) -> type | None:
    """The class that serves `architecture` without us; None if this version has none."""
    try:
        module = importlib.import_module(f"tensorrt_llm._torch.models.{module_name}")
    except Exception as error:
        # A model that this installation cannot import is none of ours, and must not stop the one that is served.
        say(f"{class_name} is left out: {module_name} does not import ({type(error).__name__}: {error})")
        module = None
    found = mapping.get(architecture)
    if found is None and architecture == class_name:
        found = getattr(module, class_name, None)
    # A second import under another name of this package finds our own subclass there.
    return getattr(found, "replayssm_base", found)


def _subclass(base: type, architecture: str) -> type:
    """A subclass of `base` that installs replay at the end of its construction, as an attribute of this module."""
    name = f"Replay{architecture}"

    @functools.wraps(base.__init__)
    def construct(self: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, *args, **kwargs)
        install.install(self)

    members = {
        "__init__": construct,
        "__module__": __name__,
        "__qualname__": name,
        "__doc__": f"{base.__name__} whose mixers decode with replay.",
        "replayssm_base": base,
    }
    created = type(base)(name, (base,), members)
    globals()[name] = created
    return created
