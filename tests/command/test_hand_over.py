"""After `expt warm` the command itself is a fork, too; what was typed stands in for it, and behaves
as it would.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from expt import signals
from expt.command import hand_over, warm_drivers
from tests.conftest import TIMEOUT_S, RunFolder, alive, environment, run, state
from tests.faults.running import LONG, ranks, wait_until, waits_for, working_in
from tests.launch.warmed import SMALL, Warm

OWN_MODEL = """
import torch
class Net(torch.nn.Linear):
    def __init__(self, channels, image_size, num_classes):
        super().__init__(channels * image_size[0] * image_size[1], num_classes)
    def forward(self, images):
        return super().forward(images.flatten(1))
"""


class Typed(NamedTuple):
    """What was typed, the driver that does it, and the folder of both."""

    process: subprocess.Popen[str]
    driver: int
    folder: Path

    def ended(self) -> tuple[int, str, str]:
        """Its exit code and what was printed; the driver is gone by then."""
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        assert not alive({self.driver})
        return self.process.returncode, out, err


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    for folder in tmp_path.parent.glob(f"{tmp_path.name}-*"):  # of a test that has failed
        for pid in working_in(folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def handed_over(
    server: Warm, tmp_path: Path, *words: str, before: Sequence[str] = (), **more: Any
) -> Typed:
    """A command for which a driver was forked, in a copy of `tmp_path`; tried anew, for it waits
    but 0.2 s for that.
    """
    for attempt in range(5):
        folder = tmp_path.with_name(f"{tmp_path.name}-{attempt}")
        shutil.copytree(tmp_path, folder)
        process = server.start(*words, cwd=folder, before=before, **more)
        if driver := server.driver_of(process, folder):
            return Typed(process, driver, folder)
        process.kill()
        process.communicate()
    raise AssertionError("it was never handed over")


def training(server: Warm, tmp_path: Path, **more: Any) -> Typed:
    """The same of a run that trains."""
    typed = handed_over(server, tmp_path, *LONG, **more)
    metrics = typed.folder / "here" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and metrics.stat().st_size, typed.process)
    return typed


def workers_of(typed: Typed) -> set[int]:
    """The processes of the run: all that work in its folder, but the driver and what was typed."""
    return working_in(typed.folder) - {typed.driver, typed.process.pid}


def test_a_run_is_what_it_is_without(server: Warm, tmp_path: Path) -> None:
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text("_target_: mine.Net\n")
    (tmp_path / "mine.py").write_text(OWN_MODEL)
    words = (*SMALL, "model=mine", "hydra.run.dir=run")
    typed = handed_over(server, tmp_path, *words)
    warm_end = typed.ended()
    wait_until(lambda: not workers_of(typed) and not alive(server.forkservers))
    cold = run(*words, cwd=tmp_path)
    assert (warm_end[0], warm_end[2]) == (cold.returncode, cold.stderr) == (0, "")
    assert _first_words(warm_end[1]) == _first_words(cold.stdout) != []
    ours, its = RunFolder(typed.folder / "run"), RunFolder(tmp_path / "run")
    assert ours.points == its.points != []
    assert ours.result["command"] == its.result["command"]


def _first_words(text: str) -> list[list[str]]:
    return [line.split()[:1] for line in text.splitlines()]


def test_plugins_that_appear_later_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path / "lib"), *sys.path])
    known, path, here = (
        warm_drivers._plugins(),
        [*sys.path, str(tmp_path / "other")],
        tmp_path / "here",
    )
    assert not warm_drivers._brings_plugins(path, here, known)
    for folder in "lib", "other", "here":
        plugins = tmp_path / folder / "hydra_plugins"
        plugins.mkdir(parents=True)
        (plugins / "mine.py").touch()
        assert warm_drivers._brings_plugins(path, here, known)
        shutil.rmtree(plugins)
    assert not warm_drivers._brings_plugins(path, here, known)


def test_what_drivers_are_forked_from_has_no_torch_and_one_thread(server: Warm) -> None:
    assert "torch" not in Path(f"/proc/{server.drivers}/maps").read_text()
    assert len([*Path(f"/proc/{server.drivers}/task").iterdir()]) == 1


def test_a_mistake_is_told_by_the_same_exit_code(server: Warm, tmp_path: Path) -> None:
    before = cpu_of_ended_children(server.drivers)
    process = server.start("epochs=none", "hydra.run.dir=run", cwd=tmp_path)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, out) == (2, "")
    assert err == "error: epochs='none': input should be a valid integer\n"
    wait_until(lambda: cpu_of_ended_children(server.drivers) > before)  # a driver was forked for it


def cpu_of_ended_children(pid: int) -> int:
    """In clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[13]) + int(fields[14])


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_what_asks_it_to_stop_asks_the_driver(
    server: Warm, tmp_path: Path, number: signal.Signals
) -> None:
    typed = training(server, tmp_path)
    os.killpg(typed.process.pid, number)  # in a group of its own, as from a shell
    code, _, err = typed.ended()
    assert code == 128 + number, err
    assert RunFolder(typed.folder / "here").result["status"] == "interrupted"
    wait_until(lambda: not workers_of(typed))


@pytest.mark.slow
def test_a_second_ctrl_c_reaches_it_too(server: Warm, tmp_path: Path) -> None:
    typed = training(server, tmp_path)
    for pid in (workers := ranks(workers_of(typed))).values():
        os.kill(pid, signal.SIGSTOP)  # so that they do not end by the first
    assert len(workers) == 2
    os.killpg(typed.process.pid, signal.SIGINT)
    wait_until(
        lambda: all(waits_for(pid, signals.ASK_WORKER) for pid in workers.values()), typed.process
    )
    os.killpg(typed.process.pid, signal.SIGINT)
    assert typed.ended()[0] == 130
    wait_until(lambda: not workers_of(typed))


@pytest.mark.parametrize("stopped", [False, True])
def test_killed_it_takes_the_driver_along(server: Warm, tmp_path: Path, *, stopped: bool) -> None:
    typed = training(server, tmp_path)
    if stopped:
        os.kill(typed.driver, signal.SIGSTOP)
    typed.process.kill()
    typed.process.communicate(timeout=TIMEOUT_S)
    wait_until(lambda: not alive({typed.driver}) and not workers_of(typed))
    assert server.pid


def test_a_killed_driver_ends_it_in_the_same_way(server: Warm, tmp_path: Path) -> None:
    typed = handed_over(server, tmp_path, *LONG)
    os.kill(typed.driver, signal.SIGKILL)
    assert typed.ended()[0] == -signal.SIGKILL
    wait_until(lambda: not workers_of(typed))


def test_ctrl_z_stops_both_and_fg_lets_both_go_on(server: Warm, tmp_path: Path) -> None:
    # Of this session, but in another group: as a shell's job, which alone can be stopped.
    typed = training(server, tmp_path, start_new_session=False, preexec_fn=os.setpgrp)
    os.killpg(typed.process.pid, signal.SIGTSTP)
    wait_until(lambda: state(typed.process.pid) == state(typed.driver) == "T")
    os.killpg(typed.process.pid, signal.SIGCONT)
    wait_until(lambda: "T" not in (state(typed.process.pid), state(typed.driver)))
    os.killpg(typed.process.pid, signal.SIGINT)
    assert typed.ended()[0] == 130


@pytest.mark.slow
def test_what_nohup_ignores_the_driver_ignores(server: Warm, tmp_path: Path) -> None:
    typed = training(server, tmp_path, before=("sh", "-c", 'trap "" HUP; exec "$@"', "sh"))
    ignored = next(
        line.split()[1]
        for line in Path(f"/proc/{typed.driver}/status").read_text().splitlines()
        if "SigIgn" in line
    )
    assert int(ignored, 16) >> (signal.SIGHUP - 1) & 1
    os.killpg(typed.process.pid, signal.SIGHUP)
    os.killpg(typed.process.pid, signal.SIGINT)
    assert typed.ended()[0] == 130, "129 by SIGHUP"


def test_it_draws_on_the_terminal_and_hears_its_keys(server: Warm, tmp_path: Path) -> None:
    terminal, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 64, 0, 0))

    def begin() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    streams: dict[str, Any] = {"stdin": its, "stdout": its, "stderr": its}
    typed = handed_over(
        server, tmp_path, *LONG, start_new_session=False, preexec_fn=begin, **streams
    )
    os.close(its)
    seen = b""
    while b"img/s" not in seen:
        seen += os.read(terminal, 1000)
    os.write(terminal, b"\x03")
    with contextlib.suppress(OSError):  # EIO: nobody is left that has it open
        while found := os.read(terminal, 1000):
            seen += found
    assert typed.process.wait(TIMEOUT_S) == 130
    assert b"\x1b[" in seen
    os.close(terminal)


def test_a_descriptor_that_it_was_given_is_the_drivers_too(server: Warm, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "model").mkdir(parents=True)
    (tmp_path / "elsewhere" / "model" / "mine.yaml").write_text("name: of-there\n")
    given = os.open(tmp_path / "elsewhere", os.O_RDONLY)
    words = ("--config-dir", f"/proc/self/fd/{given}", "model=mine", "hydra.run.dir=run")
    code, _, err = handed_over(server, tmp_path, *words, pass_fds=[given]).ended()
    os.close(given)
    assert code == 2
    assert "of-there" in err


@pytest.mark.slow
def test_runs_under_way_outlive_what_they_were_forked_from(tmp_path: Path) -> None:
    own = Warm(tmp_path.with_name(f"{tmp_path.name}-runtime"))
    own.command()
    typed = training(own, tmp_path)
    drivers = own.drivers
    own.command("--stop")
    assert alive({drivers}), "it tells how they end"
    os.killpg(typed.process.pid, signal.SIGINT)
    assert typed.ended()[0] == 130
    wait_until(lambda: not alive({drivers}) and not workers_of(typed))


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_without_what_it_is_forked_from_it_goes_on_by_itself(
    tmp_path: Path, how: signal.Signals
) -> None:
    own = Warm(tmp_path.with_name(f"{tmp_path.name}-runtime"))
    own.command()
    drivers = own.drivers
    os.kill(drivers, how)
    wait_until(lambda: state(drivers) in "ZT")
    done = own.start(*SMALL, "hydra.run.dir=run", cwd=tmp_path)
    _, err = done.communicate(timeout=TIMEOUT_S)
    assert (done.returncode, err) == (0, "")
    assert RunFolder(tmp_path / "run").result["status"] == "completed"
    own.command("--stop")
    if how == signal.SIGSTOP:
        os.kill(drivers, signal.SIGCONT)
    wait_until(lambda: not alive({drivers}))


@pytest.mark.parametrize(
    "words", [(), ("epochs=1",), ("-m", "seed=0,1"), ("~scheduler",), ("+a=1", "-q")]
)
def test_runs_and_sweeps_are_handed_over(words: tuple[str, ...]) -> None:
    assert hand_over._asks_for_runs(words)


@pytest.mark.parametrize(
    "words",
    [("report", "."), ("warm",), ("help",), ("--help",), ("--cfg=job",), ("-c", "job"), ("epochs=1", "--version"),
     ("debug=true",), ("epochs=1", "+debug=true"), ("-m", "hydra/launcher=submitit_slurm"), ("-sc", "install=bash")],
)  # fmt: skip
def test_nothing_else_is(words: tuple[str, ...]) -> None:
    assert not hand_over._asks_for_runs(words)


@pytest.mark.parametrize(
    ("typed", "change", "is_ordinary"),
    [
        (["-m", "expt"], "", True),
        (["/a/bin/expt"], "", True),
        (["/a/train.py"], "", False),
        (["-X", "utf8", "-m", "expt"], "", False),
        (["-m", "cProfile", "-m", "expt"], "", False),
        (["-m", "expt"], "sys.settrace(lambda *_: None)", False),
        (["-m", "expt"], "sys.setprofile(lambda *_: None)", False),
        (["-m", "expt"], "sys.stdout = None", False),
    ],
)
def test_one_that_is_looked_at_drives_itself(
    typed: list[str], change: str, *, is_ordinary: bool
) -> None:
    program = (
        "import sys; from expt.command import hand_over\n"
        f"sys.orig_argv[1:] = {[*typed, 'epochs=1']!r}; sys.argv[:] = [{typed[-1]!r}, 'epochs=1']\n"
        f"{change}\n"
        "found = hand_over._is_ordinary()\n"
        "sys.settrace(None); sys.setprofile(None)\n"
        "print(found, file=sys.stderr)\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stderr
    assert said == f"{is_ordinary}\n"


def test_a_terminal_that_stops_who_prints_keeps_the_driver() -> None:
    terminal, its = pty.openpty()
    assert not hand_over._stops_who_prints(its)
    attributes = termios.tcgetattr(its)
    attributes[3] |= termios.TOSTOP
    termios.tcsetattr(its, termios.TCSANOW, attributes)
    assert hand_over._stops_who_prints(its)
    os.close(terminal)
    os.close(its)


def test_one_that_comes_too_late_does_nothing() -> None:
    ends, alive_end = os.pipe()
    os.close(alive_end)
    if (pid := os.fork()) == 0:
        try:
            warm_drivers._die_with(ends)
        finally:
            os._exit(0)  # which is said to do something
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in (1, -signal.SIGKILL)
    os.close(ends)


STREAMS = """
import sys
from expt.command.warm_drivers import _opened
def about(stream):
    return [stream.name, stream.mode, stream.encoding, stream.errors, stream.line_buffering, stream.write_through,
            type(stream.buffer), stream.isatty()]
for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
    assert about(_opened(number, stream.name, stream)) == about(stream), stream
"""


@pytest.mark.parametrize(
    "env", [{}, {"PYTHONUNBUFFERED": "1"}, {"PYTHONIOENCODING": "latin1:replace"}]
)
def test_its_streams_are_opened_as_python_does(env: dict[str, str]) -> None:
    kept = {key: value for key, value in environment().items() if key != "PYTHONUNBUFFERED"}
    subprocess.run(
        [sys.executable, "-c", STREAMS], env={**kept, **env}, stdout=subprocess.PIPE, check=True
    )
