"""What a check of an engine finds, and how far results may lie apart that only rounding tells apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from replayssm.plugins.network import Network

Tensor = torch.Tensor

UNIT_ROUNDOFF = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-18}
"""Relative error of one operator's output: one rounding, or sums in another order where that is larger (fp32)."""

QUANTIZED_STEP = {"nvfp4": 2.0**-2, "fp8": 2.0**-4}
"""Relative step of quantized activations."""

SAFETY = 4.0
"""Factor between the error that is expected and the one that is taken for a fault."""


@dataclass(frozen=True)
class Finding:
    """One check. passed: None where it could not be made; measured: its numbers, for the report."""

    name: str
    passed: bool | None
    detail: str
    measured: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def attempt(name: str, check: Callable[[], Finding]) -> Finding:
    """What `check` finds, or a failure with the error that it met."""
    try:
        return check()
    except (ValueError, RuntimeError, LookupError, TypeError, AttributeError) as error:
        return Finding(name, False, f"{type(error).__name__}: {' '.join(str(error).split())}")


def operator_error(dtype: str, quantized: Sequence[str] = ()) -> float:
    """Relative error that two right implementations of an operator may differ by.

    Where activations are quantized, a difference e before the quantizer moves a share e / step of the elements by one
    step, which is sqrt(e * step) of the norm.
    """
    unit = UNIT_ROUNDOFF[dtype]
    return max([unit, *(math.sqrt(unit * QUANTIZED_STEP[name]) for name in quantized)])


def model_error(network: Network, dtype: str) -> float:
    """Bound of the relative error of a network's outputs: operators' errors are independent and add as squares."""
    return SAFETY * operator_error(dtype, quantized_activations(network)) * math.sqrt(len(network.nodes))


def quantized_activations(network: Network) -> list[str]:
    found = set()
    for node in network.nodes:
        for attributes in node.attributes.get("projections", [node.attributes]):
            found.add(attributes.get("activations"))
    return sorted(found - {None})


def relative_error(value: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of what is expected, the worst row's; infinite for what is not finite."""
    value, expected = value.detach().float().flatten(1), expected.detach().float().flatten(1)
    if not value.numel():
        return 0.0
    if not torch.isfinite(value).all():
        return math.inf
    norms = expected.norm(dim=1).clamp(min=1e-30)
    return float(((value - expected).norm(dim=1) / norms).max())
