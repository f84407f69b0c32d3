"""The words of the one command, its help, its typos, and the doors from before."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from expt.command import command_line
from expt.command.words import WORDS
from expt.launch import forkserver
from tests.command.test_help import help_text
from tests.conftest import environment, python, run


def ended(*words: str, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    """The exit code of `expt WORDS`, in this process."""
    monkeypatch.setattr(forkserver, "kill", lambda: None)  # this session's is used again
    try:
        command_line.main(words)
    except SystemExit as error:
        return error.code
    return 0


@pytest.mark.parametrize("word", WORDS)
def test_each_word_has_help_of_its_own(
    word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(word, "--help", monkeypatch=monkeypatch) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: python -m expt {word} ")
    assert f"python -m expt {word} " in whole_help()
    assert WORDS[word].meaning in whole_help()


@pytest.mark.parametrize("word", ["epochs=1", "report"])
def test_a_folder_that_is_gone_is_told_in_a_line(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (gone := tmp_path / "gone").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert ended(word, monkeypatch=monkeypatch) == 2
    told = capsys.readouterr().err
    assert (
        told
        == "error: the current folder is no longer there (No such file or directory); cd to one"
        " that is\n"
    )


@functools.cache
def whole_help() -> str:
    return help_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["reprot"],
            (
                f"reprot: neither a command ({', '.join(WORDS)}) nor of the form key=value. Did you"
                " mean"
            ),
        ),
        (
            ["train", "seed=1"],
            f"train: neither a command ({', '.join(WORDS)}) nor of the form key=value.\n",
        ),
        (
            ["rerun"],
            "the following arguments are required: FOLDER; see python -m expt rerun --help\n",
        ),
        (["rerun", "a", "b", "c"], "unrecognized arguments: c; see python -m expt rerun --help\n"),
        (
            ["rerun", "nowhere"],
            "nowhere: holds no run that could be repeated; name a folder with a result.json\n",
        ),
        (
            ["report", "--sotr", "x"],
            "unrecognized arguments: --sotr; see python -m expt report --help\n",
        ),
        (["report", "nowhere"], "nowhere: there is no such folder\n"),
        (
            ["evaluate", "nowhere"],
            "nowhere: there is no such folder; name that of a run, or of a sweep\n",
        ),
        (
            ["evaluate", ".", "epochs=2"],
            "epochs=2: is the run's, and none of it is trained again; leave it out",
        ),
        (
            ["export", "nowhere", "--format", "onnx"],
            "nowhere: there is no such folder; give that of a run ",
        ),
        (["export", ".", "--format", "tflite"], "argument --format: invalid choice: 'tflite'"),
        (["doctor", "gpus=2"], "doctor gpus=2: takes no such word; it takes dataset.root=FOLDER\n"),
    ],
)
def test_a_wrong_word_is_told_in_a_line(
    words: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ended(*words, monkeypatch=monkeypatch) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"error: {says}")
    assert not any(tmp_path.iterdir())


IMPORTED = """
import sys
from expt.command import command_line
for words in sys.argv[1:]:
    try:
        command_line.main(words.split())
    except SystemExit as error:
        assert error.code == int(words == "reprot") * 2, words
    heavy = {"torch", "hydra", "tensorboard"} & set(sys.modules)
    assert not heavy, (words, heavy)
"""


def test_help_and_a_typo_are_answered_at_once(tmp_path: Path) -> None:
    words = ("reprot", "report --help", "rerun --help", "doctor --help", "--help", "--version")
    command = [sys.executable, "-c", IMPORTED, *words]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: python -m expt") == 3


@pytest.mark.parametrize("door", ["report", "rerun"])
def test_the_modules_from_before_are_the_same_commands(door: str, tmp_path: Path) -> None:
    as_module = (
        f"import runpy, sys; del sys.modules['expt.{door}']; "  # as in an interpreter of its own
        f"runpy.run_module('expt.{door}', run_name='__main__', alter_sys=True)"
    )
    before, now = (
        python(as_module, str(tmp_path), cwd=tmp_path),
        run(door, str(tmp_path), cwd=tmp_path),
    )
    assert (before.returncode, before.stdout, before.stderr) == (
        now.returncode,
        now.stdout,
        now.stderr,
    )
    assert before.returncode == 2
    assert before.stderr.startswith(f"error: {tmp_path}: holds no run")
