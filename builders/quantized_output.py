"""Writing a quantized checkpoint, tensor by tensor, in the form of modelopt's unified Hugging Face export."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from replayssm.builders import nvfp4
from replayssm.builders.architecture import AttentionConfig, GdnConfig, LayerConfig, MlpConfig, MoeConfig
from replayssm.builders.checkpoint import INDEX_NAME, Checkpoint
from replayssm.builders.config import read_json
from replayssm.builders.formats import FP8
from replayssm.builders.output_marker import MARKER_NAME, is_marked
from replayssm.builders.safetensors_file import SafetensorsWriter, plan_shards
from replayssm.builders.weight_shapes import layer_shapes, storage
from replayssm.plugins.contract import ELEMENT_BITS
from replayssm.plugins.state import dtype_name

# Kept as stored: rounding them to bf16 costs accuracy and saves nothing.
_KEPT = ("A_log", "D", "dt_bias", "e_score_correction_bias")
_SKIPPED_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".py", ".pyc", ".gguf", ".onnx", ".h5")
_SKIPPED_NAMES = ("config.json", "hf_quant_config.json", INDEX_NAME, "pytorch_model.bin.index.json", "replayssm.json")

Spec = tuple[str, tuple[int, ...]]

_MARKER_FORMAT = "replayssm-quantized-checkpoint"


def is_own_output(directory: Path) -> bool:
    """Whether `quantize` wrote `directory`; ValueError if it holds files of others too."""
    return is_marked(directory, _MARKER_FORMAT)


def shared_input_groups(layer: LayerConfig) -> list[tuple[str, ...]]:
    """Modules of a layer that read the same input and that engines fuse: they share `weight_scale_2` and
    `input_scale`. Experts' gate and up are among them."""
    groups: list[tuple[str, ...]] = []
    if isinstance(layer.mixer, AttentionConfig):
        groups.append(tuple(f"{layer.mixer_prefix}{name}_proj" for name in "qkv"))
    if isinstance(layer.mixer, GdnConfig):
        groups.append((f"{layer.mixer_prefix}in_proj_qkv", f"{layer.mixer_prefix}in_proj_z"))
    part, prefix = layer.feed_forward, layer.feed_forward_prefix
    if isinstance(part, MlpConfig | MoeConfig) and part.activation == "swiglu":
        parents = [prefix]
        if isinstance(part, MoeConfig):
            experts = [f"{prefix}experts.{expert}." for expert in range(part.num_experts)]
            parents = [f"{prefix}shared_expert.", *experts]
        groups += [(f"{parent}gate_proj", f"{parent}up_proj") for parent in parents]
    return groups


class QuantizedOutput:
    """The files of a quantized checkpoint in `directory`, whose tensors are all known before the first is written.

    formats: canonical module name -> format, for the modules to quantize. Everything else is copied: in bf16, but for
    the few tensors whose precision matters (A_log, D, dt_bias, the sigmoid router) and the vision tower, which keep
    the dtype they are stored in.
    """

    def __init__(
        self, checkpoint: Checkpoint, directory: Path, formats: Mapping[str, str], max_shard_bytes: int
    ) -> None:
        self.checkpoint = checkpoint
        self.directory = directory
        self.formats = formats
        self.tensors: dict[str, Spec] = {}
        self._sources: dict[str, str] = {}
        self._plan()
        self.shards = plan_shards([(name, _nbytes(spec)) for name, spec in self.tensors.items()], max_shard_bytes)
        self.total_bytes = sum(_nbytes(spec) for spec in self.tensors.values())
        self._file_of = {name: file for file, names in self.shards.items() for name in names}
        self._writers: dict[str, SafetensorsWriter] = {}
        self._stack = contextlib.ExitStack()

    def _plan(self) -> None:
        for name in self.checkpoint.names:
            module = name.removesuffix(".weight")
            shape = self.checkpoint.shape(name)
            if module in self.formats:
                try:
                    stored = storage(shape, self.formats[module])
                except ValueError as error:
                    raise ValueError(
                        f"{self.checkpoint.directory}: {name}: {error}; choose --recipe fp8 for this model"
                    ) from None
                self.tensors.update((f"{self.disk_name(module)}.{suffix}", spec) for suffix, spec in stored.items())
            else:
                disk = self.disk_name(name)
                self.tensors[disk] = (self._dense_dtype(name), shape)
                self._sources[disk] = name
        for disk in self.checkpoint.extra_names:
            tensor = self.checkpoint.extra_tensor(disk)
            self.tensors[disk] = (dtype_name(tensor.dtype), tuple(tensor.shape))

    def _dense_dtype(self, name: str) -> str:
        stored = self.checkpoint.dtype(name)
        is_router = name.endswith("mixer.gate.weight")
        return stored if name.endswith(_KEPT) or is_router else "bfloat16"

    def disk_name(self, canonical: str) -> str:
        """Name that the checkpoint's own files use, with experts one by one."""
        return canonical if canonical.startswith(("lm_head", "mtp.")) else self.checkpoint.prefix + canonical

    def __enter__(self) -> QuantizedOutput:
        for file, names in self.shards.items():
            writer = SafetensorsWriter(self.directory / file, {name: self.tensors[name] for name in names})
            self._writers[file] = self._stack.enter_context(writer)
        return self

    def __exit__(self, *error: object) -> bool | None:
        return self._stack.__exit__(*error)

    def _write(self, disk: str, tensor: torch.Tensor) -> None:
        self._writers[self._file_of[disk]].write(disk, tensor, convert=True)

    def write_layer(self, layer: LayerConfig, input_amax: Mapping[str, torch.Tensor]) -> None:
        """All tensors of a layer. input_amax: largest input of each module whose format quantizes activations."""
        names = layer_shapes(self.checkpoint.config, layer)
        shared = self._shared_amax(layer)
        for name in names:
            module = name.removesuffix(".weight")
            if module in self.formats:
                self._write_quantized(module, shared.get(module), input_amax.get(module))
            else:
                self._copy(name)

    def _copy(self, name: str) -> None:
        disk = self.disk_name(name)
        self.checkpoint.require_finite(name, self.tensors[disk][0])
        self._write(disk, self.checkpoint.tensor(name))

    def check_weights(self, layer: LayerConfig) -> None:
        """ValueError naming the first weight of a layer, or of the embedding, that holds NaN or infinity."""
        for name in (self.checkpoint.config.embedding_name, *layer_shapes(self.checkpoint.config, layer)):
            if name.removesuffix(".weight") in self.formats:
                self._amax(name.removesuffix(".weight"))
            else:
                self.checkpoint.require_finite(name, self.tensors[self.disk_name(name)][0])

    def _shared_amax(self, layer: LayerConfig) -> dict[str, torch.Tensor]:
        """Largest weight of each group of modules that share scales."""
        shared = {}
        for group in shared_input_groups(layer):
            members = [module for module in group if module in self.formats]
            # modelopt shares scales of separate FP8 projections nowhere; experts' gate and up are one weight to it.
            if len(members) < 2 or (self.formats[members[0]] == FP8 and ".experts." not in members[0]):
                continue
            largest = torch.stack([self._amax(module) for module in members]).max()
            shared.update(dict.fromkeys(members, largest))
        return shared

    def _amax(self, module: str) -> torch.Tensor:
        return self._checked(module, lambda: nvfp4.amax(self._source(module)))

    def _source(self, module: str) -> torch.Tensor:
        """The weight in bf16, the precision that the quantized one replaces."""
        return self.checkpoint.tensor(f"{module}.weight").bfloat16()

    def _checked(self, module: str, compute: Callable[[], Any]) -> Any:
        try:
            return compute()
        except ValueError as error:
            raise ValueError(f"{self.checkpoint.directory}: {module}.weight: {error}") from None

    def _write_quantized(self, module: str, largest: torch.Tensor | None, input_largest: torch.Tensor | None) -> None:
        module_format, disk = self.formats[module], self.disk_name(module)
        quantize = nvfp4.quantize_fp8 if module_format == FP8 else nvfp4.quantize
        parts = self._checked(module, lambda: quantize(self._source(module), largest))
        for suffix, tensor in parts._asdict().items():
            self._write(f"{disk}.{suffix}", tensor)
        if f"{disk}.input_scale" in self.tensors:
            if input_largest is None:
                raise ValueError(f"no calibration token reached {module!r}; calibrate with more text")
            scale = nvfp4.fp8_scale if module_format == FP8 else nvfp4.nvfp4_scale
            self._write(f"{disk}.input_scale", scale(input_largest))

    def write_rest(self) -> None:
        """Everything outside the layers: embeddings, final norm, lm_head, draft head, vision tower."""
        config = self.checkpoint.config
        in_layers = {name for layer in config.layers for name in layer_shapes(config, layer)}
        for name in self.checkpoint.names:
            if name not in in_layers:
                self._copy(name)
        for disk in self.checkpoint.extra_names:
            self.checkpoint.require_finite(disk, self.tensors[disk][0])
            self._write(disk, self.checkpoint.extra_tensor(disk))

    def write_configs(self, quantization_config: Mapping[str, Any], hf_quant_config: Mapping[str, Any]) -> None:
        """config.json, hf_quant_config.json, the index, and copies of tokenizer and other small files."""
        source = self.checkpoint.directory
        config = read_json(source / "config.json")
        # The classes are part of every engine; remote code was not copied.
        config.pop("auto_map", None)
        for part in (config, config.get("text_config")):
            for key in ("dtype", "torch_dtype"):
                if isinstance(part, dict) and key in part:
                    part[key] = "bfloat16"
        config["quantization_config"] = dict(quantization_config)
        _write_json(self.directory / "config.json", config)
        _write_json(self.directory / "hf_quant_config.json", hf_quant_config)
        if len(self.shards) > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": self._file_of}
            _write_json(self.directory / INDEX_NAME, index)
        for path in sorted(source.iterdir()):
            if path.is_file() and path.suffix not in _SKIPPED_SUFFIXES and path.name not in _SKIPPED_NAMES:
                shutil.copyfile(path, self.directory / path.name)
        self._write_model_card(hf_quant_config)
        files = sorted(path.name for path in self.directory.iterdir())
        _write_json(self.directory / MARKER_NAME, {"format": _MARKER_FORMAT, "files": files})

    def _write_model_card(self, hf_quant_config: Mapping[str, Any]) -> None:
        """Say what was done to the weights; the original card keeps its text under another name."""
        source, card = self.checkpoint.directory, self.directory / "README.md"
        counts = ", ".join(f"{count} modules {name}" for name, count in sorted(Counter(self.formats.values()).items()))
        text = (
            f"# {source.resolve().name}, quantized\n\n"
            f"{counts}; everything else as in the original. Written by replayssm with "
            f"{_producer(hf_quant_config)}; `hf_quant_config.json` names every format.\n"
        )
        if card.exists():
            card.rename(self.directory / "ORIGINAL_README.md")
            text += "\n`ORIGINAL_README.md` is the card of the original model: its figures are the original's.\n"
        card.write_text(text, encoding="utf-8")


def _producer(hf_quant_config: Mapping[str, Any]) -> str:
    producer = hf_quant_config.get("producer", {})
    return f"{producer.get('name', 'modelopt')} {producer.get('version', '')}".strip()


def _nbytes(spec: Spec) -> int:
    return math.prod(spec[1]) * ELEMENT_BITS[spec[0]] // 8


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
