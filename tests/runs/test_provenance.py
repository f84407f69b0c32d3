"""Where numbers come from: the commit, and what was changed since."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from expt.runs import provenance
from tests.facade import Capture, Patch


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


def test_a_commit_that_is_not_recorded_is_a_problem(tmp_path: Path, monkeypatch: Patch) -> None:
    def problem() -> str:
        provenance.git_state.cache_clear()
        return (provenance.git_state(tmp_path) or {}).get("problem", "")

    git(tmp_path, "init", "-q")
    assert "git rev-parse failed" in problem()
    with monkeypatch.context() as changed:
        changed.setenv("PATH", "")
        assert "git is not installed" in problem()
    (tmp_path / "a.py").write_text("a")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-qm", "a")
    assert not problem()
    (tmp_path / ".git" / "index").write_bytes(b"damaged")
    assert "uncommitted changes are not recorded" in problem()


def test_source_that_git_lacks_is_named_once(repository: Path, capsys: Capture) -> None:
    for name in ("new.py", "ignored.py"):
        (repository / name).write_text("a = 1\n")
    (repository / ".gitignore").write_text("ignored.py\n")
    files = tuple(repository / name for name in ("ignored.py", "net.py", "new.py"))
    for _ in range(2):
        provenance.warn_of_unrecorded(repository, files)
    lines = capsys.readouterr().err.splitlines()
    assert [line.count("ignored.py, new.py") for line in lines] == [1]
    provenance.warn_of_unrecorded(repository, files[1:2])
    assert not capsys.readouterr().err


def test_all_distributions_that_were_imported() -> None:
    found = provenance.imported_versions()
    assert {"pytest", "pydantic-core", "pyyaml", "typing-extensions"} <= found.keys()
    assert found["pytest"] == provenance.version_of("pytest")
    assert "pip" not in found
    then: dict[str, Any] = dict(provenance.describe())
    then["distributions"] = {**found, "pytest": "0.1"}
    assert [line[:26] for line in provenance.differences(then)] == ["versions: pytest 0.1 then,"]
