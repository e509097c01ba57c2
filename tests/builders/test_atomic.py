"""Directories that appear whole or not at all, also when the writer is killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from replayssm.builders import atomic
from replayssm.builders.atomic import atomic_directory, require_apart, require_only

FILES = 40
WRITER = textwrap.dedent(
    """
    import signal, sys, time
    from pathlib import Path
    from replayssm.builders.atomic import atomic_directory

    # A shell that runs the tests in the background has its children ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    content = sys.argv[2]
    print("started", flush=True)
    try:
        with atomic_directory(Path(sys.argv[1]), overwrite=True) as directory:
            for index in range(int(sys.argv[3])):
                (directory / str(index)).write_text(content)
                time.sleep(0.001)
    except KeyboardInterrupt:
        sys.exit(130)
    """
)


def leftovers(directory):
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("."))


def whole(directory):
    """The content of a directory that WRITER finished; fails for half of one."""
    names = sorted(int(path.name) for path in directory.iterdir())
    assert names == list(range(FILES))
    contents = {path.read_text() for path in directory.iterdir()}
    assert len(contents) == 1
    return contents.pop()


def start_writer(target, content):
    return subprocess.Popen([sys.executable, "-c", WRITER, str(target), content, str(FILES)], stdout=subprocess.PIPE)


def write(target, text="new", **options):
    with atomic_directory(target, **options) as directory:
        (directory / "sub").mkdir()
        (directory / "sub" / "file").write_text(text)


def test_appears_at_the_end_only(tmp_path):
    target = tmp_path / "deep" / "engine"
    with atomic_directory(target) as directory:
        assert directory.parent.parent == target.parent
        assert not target.exists()
    assert target.is_dir()
    assert leftovers(target.parent) == []


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_overwrite(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    target = tmp_path / "engine"
    write(target, "old")
    with pytest.raises(ValueError, match=r"exists.*--overwrite"):
        write(target)
    assert (target / "sub" / "file").read_text() == "old"
    write(target, "new", overwrite=True)
    assert (target / "sub" / "file").read_text() == "new"
    assert leftovers(tmp_path) == []


def test_everything_is_on_disk_before_it_appears(tmp_path, monkeypatch):
    """A power cut behind the rename must find the content: files and folders are synchronised first, then renamed."""
    target, synced = tmp_path / "engine", []
    fsync = atomic.fsync_path

    def record(path):
        synced.append((path.name, target.exists()))
        fsync(path)

    monkeypatch.setattr(atomic, "fsync_path", record)
    write(target)
    assert {"file", "sub"} <= {name for name, appeared in synced if not appeared}
    assert synced[-1] == (tmp_path.name, True), "the rename itself, last"


def test_what_is_never_replaced(tmp_path):
    precious = tmp_path / "home"
    precious.mkdir()
    (precious / "thesis.txt").write_text("text")
    with pytest.raises(ValueError, match="never overwritten"):
        write(precious, overwrite=True, replaceable=lambda path: False)
    with pytest.raises(ValueError, match="not a directory"):
        write(precious / "thesis.txt", overwrite=True)
    assert (precious / "thesis.txt").read_text() == "text"
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", replaceable=lambda path: False)
    assert (tmp_path / "empty" / "sub" / "file").exists()


def test_through_a_symbolic_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "engine")
    write(tmp_path / "link")
    assert (tmp_path / "disk" / "engine" / "sub" / "file").exists()
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_the_old_content(tmp_path, error):
    target = tmp_path / "engine"
    write(target, "old")

    def fail():
        with atomic_directory(target, overwrite=True) as directory:
            (directory / "half").write_text("")
            raise error

    with pytest.raises(error):
        fail()
    assert (target / "sub" / "file").read_text() == "old"
    assert leftovers(tmp_path) == []


def test_a_failure_between_two_renames_restores_the_old_content(tmp_path, monkeypatch):
    target = tmp_path / "engine"
    write(target, "old")
    monkeypatch.setattr(atomic, "_exchange", lambda first, second: False)
    rename = os.rename

    def failing(source, destination):
        if str(destination) == str(target) and str(source).endswith("content"):
            raise OSError("no")
        rename(source, destination)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(OSError, match="no"):
        write(target, "new", overwrite=True)
    assert (target / "sub" / "file").read_text() == "old"
    assert leftovers(tmp_path) == []


def test_a_kill_between_two_renames_is_repaired(tmp_path):
    work = tmp_path / ".engine.replayssm-building-xyz"
    for name in ("previous", "content"):
        (work / name).mkdir(parents=True)
        (work / name / name).write_text("")
    (work / "replayssm-temporary").write_text("")
    (tmp_path / ".engine.replayssm-building-abc").mkdir()  # killed before it wrote the marker
    with pytest.raises(ValueError, match="--overwrite"):
        write(tmp_path / "engine")
    assert [path.name for path in (tmp_path / "engine").iterdir()] == ["previous"]
    assert leftovers(tmp_path) == []


def test_directories_of_others_beside_the_target_stay(tmp_path):
    """Whatever they are called: only what carries the marker is removed or put back."""
    names = [".engine.building-notes", ".engine.lock", ".engine.previous", ".engine.replayssm-building-notes",
             ".engine.replayssm-previous"]  # fmt: skip
    for name in names:
        (tmp_path / name / "content").mkdir(parents=True)
        (tmp_path / name / "content" / "thesis.txt").write_text("text")
    (tmp_path / ".engine.replayssm-building-file").write_text("text")
    write(tmp_path / "engine")
    write(tmp_path / "engine", overwrite=True)
    assert leftovers(tmp_path) == sorted([*names, ".engine.replayssm-building-file"])
    assert all((tmp_path / name / "content" / "thesis.txt").read_text() == "text" for name in names)
    assert (tmp_path / "engine" / "sub" / "file").read_text() == "new"


def test_a_file_that_comes_while_writing_is_kept(tmp_path):
    target = tmp_path / "engine"
    write(target, "old")

    def add():
        with atomic_directory(target, True, lambda path: require_only(path, {"sub/file"}) is None):
            (target / "thesis.txt").write_text("text")

    with pytest.raises(ValueError, match=r"holds 'thesis\.txt', which replayssm did not write"):
        add()
    assert (target / "thesis.txt").read_text() == "text"
    assert (target / "sub" / "file").read_text() == "old"
    assert leftovers(tmp_path) == []


def test_foreign_entries(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "file").write_text("")
    require_only(tmp_path, {"sub/file", "gone"})
    with pytest.raises(ValueError, match="holds 'sub/file'"):
        require_only(tmp_path, {"file", "sub"})
    (tmp_path / "link").symlink_to(tmp_path / "sub")
    with pytest.raises(ValueError, match="holds 'link'"):
        require_only(tmp_path, {"sub/file"})


@pytest.mark.parametrize("output", ["loop", "loop/engine"])
def test_a_loop_of_symbolic_links(tmp_path, output):
    (tmp_path / "loop").symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(tmp_path / "loop")
    for use in (write, lambda target: require_apart(tmp_path, target)):
        with pytest.raises(ValueError, match="symbolic link that leads back to itself"):
            use(tmp_path / output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loop", "other"]


def test_two_writers(tmp_path):
    target = tmp_path / "engine"
    with atomic_directory(target) as directory:
        with pytest.raises(ValueError, match="another process is writing"):
            write(target)
        assert directory.is_dir()
        write(tmp_path / "other")
    assert target.is_dir()


def test_permissions_follow_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        write(tmp_path / "engine")
    finally:
        os.umask(old)
    assert (tmp_path / "engine").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_clean_up(tmp_path, number):
    process = start_writer(tmp_path / "engine", "x")
    process.stdout.readline()
    time.sleep(0.02)
    process.send_signal(number)
    code = process.wait(timeout=30)
    process.stdout.close()
    assert code == 128 + number
    assert list(tmp_path.iterdir()) == []


def test_kill_at_random_moments(tmp_path):
    """The target is always the last whole directory; the next writer removes what was left."""
    target = tmp_path / "engine"
    choose = random.Random(0)
    write_time = 0.06
    interrupted = finished = 0
    expected = None
    for attempt in range(12):
        process = start_writer(target, str(attempt))
        process.stdout.readline()
        time.sleep(choose.uniform(0, 1.5 * write_time))
        process.kill()
        process.wait(timeout=30)
        process.stdout.close()
        now = whole(target) if target.exists() else None
        assert now in (expected, str(attempt))
        interrupted, finished = interrupted + (now == expected), finished + (now != expected)
        expected = now
    assert interrupted
    start_writer(target, "last").communicate(timeout=30)
    assert whole(target) == "last"
    assert leftovers(tmp_path) == []
