"""Files that commands read from their users and write for them."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


class FileKeyError(ValueError):
    """What is wrong in a file of a user's; names in its message are the file's keys, also where an option has one."""


def check_writable(*paths: Path | None) -> None:
    """ValueError for a file that could not be written, before the work that fills it."""
    for path in paths:
        if path is not None and not _is_special(path):
            with _temporary_file(path, delete=True):
                pass


def read_text(path: Path) -> str:
    """A file that should be text, or standard input for "-". ValueError for what is not UTF-8."""
    data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        name = "standard input" if str(path) == "-" else path
        raise ValueError(f"{name} is not UTF-8 text ({error}): convert it first") from error


def require_new(path: Path, way_out: str) -> None:
    """ValueError for a file that exists, which took somebody work to make; a device or a pipe holds nothing.

    way_out: how the user of the command replaces it.
    """
    with _naming(path):
        exists = path.exists()
    if exists and not _is_special(path):
        raise ValueError(f"the output {path} exists: choose another, or replace it with {way_out}")


def _is_special(path: Path) -> bool:
    """Whether `path` is a device or a pipe, which must be written to and not be replaced."""
    with _naming(path):  # below a folder that may not be entered
        return path.exists() and not path.is_file() and not path.is_dir()


def _temporary_file(path: Path, delete: bool) -> Any:
    """A new text file beside `path`."""
    with _naming(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        return tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=delete)


def write_lines(path: Path, lines: Iterable[str]) -> int:
    """Write lines so that the file appears whole; returns how many. ValueError where it cannot be written."""
    if _is_special(path):
        text = [line + "\n" for line in lines]
        with _naming(path), path.open("w", encoding="utf-8") as file:
            file.writelines(text)
        return len(text)
    real, count = Path(os.path.realpath(path)), 0
    with _temporary_file(real, delete=False) as file:
        try:
            for line in lines:
                with _naming(path):
                    file.write(line + "\n")
                count += 1
            with _naming(path):
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o644)
                os.replace(file.name, real)
        except BaseException:
            os.unlink(file.name)
            raise
    return count


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """ValueError that names `path` for what the system says of writing it: a full disk has no name of its own."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}; choose another file") from error
