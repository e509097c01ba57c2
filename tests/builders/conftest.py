"""Copies of the tiny checkpoints."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest


@pytest.fixture
def copied(tiny_checkpoint, tmp_path):
    """A private copy of a tiny checkpoint, to damage."""

    def copy(name: str, **options) -> Path:
        return Path(shutil.copytree(tiny_checkpoint(name, **options), tmp_path / name))

    return copy
