"""Models for the end-to-end benchmarks: an engine directory, a checkpoint, or a published shape with random weights.

Random weights are drawn on the device, one tensor at a time, in the distributions of `builders.random_checkpoint`:
activations stay near 1 and no term of the recurrences is trivial. They cost what real weights cost, and only the
tokens mean nothing.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from replayssm.builders.architecture import ModelConfig
from replayssm.builders.checkpoint import Checkpoint
from replayssm.builders.config import PUBLISHED, published, read_config
from replayssm.builders.inspection import WEIGHT_FORMATS
from replayssm.builders.models import Networks, build_networks
from replayssm.builders.parameters import WeightRecipe
from replayssm.builders.random_checkpoint import random_weight
from replayssm.builders.weight_shapes import quantizable_modules
from replayssm.plugins import fp8_experts as fp8
from replayssm.plugins.contract import AttentionGeometry, Geometry
from replayssm.plugins.manifest import EngineManifest, FileEntry, Limits, is_engine_directory
from replayssm.plugins.network import Network
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import torch_dtype
from replayssm.runtime.engine import Engine
from replayssm.runtime.fusion import FP8_TILES, TILES, fuse

DISTRIBUTION_STD_OF_NVFP4_CODES = 2.92
"""Of uniformly drawn E2M1 codes."""
LARGEST_FP8 = 448.0
FP8_ROWS = 1024
"""Of a weight that are drawn at a time."""
FP8_WEIGHT_SCALE, FP8_INPUT_SCALE = 0.125 / LARGEST_FP8, 16 / LARGEST_FP8
"""Six deviations of the widest random weights fit, and activations, which stay near 1, up to 16."""


class LazyWeights(Mapping):
    """Engine weights that are made when an executor asks for them, so that a model is on the device once."""

    def __init__(self, plan: Mapping[str, WeightRecipe], make) -> None:
        self._plan, self._make = plan, make

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._make(name, self._plan[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._plan)

    def __len__(self) -> int:
        return len(self._plan)


@dataclass(frozen=True)
class Model:
    """name: as results call it, with the format of random weights behind it where that was asked for. layers_run of
    layers_total tell how far a model was truncated.

    fp8_products, fp8_experts: products in FP8 (`runtime.engine.Engine`).
    directory: of the checkpoint or engine. resident: weights on the devices, which all sessions over the model share.
    """

    name: str
    networks: Mapping[str, Network]
    weights: Mapping[str, torch.Tensor]
    random: bool
    layers_run: int
    layers_total: int
    vocab_size: int
    directory: Path | None = None
    fp8_products: bool = False
    fp8_experts: bool = False
    resident: dict[torch.device, dict[str, torch.Tensor]] = field(default_factory=dict, repr=False)

    def tokenizer(self) -> Any:
        """The checkpoint's, or the engine's; None without one."""
        if self.directory is None or not (self.directory / "tokenizer.json").is_file():
            return None
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.directory, local_files_only=True)

    @property
    def geometries(self) -> list[Geometry]:
        """Of everything in the trunk that keeps state."""
        return [spec.geometry for spec in self.networks["main"].states.values()]

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that a step must read at least once: all but rows of an embedding that is no output head."""
        network = self.networks["main"]
        readers = {name: node.op for node in network.nodes for name in node.inputs if name in network.weights}
        return sum(_nbytes(network, name) for name, op in readers.items() if op != "embedding")

    @property
    def product_elements(self) -> int:
        """Weight elements that a token is multiplied with, those of its experts among them; two operations each."""
        network, elements = self.networks["main"], self._linear_elements
        for node in network.nodes:
            if node.op == "moe":
                stacked = [name for name in node.inputs[3:] if not name.endswith(("_scale", "_scale_2"))]
                top_k = network.spec(node.inputs[1]).shape[-1]
                elements += sum(_elements(network, name) // network.weights[name].shape[0] for name in stacked) * top_k
        return elements

    @property
    def _linear_elements(self) -> int:
        network = self.networks["main"]
        return sum(_elements(network, node.inputs[1]) for node in network.nodes if node.op == "linear")

    @property
    def fp8_elements(self) -> int:
        """Those of `product_elements` that are multiplied in FP8."""
        network = self.networks["main"]
        linear = [node for node in network.nodes if self.fp8_products and node.attributes.get("activations") == "fp8"]
        found = sum(_elements(network, node.inputs[1]) for node in linear if node.op == "linear")
        return found + (self.product_elements - self._linear_elements if self.fp8_experts else 0)

    def kv_bytes(self, dtype_bytes: int = 2) -> int:
        """Bytes of the KV cache per token."""
        attention = [geometry for geometry in self.geometries if isinstance(geometry, AttentionGeometry)]
        return sum(2 * dtype_bytes * geometry.num_kv_heads * geometry.head_dim for geometry in attention)

    def engine(self, settings: ReplaySettings, batch: int) -> Engine:
        """An engine in memory with these settings; engines of one model share its weights."""
        manifest = EngineManifest(
            model={"name": self.name, "vocab_size": self.vocab_size, "eos_token_ids": []},
            quantization={},
            replay=settings,
            limits=Limits(batch, settings.max_seq_len, settings.max_window - 1),
            target="torch",
            versions={},
            checkpoint={},
            networks="networks.json",
            files=(FileEntry("networks.json", 0, "0" * 64),),
        )
        return Engine(
            Path(self.name),
            manifest,
            dict(self.networks),
            self.weights,
            self.resident,
            fp8_products=self.fp8_products,
            fp8_experts=self.fp8_experts,
        )


def load_model(
    source: str,
    device: torch.device,
    *,
    random_weights: bool = False,
    layers: int | None = None,
    mtp: bool = False,
    fp8_products: bool = False,
    fp8_experts: bool = False,
    tiles: bool = False,
    weights: str | None = None,
    vocabulary: int | None = None,
) -> Model:
    """`source`: engine directory, checkpoint directory, or a published name, which implies random weights.

    layers, vocabulary: leading layers and tokens to keep. mtp: also load the draft head. fp8_products, fp8_experts: as
    in `Model`. tiles: draw random experts as kernels hold them (`random_tiles`), other ones than without. weights:
    format of the random weights that a recipe may quantize, of `builders.inspection.WEIGHT_FORMATS`; None: published.
    """
    path = Path(source)
    if weights is not None and (is_engine_directory(path) or (path.is_dir() and not random_weights)):
        raise ValueError("--weights takes random weights: name a published model or add --random-weights")
    if is_engine_directory(path):
        if random_weights or layers is not None or vocabulary is not None:
            options = "--random-weights, --layers and --vocabulary"
            raise ValueError(f"an engine directory is run as it is: leave {options} away")
        engine = Engine.load(path)
        count = len(engine.networks["main"].states)
        name = engine.manifest.model["name"]
        networks = {key: value for key, value in engine.networks.items() if key == "main" or mtp}
        formats = {"fp8_products": fp8_products, "fp8_experts": fp8_experts}
        return Model(name, networks, engine.weights, False, count, count, engine.vocab_size, path, **formats)
    is_published = not path.is_dir()
    if is_published and source not in PUBLISHED and source not in PUBLISHED.values():
        names = ", ".join([*PUBLISHED, *PUBLISHED.values()])
        raise ValueError(f"{source!r} is neither a directory nor a published model; those are {names}")
    checkpoint = None if is_published or random_weights else Checkpoint.open(path)
    config = published(source) if is_published else checkpoint.config if checkpoint else read_config(path)
    total = len(config.layers)
    config = replace(config, layers=config.layers[:layers])
    if vocabulary is not None:
        if checkpoint or not 0 < vocabulary <= config.vocab_size:
            raise ValueError(f"--vocabulary takes random weights and 1 to {config.vocab_size} tokens, got {vocabulary}")
        config = replace(config, vocab_size=vocabulary)
    formats = checkpoint.module_format if checkpoint else None
    if weights is not None:
        formats = dict.fromkeys(quantizable_modules(config), WEIGHT_FORMATS[weights])
    networks = build_networks(config, formats, mtp=mtp)
    if mtp and networks.mtp is None:
        raise ValueError(f"{source} has no draft head (MTP): choose --drafts ngram")
    held = _checkpoint_weights(networks, checkpoint) if checkpoint else _random_weights(config, networks, device)
    made = (
        {device: random_tiles(networks.main, device, fp8_experts)}
        if tiles and not checkpoint and device.type == "cuda"
        else {}
    )
    short = {value: key for key, value in PUBLISHED.items()}.get(source, path.name if path.is_dir() else source)
    return Model(
        f"{short}-{weights}" if weights else short,
        {"main": networks.main, **({"mtp": networks.mtp} if mtp else {})},
        held,
        checkpoint is None,
        len(config.layers),
        total,
        config.vocab_size,
        path if path.is_dir() else None,
        fp8_products,
        fp8_experts,
        made,
    )


def random_tiles(network: Network, device: torch.device, in_fp8: bool = False) -> dict[str, torch.Tensor]:
    """Random NVFP4 experts of `network` as `packed_weights.pack`, or `fp8_experts.pack`, would leave them: packing 120B
    weights takes seconds."""
    found = {}
    nodes = fuse(network, network.nodes, fp8_experts=in_fp8)
    for name in (name for node in nodes if node.op == "moe" for name in node.inputs):
        source, _, kind = name.rpartition("@")
        if "@" + kind not in (TILES, FP8_TILES) or network.weights[source].dtype != "uint8":
            continue
        spec, generator = network.weights[source], torch.Generator(device).manual_seed(zlib.crc32(source.encode()))
        shape = (spec.shape[0], -(-spec.shape[1] // 32), -(-spec.shape[2] // 64), 2304)
        tiles = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
        # Block scales of e4m3 from 0.75 to 1.25.
        tiles[..., 2048:].random_(0x34, 0x3B, generator=generator)
        if "@" + kind == FP8_TILES:
            tiles[..., 2048:] = fp8.scale_bytes(tiles[..., 2048:])
        found[name] = tiles
    return found


def _checkpoint_weights(networks: Networks, checkpoint: Checkpoint) -> LazyWeights:
    return LazyWeights(networks.weight_plan, lambda name, recipe: recipe.load(checkpoint.tensor, allow_view=True))


def _random_weights(config: ModelConfig, networks: Networks, device: torch.device) -> LazyWeights:
    in_fp8 = {
        recipe.sources[0].rpartition(".")[0]
        for recipe in networks.weight_plan.values()
        if recipe.dtype == "float8_e4m3fn" and recipe.sources[0].endswith(".weight")
    }

    def make(name: str, recipe: WeightRecipe) -> torch.Tensor:
        # The seed depends on the name alone, so that a truncated model has the same layers.
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        shape = recipe.shape[1:] if recipe.stacked else recipe.shape
        if recipe.sources[0].rpartition(".")[0] in in_fp8:
            return _random_fp8(recipe, generator, device)
        if (packed := _random_packed(recipe.sources[0], recipe.dtype, recipe.shape, generator, device)) is not None:
            return packed
        out = torch.empty(recipe.shape, dtype=torch_dtype(recipe.dtype), device=device)
        targets = out.unbind() if recipe.stacked else [out]
        for source, target in zip(recipe.sources, targets, strict=True):
            with torch.device(device):
                target.copy_(random_weight(config, source, shape, generator))
        return out

    return LazyWeights(networks.weight_plan, make)


def _random_fp8(recipe: WeightRecipe, generator: torch.Generator, device: torch.device) -> torch.Tensor:
    """An FP8 weight, or one of its scales."""
    if recipe.dtype == "float32":
        scale = FP8_WEIGHT_SCALE if recipe.sources[0].endswith("weight_scale") else FP8_INPUT_SCALE
        return torch.full(recipe.shape, scale, device=device)
    out = torch.empty(recipe.shape, dtype=torch.float8_e4m3fn, device=device)
    for rows in out.view(-1, recipe.shape[-1]).split(FP8_ROWS):
        values = torch.randn(rows.shape, device=device, generator=generator) / recipe.shape[-1] ** 0.5
        rows.copy_((values / FP8_WEIGHT_SCALE).clamp(-LARGEST_FP8, LARGEST_FP8))
    return out


def _random_packed(
    name: str, dtype: str, shape: tuple[int, ...], generator: torch.Generator, device: torch.device
) -> torch.Tensor | None:
    """Codes and scales of quantized weights, of all experts at once; None for a weight of another kind."""
    if dtype == "uint8":
        return torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
    if name.endswith(("scale_2", "input_scale")):
        # Widths of published models lie between 1,024 and 12,544: products then stay within an order of 1.
        return torch.full(shape, 1 / (DISTRIBUTION_STD_OF_NVFP4_CODES * math.sqrt(4096)), device=device)
    if name.endswith("weight_scale"):
        scale = torch.rand(shape, device=device, generator=generator) / 2 + 0.75
        return scale.to(torch_dtype(dtype))
    return None


def _elements(network: Network, name: str) -> int:
    """Of the weight, dequantized."""
    spec = network.weights[name]
    return math.prod(spec.shape) * (2 if spec.dtype == "uint8" else 1)


def _nbytes(network: Network, name: str) -> int:
    spec = network.weights[name]
    return math.prod(spec.shape) * torch_dtype(spec.dtype).itemsize
