"""Which layers a 4-bit readout hurts: formats with a wider readout in few layers, found on a user's own prompts.

What one layer's readout does to the predictions is measured with all other layers reading their checkpoints. Of the
example model with Gated DeltaNet one layer of five causes nearly all of it (docs/state_formats.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from replayssm.plugins.contract import RecurrentGeometry
from replayssm.plugins.settings import ReplaySettings
from replayssm.runtime.engine import Engine
from replayssm.runtime.format_comparison import REFERENCE, Problem, Progress, compare

NARROW, WIDER = "nvfp4", "float8"

SHARE = 0.9
"""Of the divergence that the layers cause one by one, what those with the wider readout have caused at least."""

FLOAT32_FLOOR = 2.0**-20
"""Nats a token: float32 log probabilities of 8 to 16 nats, which most of a vocabulary has, lie that far apart. Smaller
differences between two divergences are rounding."""

SHARE_FLOOR = 0.01
"""Of the divergence that the readouts of all layers add together: a layer with less cannot repair the format."""

LAYERS_AT_ONCE = 8
"""Each has a session of its own, with states."""

_CHECKPOINTS, _WHOLE = "checkpoints", "whole"


@dataclass(frozen=True)
class LayerDivergences:
    """KL divergence from float32's predictions, nats a token, that readouts in one format add to its checkpoints'.

    layers: layer -> that of its readout alone. whole: that of the readouts of all layers together.
    """

    layers: Mapping[int, float]
    whole: float

    @property
    def floor(self) -> float:
        """Below it a layer's divergence is noise."""
        return max(FLOAT32_FLOOR, SHARE_FLOOR * self.whole)

    @property
    def to_widen(self) -> list[int]:
        """The fewest layers that have `SHARE` of all divergence, less those below the floor."""
        return [layer for layer in layers_to_widen(self.layers) if self.layers[layer] >= self.floor]

    @property
    def notes(self) -> list[str]:
        """What was measured and, where it names no layer, why."""
        each = ", ".join(f"{layer}: {kl:.1e}" for layer, kl in sorted(self.layers.items()))
        why = (
            f"{SHARE_FLOOR:.0%} of that"
            if self.floor > FLOAT32_FLOOR
            else "to which float32 log probabilities are rounded"
        )
        found = [
            f"KL that the 4-bit readout of each layer adds, nats: {each}; of all layers together {self.whole:.1e}; "
            f"noise is below {self.floor:.1e}, {why}"
        ]
        if not self.to_widen:
            found.append(
                "no layer stands out of the noise: easy prompts, whose every token is certain, cannot find layers; try "
                "harder or longer ones"
            )
        return found


def recurrent_layers(engine: Engine) -> list[int]:
    """Numbers of the layers that keep a recurrent state, ascending."""
    states = engine.networks["main"].states.values()
    return sorted(state.number for state in states if isinstance(state.geometry, RecurrentGeometry))


def divergences(
    engine: Engine,
    problems: Sequence[Problem],
    formats: Mapping[str, ReplaySettings],
    name: str,
    progress: Progress = lambda what, done: None,
    **options: Any,
) -> LayerDivergences:
    """What the readouts of format `name` add, of each layer alone and of all.

    formats: of `candidates`. progress, options: of `compare`, which every group of layers runs.
    """
    unanswered = [replace(problem, answer=None) for problem in problems]
    settings, found, whole, layers = formats[name], {}, 0.0, recurrent_layers(engine)
    checkpoints = replace(settings, readout_dtype="same", u_source="readout")
    for start in range(0, len(layers), LAYERS_AT_ONCE):
        group = layers[start : start + LAYERS_AT_ONCE]
        compared = {REFERENCE: formats[REFERENCE], _CHECKPOINTS: checkpoints}
        compared |= {str(layer): replace(checkpoints, readout_layers=((layer, NARROW),)) for layer in group}
        if not start:
            compared[_WHOLE] = settings
        hear = partial(_with_layers, progress, group)
        kl = {result.name: result.kl for result in compare(engine, unanswered, compared, progress=hear, **options)}
        found |= {layer: max(0.0, kl[str(layer)] - kl[_CHECKPOINTS]) for layer in group}
        if not start:
            whole = max(0.0, kl[_WHOLE] - kl[_CHECKPOINTS])
    return LayerDivergences(found, whole)


def _with_layers(progress: Progress, group: Sequence[int], what: str, done: int) -> None:
    progress(f"{what}, layers {group[0]} to {group[-1]}" if what else what, done)


def readings(engine: Engine, formats: Mapping[str, ReplaySettings]) -> int:
    """How often `with_layers` reads all problems."""
    return sum(map(_can_widen, formats.values())) * math.ceil(len(recurrent_layers(engine)) / LAYERS_AT_ONCE)


def _can_widen(settings: ReplaySettings) -> bool:
    """Whether a wider readout in few layers is a format of its own: behind a float8 checkpoint it would be that."""
    return settings.readout_dtype == NARROW and settings.state_dtype != WIDER


def layers_to_widen(divergences: Mapping[int, float]) -> list[int]:
    """The fewest layers that have `SHARE` of all divergence; none where there is none."""
    total, chosen, covered = sum(divergences.values()), [], 0.0
    for layer in sorted(divergences, key=divergences.__getitem__, reverse=True):
        if covered >= SHARE * total:
            break
        chosen.append(layer)
        covered += divergences[layer]
    return sorted(chosen)


def with_layers(
    engine: Engine,
    problems: Sequence[Problem],
    formats: Mapping[str, ReplaySettings],
    progress: Progress = lambda what, done: None,
    **options: Any,
) -> tuple[dict[str, ReplaySettings], dict[str, LayerDivergences]]:
    """`formats`, and behind each with a 4-bit readout one whose layers that it hurts most have readouts of 8 bits; and
    what was measured of those formats.
    """
    found, measured = {}, {}
    for name, settings in formats.items():
        found[name] = settings
        if not _can_widen(settings):
            continue
        measured[name] = divergences(engine, problems, formats, name, progress, **options)
        widened = measured[name].to_widen
        if widened:
            mixed = replace(settings, readout_layers=tuple((layer, WIDER) for layer in widened))
            found[f"{name}, {WIDER} in {', '.join(map(str, widened))}"] = mixed
    return found, measured
