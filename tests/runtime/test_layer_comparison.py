"""Layers that a 4-bit readout hurts: how they are chosen, and what is measured of each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from replayssm.builders.engine import BuildOptions, build_engine
from replayssm.plugins.traffic import slot_bytes
from replayssm.runtime import layer_comparison
from replayssm.runtime.engine import Engine
from replayssm.runtime.format_comparison import Problem, candidates, compare
from replayssm.runtime.session import Session

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "qwen3.5-tiny"
NAME = "float16-stochastic+nvfp4"


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    output = tmp_path_factory.mktemp("engine") / "qwen"
    build_engine(EXAMPLE, output, BuildOptions(max_batch_size=1, max_seq_len=64))
    return Engine.load(output)


def test_layers_of_an_engine_keep_their_own_formats(engine):
    """Through a flush; a blob goes on alike where layers have the same formats, and nowhere else."""
    low = {"state_dtype": "float16", "readout_dtype": "nvfp4", "u_source": "checkpoint"}
    uniform = replace(engine.manifest.replay, **low)
    mixed = replace(uniform, readout_layers=((1, "same"), (4, "float8")))

    def session(settings):
        return Session(replace(engine, manifest=replace(engine.manifest, replay=settings)), slots=1)

    first, second, other = session(mixed), session(mixed), session(uniform)
    parts = {
        int(name.split(".")[-2]): sum(part.startswith("readout") for part in state.tensors)
        for name, state in first.states.items()
        if name.endswith("ssm")
    }
    assert parts == {0: 3, 1: 0, 2: 3, 4: 2, 5: 3}, "codes and scales"
    slot = first.allocate()
    first.prefill(slot, list(range(30, 50)))
    first.decode([slot], [7])
    blob = first.save(slot)
    loaded = second.load(blob)
    for token in range(17):
        assert torch.equal(first.decode([slot], [token]), second.decode([loaded], [token]))
    assert first.save(slot) == second.save(loaded)
    with pytest.raises(ValueError, match="settings"):
        other.load(blob)


def test_one_layer_at_a_time_beside_what_the_checkpoints_do(engine, monkeypatch):
    """Layer 3 is attention and has none. A layer's figure is that of its readout less that of no readout at all."""
    monkeypatch.setattr(layer_comparison, "LAYERS_AT_ONCE", 3)
    problems, formats, heard = [Problem(list(range(20, 30)), "never")], candidates(engine, [NAME]), []
    measured = layer_comparison.divergences(
        engine, problems, formats, NAME, lambda *news: heard.append(news), max_new_tokens=2
    )
    found = measured.layers
    assert sorted(found) == [0, 1, 2, 4, 5]
    whats = ("prompts", "token 1 of at most 2", "token 2 of at most 2")
    first, second = ([(f"{what}, layers {layers}", 0) for what in whats] for layers in ("0 to 2", "4 to 5"))
    assert heard == [*first, ("", 1), *second, ("", 1)]
    more = {**formats, "float8": replace(formats[NAME], state_dtype="float8")}
    assert layer_comparison.readings(engine, more) == 2, "groups of layers; nothing is wider than a float8 checkpoint"
    checkpoints = replace(formats[NAME], readout_dtype="same")
    compared = {
        "float32": formats["float32"],
        "none": checkpoints,
        "4": replace(checkpoints, readout_layers=((4, "nvfp4"),)),
    }
    compared["whole"] = formats[NAME]
    _, none, alone, whole = compare(engine, problems, compared, max_new_tokens=2)
    assert found[4] == pytest.approx(max(0.0, alone.kl - none.kl))
    assert measured.whole == pytest.approx(max(0.0, whole.kl - none.kl))
    assert alone.accuracy == 0.0, "answers count here, in divergences they do not"
    assert alone.state_bytes - none.state_bytes == 4 * 128 * (128 * 9 // 16 + 1)
    assert max(found.values()) > 0


def test_few_layers_with_most_of_it_are_widened():
    choose = layer_comparison.layers_to_widen
    assert choose({0: 0.0, 1: 0.0}) == []
    assert choose({0: 0.01, 2: 0.95, 5: 0.04}) == [2]
    assert choose({0: 0.5, 1: 0.05, 2: 0.35, 5: 0.1}) == [0, 2, 5]
    assert choose({7: 1.0}) == [7]


def test_layers_in_the_noise_are_not_named():
    """Rounding of float32 is about 1e-6 nats; a layer below a hundredth of the whole format's divergence is not it."""
    rounding = layer_comparison.LayerDivergences({0: 3e-9, 4: 2e-9}, 5e-9)
    assert rounding.to_widen == []
    measured, advice = rounding.notes
    assert "0: 3.0e-09, 4: 2.0e-09; of all layers together 5.0e-09; noise is below 9.5e-07" in measured
    assert "easy prompts" in advice
    clear = layer_comparison.LayerDivergences({0: 0.01, 2: 0.95, 5: 0.04}, 1.2)
    assert clear.to_widen == [2]
    assert len(clear.notes) == 1
    assert "noise is below 1.2e-02, 1% of that" in clear.notes[0]
    assert layer_comparison.LayerDivergences({0: 5e-5, 2: 5e-5}, 0.1).to_widen == [], "less than 1e-3"


def test_formats_are_added_behind_their_own(engine, monkeypatch):
    names = ["float16-stochastic+float8", NAME, "float8-stochastic+nvfp4"]
    formats = candidates(engine, names)
    layers = layer_comparison.LayerDivergences({0: 0.1, 1: 2.0, 4: 3.0}, 5.0)
    monkeypatch.setattr(layer_comparison, "divergences", lambda *arguments, **options: layers)
    found, measured = layer_comparison.with_layers(engine, [], formats)
    assert measured == {NAME: layers}
    mixed = f"{NAME}, float8 in 1, 4"
    assert list(found) == ["float32", *names[:2], mixed, names[2]]
    assert found[mixed] == replace(formats[NAME], readout_layers=((1, "float8"), (4, "float8")))
    states = engine.networks["main"].states.values()
    geometries, layers = [state.geometry for state in states], [state.number for state in states]
    # Of 8 bits without block scales, so of 4.5.
    more = slot_bytes(geometries, found[mixed], layers).readout - slot_bytes(geometries, found[NAME], layers).readout
    assert more == 2 * 4 * 128 * 128 * 7 // 16
    layers = layer_comparison.LayerDivergences(dict.fromkeys((0, 1), 0.0), 0.0)
    assert layer_comparison.with_layers(engine, [], formats)[0] == formats
