"""Files appear whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from sdxl.files import OutputError, grant_usual, prepare_folder, write_atomic


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    for data in (b"first", b"second, and longer", b""):
        write_atomic(path, data)
        assert path.read_bytes() == data
    assert os.listdir(tmp_path) == ["a.bin"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.bin"
    write_atomic(path, b"old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left") as caught:
        write_atomic(path, b"new")
    assert str(path) in str(caught.value)
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["a.bin"]


def test_the_longest_name_the_file_system_takes_works(tmp_path: Path) -> None:
    write_atomic(tmp_path / ("n" * 255), b"data")


def test_a_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    prepare_folder(tmp_path / "a" / "b")
    prepare_folder(tmp_path / "a" / "b")
    assert os.listdir(tmp_path / "a" / "b") == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"out must be a folder that can be written.*file/sub"):
        prepare_folder(tmp_path / "file" / "sub")


def test_a_private_file_gets_the_permissions_of_any_other(tmp_path: Path) -> None:
    private, usual = tmp_path / "private", tmp_path / "usual"
    private.touch(0o600)
    write_atomic(usual, b"")
    grant_usual(private)
    assert private.stat().st_mode == usual.stat().st_mode
