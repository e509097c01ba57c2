"""Files that commands write for their users."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path


def write_lines(path: Path, lines: Iterable[str]) -> int:
    """Write lines so that the file appears whole; returns how many."""
    count = 0
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        try:
            for line in lines:
                file.write(line + "\n")
                count += 1
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise
    return count
