"""A folder takes one command at a time, and its workers count."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from expt.errors import ConfigError, FolderInUse
from expt.runs.paths import FolderLock, RunPaths, at_work, is_held


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expt.runs.paths.PATIENCE_S", 0.0)


def test_a_second_command_is_refused_until_the_first_leaves(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "new" / "run")
    with (
        at_work(paths),
        pytest.raises(FolderInUse, match="another command is at work there"),
        at_work(paths),
    ):
        pass
    with at_work(paths):
        assert paths.folder.is_dir()


def test_a_failure_lets_others_in(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    with pytest.raises(KeyError), at_work(paths):
        raise KeyError
    with at_work(paths):
        pass


def test_a_folder_that_cannot_be_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    paths = RunPaths(tmp_path / "file" / "run")
    with pytest.raises(ConfigError) as refused, at_work(paths):
        pass
    assert (
        str(refused.value)
        == f"hydra.run.dir={paths.folder}: Not a directory; choose another folder"
    )


def test_it_is_held_as_long_as_a_worker_has_it(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    lock = FolderLock(paths)
    workers = os.dup(lock.descriptor)
    os.close(lock.descriptor)  # as of a driver that was killed
    with pytest.raises(FolderInUse):
        FolderLock(paths)
    os.close(workers)
    FolderLock(paths).release()


def test_who_was_killed_a_moment_ago_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = RunPaths(tmp_path)
    first = FolderLock(paths)
    monkeypatch.setattr("expt.runs.paths.PATIENCE_S", 10.0)
    monkeypatch.setattr(time, "sleep", lambda _: first.release())
    FolderLock(paths).release()


def test_to_look_whether_it_is_held_leaves_nothing(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert not is_held(paths)
    assert os.listdir(tmp_path) == []
    with at_work(paths):
        assert is_held(paths)
    assert not is_held(paths)


def test_a_lock_that_was_removed_meanwhile_is_none(tmp_path: Path) -> None:
    """Its last holder has removed the folder that came to nothing; another has made it anew."""
    paths = RunPaths(tmp_path)
    with at_work(paths):
        paths.lock.unlink()
        with at_work(paths):
            assert is_held(paths)
