"""Engines of the tiny checkpoints, and the rule for comparing two greedy outputs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "stand_in"))

LAYOUTS = ("nano", "super", "qwen", "qwen_moe")


@pytest.fixture(scope="session")
def tiny_engine(tiny_checkpoint, tmp_path_factory):
    """`tiny_engine(layout, **build_options)` -> Engine, built once. The default dtype is float64: there, differences of
    rounding between batch shapes are some 1e-15 of logits of order 1, too small to change a choice."""
    from replayssm.builders.engine import BuildOptions, build_engine
    from replayssm.runtime.engine import Engine

    built = {}

    def make(layout, **options):
        options = {
            "max_batch_size": 8,
            "max_seq_len": 400,
            "max_draft_len": 3,
            "buffer_len": 8,
            "dtype": "float64",
            "state_dtype": "float64" if options.get("dtype", "float64") == "float64" else "float32",
            "u_format": "exact" if options.get("dtype", "float64") == "float64" else "bfloat16x2",
            **options,
        }
        key = (layout, *sorted(options.items()))
        if key not in built:
            output = tmp_path_factory.mktemp("engines") / layout
            build_engine(tiny_checkpoint(layout), output, BuildOptions(**options))
            built[key] = Engine.load(output)
        return built[key]

    return make


@pytest.fixture
def assert_same_tokens():
    """`assert_same_tokens(engine, prompt, ours, plain, bound)`: equal, or first different where it may be.

    CPU matmuls are not batch-invariant, so logits of one token differ in the last bits between batch shapes. Two
    greedy outputs may part only where the plain run's two largest logits lie closer than `bound`.
    """
    from replayssm.runtime.session import Session

    def check(engine, prompt, ours, plain, bound):
        if ours == plain:
            return
        index = next(i for i, pair in enumerate(zip(ours, plain, strict=False)) if pair[0] != pair[1])
        session = Session(engine, slots=1)
        logits = session.prefill(session.allocate(), [*prompt, *plain[:index]])
        first, second = logits.topk(2).values.tolist()
        assert first - second < bound, f"token {index}: {ours[index]} instead of {plain[index]}, gap {first - second}"

    return check


@pytest.fixture
def plan_engine(tiny_checkpoint, tmp_path, monkeypatch):
    """`plan_engine(layout, target="tensorrt", **build_options)` -> (Engine, stand-in module)."""
    from replayssm.builders.engine import BuildOptions, build_engine
    from replayssm.runtime.engine import Engine

    modules = {}

    def make(layout, target="tensorrt", **options):
        if target not in modules:
            modules[target] = use_stand_in(monkeypatch, target)
        options = {"max_batch_size": 4, "max_seq_len": 400, "max_draft_len": 3, "buffer_len": 8, **options}
        output = tmp_path / f"{layout}-{target}-{len(list(tmp_path.iterdir()))}"
        build_engine(tiny_checkpoint(layout), output, BuildOptions(target, dtype="float16", **options))
        return Engine.load(output), modules[target]

    return make


def use_stand_in(monkeypatch, target):
    """A stand-in for TensorRT that `target` finds, on a machine that plans are built and run on."""
    from tensorrt_stand_in import make_module

    from replayssm.builders.targets import tensorrt
    from replayssm.runtime import plans

    module = make_module(target.replace("-", "_"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, f"{module.__name__}.plugin", module.plugin)
    monkeypatch.setattr(tensorrt, "_build_arch", lambda: 90)
    monkeypatch.setattr(plans, "PLAN_DEVICE", "cpu")
    return module
