"""Workers that wait for their work: real processes, in a Python of their own, without torch."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.conftest import environment
from tests.launch.test_forkserver import ALONE, python

STARTS = """
    import socket, time
    from multiprocessing.connection import wait
    from pathlib import Path
    from expt.launch import processes
    from expt.launch.spares import Spares

    def work(function, *arguments, **more):
        return processes.Work(function, arguments, more.pop("env", {}), Path("out"), Path("err"), **more)

    def until(true):
        deadline = time.monotonic() + 30
        while not true():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    forkserver.warm()
    spares = Spares()
"""

DOES = """
import os, signal, threading

def tell(kept, met, fifo):
    print(os.environ["WORD"], oct(os.umask(0)), os.fstat(kept.descriptor).st_size, met.getsockname()[1])
    def wait():
        open(fifo).read()
    threading.Thread(target=wait).start()  # for which Python waits as it ends

def fork(fifo):
    if os.fork() == 0:
        open(fifo).read()
        os._exit(0)

def fail():
    raise ValueError("no good")
"""


def told(code: str, folder: Path) -> list[str]:
    (folder / "does.py").write_text(DOES)
    return python(textwrap.dedent(STARTS) + textwrap.dedent(code), folder)


def test_one_does_what_it_is_given_and_says_so_before_it_is_gone(tmp_path: Path) -> None:
    (tmp_path / "five").write_text("12345")
    code = """
        os.mkfifo("fifo")
        listener = socket.create_server(("127.0.0.1", 0))
        kept = processes.Kept(os.open("five", os.O_RDONLY))
        spares.keep(1), spares.keep(1)
        pid = spares._waiting[0].pid
        os.umask(0o027)
        worker = spares.start(work("does:tell", kept, listener, "fifo", env={"WORD": "hello"}, kept=[kept]))
        print(worker.pid == pid, len(spares._waiting))
        until(lambda: wait(worker.sentinels, 30) and worker.exitcode is not None)
        print(worker.exitcode, alive(pid), worker.sentinels == [worker.sentinel])
        print(Path("out").read_text().replace(str(listener.getsockname()[1]), "port") + Path("err").read_text(), end="")
        worker.close()
        open("fifo", "w").close()
        spares.close()
        print(alive(pid), spares._leaving)
        forkserver.kill()
    """
    assert told(code, tmp_path) == ["True 0", "93 True True", "hello 0o27 5 port", "False []"]


def test_how_it_fails_is_told_as_of_any_worker(tmp_path: Path) -> None:
    code = """
        for function in "does:fail", "signal:pause":
            spares.keep(1)
            worker = spares.start(work(function))
            if function == "signal:pause":
                worker.kill()
            worker.join()
            print(worker.exitcode, "ValueError: no good" in Path("err").read_text())
            worker.close()
        spares.keep(1)
        os.mkfifo("fifo")
        worker = spares.start(work("does:fork", "fifo"))  # who is left behind holds up nobody
        worker.join()
        worker._line.setblocking(True)  # the one that is left may close its end of it a moment later
        print(worker._line.recv(2), worker._line.recv(2))
        worker.close()
        spares.close()
        open("fifo", "w").close()
        forkserver.kill()
    """
    assert told(code, tmp_path) == ["1 True", "-9 True", "b'.' b''"]


def test_one_that_was_killed_is_not_missed(tmp_path: Path) -> None:
    code = """
        spares.keep(2), spares.keep(2)
        os.kill(spares._waiting[0].pid, signal.SIGKILL)
        until(lambda: not alive(spares._waiting[0].pid))
        second = spares._waiting[1].pid
        worker = spares.start(work("os:getpid"))
        print(worker.pid == second)
        worker.join()
        spares.keep(1)
        last = spares._waiting[0].pid
        os.kill(last, signal.SIGKILL)
        until(lambda: not alive(last))
        worker = spares.start(work("os:getpid"))
        worker.join()
        print(worker.exitcode, worker.pid != last, spares._waiting)
        spares.keep(1)
        spares.close()
        until(lambda: not alive(last))
        forkserver.kill()
    """
    assert told(code, tmp_path) == ["True", "93 True []"]


def test_they_end_with_their_driver_however_it_ends(tmp_path: Path) -> None:
    code = """
        spares.keep(1)
        print(spares._waiting[0].pid, flush=True)
        sys.stdin.read()
    """
    script = tmp_path / "script.py"
    script.write_text(ALONE + textwrap.dedent(STARTS) + textwrap.dedent(code))
    command = [sys.executable, str(script)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment(), cwd=tmp_path, text=True, **pipes) as driver:  # type: ignore[call-overload]
        spare = os.pidfd_open(int(driver.stdout.readline()))
        driver.send_signal(signal.SIGKILL)
        gone, _, _ = select.select([spare], [], [], 30)
    os.close(spare)
    assert gone
