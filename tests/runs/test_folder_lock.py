"""A folder takes one command at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from expt.errors import ConfigError
from expt.runs.folder_lock import at_work
from expt.runs.paths import RunPaths


def test_a_second_command_is_refused_until_the_first_leaves(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path / "new" / "run")
    with at_work(paths), pytest.raises(ConfigError, match="another command is at work there"), at_work(paths):
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
    assert str(refused.value) == f"hydra.run.dir={paths.folder}: Not a directory; choose another folder"
