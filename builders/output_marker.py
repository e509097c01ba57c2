"""Directories that replayssm wrote say so, and with which files, so that nothing else is ever replaced."""

from __future__ import annotations

from pathlib import Path

from replayssm.builders.atomic import require_only
from replayssm.builders.config import read_json

MARKER_NAME = "replayssm.json"
"""Holds {"format": what wrote the directory, "files": their POSIX paths relative to it}."""


def is_marked(directory: Path, marker_format: str) -> bool:
    """Whether `directory` carries a marker of that format; ValueError if it holds files of others too."""
    try:
        marker = read_json(directory / MARKER_NAME)
    except (OSError, ValueError):
        return False
    files = marker.get("files")
    if marker.get("format") != marker_format or not isinstance(files, list):
        return False
    require_only(directory, {MARKER_NAME, *(name for name in files if isinstance(name, str))})
    return True
