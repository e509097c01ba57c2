"""Directories that appear whole or not at all.

`atomic_directory` hands out a temporary sibling of the target and renames it into place after everything in it has
reached the disk. A process killed at any moment leaves the target as it was; what it left beside the target is removed
by the next writer of the same target. A lock file beside the target tells a killed writer from one that still runs:
the kernel drops the lock with the process.
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
from collections.abc import Callable, Iterator
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


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


def _publish(temporary: Path, target: Path, previous: Path) -> None:
    """Put `temporary` at `target`; an existing directory there ends up at `previous` or `temporary`."""
    if not target.exists():
        os.rename(temporary, target)
    elif not any(target.iterdir()):
        os.rename(temporary, target)  # rename(2) replaces an empty directory
    elif not _exchange(temporary, target):
        # Two renames leave a moment without a target, never one with half of it; `_recover` closes it after a kill.
        os.rename(target, previous)
        os.rename(temporary, target)
    fsync_path(target.parent)


def _recover(target: Path, prefix: str, previous: Path) -> None:
    """Undo what an unfinished writer left beside `target`. Call with the lock held."""
    if previous.exists() and not target.exists():
        os.rename(previous, target)
    for path in target.parent.iterdir():
        if path == previous or path.name.startswith(prefix):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def atomic_directory(
    target: Path, overwrite: bool = False, replaceable: Callable[[Path], bool] = lambda path: True
) -> Iterator[Path]:
    """Yield a temporary directory that becomes `target` when the block ends without an exception.

    An existing `target` is refused with ValueError unless it is an empty directory, or `overwrite` is set and
    `replaceable(target)` holds. On an exception, SIGINT or SIGTERM nothing is left behind.
    """
    target = Path(os.path.realpath(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name}.building-"
    previous = target.parent / f".{target.name}.previous"
    with _sigterm_raises(), _exclusive(target.parent / f".{target.name}.lock", target):
        _recover(target, prefix, previous)
        _check_target(target, overwrite, replaceable)
        temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        try:
            os.chmod(temporary, 0o777 & ~_umask())
            yield temporary
            _fsync_tree(temporary)
            _publish(temporary, target, previous)
        finally:
            _recover(target, prefix, previous)


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


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
