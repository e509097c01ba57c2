"""The commit that a result line names."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def current_commit(*options: str) -> str:
    """`git rev-parse` of this checkout's HEAD with `options`; $REPLAYSSM_COMMIT where that is set, "" without git."""
    if given := os.environ.get("REPLAYSSM_COMMIT"):
        return given
    command = ["git", "rev-parse", *options, "HEAD"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()
