"""What a model costs in state, traffic and memory, from its config or its engine's manifest alone."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from replayssm.builders.architecture import AttentionConfig, ModelConfig
from replayssm.builders.config import published, weight_bytes
from replayssm.builders.formats import DENSE, FP8, NVFP4, W4A16_NVFP4
from replayssm.builders.weight_shapes import quantizable_modules
from replayssm.plugins.contract import GdnGeometry, Geometry, RecurrentGeometry
from replayssm.plugins.manifest import EngineManifest
from replayssm.plugins.network import Network
from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.traffic import SlotBytes, Traffic, slot_bytes, traffic_per_token

WEIGHT_FORMATS = {"bf16": DENSE, "nvfp4": NVFP4, "nvfp4-w4a16": W4A16_NVFP4, "fp8": FP8}
"""Choices for "as if all projections were stored so"; "checkpoint" is what the config itself declares."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of "139GiB", "80 GB", "512m" or a plain number. Without the i, units are powers of 1,000."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a size; expected a number with B, KB, MB, GB, TB or KiB, MiB, GiB, TiB")
    number, unit, binary = match.groups()
    base = 1024 if binary else 1000
    return int(float(number) * base ** ("kmgt".index(unit.lower()) + 1 if unit else 0))


def geometries(config: ModelConfig) -> tuple[Geometry, ...]:
    """Geometry of everything in the trunk that keeps state, in execution order."""
    return tuple(geometry for _, geometry in _numbered(config))


def _numbered(config: ModelConfig) -> Iterator[tuple[int, Geometry]]:
    """`geometries` with the numbers of their layers."""
    for layer in config.layers:
        if layer.mixer is not None:
            yield layer.index, layer.mixer.geometry
            if not isinstance(layer.mixer, AttentionConfig):
                yield layer.index, layer.mixer.conv


def recurrent_geometry(name: str) -> RecurrentGeometry:
    """Of the recurrent layers of a published model, which are all alike."""
    return next(found for found in geometries(published(name)) if isinstance(found, RecurrentGeometry))


@dataclass(frozen=True)
class Inspection:
    """The figures of `replayssm inspect`. Bytes are exact; `traffic` is the model of `plugins.traffic`.

    layers: number of layers by kind.  weights: stored bytes by dtype, and "total", with the draft head.
    max_batch: sequences of `max_seq_len` tokens that fit `memory_bytes` less `reserve_bytes` beside the weights.
    batch_limit: most that an engine was built for; None for a model.
    """

    model: str
    layers: dict[str, int]
    settings: ReplaySettings
    slot: SlotBytes
    traffic: Traffic
    weights: dict[str, int]
    draft_len: int
    acceptance_length: float
    memory_bytes: int
    reserve_bytes: int
    batch_limit: int | None = None

    @property
    def max_batch(self) -> int:
        free = self.memory_bytes - self.reserve_bytes - self.weights["total"]
        return max(0, free // self.slot.total(self.settings.max_seq_len))

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "layers": self.layers,
            "state_bytes_per_sequence": self.slot.state,
            "readout_bytes_per_sequence": self.slot.readout,
            "ring_bytes_per_sequence": self.slot.ring,
            "conv_bytes_per_sequence": self.slot.conv,
            "kv_bytes_per_token": self.slot.kv_per_token,
            "weight_bytes": self.weights["total"],
            "traffic_bytes_per_token": {
                "plain": round(self.traffic.plain),
                "replay": round(self.traffic.replay),
                "snapshot_speculation": round(self.traffic.snapshot_speculation),
                "replay_speculation": round(self.traffic.replay_speculation),
            },
            "max_batch": self.max_batch,
        }


def inspect_model(
    config: ModelConfig,
    settings: ReplaySettings,
    *,
    name: str,
    weights: str = "checkpoint",
    acceptance_length: float | None = None,
    memory_bytes: int,
    reserve_bytes: int = 0,
) -> Inspection:
    """All figures of a model. The draft length is `settings.max_window - 1`.

    weights: "checkpoint", or a key of WEIGHT_FORMATS.  acceptance_length: mean tokens per verify call; by default
    half of the drafts are accepted.
    """
    numbered = tuple(_numbered(config))
    check_u_source((geometry for _, geometry in numbered), settings)
    check_readout_layers([layer for layer, part in numbered if isinstance(part, RecurrentGeometry)], settings)
    formats = None
    if weights != "checkpoint":
        formats = dict.fromkeys(quantizable_modules(config), WEIGHT_FORMATS[weights])
    return _inspection(
        numbered,
        settings,
        acceptance_length,
        model=name,
        layers=count_layers(config),
        weights=weight_bytes(config, formats),
        memory_bytes=memory_bytes,
        reserve_bytes=reserve_bytes,
    )


def inspect_engine(
    manifest: EngineManifest,
    network: Network,
    *,
    acceptance_length: float | None = None,
    memory_bytes: int,
    reserve_bytes: int = 0,
) -> Inspection:
    """The same figures of an engine, kept as it was built; `network` is its main one. Weights are as it stores them."""
    stored = manifest.quantization
    return _inspection(
        [(state.number, state.geometry) for state in network.states.values()],
        manifest.replay,
        acceptance_length,
        model=manifest.model["name"],
        layers=dict(manifest.model["layers"]),
        weights={**stored["weight_bytes_by_dtype"], "total": stored["weight_bytes"]},
        memory_bytes=memory_bytes,
        reserve_bytes=reserve_bytes,
        batch_limit=manifest.limits.max_batch_size,
    )


def _inspection(
    numbered: Sequence[tuple[int, Geometry]], settings: ReplaySettings, acceptance_length: float | None, **known: Any
) -> Inspection:
    """numbered: geometries with the numbers of their layers. known: fields that need no computing."""
    draft_len = settings.max_window - 1
    if acceptance_length is None:
        acceptance_length = 1 + draft_len / 2
    layers, stateful = [layer for layer, _ in numbered], [geometry for _, geometry in numbered]
    return Inspection(
        settings=settings,
        slot=slot_bytes(stateful, settings, layers),
        traffic=traffic_per_token(stateful, settings, draft_len, acceptance_length, layers),
        draft_len=draft_len,
        acceptance_length=acceptance_length,
        **known,
    )


def count_layers(config: ModelConfig) -> dict[str, int]:
    """Layers by kind; a decoder layer of a mixer and an MLP counts as one of each."""
    return dict(Counter(part.kind for layer in config.layers for part in _parts(layer)))


def check_u_source(geometries: Iterable[Geometry], settings: ReplaySettings) -> None:
    """ValueError where no layer has a u whose source could be chosen."""
    if settings.u_source != "readout" and not any(isinstance(geometry, GdnGeometry) for geometry in geometries):
        raise ValueError(
            f"u_source {settings.u_source!r} is for Gated DeltaNet layers, and this model has none: "
            "leave it at 'readout'"
        )


def check_readout_layers(recurrent: Collection[int], settings: ReplaySettings) -> None:
    """ValueError for readouts of layers that are not among the `recurrent` ones of a model, or that change nothing."""
    for layer, dtype in settings.readout_layers:
        if layer not in recurrent:
            known = ", ".join(map(str, sorted(recurrent)))
            raise ValueError(f"readout_layers: layer {layer} keeps no recurrent state; layers that do: {known}")
        if dtype == settings.readout_dtype:
            raise ValueError(f"readout_layers: layer {layer} is {dtype!r} by readout_dtype already: leave it out")
    # Here no layer repeats readout_dtype: where that is "same", none of them is.
    if recurrent and {layer for layer, dtype in settings.readout_layers if dtype == "same"} == set(recurrent):
        raise ValueError(
            f"readout_layers: all layers are 'same', so the {settings.readout_dtype} copy would exist nowhere: "
            "leave out readout_dtype and readout_layers"
        )


def _parts(layer) -> list:
    return [part for part in (layer.mixer, layer.feed_forward) if part is not None]
