"""Engines of the tiny checkpoints, and the rule for comparing two greedy outputs."""

from __future__ import annotations

import pytest

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
