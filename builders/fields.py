"""Checked access to the keys of a parsed JSON config."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping
from typing import Any

from replayssm.plugins.integers import is_integer

_REQUIRED = object()


def parse_number(value: Any) -> Any:
    """`value`, with transformers' {"__float__": "Infinity"} as a float; unchanged where it is none."""
    if isinstance(value, Mapping) and set(value) == {"__float__"}:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return float(value["__float__"])
    return value


def is_name(value: Any, *known: Collection[str]) -> bool:
    """Whether a value read from JSON, which may be a list or an object, is a string of `known` (any without it)."""
    return isinstance(value, str) and all(value in names for names in known)


class Fields:
    """Keys of one JSON object. Every failure is one ValueError that names the file, the key, the value and what was
    expected. Several spellings of one key may be given; where more than one is present they must agree."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, Mapping):
            raise ValueError(f"{where}: expected a JSON object, got {type(values).__name__}")
        self.values = values
        self.where = where

    def error(self, key: str, value: Any, expected: str) -> ValueError:
        return ValueError(f"{self.where}: {key} is {value!r}, expected {expected}")

    def get(self, *keys: str, default: Any = _REQUIRED) -> Any:
        """Value of the first key present; null counts as absent."""
        present = [(key, self.values[key]) for key in keys if self.values.get(key) is not None]
        for key, value in present[1:]:
            if value != present[0][1]:
                raise ValueError(
                    f"{self.where}: {present[0][0]} is {present[0][1]!r} but {key}, another spelling of it, "
                    f"is {value!r}; expected one value"
                )
        if present:
            return present[0][1]
        if default is _REQUIRED:
            raise ValueError(f"{self.where}: {keys[0]} is missing")
        return default

    def name_of(self, *keys: str) -> str:
        """The spelling that is present, for messages."""
        return next((key for key in keys if self.values.get(key) is not None), keys[0])

    def integer(self, *keys: str, default: Any = _REQUIRED, minimum: int = 1) -> Any:
        value = self.get(*keys, default=default)
        if value is default and default is None:
            return None
        if not is_integer(value, minimum):
            raise self.error(self.name_of(*keys), value, f"an integer >= {minimum}")
        if value >= 2**63:
            raise ValueError(f"{self.where}: {self.name_of(*keys)} has {value.bit_length()} bits, expected at most 63")
        return value

    def number(self, *keys: str, default: Any = _REQUIRED, above: float = 0.0) -> float:
        value = parse_number(self.get(*keys, default=default))
        if not isinstance(value, int | float) or isinstance(value, bool) or not above < value < math.inf:
            raise self.error(self.name_of(*keys), value, f"a finite number above {above:g}")
        try:
            return float(value)
        except OverflowError:
            raise self.error(self.name_of(*keys), value, "a number that fits a float") from None

    def multiple(self, value: int, of: int, *keys: str, of_key: str) -> int:
        """`value` of the keys, once it is a multiple of another key's."""
        if value % of:
            raise self.error(self.name_of(*keys), value, f"a multiple of {of_key} ({of})")
        return value

    def boolean(self, *keys: str, default: Any = _REQUIRED) -> bool:
        value = self.get(*keys, default=default)
        if not isinstance(value, bool):
            raise self.error(self.name_of(*keys), value, "true or false")
        return value

    def expect(self, key: str, *allowed: Any, hint: str = "") -> None:
        """The key is absent, null or one of `allowed`; anything else is unsupported."""
        value = self.values.get(key)
        if value is not None and (value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool)):
            words = " or ".join(repr(item) for item in allowed)
            raise self.error(key, value, f"{words} (nothing else is supported){'; ' + hint if hint else ''}")
