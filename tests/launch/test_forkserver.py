"""The warm process: started once, deaf to Ctrl-C, ended at once. Each in a Python of its own, without torch."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import environment

ALONE = """
import multiprocessing, os, signal, sys, time
from multiprocessing import forkserver as theirs
from expt.launch import forkserver
forkserver.WORKER_MODULES = ()  # nothing that takes long

def alive(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
"""


def python(code: str, cwd: Path) -> list[str]:
    """What the code prints, line by line."""
    script = cwd / "script.py"
    script.write_text(ALONE + textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, str(script)], env=environment(), cwd=cwd, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_there_is_one_and_kill_ends_it(tmp_path: Path) -> None:
    code = """
        forkserver.kill()  # there is none yet: no harm
        forkserver.warm()
        pid = theirs._forkserver._forkserver_pid
        forkserver.warm(["json"])
        print(pid == theirs._forkserver._forkserver_pid, alive(pid))
        forkserver.kill()
        print(alive(pid), theirs._forkserver._forkserver_pid)
        forkserver.warm()
        print(alive(theirs._forkserver._forkserver_pid))
        forkserver.kill()
    """
    assert python(code, tmp_path) == ["True True", "False None", "True"]


def test_ctrl_c_does_not_reach_it_and_the_driver_hears_it_still(tmp_path: Path) -> None:
    code = """
        before = signal.getsignal(signal.SIGINT)
        forkserver.warm()
        pid = theirs._forkserver._forkserver_pid
        ignored = next(line for line in open(f"/proc/{pid}/status") if line.startswith("SigIgn"))
        print(bool(int(ignored.split()[1], 16) & 1 << signal.SIGINT - 1))
        print(signal.getsignal(signal.SIGINT) is before)
        forkserver.kill()
    """
    assert python(code, tmp_path) == ["True", "True"]


@pytest.mark.parametrize("name", ["_forkserver", "_forkserver_pid", "_stop"])
def test_a_python_that_names_its_parts_otherwise_does_no_harm(tmp_path: Path, name: str) -> None:
    code = f"""
        class Other:
            _forkserver_pid, _stop = None, None
        if {name!r} == "_forkserver":
            del theirs._forkserver
        else:
            other = Other()
            if {name!r} == "_forkserver_pid":
                del Other._forkserver_pid
            else:
                other._forkserver_pid = os.posix_spawn("/bin/sleep", ["sleep", "60"], {{}})
                del Other._stop
            theirs._forkserver = other
        forkserver.kill()
        print("unharmed")
    """
    assert python(code, tmp_path) == ["unharmed"]


def test_a_worker_does_not_run_the_persons_script_again(tmp_path: Path) -> None:
    """The script has no `if __name__ == "__main__"`, and stands in a worker's way if it is imported there."""
    code = """
        print("script", flush=True)
        from expt.launch import processes
        from pathlib import Path
        forkserver.warm()
        main = sys.modules["__main__"]
        worker = processes.start(
            "os:putenv", ("A", "b"), env={"C": "d"}, stdout=Path("out"), stderr=Path("err"))
        worker.join(30)
        print(worker.exitcode, sys.modules["__main__"] is main, Path("out").read_text(), Path("err").read_text())
        forkserver.kill()
    """
    assert python(code, tmp_path) == ["script", "93 True  "]
