"""A worker as a process: where it prints to, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from expt.launch import processes

DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
SLEEP = "import time; print('ready', flush=True); time.sleep(60)"


class Sleeper:
    """A process that waits to be ended, and may take no hint; as multiprocessing would show it."""

    def __init__(self, *, deaf: bool = False) -> None:
        code = (DEAF if deaf else "") + SLEEP
        self._process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        self.pid, self.sentinel = self._process.pid, os.pidfd_open(self._process.pid)

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()

    def join(self) -> None:
        self._process.wait()

    def close(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()
        os.close(self.sentinel)


@pytest.fixture
def both(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Two processes, which are gone in the end; the second is deaf where the test asks for that."""
    started = [Sleeper(), Sleeper(deaf=getattr(request, "param", False))]
    yield started
    for process in started:
        process.kill()
        process.join()
        process.close()


@pytest.mark.parametrize("both", [True], indirect=True, ids=["one is deaf"])
def test_those_that_take_no_hint_are_killed(both: Any) -> None:
    processes.end(both, signal.SIGTERM, 0.2)
    assert [process.exitcode for process in both] == [-signal.SIGTERM, -signal.SIGKILL]
    processes.ask(both, signal.SIGTERM)  # gone: no harm


def test_waiting_ends_with_the_last_process_or_with_the_time(both: Any) -> None:
    both[0].kill()
    began = time.monotonic()
    processes.wait_for_all(both, 0.05)
    assert 0.05 <= time.monotonic() - began < 5
    both[1].kill()
    processes.wait_for_all(both, 60)
    assert time.monotonic() - began < 30


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


FORKING = """
import os, sys
from types import SimpleNamespace
from expt.launch import processes
ours, other = os.pipe()
kept = processes._received(SimpleNamespace(detach=lambda: ours))
assert kept.descriptor == ours
for _ in range(2):
    if child := os.fork():
        os.fstat(ours)  # open here
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    else:
        os.fstat(other)
        try:
            os.fstat(ours)
        except OSError:
            os._exit(0)
        os._exit(1)
"""


def test_what_a_process_keeps_open_is_closed_in_those_that_it_forks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
