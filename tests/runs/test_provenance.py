"""Where numbers come from: the commit, and what was changed since."""

import subprocess
from pathlib import Path

import pytest

from expt.runs import provenance
from tests.facade import Patch


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    return subprocess.run(
        ["git", "-C", folder, *who, *words], check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """With one file, which was changed since its commit."""
    git(tmp_path, "init", "-q")
    (tmp_path / "net.py").write_text("width = 1\n")
    git(tmp_path, "add", "net.py")
    git(tmp_path, "commit", "-qm", "a")
    (tmp_path / "net.py").write_text("width = 2\n")
    return tmp_path


def test_what_was_changed_since_the_commit(repository: Path, monkeypatch: Patch) -> None:
    """As git itself would show it, whatever a person has it use instead."""
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "true")
    git(repository, "config", "color.ui", "always")
    state = provenance.git_state(repository)
    assert state is not None
    assert state["commit"] == git(repository, "rev-parse", "HEAD").strip()
    assert state["diff"].splitlines()[-2:] == ["-width = 1", "+width = 2"]


def test_a_long_change_is_cut_with_its_length(repository: Path) -> None:
    (repository / "net.py").write_text("x" * (provenance.MAX_DIFF_BYTES + 10))
    state = provenance.git_state(repository)
    assert state is not None
    text, _, cut = state["diff"].rpartition("\n... ")
    assert len(text) == provenance.MAX_DIFF_BYTES
    assert cut.endswith(" more characters\n")
    assert int(cut.split()[0]) > 10


def test_outside_a_repository_there_is_no_commit(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.git_state(tmp_path) is None
    monkeypatch.setenv("PATH", "")
    assert provenance.git_state(tmp_path / "without git") is None
