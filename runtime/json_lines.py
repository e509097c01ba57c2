"""Files of one JSON object a line, which users make and commands read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")


def read_json_lines(path: Path, parse: Callable[[dict[str, Any]], Item], limit: int, example: str) -> list[Item]:
    """What `parse` makes of the first `limit` objects of a file, of all for 0; empty lines do not count.

    ValueError, with the file and the line, for what is no such file and for what `parse` refuses; example: a line as
    it should be.
    """
    found: list[Item] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8"))
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{path}, line {number} is not JSON ({error}): expected lines such as {example}"
                ) from error
            if not isinstance(value, dict):
                raise ValueError(
                    f"{path}, line {number}: expected a JSON object such as {example}, got {str(value)[:40]!r}"
                )
            try:
                found.append(parse(value))
            except (ValueError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            if len(found) == limit:
                break
    return found
