"""Quantization of Hugging Face checkpoints with NVIDIA's modelopt; the only module that imports it.

modelopt decides what is quantized and measures the activations; its rules are applied to transformers' model. What is
done here is to do so for a model that does not fit memory: layers are calibrated one by one on memory-mapped weights
(`layer_model`), and each quantized tensor is written as soon as it exists (`quantized_output`). As no layer's
calibration depends on another's quantization, the result equals modelopt's own export of the whole model bit for bit.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import shutil
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from replayssm.builders.architecture import LayerConfig, MoeConfig
from replayssm.builders.atomic import atomic_directory, require_apart
from replayssm.builders.calibration import calibration_batches
from replayssm.builders.checkpoint import Checkpoint
from replayssm.builders.formats import ALGO_OF_FORMAT, DENSE, FORMAT_OF_ALGO, GROUP_SIZE, NVFP4, W4A16_NVFP4
from replayssm.builders.layer_model import INSTALL, LayerModels
from replayssm.builders.quantized_output import QuantizedOutput, is_own_output

RECIPES = {
    "nvfp4": "NVFP4_DEFAULT_CFG",
    "nvfp4-w4a16": "W4A16_NVFP4_CFG",
    "fp8": "FP8_DEFAULT_CFG",
}
"""Recipe names and modelopt's configurations. All leave convolutions, norms, routers, gates, in_proj_a/b, embeddings,
lm_head, the draft head and the vision tower unquantized."""


_OUTSIDE_LAYERS = {False: ("mtp*",), True: ("mtp*", "model.visual*")}
"""Excluded patterns outside the language model's layers, by whether there is a vision tower."""

Progress = Callable[[str, int, int], None]
"""Called with (what is being done, steps done, steps in all)."""


@dataclass(frozen=True)
class QuantizeOptions:
    """recipe: see RECIPES. calibration: see `calibration_batches`; ignored by recipes that leave activations alone.
    calibration_samples, calibration_length: at most so many sequences of at most so many tokens. verbose: let modelopt
    and transformers print. max_shard_bytes: a file of the output is larger only for a single tensor."""

    recipe: str = "nvfp4"
    calibration: Path | None = None
    calibration_samples: int = 64
    calibration_length: int = 256
    overwrite: bool = False
    verbose: bool = False
    max_shard_bytes: int = 5 * 10**9

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise ValueError(f"recipe is {self.recipe!r}, expected one of {', '.join(RECIPES)}")
        for name in ("calibration_samples", "calibration_length", "max_shard_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")


@dataclass(frozen=True)
class QuantizeReport:
    """What was done: bytes of all tensors before and after, modules per format, calibration tokens, seconds."""

    source_bytes: int
    output_bytes: int
    modules: Mapping[str, int]
    calibration_tokens: int
    seconds: float


def quantize_checkpoint(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    options: QuantizeOptions | None = None,
    progress: Progress = lambda what, done, total: None,
) -> QuantizeReport:
    """Write a quantized copy of a checkpoint to `output_dir`: a standard unified Hugging Face checkpoint.

    The output appears whole or not at all. Needs memory for a small part of the model only.
    Raises ValueError for a checkpoint, calibration data or output that cannot be used, and where modelopt is missing.
    """
    options = options or QuantizeOptions()
    started = time.monotonic()
    output_dir = Path(output_dir)
    require_apart(Path(checkpoint_dir), output_dir)
    progress("Reading checkpoint", 0, 1)
    checkpoint = Checkpoint.open(checkpoint_dir)
    if checkpoint.formats:
        raise ValueError(f"{checkpoint.directory}: already quantized; give the original checkpoint")
    with _quiet(options.verbose):
        modelopt = _Modelopt(options.recipe)
    batches = _calibration(checkpoint, options) if modelopt.quantizes_activations else []
    with (
        atomic_directory(output_dir, options.overwrite, is_own_output) as directory,
        torch.inference_mode(),
        _quiet(options.verbose),
    ):
        layers = LayerModels(checkpoint, directory)
        formats, excluded = _structure(checkpoint, layers, modelopt)
        output = QuantizedOutput(checkpoint, directory, formats, options.max_shard_bytes)
        _check_disk(directory, output.total_bytes, output_dir.parent)
        with output:
            _write_layers(checkpoint, layers, output, modelopt, batches, progress)
            output.write_rest()
        progress("Checking output", 0, 1)
        excluded_names = {*map(output.disk_name, excluded), *_OUTSIDE_LAYERS[checkpoint.config.multimodal]}
        output.write_configs(*modelopt.configs(excluded_names))
        Checkpoint.open(directory)
    return QuantizeReport(
        sum(checkpoint.nbytes(name) for name in checkpoint.names),
        output.total_bytes,
        Counter(formats.values()),
        sum(batch.numel() for batch in batches),
        time.monotonic() - started,
    )


def _check_disk(directory: Path, needed: int, place: Path) -> None:
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ValueError(f"{place}: {free / 1e9:.1f} GB free, expected the output's {needed / 1e9:.1f} GB")


def _calibration(checkpoint: Checkpoint, options: QuantizeOptions) -> list[torch.Tensor]:
    return calibration_batches(
        checkpoint.directory,
        options.calibration,
        options.calibration_samples,
        options.calibration_length,
        checkpoint.config.vocab_size,
    )


def _structure(checkpoint: Checkpoint, layers: LayerModels, modelopt: _Modelopt) -> tuple[dict[str, str], list[str]]:
    """Formats of the modules that the recipe quantizes, and the modules it excludes, by canonical name."""
    formats: dict[str, str] = {}
    excluded = ["lm_head", checkpoint.config.embedding_name.removesuffix(".weight")]
    known: dict[tuple, tuple[dict[str, str], list[str]]] = {}
    for layer in checkpoint.config.layers:
        # The rules look at module names and classes, which are the same for all layers of a kind.
        kind = (layer.mixer, layer.feed_forward)
        if kind not in known:
            known[kind] = modelopt.structure(layers.structure(layer), layer)
        for module, module_format in known[kind][0].items():
            formats[layer.prefix + module] = module_format
        excluded += [layer.prefix + module for module in known[kind][1]]
    return formats, excluded


def _write_layers(
    checkpoint: Checkpoint,
    layers: LayerModels,
    output: QuantizedOutput,
    modelopt: _Modelopt,
    batches: list[torch.Tensor],
    progress: Progress,
) -> None:
    what = "Calibrating and quantizing layers" if batches else "Quantizing layers"
    hidden = [layers.embed(piece) for batch in batches for piece in batch.split(_sequences_per_call(batch))]
    count = len(checkpoint.config.layers)
    for layer in checkpoint.config.layers:
        progress(what, layer.index, count)
        input_amax: dict[str, torch.Tensor] = {}
        if batches:
            try:
                input_amax, hidden = _calibrate(layers, layer, modelopt, hidden)
            except FloatingPointError as error:
                output.check_weights(layer)
                raise ValueError(f"{checkpoint.directory}: {layer.prefix}: {error}") from None
        output.write_layer(layer, input_amax)
        checkpoint.release()
    progress("Copying unquantized weights", 0, 1)


def _calibrate(
    layers: LayerModels, layer: LayerConfig, modelopt: _Modelopt, hidden: list[torch.Tensor]
) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
    """`_Modelopt.calibrate` in a scope of its own: with it goes the last reference to the mapped weights."""
    with layers.loaded(layer) as model:
        return modelopt.calibrate(model, layer, hidden)


def _sequences_per_call(batch: torch.Tensor) -> int:
    """Sequences that run together. transformers' Mamba2 takes about 2 MB a token of Nano-4B: 512 tokens are 1 GB."""
    return max(1, 512 // batch.shape[1])


class _Modelopt:
    """modelopt's side: a recipe applied to models of one layer."""

    def __init__(self, recipe: str) -> None:
        try:
            import modelopt.torch.quantization as mtq
            from modelopt.torch.export import convert_hf_config, quant_utils
        except ImportError as error:
            missing = error.name or "modelopt"
            raise ValueError(f"quantization needs modelopt, but {missing} is not installed; {INSTALL}") from None
        self._mtq = mtq
        self._quant_utils = quant_utils
        self._to_config_json = convert_hf_config.convert_hf_quant_config_format
        self._recipe = copy.deepcopy(getattr(mtq, RECIPES[recipe]))
        self._producer: dict[str, Any] = {}
        self._algo = ""

    @property
    def quantizes_activations(self) -> bool:
        return any(
            rule["quantizer_name"] == "*input_quantizer" and rule.get("enable", True)
            for rule in self._recipe["quant_cfg"]
        )

    def structure(self, model: torch.nn.Module, layer: LayerConfig) -> tuple[dict[str, str], list[str]]:
        """(module -> format, excluded modules) of a layer, names without the layer's prefix."""
        model = self._mtq.quantize(model, {**copy.deepcopy(self._recipe), "algorithm": None})
        described = self._quant_utils.get_quant_config(model)
        self._producer = described["producer"]
        formats = {}
        for name, module in model.named_modules():
            if hasattr(module, "input_quantizer") and hasattr(module, "weight_quantizer"):
                formats.update(self._format(name, module, [""]))
            elif _expert_quantizers(module):
                formats.update(self._format(name, module, _expert_projections(layer)))
        excluded = [
            name.removeprefix("layers.0.")
            for name in described["quantization"].get("exclude_modules", ())
            if name.startswith("layers.0.")
        ]
        return formats, excluded

    def _format(self, name: str, module: torch.nn.Module, children: list[str]) -> dict[str, str]:
        algo = self._quant_utils.get_quantization_format(module)
        known = {key.lower(): value for key, value in FORMAT_OF_ALGO.items() if key}
        module_format = known[algo] if algo else DENSE
        if module_format == DENSE:
            return {}
        self._algo = ALGO_OF_FORMAT[module_format]
        base = name.removeprefix("layers.0.")
        return {f"{base}{child}": module_format for child in children}

    def calibrate(
        self, model: torch.nn.Module, layer: LayerConfig, hidden: list[torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor], list[torch.Tensor]]:
        """(largest input of each module by canonical name, outputs of the layer) for its inputs `hidden`.

        Raises FloatingPointError where an activation is not finite.
        """
        outputs: list[torch.Tensor] = []

        def loop(converted: torch.nn.Module) -> None:
            for batch in hidden:
                outputs.append(converted(inputs_embeds=batch, use_cache=False).last_hidden_state)

        # The weights' ranges are measured when they are quantized; here they would be read once per batch.
        recipe = copy.deepcopy(self._recipe)
        recipe["quant_cfg"] = [rule for rule in recipe["quant_cfg"] if rule["quantizer_name"] != "*weight_quantizer"]
        try:
            model = self._mtq.quantize(model, recipe, loop)
        except AssertionError as error:
            if "values in amax" not in str(error):
                raise
            raise FloatingPointError("NaN or infinity among the activations; the weights are damaged") from None
        largest: dict[str, torch.Tensor] = {}
        for name, module in model.named_modules():
            base = layer.prefix + name.removeprefix("layers.0.")
            quantizers = {"": getattr(module, "input_quantizer", None), **_expert_quantizers(module)}
            for attribute, quantizer in quantizers.items():
                if quantizer is not None and quantizer.is_enabled and quantizer.amax is not None:
                    amax = quantizer.amax.float().reshape(())
                    largest.update((f"{base}{child}", amax) for child in _children(layer, attribute))
        return largest, outputs

    def configs(self, excluded: Iterable[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(quantization_config of config.json, hf_quant_config.json) with the on-disk names of excluded modules."""
        section: dict[str, Any] = {"quant_algo": self._algo, "kv_cache_quant_algo": None}
        if FORMAT_OF_ALGO[self._algo] in (NVFP4, W4A16_NVFP4):
            section["group_size"] = GROUP_SIZE
        section["exclude_modules"] = sorted(excluded)
        hf_quant_config = {"producer": self._producer, "quantization": section}
        return self._to_config_json(hf_quant_config), hf_quant_config


# modelopt keeps one input quantizer per projection for all experts of a fused tensor.
_FIRST_PROJECTIONS = ("gate_up_proj", "up_proj")


def _expert_quantizers(module: torch.nn.Module) -> dict[str, Any]:
    """Input quantizers of a fused-experts module by the parameter they belong to; empty for other modules."""
    names = (*_FIRST_PROJECTIONS, "down_proj")
    found = {name: getattr(module, f"{name}_input_quantizer", None) for name in names}
    return {name: quantizer for name, quantizer in found.items() if quantizer is not None}


def _expert_projections(layer: LayerConfig) -> list[str]:
    return [child for name in (*_FIRST_PROJECTIONS[:1], "down_proj") for child in _children(layer, name)]


def _children(layer: LayerConfig, attribute: str) -> list[str]:
    """Suffixes of the modules behind a quantizer: itself, or the experts' projections."""
    moe = layer.feed_forward
    if not attribute or not isinstance(moe, MoeConfig):
        return [""]
    projections = ["down_proj"]
    if attribute in _FIRST_PROJECTIONS:
        projections = ["gate_proj", "up_proj"] if moe.activation == "swiglu" else ["up_proj"]
    return [f".{expert}.{projection}" for expert in range(moe.num_experts) for projection in projections]


@contextlib.contextmanager
def _quiet(verbose: bool) -> Iterator[None]:
    """Silence what modelopt and transformers print."""
    if verbose:
        yield
        return
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)
