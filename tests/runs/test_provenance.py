"""Where numbers come from: the commit, and what was changed since."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from expt.runs import provenance
from expt.runs.overrides import words_after_expt
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


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        (["/a/bob's runs.py", "a b", "$c"], None),
        (["/a/expt/__main__.py", "-m", "model='it''s'"], ["-m", "model='it''s'"]),
        (["/bin/expt", "--config-dir", "a=b", "-x y"], ["--config-dir", "a=b", "-x y"]),
    ],
)
def test_a_command_is_read_as_it_was_typed(
    typed: list[str], words: list[str] | None, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(sys, "argv", typed)
    assert words_after_expt(provenance.command()) == words


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
        return (provenance.git_state(tmp_path) or {}).get("problem", "")

    git(tmp_path, "init", "-q")
    assert "git log failed" in problem()
    with monkeypatch.context() as changed:
        changed.setenv("PATH", "")
        assert "git is not installed" in problem()
    (tmp_path / "a.py").write_text("a")
    git(tmp_path, "add", "a.py")
    git(tmp_path, "commit", "-qm", "a")
    assert not problem()
    (tmp_path / ".git" / "index").write_bytes(b"damaged")
    assert "uncommitted changes are not recorded" in problem()


def test_changes_are_as_git_apply_takes_them_whatever_a_person_has_git_show(
    repository: Path, monkeypatch: Patch
) -> None:
    """Also bytes that are not UTF-8, ends of lines, and a binary file."""
    monkeypatch.delenv("GIT_EXTERNAL_DIFF", raising=False)
    (sub := repository / "sub").mkdir()
    names = ("net.py", "latin.py", "dos.py", "picture.bin", "sealed.txt")
    (repository / ".gitattributes").write_text("sealed.txt diff=sealed\n")
    for name in names[1:]:
        (repository / name).write_bytes(b"a\nb\nc\n")
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "b")
    for key, value in {
        "diff.relative": "true",
        "diff.noprefix": "true",
        "diff.context": "0",
        "diff.sealed.textconv": "echo secret; true",
    }.items():
        git(repository, "config", key, value)
    texts = (b"width = 3\n", b"a\n# caf\xe9\nc\n", b"a\r\n", b"\0\1\2", b"sealed again\n")
    for name, text in zip(names, texts, strict=True):
        (repository / name).write_bytes(text)
    state = provenance.git_state(sub)
    assert state is not None
    assert "problem" not in state
    assert "secret" not in state["diff"]
    git(repository, "checkout", "-q", ".")
    (changes := repository / "changes").write_bytes(
        state["diff"].encode("utf-8", "surrogateescape")
    )
    git(repository, "apply", str(changes))
    assert tuple((repository / name).read_bytes() for name in names) == texts
    (repository / "picture.bin").write_bytes(os.urandom(2 * provenance.MAX_DIFF_BYTES))
    state = provenance.git_state(sub)
    assert state is not None
    assert "binary picture.bin" in state["problem"]
    assert "+width = 3" in state["diff"], "the text is"


def test_source_that_git_lacks_is_named_once(
    repository: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.chdir(repository)
    for name in ("new.py", "ignored.py"):
        (repository / name).write_text("a = 1\n")
    (repository / ".gitignore").write_text("ignored.py\n")
    files = [repository / name for name in ("ignored.py", "net.py", "new.py")]
    for _ in range(2):
        provenance.in_git(files)
    lines = capsys.readouterr().err.splitlines()
    assert [line.count("ignored.py, new.py") for line in lines] == [1]
    provenance.in_git(files[1:2])
    assert not capsys.readouterr().err
    (repository / "net.py").write_text("width = 3\n")
    git_now = provenance.in_git(files)["git"]
    assert git_now is not None
    assert "+width = 3" in git_now["diff"], "of this run, not of the process's first"
    git(repository, "update-index", "--assume-unchanged", "net.py")
    provenance.in_git(files[1:2])
    assert "net.py or its changes" in capsys.readouterr().err


def test_source_is_looked_for_in_the_repository_that_it_lies_in(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: Patch, capsys: Capture
) -> None:
    """Wherever the current folder is: below it, in another one, or in none."""
    other, outside = tmp_path_factory.mktemp("other"), tmp_path_factory.mktemp("outside")
    git(other, "init", "-q")
    for folder in (other, outside):
        (folder / "lib.py").write_text("a = 1\n")
    git(other, "add", "lib.py")
    git(other, "commit", "-qm", "a")
    git(repository, *"-c protocol.file.allow=always submodule add -q".split(), str(other), "vendor")
    (repository / "linked.py").symlink_to(outside / "lib.py")
    git(repository, "add", "linked.py")
    git(repository, "commit", "-qam", "b")
    (sub := repository / "sub").mkdir()
    (repository / "new.py").touch()

    def seen(*files: Path) -> tuple[list[str], str]:
        found = provenance.in_git(files).get("repositories", {})
        return list(found), capsys.readouterr().err

    monkeypatch.chdir(sub)
    assert seen(repository / "net.py") == ([], "")
    assert "not track ../new.py" in seen(repository / "new.py")[1]
    assert seen(repository / "vendor/lib.py") == ([str(repository / "vendor")], "")
    assert seen(other / "lib.py") == ([str(other)], "")
    assert "/lib.py" in seen(repository / "linked.py")[1], "git has the link only"
    monkeypatch.chdir(repository)
    assert seen(repository / "vendor/lib.py") == (["vendor"], "")
    monkeypatch.chdir(outside)
    assert seen(outside / "lib.py") == ([], ""), "there is no repository at all"
    (other / "lib.py").write_text("a = 2\n")
    states = provenance.in_git([other / "lib.py"])
    assert states["git"] is None
    assert "+a = 2" in states["repositories"][str(other)]["diff"]
    assert "lib.py" in seen(outside / "lib.py", other / "lib.py")[1]


def test_all_distributions_that_were_imported() -> None:
    found = provenance.imported_versions()
    assert {"pytest", "pydantic-core", "pyyaml", "typing-extensions"} <= found.keys()
    assert found["pytest"] == provenance.version_of("pytest")
    assert "pip" not in found
    then: dict[str, Any] = dict(provenance.describe())
    then["distributions"] = {**found, "pytest": "0.1"}
    assert [line[:26] for line in provenance.differences(then)] == ["versions: pytest 0.1 then,"]


def test_distributions_without_a_dist_info_or_the_names_of_their_modules(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """As Debian's, and as after `pip install --editable`."""
    (packages := tmp_path / "packages").mkdir()
    (project := tmp_path / "my project").mkdir()
    (old := packages / "Old_Thing-1.5-py3.11.egg-info").mkdir()
    (old / "top_level.txt").write_text("olden\n")
    (packages / "absent-1.5.egg-info").mkdir()
    (packages / "olden.py").touch()
    (project / "edited_module.py").touch()
    (project / "develops.egg-info").mkdir()
    (project / "develops.egg-info/PKG-INFO").write_text("Name: develops\nVersion: 3.0\n")
    (project / "develops.egg-info/top_level.txt").write_text("edited_module\n")
    for name, folder in {"called_so": project, "not_used": tmp_path / "elsewhere"}.items():
        (info := packages / f"{name}-2.0.dist-info").mkdir()
        (info / "RECORD").write_text(f"_{name}.pth,,\n")
        url = f'"url": "{folder.as_uri()}", "dir_info": {{"editable": true}}'
        (info / "direct_url.json").write_text(f"{{{url}}}")
    for folder in (packages, project):
        monkeypatch.syspath_prepend(str(folder))
    before = provenance.imported_versions()
    for module in ("olden", "edited_module"):
        importlib.import_module(module)
    more = dict(provenance.imported_versions().items() - before.items())
    for module in ("olden", "edited_module"):
        del sys.modules[module]  # they are no other test's
    assert more == {"old-thing": "1.5", "called-so": "2.0", "develops": "3.0"}
