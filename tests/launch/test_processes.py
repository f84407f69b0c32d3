"""A worker as a process: where it prints to, and how it ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from expt.launch import processes


def test_what_is_printed_goes_to_the_ends_of_files(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    out.write_text("before\n")
    kept = [os.dup(1), os.dup(2)]
    try:
        processes.print_to(out, err)
        os.write(1, b"as C does\n")
        os.write(2, b"a warning\n")
    finally:
        for number, before in enumerate(kept, start=1):
            os.dup2(before, number)
            os.close(before)
    assert (out.read_text(), err.read_text()) == ("before\nas C does\n", "a warning\n")
    assert capfd.readouterr() == ("", "")


def test_where_one_file_cannot_be_written_nothing_changes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OSError, match="missing"):
        processes.print_to(tmp_path / "out", tmp_path / "missing" / "err")
    os.write(1, b"still here\n")
    assert capfd.readouterr().out == "still here\n"
