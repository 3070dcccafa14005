"""Directories of runs are tried before a run starts, without a trace and while another node creates them."""

import os
from pathlib import Path

import pytest

from lightning_rlhf.cli.earlier_run import check_writable
from lightning_rlhf.expected_errors import UsageError


def test_missing_directory_is_tried_without_a_trace(tmp_path, monkeypatch):
    """Another process, which tries it at the same moment, must not meet it."""
    made, mkdir = [], os.mkdir

    def recorded(path, *arguments, **options):
        made.append(Path(path).absolute())
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(os, "mkdir", recorded)
    check_writable(tmp_path / "runs" / "a" / "b", renames=False)
    monkeypatch.chdir(tmp_path)
    check_writable(Path("runs/a"), renames=False)
    assert made
    assert not {tmp_path / "runs", tmp_path / "runs/a", tmp_path / "runs/a/b"} & set(made)
    assert list(tmp_path.iterdir()) == []


def test_directory_that_another_node_creates_meanwhile_is_accepted_and_kept(tmp_path, monkeypatch):
    directory = tmp_path / "runs" / "a"
    lexists = os.path.lexists

    def created_after_it_was_missed(path):
        found = lexists(path)
        if path == directory:
            directory.mkdir(parents=True, exist_ok=True)
        return found

    monkeypatch.setattr(os.path, "lexists", created_after_it_was_missed)
    check_writable(directory, renames=False)
    assert directory.is_dir()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("file/a", "no permission to write in .*/file, which"),
        ("link", "link' cannot be created .No such file or directory.: set"),
        ("n" * 300, "nn' cannot be created .File name too long.: set"),
    ],
)
def test_path_that_can_be_no_directory_is_refused(tmp_path, name, reason):
    (tmp_path / "file").touch()
    os.symlink(tmp_path / "missing", tmp_path / "link")
    with pytest.raises(UsageError, match=reason):
        check_writable(tmp_path / name, renames=False)
