"""Directories that appear whole or not at all.

`atomic_directory` hands out a temporary directory beside the target and renames it into place after everything in it
has reached the disk. A process killed at any moment leaves the target as it was; what it left beside the target is
removed by the next writer of the same target. A lock file beside the target tells a killed writer from one that still
runs: the kernel drops the lock with the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2

# Of the working directory beside the target: what says that it is ours, what becomes the target, what was there before.
_MARKER = "replayssm-temporary"
_CONTENT = "content"
_PREVIOUS = "previous"


def fsync_path(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync_tree(directory: Path) -> None:
    for folder, _, files in os.walk(directory):
        for name in files:
            fsync_path(Path(folder) / name)
        fsync_path(Path(folder))


@contextlib.contextmanager
def _exclusive(lock: Path, target: Path) -> Iterator[None]:
    """Hold `lock`, or raise ValueError if another process does. The file exists only while it is held."""
    while True:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise ValueError(f"another process is writing {target}: wait for it or choose another output") from error
        # Between open and flock, the previous holder may have removed the file: then this lock excludes nobody.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(lock)):
                break
        os.close(descriptor)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into SystemExit inside the block, so that it cleans up as SIGINT's KeyboardInterrupt does."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def handler(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exchange(first: Path, second: Path) -> bool:
    """Swap two directories in one step. False where the kernel or the file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    result = renameat2(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE)
    if result == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(first), None, str(second))


def _publish(work: Path, target: Path) -> None:
    """Put the content of `work` at `target`; an existing directory there ends up in `work`."""
    content = work / _CONTENT
    if not target.exists():
        os.rename(content, target)
    elif not any(target.iterdir()):
        os.rename(content, target)  # rename(2) replaces an empty directory
    elif not _exchange(content, target):
        # Two renames leave a moment without a target, never one with half of it; `_recover` closes it after a kill.
        os.rename(target, work / _PREVIOUS)
        os.rename(content, target)
    fsync_path(target.parent)


def _recover(target: Path, prefix: str) -> None:
    """Undo what an unfinished writer left beside `target`. Call with the lock held.

    Only directories that hold the marker are touched, and empty ones, left by a kill before the marker was written.
    """
    for work in [path for path in target.parent.iterdir() if path.name.startswith(prefix)]:
        if work.is_symlink() or not work.is_dir():
            continue
        if (work / _MARKER).is_file():
            if (work / _PREVIOUS).exists() and not target.exists():
                os.rename(work / _PREVIOUS, target)
            for name in (_CONTENT, _PREVIOUS):
                shutil.rmtree(work / name, ignore_errors=True)
            if not any((work / name).exists() for name in (_CONTENT, _PREVIOUS)):
                (work / _MARKER).unlink(missing_ok=True)  # last, so that a kill in between leaves it recognizable
        with contextlib.suppress(OSError):
            work.rmdir()


@contextlib.contextmanager
def atomic_directory(
    target: Path, overwrite: bool = False, replaceable: Callable[[Path], bool] = lambda path: True
) -> Iterator[Path]:
    """Yield a temporary directory that becomes `target` when the block ends without an exception.

    An existing `target` is refused with ValueError unless it is an empty directory, or `overwrite` is set and
    `replaceable(target)` holds; that may also raise a ValueError of its own, such as `require_only`'s. It is asked
    again at the end, as files may have come meanwhile. On an exception, SIGINT or SIGTERM nothing is left behind.
    """
    target = real_output(target)
    _make_parent(target)
    prefix = f".{target.name}.replayssm-building-"
    with _sigterm_raises(), _exclusive(target.parent / f".{target.name}.replayssm-lock", target):
        _recover(target, prefix)
        _check_target(target, overwrite, replaceable)
        try:
            work = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
            (work / _MARKER).write_text(
                "a directory of replayssm's that is removed by its next run\n", encoding="utf-8"
            )
            (work / _CONTENT).mkdir()
            yield work / _CONTENT
            _fsync_tree(work / _CONTENT)
            _check_target(target, overwrite, replaceable)
            _publish(work, target)
        finally:
            _recover(target, prefix)


def _make_parent(target: Path) -> None:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=target.parent):
            pass
    except OSError as error:
        raise ValueError(f"cannot write {target}: {error.strerror}; choose another output") from error


def real_output(output: Path) -> Path:
    """`output` without symbolic links. Raises ValueError where they form a loop."""
    real = Path(os.path.realpath(output))
    if any(path.is_symlink() for path in (real, *real.parents)):
        raise ValueError(f"the output {output} is a symbolic link that leads back to itself: choose another")
    return real


def require_apart(checkpoint: Path, output: Path) -> None:
    """Raise ValueError where `output` is the checkpoint directory or holds it: replacing it would delete its input."""
    source, target = Path(os.path.realpath(checkpoint)), real_output(output)
    if target == source or target in source.parents:
        raise ValueError(f"the output {output} holds the checkpoint {checkpoint}: choose another output")


def require_only(directory: Path, known: Collection[str]) -> None:
    """Raise ValueError naming a file below `directory` that is not among `known`, POSIX paths relative to it."""
    for folder, folders, files in os.walk(directory):
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        for name in sorted([*files, *links]):
            found = (Path(folder) / name).relative_to(directory).as_posix()
            if found not in known:
                raise ValueError(
                    f"the output {directory} holds {found!r}, which replayssm did not write there and never deletes: "
                    "move it away or choose another output"
                )


def _check_target(target: Path, overwrite: bool, replaceable: Callable[[Path], bool]) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"the output {target} exists and is not a directory: choose another")
    if not any(target.iterdir()):
        return
    if not replaceable(target):
        raise ValueError(f"the output {target} holds other files, which are never overwritten: choose another")
    if not overwrite:
        raise ValueError(f"the output {target} exists: choose another, or replace it with --overwrite")
