"""Which layers a 4-bit readout hurts: formats with a wider readout in few layers, found on a user's own prompts.

What one layer's readout does to the predictions is measured with all other layers reading their checkpoints. Of the
example model with Gated DeltaNet one layer of five causes nearly all of it (docs/state_formats.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from replayssm.plugins.contract import RecurrentGeometry, ReplaySettings
from replayssm.runtime.engine import Engine
from replayssm.runtime.format_comparison import REFERENCE, Problem, compare

NARROW, WIDER = "nvfp4", "float8"

SHARE = 0.9
"""Of the divergence that the layers cause one by one, what those with the wider readout have caused at least."""

LAYERS_AT_ONCE = 8
"""Each has a session of its own, with states."""

_CHECKPOINTS = "checkpoints"


def recurrent_layers(engine: Engine) -> list[int]:
    """Numbers of the layers that keep a recurrent state, ascending."""
    states = engine.networks["main"].states.values()
    return sorted(state.number for state in states if isinstance(state.geometry, RecurrentGeometry))


def divergences(
    engine: Engine,
    problems: Sequence[Problem],
    formats: Mapping[str, ReplaySettings],
    name: str,
    progress: Callable[[int], None] = lambda done: None,
    **options: Any,
) -> dict[int, float]:
    """Layer -> KL divergence from float32's predictions, nats a token, that its readout in format `name` adds.

    formats: of `candidates`. progress: hears of layers done. options: of `compare`.
    """
    unanswered = [replace(problem, answer=None) for problem in problems]
    settings, found, layers = formats[name], {}, recurrent_layers(engine)
    checkpoints = replace(settings, readout_dtype="same", u_source="readout")
    for start in range(0, len(layers), LAYERS_AT_ONCE):
        group = layers[start : start + LAYERS_AT_ONCE]
        compared = {REFERENCE: formats[REFERENCE], _CHECKPOINTS: checkpoints}
        compared |= {str(layer): replace(checkpoints, readout_layers=((layer, NARROW),)) for layer in group}
        kl = {result.name: result.kl for result in compare(engine, unanswered, compared, **options)}
        found |= {layer: max(0.0, kl[str(layer)] - kl[_CHECKPOINTS]) for layer in group}
        progress(len(group))
    return found


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
    progress: Callable[[int], None] = lambda done: None,
    **options: Any,
) -> dict[str, ReplaySettings]:
    """`formats`, and behind each with a 4-bit readout one whose layers that it hurts most have readouts of 8 bits.

    Formats with a float8 checkpoint are left as they are: there the wider readout would be the checkpoint itself.
    """
    found = {}
    for name, settings in formats.items():
        found[name] = settings
        if settings.readout_dtype != NARROW or settings.state_dtype == WIDER:
            continue
        widened = layers_to_widen(divergences(engine, problems, formats, name, progress, **options))
        if widened:
            mixed = replace(settings, readout_layers=tuple((layer, WIDER) for layer in widened))
            found[f"{name}, {WIDER} in {', '.join(map(str, widened))}"] = mixed
    return found
