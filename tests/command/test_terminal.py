"""What a command prints arrives, or goes nowhere; it ends no run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from expt.command import terminal
from tests.facade import Capture, environment

PRINTS = """
import os, sys
from expt.command import terminal
terminal.prepare()
mine = os.open("file", os.O_WRONLY | os.O_CREAT)
print("seen ≥ 0.5 ± 0.1 ☃", flush=True)
print("a mistake", file=sys.stderr, flush=True)
os.write(mine, str(mine > 2).encode())
"""


def python(folder: Path, redirected: str, **extra: str) -> subprocess.CompletedProcess[str]:
    (folder / "prints.py").write_text(PRINTS)
    command = f"{sys.executable} prints.py {redirected}"
    return subprocess.run(
        ["sh", "-c", command],
        cwd=folder,
        env=environment(**extra),
        capture_output=True,
        text=True,
        check=True,
    )


def test_a_command_hears_that_nobody_reads_any_more() -> None:
    ends, other = os.pipe()
    os.close(ends)
    console = terminal.console(quiet=False)
    console.file = os.fdopen(other, "w", closefd=False)
    with pytest.raises(BrokenPipeError):
        console.print("epoch 1")


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_a_closed_stream_is_no_file_that_is_opened_later(tmp_path: Path, closed: str) -> None:
    done = python(tmp_path, closed)
    assert (tmp_path / "file").read_text() == "True"
    assert done.stdout == ("seen ≥ 0.5 ± 0.1 ☃\n" if closed == "2>&-" else "")
    assert done.stderr == ("a mistake\n" if closed == ">&-" else "")


def test_what_a_terminal_cannot_show_ends_nothing(tmp_path: Path) -> None:
    assert python(tmp_path, "", PYTHONIOENCODING="ascii").stdout == "seen ? 0.5 ? 0.1 ?\n"


def test_a_quiet_console_prints_nothing(capsys: Capture) -> None:
    for quiet in (True, False):
        console = terminal.console(quiet=quiet)
        console.print("a number")
        console.file.write("a line\n")
        assert capsys.readouterr() == ("" if quiet else "a number\na line\n", "")
