"""Files that commands write: whole or not at all, through links, and never in place of a device."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from replayssm.scripts.files import check_writable, write_lines


def test_a_file_appears_whole(tmp_path):
    assert write_lines(tmp_path / "a", ["x", "y"]) == 2
    assert (tmp_path / "a").read_text() == "x\ny\n"
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644

    def lines():
        yield "z"
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        write_lines(tmp_path / "a", lines())
    assert (tmp_path / "a").read_text() == "x\ny\n"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder" / "a")
    write_lines(tmp_path / "link", ["x"])
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "folder" / "a").read_text() == "x\n"


def test_a_pipe_or_device_is_written_to(tmp_path):
    """A file in place of /dev/null would break the machine of a user with the right to make one."""
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()))
    reader.start()
    check_writable(tmp_path / "pipe")
    assert write_lines(tmp_path / "pipe", ["x"]) == 1
    reader.join(10)
    assert read == ["x\n"]
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs Linux's full device")
def test_a_full_disk_is_named():
    with pytest.raises(ValueError, match="cannot write /dev/full: No space left on device"):
        write_lines(Path("/dev/full"), ["x"])
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


@pytest.mark.parametrize("name", ["no/a", "folder"])
def test_what_cannot_be_written_is_said_before(tmp_path, name):
    (tmp_path / "folder").mkdir()
    for call in (check_writable, lambda path: write_lines(path, [])):
        with pytest.raises(ValueError, match=f"cannot write {tmp_path / name}: .*; choose another file"):
            call(tmp_path / name)
    check_writable(tmp_path / "new", None)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_folder_that_may_not_be_entered_is_named(tmp_path, monkeypatch):
    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refused)
    with pytest.raises(ValueError, match="Permission denied; choose another file"):
        check_writable(tmp_path / "a")
