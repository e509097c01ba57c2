"""Checks of integers that a user, a file or a caller gives."""

from __future__ import annotations

import math
from typing import TypeGuard

MAX_SIZE = 2**31 - 1
"""Largest size or position: kernels take them as int32."""


def is_integer(value: object, least: float = -math.inf, most: float = math.inf) -> TypeGuard[int]:
    """Whether `value` is an integer from `least` to `most`; True and False are none."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def require_integer(name: str, value: object, least: int, most: int) -> None:
    """ValueError for what is not an integer from `least` to `most`; `name` is what the user calls it."""
    if not is_integer(value, least, most):
        raise ValueError(f"{name} must be an integer between {least} and {most}, got {short(value)}")


def require_positive(owner: str, **values: int) -> None:
    """ValueError for a size of `owner` that is not between 1 and MAX_SIZE."""
    for name, value in values.items():
        require_integer(f"{owner}.{name}", value, 1, MAX_SIZE)


def short(value: object) -> str:
    """`value` as an error shows it."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:20]}... ({len(text)} characters)"
