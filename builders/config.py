"""Hugging Face `config.json` to `ModelConfig`.

Reads NemotronHForCausalLM and Qwen3.5 (dense and MoE, language models and the text part of the multimodal classes) in
the spellings of the published checkpoints and of transformers 5. A field that would change the computation and is not
supported raises one ValueError naming file, key, value and expectation; unrelated fields are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from replayssm.builders.architecture import NEMOTRON_H, QWEN3_5, LayerConfig, ModelConfig
from replayssm.builders.config_nemotron_h import read_nemotron_h
from replayssm.builders.config_qwen3_5 import read_qwen3_5
from replayssm.builders.fields import Fields, is_name
from replayssm.builders.formats import QuantizationFormats, read_formats
from replayssm.builders.weight_shapes import weight_bytes, weight_shapes
from replayssm.plugins.integers import is_integer
from replayssm.plugins.manifest import is_engine_directory

__all__ = [
    "PUBLISHED",
    "LayerConfig",
    "ModelConfig",
    "QuantizationFormats",
    "published",
    "read_config",
    "weight_bytes",
    "weight_shapes",
]

ARCHITECTURES = {
    "NemotronHForCausalLM": NEMOTRON_H,
    "Qwen3_5ForCausalLM": QWEN3_5,
    "Qwen3_5MoeForCausalLM": QWEN3_5,
    "Qwen3_5ForConditionalGeneration": QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": QWEN3_5,
}
_ARCHITECTURE_OF_MODEL_TYPE = {
    "nemotron_h": "NemotronHForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}

PUBLISHED = {
    "nano4b": "nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16",
    "super120b": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
    "super120b-nvfp4": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4",
    "qwen4b": "Qwen/Qwen3.5-4B",
    "qwen122b": "Qwen/Qwen3.5-122B-A10B",
    "qwen122b-nvfp4": "nvidia/Qwen3.5-122B-A10B-NVFP4",
}
"""Short names and Hugging Face ids of the models whose configs ship with this package."""


def read_config(source: str | Path | Mapping[str, Any]) -> ModelConfig:
    """Description of the model in a checkpoint directory, a `config.json` file, or a parsed config.

    From a directory or file, `hf_quant_config.json` and `generation_config.json` beside it are read too.
    Raises ValueError for unsupported or contradictory content, FileNotFoundError where there is no config.
    """
    if isinstance(source, Mapping):
        return _read(
            source, None, None, str(source.get("_name_or_path") or "config"), "hf_quant_config", "generation_config"
        )
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; expected the config.json of a Hugging Face checkpoint")
    if is_engine_directory(path.parent):
        raise ValueError(f"{path.parent} is an engine directory; give the checkpoint that it was built from")
    quant_path, generation_path = path.with_name("hf_quant_config.json"), path.with_name("generation_config.json")
    return _read(
        read_json(path),
        read_json(quant_path) if quant_path.is_file() else None,
        read_json(generation_path) if generation_path.is_file() else None,
        str(path),
        str(quant_path),
        str(generation_path),
    )


def published(name: str) -> ModelConfig:
    """A published model by Hugging Face id or short name (`PUBLISHED`).

    `published_config(name)["_source"]` says where the values are from and which are not confirmed.
    """
    return read_config(published_config(name))


def published_config(name: str) -> dict[str, Any]:
    """The Hugging Face style config of a published model."""
    full = PUBLISHED.get(name, name)
    if full not in PUBLISHED.values():
        known = ", ".join(f"{short} ({long})" for short, long in PUBLISHED.items())
        raise ValueError(f"unknown published model {name!r}; known are {known}")
    file = resources.files("replayssm.builders.published") / f"{full.split('/')[-1]}.json"
    return json.loads(file.read_text(encoding="utf-8"))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`; ValueError for anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError also for an integer of thousands of digits
        raise ValueError(f"{path}: not valid JSON ({error}); copy the file again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _read(
    config: Mapping[str, Any],
    quant: Mapping[str, Any] | None,
    generation: Mapping[str, Any] | None,
    where: str,
    quant_where: str,
    generation_where: str,
) -> ModelConfig:
    architecture = _architecture(config, where)
    formats = read_formats(config, quant, where, quant_where)
    multimodal = architecture.endswith("ForConditionalGeneration")
    if multimodal and "text_config" not in config:
        raise ValueError(f"{where}: text_config is missing, which {architecture} needs")
    text = Fields(config["text_config"] if multimodal else config, f"{where}: text_config" if multimodal else where)
    if ARCHITECTURES[architecture] == NEMOTRON_H:
        specific = read_nemotron_h(text)
    else:
        specific = read_qwen3_5(text, is_moe=architecture.startswith("Qwen3_5Moe"))
    # A wrapper's own key wins over the text part's, which may hold its class's default.
    tied = text if config.get("tie_word_embeddings") is None else Fields(config, where)
    eos, eos_where = (generation or {}).get("eos_token_id"), generation_where
    if eos is None:
        eos, eos_where = text.get("eos_token_id", default=config.get("eos_token_id")), where
    return ModelConfig(
        architecture=architecture,
        hidden_size=text.integer("hidden_size"),
        vocab_size=text.integer("vocab_size"),
        tie_word_embeddings=tied.boolean("tie_word_embeddings", default=False),
        max_position_embeddings=text.integer("max_position_embeddings"),
        dtype=_dtype(config, text),
        bos_token_id=text.integer("bos_token_id", default=None, minimum=0),
        eos_token_ids=_token_ids(eos, eos_where),
        pad_token_id=text.integer("pad_token_id", default=None, minimum=0),
        multimodal=multimodal,
        formats=formats,
        source=where,
        **specific,
    )


def _architecture(config: Mapping[str, Any], where: str) -> str:
    named = config.get("architectures")
    if named is not None and not isinstance(named, list | tuple):
        raise ValueError(f"{where}: architectures is {named!r}, expected a list of class names")
    if named:
        supported = [name for name in named if is_name(name, ARCHITECTURES)]
        if not supported:
            remote = "; it needs remote code, which is never run" if config.get("auto_map") else ""
            raise ValueError(f"{where}: architectures is {named!r}, expected one of {', '.join(ARCHITECTURES)}{remote}")
        return supported[0]
    model_type = config.get("model_type")
    if not is_name(model_type, _ARCHITECTURE_OF_MODEL_TYPE):
        raise ValueError(
            f"{where}: architectures is missing and model_type is {model_type!r}, "
            f"expected architectures with one of {', '.join(ARCHITECTURES)}"
        )
    return _ARCHITECTURE_OF_MODEL_TYPE[model_type]


def _dtype(config: Mapping[str, Any], text: Fields) -> str:
    value = Fields(config, text.where).get("dtype", "torch_dtype", default=None)
    value = text.get("dtype", "torch_dtype", default="bfloat16") if value is None else value
    name = str(value).removeprefix("torch.")
    if name not in ("bfloat16", "float16", "float32", "float64"):
        raise text.error("dtype", value, "bfloat16, float16, float32 or float64")
    return name


def _token_ids(value: Any, where: str) -> tuple[int, ...]:
    ids = () if value is None else tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(is_integer(item, 0) for item in ids):
        raise ValueError(f"{where}: eos_token_id is {value!r}, expected a token id or a list of them")
    return ids
