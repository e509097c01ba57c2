"""A trial of both decode operators on the same random inputs, before ours takes over.

TensorRT-LLM's operators changed their state layout and their conventions between versions without changing their names.
A trial on a few slots of scratch memory tells, whatever the version, whether ours computes the same.
"""

from __future__ import annotations

import torch

from replayssm.plugins.settings import ReplaySettings
from replayssm.plugins.state import raise_on_error

from .batch import Batch
from .layer import Layer
from .settings import RefusedError
from .steps import Steps

TOLERANCE = 0.05
"""Largest relative difference (Euclidean norm) of outputs and state. Rounding the state to bf16 after each of the
trial's tokens, and keys to bf16, stays below 2 %; a transposed state or another formula differs by 50 % and more."""

SCALE = 0.5
"""Standard deviation of the trial's initial state: of the size of what the trial's tokens add to it."""


def check_operator(layer: Layer, pool: torch.Tensor, settings: ReplaySettings) -> None:
    """RefusedError unless `layer`'s decode operator agrees with the one that it replaces. Leaves no state attached.

    pool: the layer's real pool, for dtype and device only.
    """
    geometry = layer.geometry()
    heads, tiles = geometry.state_shape[0], geometry.row_tiles
    generator = torch.Generator().manual_seed(0)
    start = torch.randn((2, *geometry.state_shape), generator=generator) * SCALE
    theirs, ours = (start.to(pool.device, pool.dtype, copy=True) for _ in range(2))
    tokens = settings.buffer_len + 2
    flag = torch.zeros(1, dtype=torch.int32, device=pool.device)
    steps = Steps(2, heads * tiles, pool.device)
    try:
        layer.attach(ours, settings, steps.positions, flag)
        pairs = zip(
            layer.sample(tokens, theirs, torch.Generator().manual_seed(1)),
            layer.sample(tokens, ours, torch.Generator().manual_seed(1)),
            strict=True,
        )
        expected, got = [], []
        for token, ((args, options), (own_args, own_options)) in enumerate(pairs):
            result = layer.original(*args, **options)
            expected.append(options.get("out", result))
            slots = own_options.get("state_batch_indices", own_options.get("initial_state_indices"))
            lens = torch.full((1,), token + 1, dtype=torch.int32, device=pool.device)
            batch = Batch(0, 1, slots, True, lens, None, False)
            layer.enter(batch, steps.advance(batch))
            result = layer.decode(*own_args, **own_options)
            got.append(own_options.get("out", result))
            if not layer.replayed:
                raise RefusedError(f"the decode operator of layer {layer.index} is called in an unknown way")
        layer.write_back(slots.long(), steps.expected[slots.long()])
        raise_on_error(flag)
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(f"the trial of layer {layer.index}'s decode operator failed: {error}") from error
    finally:
        layer.leave()
        layer.state = None
    outputs, states = difference(torch.stack(got), torch.stack(expected)), difference(ours, theirs)
    # Written so that NaN refuses.
    if not (outputs < TOLERANCE and states < TOLERANCE):
        raise RefusedError(
            f"the decode operator of layer {layer.index} computes something else here than in this module "
            f"(outputs differ by {outputs:.1%}, states by {states:.1%}): TensorRT-LLM may keep states transposed in "
            "this version, or the weights are dummies"
        )


def difference(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative difference in the Euclidean norm."""
    value, reference = value.double(), reference.double()
    return float((value - reference).norm() / reference.norm())
