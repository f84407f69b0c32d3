"""The warm process: started once, deaf to Ctrl-C, ended at once.

Each in a Python of its own, without torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from expt.launch import forkserver
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


def python(code: str, cwd: Path, typed: str = "") -> list[str]:
    """What the code prints, line by line."""
    script = cwd / "script.py"
    script.write_text(ALONE + textwrap.dedent(code))
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment(),
        cwd=cwd,
        input=typed,
        capture_output=True,
        text=True,
        timeout=60,
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


def test_what_is_typed_for_the_command_is_left_to_it(tmp_path: Path) -> None:
    """So a class of one's own that reads it gets the same with a warm server as without."""
    (tmp_path / "reads.py").write_text(
        "import os\ndef now(): print(os.read(0, 9), os.readlink('/proc/self/fd/0'))\n"
    )
    code = """
        forkserver.warm()
        started("reads:now").join(30)
        print(open("out").read(), end="")
        print(sys.stdin.read())
        forkserver.kill()
    """
    found = python(textwrap.dedent(STARTS) + textwrap.dedent(code), tmp_path, typed="typed")
    assert found == ["b'' /dev/null", "typed"]


def test_ctrl_c_does_not_reach_it_and_the_driver_hears_it_still(tmp_path: Path) -> None:
    code = """
        before = signal.getsignal(signal.SIGINT)
        forkserver.warm()
        pid = theirs._forkserver._forkserver_pid
        deaf = [line.split()[1] for line in open(f"/proc/{pid}/status") if line.startswith(("SigIgn", "SigBlk"))]
        print(any(int(mask, 16) & 1 << signal.SIGINT - 1 for mask in deaf))
        print(signal.getsignal(signal.SIGINT) is before)
        forkserver.kill()
    """
    assert python(code, tmp_path) == ["True", "True"]


def test_it_ends_with_its_driver_without_a_word(tmp_path: Path) -> None:
    """As nanobind would say, in a terminal that has its prompt again, what of Triton was not freed."""
    (tmp_path / "leaks.py").write_text(
        "import os\nclass Leak:\n    def __del__(self, write=os.write):\n        write(1,"
        " b'leaked')\nleak = Leak()\n"
    )
    code = """
        if os.fork():  # until all who have the pipe are gone
            os.wait()
        else:
            forkserver.warm(["leaks"])
            started("os:getpid").join(30)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    assert python(textwrap.dedent(STARTS) + textwrap.dedent(code), tmp_path) == []


def test_a_signal_that_comes_as_it_is_started_is_heard_after_that(tmp_path: Path) -> None:
    """Else what is half made would be interrupted, and what Ctrl-C asks for lost."""
    code = """
        heard, real = [], theirs.util.spawnv_passfds
        def spawn(*arguments):
            os.kill(os.getpid(), signal.SIGINT)
            heard.append("started")
            return real(*arguments)
        theirs.util.spawnv_passfds = spawn
        signal.signal(signal.SIGINT, lambda *_: heard.append("asked"))
        forkserver.warm()
        print(*heard)
        forkserver.kill()
    """
    assert python(code, tmp_path) == ["started started asked asked"]


LOADS = """
import os
from expt.launch import forkserver, torch_import
open("go").read()  # until the driver is seen to wait
open("told", "w").close()
torch_import.tell_loaded()
def left(): print(os.environ.get(forkserver.LOADING))
"""


@pytest.mark.parametrize(("cpus", "waits"), [(1, True), (2, True), (3, False)])
def test_where_cores_are_few_the_driver_waits_for_torch_libraries(
    tmp_path: Path, cpus: int, waits: bool
) -> None:
    (tmp_path / "loads.py").write_text(LOADS)
    os.mkfifo(tmp_path / "go")
    code = f"""
        import select, threading
        forkserver.usable_cpus = lambda: {cpus}
        forkserver._LONGEST_LOAD_S = 30
        go, real = threading.Event(), select.select
        threading.Thread(target=lambda: go.wait() and open("go", "w").write("now")).start()
        select.select = lambda *arguments: go.set() or real(*arguments)
        forkserver.warm(["loads"])
        forkserver.leave_it_both_cores()
        print(os.path.exists("told"))
        go.set()
        started("loads:left").join(30)
        print(open("out").read(), end="")
        forkserver.kill()
    """
    assert python(textwrap.dedent(STARTS) + textwrap.dedent(code), tmp_path) == [str(waits), "None"]


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


STARTS = """
    from expt.launch import processes
    from pathlib import Path

    def started(function, *arguments, kept=()):
        return processes.start(processes.Work(function, arguments, {}, Path("out"), Path("err"), kept))
"""


def test_what_a_command_names_is_imported_for_all_its_workers(tmp_path: Path) -> None:
    words = [
        "-m",
        "model=mlp,timm",
        "+task.metrics.auroc._target_=torchmetrics.AUROC",
        "dataset.root=a/mytimmy",
    ]
    assert forkserver.libraries_in(words) == ["timm", "torchmetrics"]
    assert forkserver.libraries_in(["model=mlp", "strategy=ddp"]) == []
    for word in ("strategy=fsdp", "strategy=ddp,hsdp"):
        assert forkserver.libraries_in(["model=mlp", word]) == ["expt.launch.preload_sharded"]
    code = """
        forkserver.warm(["colorsys", "no_such_library"])
        started("builtins:exec", "import sys; print('colorsys' in sys.modules)").join(30)
        print(open("out").read())
        forkserver.kill()
    """
    assert python(textwrap.dedent(STARTS) + textwrap.dedent(code), tmp_path)[0] == "True"


@pytest.mark.slow
def test_what_sharded_models_need_is_imported_once(tmp_path: Path) -> None:
    code = """
        forkserver.warm(forkserver.libraries_in(["strategy=fsdp"]))
        needed = ("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint")
        started("builtins:exec", f"import sys; print([name in sys.modules for name in {needed}])").join(60)
        print(open("out").read())
        forkserver.kill()
    """
    assert (
        python(textwrap.dedent(STARTS) + textwrap.dedent(code), tmp_path)[0] == "[True, True, True]"
    )


def test_a_workers_logs_are_as_private_as_its_command(tmp_path: Path) -> None:
    code = """
        os.umask(0)
        forkserver.warm()
        os.umask(0o027)
        started("os:getpid").join(30)
        print(*(oct(os.stat(name).st_mode & 0o777) for name in ("out", "err")))
        forkserver.kill()
    """
    assert python(textwrap.dedent(STARTS) + textwrap.dedent(code), tmp_path) == ["0o640 0o640"]


def test_one_that_was_killed_is_started_again_deaf_to_the_terminal(tmp_path: Path) -> None:
    code = """
        forkserver.warm()
        first = forkserver.ensure_running()
        print(forkserver.is_gone(first), forkserver.is_gone(None))
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        print(forkserver.is_gone(first))
        worker = started("os:getpid")
        worker.join(30)
        second = forkserver.ensure_running()
        print(worker.exitcode, first != second, forkserver.is_gone(first), forkserver.is_gone(second))
        ignored = next(line for line in open(f"/proc/{second}/status") if line.startswith("SigIgn"))
        print([bool(int(ignored.split()[1], 16) & 1 << number - 1) for number in (signal.SIGINT, signal.SIGHUP)])
        forkserver.kill()
    """
    assert python(textwrap.dedent(STARTS) + textwrap.dedent(code), tmp_path) == [
        "False False",
        "True",
        "93 True True False",
        "[True, True]",
    ]


def test_what_was_sent_to_it_while_it_imports_is_free_once_its_driver_is_killed(
    tmp_path: Path,
) -> None:
    """Else it has the lock of a run's folder until its imports end, of which a busy machine makes
    many seconds.
    """
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)\n")
    code = """
        import fcntl
        if driver := os.fork():
            os.waitpid(driver, 0)
            lock, end = os.open("lock", os.O_RDWR | os.O_CREAT), time.monotonic() + 20
            while time.monotonic() < end:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    print("free")
                    break
                except BlockingIOError:
                    time.sleep(0.02)
        else:
            kept = processes.Kept(os.open("lock", os.O_RDWR | os.O_CREAT))
            fcntl.flock(kept.descriptor, fcntl.LOCK_EX)
            forkserver.warm(["slow"])
            theirs.read_signed = lambda _: os.kill(os.getpid(), signal.SIGKILL)  # what follows once all is sent
            started("os:getpid", kept=[kept])
    """
    assert python(textwrap.dedent(STARTS) + textwrap.dedent(code), tmp_path) == ["free"]


def test_one_that_dies_of_its_imports_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "deadly.py").write_text("import os; os.kill(os.getpid(), 9)\n")
    code = """
        from expt.errors import RunFailed
        forkserver.warm(["deadly"])
        try:
            started("os:getpid")
        except RunFailed as error:
            print(error)
        forkserver.kill()
    """
    assert python(textwrap.dedent(STARTS) + textwrap.dedent(code), tmp_path) == [
        "the process that all workers are forked from was killed (out of memory?), 3 times"
    ]


def test_a_worker_keeps_a_descriptor_open_and_its_children_do_not(tmp_path: Path) -> None:
    (tmp_path / "looks.py").write_text(
        "import os\n"
        "def look(kept):\n"
        "    def size():\n"
        "        try:\n"
        "            return os.fstat(kept.descriptor).st_size\n"
        "        except OSError:\n"
        "            return None\n"
        "    print(size(), flush=True)\n"
        "    if os.fork() == 0:\n"
        "        print(size(), flush=True)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
    )
    (tmp_path / "five").write_text("12345")
    code = """
        forkserver.warm()
        kept = processes.Kept(os.open("five", os.O_RDONLY))
        started("looks:look", kept, kept=[]).join(30)
        print(Path("out").read_text().split(), Path("err").read_text())
        forkserver.kill()
    """
    assert python(textwrap.dedent(STARTS) + textwrap.dedent(code), tmp_path) == ["['5', 'None'] "]


def test_a_worker_does_not_run_the_persons_script_again(tmp_path: Path) -> None:
    """The script has no `if __name__ == "__main__"`, and stands in a worker's way if it is imported
    there.
    """
    code = """
        print("script", flush=True)
        from expt.launch import processes
        from pathlib import Path
        forkserver.warm()
        main = sys.modules["__main__"]
        worker = processes.start(
            processes.Work("os:putenv", ("A", "b"), {"C": "d"}, Path("out"), Path("err")))
        worker.join(30)
        print(worker.exitcode, sys.modules["__main__"] is main, Path("out").read_text(), Path("err").read_text())
        forkserver.kill()
    """
    assert python(code, tmp_path) == ["script", "93 True  "]
